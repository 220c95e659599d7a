"""The workload of many callers, threads or tasks, on one client.

Each caller has a lock with a name of its own, so no caller waits for the lock of another. All callers start at once. A
pair that is under way at the end of the time is finished and counts, and so does its time.

The event loop of tasks and its connections stay from round to round.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

import redis
import redis.asyncio

from bench.contestants import AbsentError, AnyAsyncLock, AnyLock, CheckFailedError, Contestant, expect, is_left
from bench.measuring.costs import Meter
from bench.measuring.rounds import Entrant, Sample, Scene

THREADS = (4, 16, 64)
TASKS = (1, 10, 100, 1000)
"""The numbers of callers in `python -m bench throughput --mode threads` and `asyncio`; each is a row."""

_T = TypeVar("_T")


def of_threads(contestant: Contestant, scene: Scene, counts: Sequence[int] = THREADS) -> list[Entrant]:
    """Make the rows of a contestant, one for each number of threads."""
    return [Threads(contestant, scene, count).entrant(f"{count} threads") for count in counts]


def of_tasks(
    contestant: Contestant, scene: Scene, loop: str, counts: Sequence[int] = TASKS, pairs_per_yield: int = 0
) -> list[Entrant]:
    """Make the rows of a contestant, one for each number of tasks, in a loop of the module "asyncio" or "uvloop".

    `pairs_per_yield` is that of `take_turns_in_tasks`. Raises `AbsentError` without the module, or without locks for
    asyncio.
    """
    try:
        new_loop = importlib.import_module(loop).new_event_loop
    except ModuleNotFoundError:
        raise AbsentError(f"{loop} is not installed") from None
    return [
        Tasks(contestant, scene, count, new_loop, pairs_per_yield).entrant(f"{count:,} task{'s' * (count > 1)}, {loop}")
        for count in counts
    ]


def take_turns(locks: Sequence[AnyLock], seconds: float, at_start: Callable[[], None] = lambda: None) -> Sample:
    """Acquire and release each lock in a thread of its own, from the moment when all threads are ready.

    Calls `at_start` once at that moment. Raises `CheckFailedError` when a lock is not acquired.
    """
    began_all = deadline = 0.0

    def start() -> None:
        nonlocal began_all, deadline
        at_start()
        began_all = time.perf_counter()
        deadline = began_all + seconds

    ready = threading.Barrier(len(locks), action=start)

    def work(lock: AnyLock) -> tuple[array[float], array[float], float]:
        acquires_s, releases_s = array("d"), array("d")
        acquire, release = lock.acquire, lock.release
        ready.wait()
        now = time.perf_counter()
        while now < deadline or not acquires_s:  # a thread may come late on a busy machine
            began = now
            if not acquire():
                raise CheckFailedError("a free lock was not acquired")
            acquired = time.perf_counter()
            release()
            now = time.perf_counter()
            acquires_s.append(acquired - began)
            releases_s.append(now - acquired)
        return acquires_s, releases_s, now

    done = _in_threads(locks, work)
    return _sample([turns[:2] for turns in done], max(ended for *_, ended in done) - began_all)


async def take_turns_in_tasks(locks: Sequence[AnyAsyncLock], seconds: float, pairs_per_yield: int = 0) -> Sample:
    """As `take_turns`, in a task for each lock.

    A task lets the others run after `pairs_per_yield` pairs: locks that are acquired without a wait would not. 0: it
    relies on its waits.
    """

    async def work(lock: AnyAsyncLock) -> tuple[array[float], array[float]]:
        acquires_s, releases_s = array("d"), array("d")
        acquire, release = lock.acquire, lock.release
        now = time.perf_counter()
        while now < deadline or not acquires_s:
            began = now
            if not await acquire():
                raise CheckFailedError("a free lock was not acquired")
            acquired = time.perf_counter()
            await release()
            now = time.perf_counter()
            acquires_s.append(acquired - began)
            releases_s.append(now - acquired)
            if pairs_per_yield and not len(acquires_s) % pairs_per_yield:
                await asyncio.sleep(0)
                now = time.perf_counter()
        return acquires_s, releases_s

    began_all = time.perf_counter()
    deadline = began_all + seconds
    done = await _in_tasks(locks, work)
    return _sample(done, time.perf_counter() - began_all)


def _sample(of_callers: Iterable[tuple[array[float], array[float]]], seconds: float) -> Sample:
    acquires_s, releases_s = array("d"), array("d")
    for acquires, releases in of_callers:
        acquires_s.extend(acquires)
        releases_s.extend(releases)
    pairs_s = array("d", map(float.__add__, acquires_s, releases_s))
    return Sample(len(pairs_s) / seconds, acquires_s + releases_s, acquires_s, pairs_s, len(pairs_s))


class _Callers(ABC):
    """A number of callers, each with a lock of its own, on one client, which no others use."""

    def __init__(self, contestant: Contestant, scene: Scene, count: int) -> None:
        names = [f"{scene.prefix}:{index}" for index in range(count)]
        self._contestant = contestant
        self._client_name = f"{scene.prefix}:{contestant.name}:{id(self):x}"
        # With the default of redis-py, 100 connections, the 101st of its tasks would fail.
        self._of_client: dict[str, Any] = {"client_name": self._client_name, "max_connections": count}
        self._names = names
        self._keys = [contestant.key_of(name) for name in names]
        self._witness = scene.witness
        self._meter = Meter(scene.witness)

    def entrant(self, workload: str) -> Entrant:
        """Make the row."""
        return Entrant(self._contestant.name, workload, self.measure, self.check, len(self._names))

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the locks for some seconds."""
        sample = self._take_turns(seconds)
        connections = sum(client["name"] == self._client_name for client in self._witness.client_list())
        return replace(sample, connections=connections, **self._meter.read(sample.pairs))

    def check(self) -> None:
        """Check on an independent connection that there is a key with a token of its own for each held lock."""
        expect(not self._are_left(), "keys were left behind")
        found = len(self._tokens_while_held() - {None})
        expect(found == len(self._keys), f"{len(self._keys)} callers hold a lock, with {found} tokens")
        expect(not self._are_left(), "released, but keys are still there")

    @abstractmethod
    def _take_turns(self, seconds: float) -> Sample: ...

    @abstractmethod
    def _tokens_while_held(self) -> set[Any]: ...

    def _are_left(self) -> bool:
        return is_left(lambda: self._witness.exists(*self._keys), self._contestant.linger_s)


