"""Runs one test for threads and for tasks: it is written for threads, and its locks may be asyncio's.

A module with `pytestmark = pytest.mark.usefixtures("world")` runs each of its tests in threads, and in a task of each
kind of loop. In a loop, `lock_class` makes asyncio locks whose methods block: the test is a greenlet of the task, which
awaits for it. So one task does all that the test does, and the test's other clients stay synchronous.

A test may subclass `lock_class` and override `do_*` hooks, or assign methods to a lock: it writes plain methods, which
become coroutine functions in a loop. What such a method calls on `self` or `super()` is an asyncio lock's, so it goes
through `waited`.

`conftest.py` imports the fixtures and the hook. A test waits by `wait_until`, which lets the loop run. Another thread
must not use an asyncio lock: `World.start` runs work in another thread or task.

Nothing may wait in a generator that a list, a set or `sorted` is made of: without the GIL, CPython has the lock of the
list meanwhile, of which greenlets know nothing. A comprehension may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType, TracebackType
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry

import redislock_fast.asyncio
from tests.support.async_helpers import ASYNC_CLASSES, LOOP_KINDS, FakeAsyncio, run_in_loop
from tests.support.helpers import CLASSES, PATIENCE_S, FakeTime, start

THREADS = "threads"
IN_THREADS = pytest.mark.parametrize("world", [THREADS], indirect=True)
"""Marks a test of threads alone."""

_COPIED = (
    *("host", "port", "db", "username", "password", "protocol", "client_name", "socket_timeout"),
    *("encoding", "encoding_errors", "decode_responses", "retry_on_error"),
)


_MADE = (redislock_fast.asyncio.Batch, redislock_fast.asyncio.Lock, redislock_fast.asyncio.Permit)
"""What methods of asyncio objects return that has coroutine methods itself."""


def waited(answer: Any) -> Any:
    """Await an awaitable in the greenlet of a test; anything else is returned as it is."""
    if not inspect.isawaitable(answer):
        return answer
    import greenlet

    task = greenlet.getcurrent().parent
    assert task is not None, "not in a loop"
    return task.switch(answer)


async def _blocking(work: Callable[[], Any]) -> Any:
    """Run the work as a greenlet of this task, which awaits what the work waits for. Returns what the work returns."""
    import greenlet

    running = greenlet.greenlet(work)
    running.gr_context = contextvars.copy_context()
    asked = running.switch()
    while not running.dead:
        try:
            answer = await asked
        except BaseException as error:
            asked = running.throw(error)
        else:
            asked = running.switch(answer)
    return asked


def awaitable(method: Callable[..., Any]) -> Callable[..., Any]:
    """The coroutine function that does what the method does, which may block."""

    async def call(*args: Any, **settings: Any) -> Any:
        return await _blocking(lambda: method(*args, **settings))

    return call


async def _drive(test: Callable[[], object], clients: Clients) -> None:
    """Run the test, and close its clients."""
    try:
        await _blocking(test)
    finally:
        await clients.aclose()


class Clients:
    """The asyncio clients of a test, each beside a synchronous one with the same settings."""

    def __init__(self) -> None:
        self._pairs: list[tuple[redis.Redis, redis.asyncio.Redis]] = []
        self._made: list[redis.asyncio.Redis] = []

    def beside(self, client: redis.Redis | redis.asyncio.Redis) -> redis.asyncio.Redis:
        """The asyncio client for this one, which may be that client itself."""
        if isinstance(client, redis.asyncio.Redis):
            return client
        for known, beside in self._pairs:
            if known is client:
                return beside
        settings = client.connection_pool.connection_kwargs
        copied = {name: settings[name] for name in _COPIED if name in settings}
        if (retry := settings.get("retry")) is not None:
            copied["retry"] = AsyncRetry(retry._backoff, retry._retries)
        is_fake = isinstance(client, fakeredis.FakeRedis)
        beside = fakeredis.FakeAsyncRedis(server=settings["server"]) if is_fake else redis.asyncio.Redis(**copied)
        self._pairs.append((client, beside))
        return beside

    def make(self, port: int, **options: Any) -> redis.asyncio.Redis:
        """An asyncio client of the server on this port."""
        self._made.append(redis.asyncio.Redis(port=port, **options))
        return self._made[-1]

    def of(self, beside: redis.asyncio.Redis) -> redis.Redis:
        """The synchronous client for this one."""
        return next(client for client, known in self._pairs if known is beside)

    def keep(self, client: redis.asyncio.Redis) -> None:
        """Close this client behind the test."""
        self._made.append(client)

    async def aclose(self) -> None:
        """Close the asyncio clients."""
        for client in (*(beside for _, beside in self._pairs), *self._made):
            await client.aclose()


class Blocking:
    """An asyncio lock, Locker, batch, semaphore or permit whose methods block."""

    def __init__(self, lock: Any, clients: Clients) -> None:
        vars(self).update(_lock=lock, _clients=clients)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._lock, name)
        if name == "redis":
            return self._clients.of(attribute)
        if not inspect.isroutine(attribute):
            return attribute
        return lambda *args, **settings: self._finished(attribute(*args, **settings))

    def _finished(self, answer: Any) -> Any:
        answer = waited(answer)
        return Blocking(answer, self._clients) if isinstance(answer, _MADE) else answer

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "redis":
            value = self._clients.beside(value)
        elif inspect.isroutine(value):
            value = awaitable(value)
        setattr(self._lock, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocking) and bool(self._lock == other._lock)

    def __hash__(self) -> int:
        return hash(self._lock)

    def __enter__(self) -> Blocking:
        entered = waited(self._lock.__aenter__())
        return self if entered is self._lock else Blocking(entered, self._clients)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        waited(self._lock.__aexit__(kind, error, traceback))

    def __copy__(self) -> Blocking:
        return Blocking(copy.copy(self._lock), self._clients)

    def __repr__(self) -> str:
        return repr(self._lock)


class BlockingClass(type):
    """A class of asyncio locks whose methods block, for a loop's clients; hooks that its subclasses override may block.

    Attributes:
        clients: of the test.
    """

    clients: Clients

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> BlockingClass:
        """Make the hooks coroutine functions."""
        hooks = {key: awaitable(value) for key, value in namespace.items() if key.startswith("do_")}
        return super().__new__(cls, name, bases, namespace | hooks)

    def __call__(cls, client: Any, *args: Any, **settings: Any) -> Blocking:
        """A lock whose methods block."""
        return Blocking(super().__call__(cls.clients.beside(client), *args, **settings), cls.clients)


class Running:
    """Work of a task beside the test, with the methods of a `concurrent.futures.Future`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._task = asyncio.get_running_loop().create_task(_blocking(work))

    def done(self) -> bool:
        """Whether it has ended."""
        return self._task.done()

    def result(self, timeout_s: float = PATIENCE_S) -> Any:
        """The result or the error of the work."""
        return waited(asyncio.wait_for(asyncio.shield(self._task), timeout_s))


