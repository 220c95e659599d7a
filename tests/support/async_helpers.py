"""Helpers of asyncio tests: a loop per test, clients that live in it, waiting in it, its fake clock.

As in `helpers.py`, nothing here asserts what a lock should do, and every wait is on a condition. A test is an
`async def` under `in_loop`; its clients are closed in its own loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import redis.asyncio
import redis.asyncio.lock
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff

import redislock_fast.asyncio.lock
from redislock_fast._transport.loop import driver
from tests.support.helpers import PATIENCE_S, FakeTime, replace_clock

AsyncLockClass = type[redis.asyncio.lock.Lock]

LOOP_KINDS = ("asyncio", "uvloop")
"""The event loops that a test can run in."""

ASYNC_MODULES: dict[str, Any] = {"redis-py": redis.asyncio.lock, "ours": redislock_fast.asyncio.lock}
"""The module of each class."""

ASYNC_CLASSES: dict[str, AsyncLockClass] = {"redis-py": redis.asyncio.lock.Lock, "ours": redislock_fast.asyncio.Lock}


class AsyncClients:
    """Makes asyncio clients and keeps those that a test makes itself, until `in_loop` closes them all in their loop."""

    def __init__(self) -> None:
        self._clients: list[Any] = []

    def __call__(self, port: int, **options: Any) -> redis.asyncio.Redis:
        """A client of the server on this port."""
        client: redis.asyncio.Redis = self.keep(redis.asyncio.Redis(port=port, **options))
        return client

    def keep(self, client: Any) -> Any:
        """The client, to be closed after the test; anything with `aclose`."""
        self._clients.append(client)
        return client

    async def aclose(self) -> None:
        """Close them."""
        while self._clients:
            await self._clients.pop().aclose()


def run_in_loop(kind: str, scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run the scenario in a new loop of this kind; returns or raises what it does."""
    if kind == "uvloop":
        import uvloop

        return uvloop.run(scenario)
    return asyncio.run(scenario)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an `async def` a test: it runs in a loop of its own, of the kind that the fixture `loop_kind` says."""
    parameters = inspect.signature(test).parameters
    added = [name for name in ("loop_kind", "async_connect") if name not in parameters]

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def scenario() -> None:
            try:
                await test(**{name: fixtures[name] for name in parameters})
            finally:
                await fixtures["async_connect"].aclose()

        run_in_loop(fixtures["loop_kind"], scenario())

    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in added]
    run.__signature__ = inspect.Signature([*parameters.values(), *extra])  # type: ignore[attr-defined]
    return run


async def eventually(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Return once the condition is true; a condition may be asked of a server by an awaitable.

    Raises:
        AssertionError: when it does not come true.
    """
    give_up = time.monotonic() + patience_s
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        if time.monotonic() > give_up:
            raise AssertionError(f"did not happen: {what}")
        await asyncio.sleep(0.002)


async def settle() -> None:
    """Let every task run until it waits for something outside of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def in_task(work: Callable[[], Awaitable[Any]]) -> Any:
    """Do the work in a task of its own; returns or raises what it does."""

    async def run() -> Any:
        return await work()

    return await asyncio.wait_for(asyncio.create_task(run()), PATIENCE_S)


class Owner:
    """A lock acquired by a task that goes on living: `async with Owner(lock): ...`."""

    def __init__(self, lock: redis.asyncio.lock.Lock, **arguments: Any) -> None:
        self._lock = lock
        self._arguments = arguments
        self._asked: asyncio.Queue[Callable[[], Awaitable[Any]] | None] = asyncio.Queue()
        self._answers: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def ask(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do the work in the holder's task; returns or raises what it does."""
        self._asked.put_nowait(work)
        return await asyncio.wait_for(await self._answers.get(), PATIENCE_S)

    async def _live(self) -> None:
        work: Callable[[], Awaitable[Any]] | None = functools.partial(self._lock.acquire, **self._arguments)
        while work is not None:
            answer = asyncio.get_running_loop().create_future()
            try:
                answer.set_result(await work())
            except Exception as error:
                answer.set_exception(error)
            self._answers.put_nowait(answer)
            work = await self._asked.get()

    async def __aenter__(self) -> Owner:
        """The holder, once it holds."""
        self._task = asyncio.create_task(self._live())
        assert await asyncio.wait_for(await self._answers.get(), PATIENCE_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the holder's task, even if it holds the lock."""
        assert self._task is not None
        self._asked.put_nowait(None)
        await asyncio.wait_for(self._task, PATIENCE_S)


class _FakeLoop:
    """The running loop with another clock."""

    def __init__(self, clock: FakeTime) -> None:
        self.time = clock.monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


class FakeAsyncio:
    """Stands for `asyncio` in redis-py's lock, or our driver: its sleeps move the loop's clock and take no time."""

    def __init__(self, clock: FakeTime) -> None:
        self._clock = clock

    def replace_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have our locks for tasks sleep by this, and their deadlines be read from its clock."""
        monkeypatch.setattr(driver, "asyncio", self)
        replace_clock(monkeypatch, self._clock.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self._clock.sleep(seconds)
        await asyncio.sleep(0)

    def get_running_loop(self) -> _FakeLoop:
        """The loop, by the fake clock."""
        return _FakeLoop(self._clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


def async_once() -> Retry:
    """A retry policy without retries."""
    return Retry(NoBackoff(), 0)


def async_few() -> Retry:
    """A retry policy that soon gives up."""
    return Retry(ConstantBackoff(0.01), 3)