class Threads(_Callers):
    """Threads on one client."""

    def __init__(self, contestant: Contestant, scene: Scene, count: int) -> None:
        super().__init__(contestant, scene, count)
        client = redis.Redis.from_url(scene.url, **self._of_client)
        self._locks = [contestant.make(client, name) for name in self._names]

    def _take_turns(self, seconds: float) -> Sample:
        return take_turns(self._locks, seconds, self._meter.start)

    def _tokens_while_held(self) -> set[Any]:
        tokens: set[Any] = set()
        all_hold = threading.Barrier(len(self._locks), action=lambda: tokens.update(self._witness.mget(self._keys)))

        def hold(lock: AnyLock) -> None:
            try:
                expect(lock.acquire(blocking=False), "a free lock could not be acquired")
            finally:
                all_hold.wait()  # the other threads wait for this one, even if it failed
            lock.release()

        _in_threads(self._locks, hold)
        return tokens


class Tasks(_Callers):
    """Tasks on one client, in a loop of their own that ends with the scene."""

    def __init__(
        self,
        contestant: Contestant,
        scene: Scene,
        count: int,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        pairs_per_yield: int = 0,
    ) -> None:
        if contestant.make_async is None:
            raise AbsentError("no locks for asyncio")
        super().__init__(contestant, scene, count)
        self._loop = new_loop()
        self._client = redis.asyncio.Redis.from_url(scene.url, **self._of_client)
        self._locks = [contestant.make_async(self._client, name) for name in self._names]
        self._pairs_per_yield = pairs_per_yield
        scene.closing.callback(close_loop, self._loop, self._client)

    def _take_turns(self, seconds: float) -> Sample:
        self._meter.start()
        return self._loop.run_until_complete(take_turns_in_tasks(self._locks, seconds, self._pairs_per_yield))

    def _are_left(self) -> bool:
        # In another thread: the loop gives back the keys that linger.
        return self._loop.run_until_complete(asyncio.to_thread(super()._are_left))

    def _tokens_while_held(self) -> set[Any]:
        return self._loop.run_until_complete(self._hold())

    async def _hold(self) -> set[Any]:
        tokens: set[Any] = set()
        to_arrive = len(self._locks)
        all_hold = asyncio.Event()

        async def hold(lock: AnyAsyncLock) -> None:
            nonlocal to_arrive
            try:
                expect(await lock.acquire(blocking=False), "a free lock could not be acquired")
            finally:  # the other tasks wait for this one, even if it failed
                to_arrive -= 1
                if not to_arrive:
                    tokens.update(self._witness.mget(self._keys))
                    all_hold.set()
            await all_hold.wait()
            await lock.release()

        await _in_tasks(self._locks, hold)
        return tokens


def close_loop(loop: asyncio.AbstractEventLoop, client: Any) -> None:
    """Cancel the tasks that an interrupted race has left in a loop, and close its client and the loop."""

    async def end() -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await client.aclose()

    loop.run_until_complete(end())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def _in_threads(locks: Sequence[AnyLock], work: Callable[[AnyLock], _T]) -> list[_T]:
    """Run the work for every lock at a time, each in a thread of its own."""
    with ThreadPoolExecutor(len(locks)) as threads:
        return list(threads.map(work, locks))


async def _in_tasks(locks: Sequence[AnyAsyncLock], work: Callable[[AnyAsyncLock], Awaitable[_T]]) -> list[_T]:
    """Run the work for every lock at a time, each in a task of its own, and wait for all of them."""
    results = await asyncio.gather(*map(work, locks), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[_T]", results)