class World:
    """The world of a test: threads, or the tasks of a loop.

    Attributes:
        kind: "threads", or a kind of event loop.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._clients = Clients()
        self._connected: list[redis.Redis] = []  # a lock does not keep its client alive

    @property
    def in_threads(self) -> bool:
        """Whether the test runs as it is written."""
        return self.kind == THREADS

    def lock_class(self, lock_class_id: str) -> Any:
        """The class of locks of this world: "redis-py" or "ours"."""
        if self.in_threads:
            return CLASSES[lock_class_id]
        return BlockingClass("Lock", (ASYNC_CLASSES[lock_class_id],), {"clients": self._clients})

    @property
    def ours(self) -> ModuleType:
        """The package for this world."""
        return redislock_fast if self.in_threads else redislock_fast.asyncio

    def client(self, client: redis.Redis) -> Any:
        """The client for this world that has the settings of this one."""
        return client if self.in_threads else self._clients.beside(client)

    def connect(self, port: int, **options: Any) -> Any:
        """A client for this world of the server on this port, which lives as long as the test."""
        if not self.in_threads:
            return self._clients.make(port, **options)
        self._connected.append(redis.Redis(host="127.0.0.1", port=port, **options))
        return self._connected[-1]

    def keep(self, client: Any) -> Any:
        """A client for this world that the test has made, which lives as long as the test."""
        (self._connected.append if self.in_threads else self._clients.keep)(client)
        return client

    def lock(self, client: Any, name: str | bytes = "name", **settings: Any) -> Any:
        """A lock of ours on a client for this world."""
        lock = self.ours.Lock(client, name, **settings)
        return lock if self.in_threads else Blocking(lock, self._clients)

    def callback(self, work: Callable[..., object]) -> Callable[..., object]:
        """An `on_lost` for this world that does the work with the lock or batch, which may block."""
        if self.in_threads:
            return work
        return awaitable(lambda lock, *what: work(Blocking(lock, self._clients), *what))

    def redlock(self, clients: list[Any], name: str = "name", **settings: Any) -> Any:
        """A Redlock on clients for this world. A machine that stalls does not make servers silent."""
        lock = self.ours.Redlock(clients, name, **{"limit": PATIENCE_S, **settings})
        return lock if self.in_threads else Blocking(lock, self._clients)

    def semaphore(self, client: Any, limit: int = 2, name: str | bytes = "name", **settings: Any) -> Any:
        """A semaphore on a client for this world."""
        semaphore = self.ours.Semaphore(client, name, limit, **settings)
        return semaphore if self.in_threads else Blocking(semaphore, self._clients)

    def locker(self, client: Any) -> Any:
        """A Locker on a client for this world."""
        locker = self.ours.Locker(client)
        return locker if self.in_threads else Blocking(locker, self._clients)

    def start(self, work: Callable[[], Any]) -> Any:
        """Do this in another thread or task; a future of what it returns or raises."""
        return start(work) if self.in_threads else Running(work)

    def beside(self, work: Callable[[], Any]) -> Any:
        """The result or the error of the work in another thread or task."""
        return self.start(work).result(PATIENCE_S)

    def sleep_by(self, clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have our locks of this world sleep by this clock."""
        (clock if self.in_threads else FakeAsyncio(clock)).replace_ours(monkeypatch)

    def close(self) -> None:
        """Close the clients for threads. One in a cycle would leave its socket to another test's collection."""
        for client in self._connected:
            client.close()

    def run(self, test: Callable[[], object]) -> None:
        """Run the test in a loop of this kind."""
        run_in_loop(self.kind, _drive(test, self._clients))


@pytest.fixture(params=[THREADS, *LOOP_KINDS])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Threads and each kind of event loop in turn."""
    kind: str = request.param
    if kind != THREADS:
        pytest.importorskip("greenlet")
    if kind not in {THREADS, "asyncio"}:
        pytest.importorskip(kind)
    with contextlib.closing(World(kind)) as made:
        yield made


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
