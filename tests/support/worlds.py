"""Runs one test for threads and for tasks: it is written for threads, and its locks may be asyncio's.

A module with `pytestmark = pytest.mark.usefixtures("world")` runs each of its tests in threads, and in a task of each
kind of loop. In a loop, `lock_class` makes asyncio locks whose methods block: the test is a greenlet of the task, which
awaits for it. So one task does all that the test does, and the test's other clients stay synchronous. Other threads of
a test must not use an asyncio lock. `conftest.py` imports the fixtures and the hook.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry

import redislock_fast.asyncio
from tests.support.async_helpers import ASYNC_CLASSES, LOOP_KINDS, run_in_loop
from tests.support.helpers import CLASSES

THREADS = "threads"
IN_THREADS = pytest.mark.parametrize("world", [THREADS], indirect=True)
"""Marks a test of threads alone."""

_COPIED = ("host", "port", "db", "encoding", "encoding_errors", "decode_responses")


def waited(answer: Any) -> Any:
    """Await an awaitable in the greenlet of a test; anything else is returned as it is."""
    if not inspect.isawaitable(answer):
        return answer
    import greenlet

    task = greenlet.getcurrent().parent
    assert task is not None, "not in a loop"
    return task.switch(answer)


async def _drive(test: Callable[[], object], clients: Clients) -> None:
    """Run the test as a greenlet of this task, which awaits what the test waits for."""
    import greenlet

    running = greenlet.greenlet(test)
    try:
        asked = running.switch()
        while not running.dead:
            try:
                answer = await asked
            except BaseException as error:
                asked = running.throw(error)
            else:
                asked = running.switch(answer)
    finally:
        await clients.aclose()


class Clients:
    """The asyncio clients of a test, each beside a synchronous one with the same settings."""

    def __init__(self) -> None:
        self._pairs: list[tuple[redis.Redis, redis.asyncio.Redis]] = []

    def beside(self, client: redis.Redis) -> redis.asyncio.Redis:
        """The asyncio client for this one."""
        for known, beside in self._pairs:
            if known is client:
                return beside
        settings = client.connection_pool.connection_kwargs
        copied = {name: settings[name] for name in _COPIED if name in settings}
        if (retry := settings.get("retry")) is not None:
            copied["retry"] = AsyncRetry(retry._backoff, retry._retries)
        beside = redis.asyncio.Redis(**copied)
        self._pairs.append((client, beside))
        return beside

    def of(self, beside: redis.asyncio.Redis) -> redis.Redis:
        """The synchronous client for this one."""
        return next(client for client, known in self._pairs if known is beside)

    async def aclose(self) -> None:
        """Close the asyncio clients."""
        for _, client in self._pairs:
            await client.aclose()


class Blocking:
    """An asyncio lock whose methods block."""

    def __init__(self, lock: Any, clients: Clients) -> None:
        vars(self).update(_lock=lock, _clients=clients)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._lock, name)
        if name == "redis":
            return self._clients.of(attribute)
        if not inspect.ismethod(attribute):
            return attribute
        return lambda *args, **settings: waited(attribute(*args, **settings))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._lock, name, self._clients.beside(value) if name == "redis" else value)

    def __enter__(self) -> Blocking:
        waited(self._lock.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        waited(self._lock.__aexit__(kind, error, traceback))

    def __copy__(self) -> Blocking:
        return Blocking(copy.copy(self._lock), self._clients)

    def __repr__(self) -> str:
        return repr(self._lock)


class World:
    """Where a test runs.

    Attributes:
        kind: "threads", or a kind of event loop.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._clients = Clients()

    @property
    def in_threads(self) -> bool:
        """Whether the test runs as it is written."""
        return self.kind == THREADS

    def lock_class(self, lock_class_id: str) -> Any:
        """The class of locks of this world: "redis-py" or "ours"."""
        if self.in_threads:
            return CLASSES[lock_class_id]
        return lambda client, *args, **settings: Blocking(
            ASYNC_CLASSES[lock_class_id](self._clients.beside(client), *args, **settings), self._clients
        )

    @property
    def ours(self) -> ModuleType:
        """The package for this world."""
        return redislock_fast if self.in_threads else redislock_fast.asyncio

    def client(self, client: redis.Redis) -> Any:
        """The client for this world that has the settings of this one."""
        return client if self.in_threads else self._clients.beside(client)

    def run(self, test: Callable[[], object]) -> None:
        """Run the test in a loop of this kind."""
        run_in_loop(self.kind, _drive(test, self._clients))


@pytest.fixture(params=[THREADS, *LOOP_KINDS])
def world(request: pytest.FixtureRequest) -> World:
    """Threads and each kind of event loop in turn."""
    kind: str = request.param
    if kind != THREADS:
        pytest.importorskip("greenlet")
    if kind not in {THREADS, "asyncio"}:
        pytest.importorskip(kind)
    return World(kind)


def world_of(request: pytest.FixtureRequest) -> World:
    """The world of a test; threads where it does not ask for any."""
    if "world" not in request.fixturenames:
        return World(THREADS)
    chosen: World = request.getfixturevalue("world")
    return chosen


@pytest.fixture
def our_lock(request: pytest.FixtureRequest) -> Any:
    """Our class of locks in the test's world."""
    return world_of(request).lock_class("ours")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in the loop of its world."""
    chosen = pyfuncitem.funcargs.get("world")
    if not isinstance(chosen, World) or chosen.in_threads:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    chosen.run(lambda: pyfuncitem.obj(**arguments))
    return True
