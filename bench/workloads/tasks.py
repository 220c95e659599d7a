"""The workload of `python -m bench throughput --mode asyncio` and `uvloop`: many tasks on one client.

Each task has a lock with a name of its own, so no task waits for the lock of another. The loop and its connections stay
from round to round, and each task has connected before the clock starts. A pair that is under way at the end of the
time is finished and counts, and so does its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import redis.asyncio

from bench.contestants import AbsentError, AnyAsyncLock, CheckFailedError, Contestant, is_left
from bench.measuring.costs import Meter
from bench.measuring.rounds import Entrant, Sample, Scene
from bench.workloads.threads import CLEANUP_LIMIT_S

COUNTS = (1, 10, 100, 1000)
"""The numbers of tasks; each is a row."""

_T = TypeVar("_T")


def entrants_of(
    contestant: Contestant, scene: Scene, loop: str, counts: Sequence[int] = COUNTS, pairs_per_yield: int | None = None
) -> list[Entrant]:
    """Make the rows of a contestant, one for each number of tasks.

    Args:
        contestant: the library.
        scene: of the measurement.
        loop: the module whose `new_event_loop` makes the loop, "asyncio" or "uvloop".
        counts: the numbers of tasks.
        pairs_per_yield: after so many pairs, a task lets the others run, for locks that are acquired without waiting;
            None: it relies on its waits.

    Raises:
        AbsentError: when there is no such module, or the contestant has no locks for asyncio.
    """
    try:
        new_loop = importlib.import_module(loop).new_event_loop
    except ModuleNotFoundError:
        raise AbsentError(f"{loop} is not installed") from None

    def entrant(count: int) -> Entrant:
        crew = Crew(contestant, scene, new_loop(), count, pairs_per_yield)
        scene.closing.callback(crew.close)
        workload = f"{count:,} task{'s' * (count > 1)}, {loop}"
        return Entrant(contestant.name, contestant.name, workload, crew.measure, crew.check, count)

    return [entrant(count) for count in counts]


class Crew:
    """A number of tasks, each with a lock of its own, on one client in one loop.

    No other crew uses the client, so all of its connections come from this number of tasks.
    """

    def __init__(
        self,
        contestant: Contestant,
        scene: Scene,
        loop: asyncio.AbstractEventLoop,
        count: int,
        pairs_per_yield: int | None = None,
    ) -> None:
        if contestant.make_async is None:
            raise AbsentError("no locks for asyncio")
        names = [f"{scene.prefix}:{index}" for index in range(count)]
        self._loop = loop
        self._client_name = f"{scene.prefix}:{contestant.name}:{type(loop).__module__}:{count}"
        # With the default of redis-py, 100 connections, the 101st of its tasks would fail.
        self._client = redis.asyncio.Redis.from_url(scene.url, client_name=self._client_name, max_connections=count)
        self._locks = [contestant.make_async(self._client, name) for name in names]
        self._keys = [contestant.key_of(name) for name in names]
        self._witness = scene.witness
        self._linger_s = contestant.linger_s
        self._pairs_per_yield = pairs_per_yield

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the locks for some seconds."""
        return self._loop.run_until_complete(self._measure(seconds))

    def acquire_within(self, limit_s: float, tries: int) -> int:
        """Acquire each lock several times with a time limit, as `threads.Crew.acquire_within` does."""

        async def work(lock: Any) -> int:
            taken = 0
            for _ in range(tries):
                await asyncio.sleep(random.uniform(0, limit_s))
                with contextlib.suppress(redis.RedisError):
                    if await lock.acquire(blocking_timeout=limit_s):
                        taken += 1
                        await lock.release()
            return taken

        async def all_of_them() -> int:
            taken = sum(await _each(self._locks, work))
            give_up = time.monotonic() + CLEANUP_LIMIT_S
            while self._witness.exists(*self._keys) and time.monotonic() < give_up:
                await asyncio.sleep(0.001)  # the cleanup of an acquire that failed runs in the background
            return taken

        return self._loop.run_until_complete(all_of_them())

    def check(self) -> None:
        """Check on an independent connection that all locks are held at a time, and none after the release.

        Raises:
            CheckFailedError: unless there is a key for each lock, with a token of its own.
        """
        self._loop.run_until_complete(self._check())

    def close(self) -> None:
        """Close the client and the loop, and cancel the tasks that an interrupted race has left."""
        self._loop.run_until_complete(self._end())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()

    async def _measure(self, seconds: float) -> Sample:
        meter = Meter(self._witness)
        acquires_s, releases_s = array("d"), array("d")
        pairs_per_yield = self._pairs_per_yield

        async def work(lock: AnyAsyncLock) -> int:
            acquire, release = lock.acquire, lock.release
            pairs = 0
            now = time.perf_counter()
            while now < deadline or not pairs:
                began = now
                if not await acquire():
                    raise CheckFailedError("a free lock was not acquired")
                acquired = time.perf_counter()
                await release()
                now = time.perf_counter()
                acquires_s.append(acquired - began)
                releases_s.append(now - acquired)
                pairs += 1
                if pairs_per_yield and not pairs % pairs_per_yield:
                    await asyncio.sleep(0)
                    now = time.perf_counter()
            return pairs

        meter.start()
        began_all = time.perf_counter()
        deadline = began_all + seconds
        pairs = sum(await _each(self._locks, work))
        seconds_taken = time.perf_counter() - began_all
        client_cpu_us, server_cpu_us = meter.read(pairs)
        return Sample(
            pairs / seconds_taken,
            [*acquires_s, *releases_s],
            self._connections(),
            client_cpu_us,
            server_cpu_us,
            acquires_s=acquires_s,
        )

    async def _check(self) -> None:
        tokens: set[bytes | str | None] = set()
        to_arrive = len(self._locks)
        all_hold = asyncio.Event()

        async def hold(lock: AnyAsyncLock) -> None:
            nonlocal to_arrive
            try:
                if not await lock.acquire(blocking=False):
                    raise CheckFailedError("a free lock could not be acquired")
            finally:  # the other tasks wait for this one, even if it failed
                to_arrive -= 1
                if not to_arrive:
                    tokens.update(self._witness.mget(self._keys))
                    all_hold.set()
            await all_hold.wait()
            await lock.release()

        if await self._are_left():
            raise CheckFailedError("keys were left behind")
        await _each(self._locks, hold)
        if len(tokens - {None}) != len(self._keys):
            raise CheckFailedError(f"{len(self._keys)} tasks hold a lock, with {len(tokens - {None})} tokens")
        if await self._are_left():
            raise CheckFailedError("released, but keys are still there")

    async def _are_left(self) -> bool:
        """`is_left`, in another thread: the loop gives back the keys that linger."""
        if not self._linger_s:
            return bool(self._witness.exists(*self._keys))
        return await asyncio.to_thread(is_left, lambda: self._witness.exists(*self._keys), self._linger_s)

    def _connections(self) -> int:
        return sum(client["name"] == self._client_name for client in self._witness.client_list())


async def _each(locks: Sequence[AnyAsyncLock], work: Callable[[AnyAsyncLock], Awaitable[_T]]) -> list[_T]:
    """Run the work for every lock at a time, each in a task of its own, and wait for all of them."""
    results = await asyncio.gather(*map(work, locks), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)
