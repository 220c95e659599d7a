"""The workload of many callers, threads or tasks, on one client.

Each caller has a lock with a name of its own, so no caller waits for the lock of another. All callers start at once. A
pair that is under way at the end of the time is finished and counts, and so does its time.

The event loop of tasks and its connections stay from round to round.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import redis
import redis.asyncio

from bench.contestants import AbsentError, CheckFailedError, Contestant, expect, is_left
from bench.measuring.rounds import Entrant, Sample, Scene

THREADS = (4, 16, 64)
TASKS = (1, 10, 100, 1000)
"""The numbers of callers in `python -m bench throughput --mode threads` and `asyncio`; each is a row."""

_PAIRS_PER_YIELD = 10  # a task whose locks are in memory never waits

NewLoop = Callable[[], asyncio.AbstractEventLoop]
_T = TypeVar("_T")


def of_threads(contestant: Contestant, scene: Scene, counts: Sequence[int] = THREADS) -> list[Entrant]:
    """Make the rows of a contestant, one for each number of threads."""
    return [row(contestant, scene, count, f"{count} threads") for count in counts]


def of_tasks(contestant: Contestant, scene: Scene, loop: str, counts: Sequence[int] = TASKS) -> list[Entrant]:
    """Make the rows of a contestant, one for each number of tasks, in a loop of the module "asyncio" or "uvloop".

    Raises `AbsentError` without the module, or without locks for asyncio.
    """
    try:
        new_loop = importlib.import_module(loop).new_event_loop
    except ModuleNotFoundError:
        raise AbsentError(f"{loop} is not installed") from None
    return [row(contestant, scene, count, f"{count:,} task{'s' * (count > 1)}, {loop}", new_loop) for count in counts]


def row(contestant: Contestant, scene: Scene, count: int, workload: str, new_loop: NewLoop | None = None) -> Entrant:
    """Make a row of so many tasks in a new loop, or threads without one; raises `AbsentError` without such locks."""
    make = contestant.maker(new_loop is not None)
    client_name = f"{scene.prefix}:{secrets.token_hex(4)}"
    client_class = redis.Redis if new_loop is None else redis.asyncio.Redis
    # With the default of redis-py, 100 connections, the 101st of its tasks would fail.
    client: Any = client_class.from_url(scene.url, client_name=client_name, max_connections=count)
    names = [f"{scene.prefix}:{index}" for index in range(count)]
    keys = [contestant.key_of(name) for name in names]
    crew = Crew(client, [make(client, name) for name in names], scene.closing, new_loop)

    def is_there() -> bool:
        return is_left(lambda: scene.witness.exists(*keys), contestant.linger_s)

    def check() -> None:
        expect(not crew.beside(is_there), "keys were left behind")
        found = len(crew.while_held(lambda: set(scene.witness.mget(keys))) - {None})
        expect(found == count, f"{count} callers hold a lock, with {found} tokens")
        expect(not crew.beside(is_there), "released, but keys are still there")

    costs: dict[str, Any] = {"witnesses": [scene.witness], "client_name": client_name}
    return Entrant(contestant.name, workload, crew.measure, check, count, **costs)


def take_turns(locks: Sequence[Any], seconds: float) -> Sample:
    """Acquire and release each lock in a thread of its own, from the moment when all threads are ready.

    Raises `CheckFailedError` when a lock is not acquired.
    """
    began_all = deadline = 0.0

    def start() -> None:
        nonlocal began_all, deadline
        began_all = time.perf_counter()
        deadline = began_all + seconds

    ready = threading.Barrier(len(locks), action=start)

    def work(lock: Any) -> tuple[array[float], array[float], float]:
        acquires_s, releases_s = array("d"), array("d")
        acquire, release = lock.acquire, lock.release
        ready.wait()
        clock_s, ends_at = time.perf_counter, deadline + 0  # without the GIL, threads contend for what they share
        now = clock_s()
        while now < ends_at or not acquires_s:  # a thread may come late on a busy machine
            began = now
            if not acquire():
                raise CheckFailedError("a free lock was not acquired")
            acquired = clock_s()
            release()
            now = clock_s()
            acquires_s.append(acquired - began)
            releases_s.append(now - acquired)
        return acquires_s, releases_s, now

    done = _in_threads(locks, work)
    return _sample([turns[:2] for turns in done], max(ended for *_, ended in done) - began_all)


async def take_turns_in_tasks(locks: Sequence[Any], seconds: float) -> Sample:
    """As `take_turns`, in a task for each lock, which lets the others run now and then."""

    async def work(lock: Any) -> tuple[array[float], array[float]]:
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
            if not len(acquires_s) % _PAIRS_PER_YIELD:
                await asyncio.sleep(0)
                now = time.perf_counter()
        return acquires_s, releases_s

    began_all = time.perf_counter()
    deadline = began_all + seconds
    done = await asyncio.gather(*map(work, locks))
    return _sample(done, time.perf_counter() - began_all)


def _sample(of_callers: Iterable[tuple[array[float], array[float]]], seconds: float) -> Sample:
    acquires_s, releases_s = array("d"), array("d")
    for acquires, releases in of_callers:
        acquires_s.extend(acquires)
        releases_s.extend(releases)
    pairs_s = array("d", map(float.__add__, acquires_s, releases_s))
    return Sample(len(pairs_s) / seconds, acquires_s + releases_s, acquires_s, pairs_s, len(pairs_s))


class Crew:
    """Callers, each with a lock of its own: tasks of a new loop, or threads where there is none.

    Their client, which nobody else uses, is closed in the end, and so is the loop.
    """

    def __init__(self, client: Any, locks: Sequence[Any], closing: ExitStack, new_loop: NewLoop | None = None) -> None:
        self.locks = locks
        self.loop = new_loop and new_loop()
        if self.loop is None:
            closing.callback(client.close)
        else:
            closing.callback(close_loop, self.loop, client)

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the locks for some seconds."""
        if self.loop is None:
            return take_turns(self.locks, seconds)
        return self.loop.run_until_complete(take_turns_in_tasks(self.locks, seconds))

    def beside(self, look: Callable[[], _T]) -> _T:
        """Call a function beside the loop, which gives back keys that linger."""
        return look() if self.loop is None else self.loop.run_until_complete(asyncio.to_thread(look))

    def while_held(self, look: Callable[[], _T]) -> _T:
        """Call a function while all callers hold their locks."""
        if self.loop is not None:
            return self.loop.run_until_complete(self._while_tasks_hold(look))
        found: list[_T] = []
        all_hold = threading.Barrier(len(self.locks), action=lambda: found.append(look()))

        def hold(lock: Any) -> None:
            try:
                expect(lock.acquire(blocking=False), "a free lock could not be acquired")
            finally:
                all_hold.wait()  # the other threads wait for this one, even if it failed
            lock.release()

        _in_threads(self.locks, hold)
        return found[0]

    async def _while_tasks_hold(self, look: Callable[[], _T]) -> _T:
        acquired = await asyncio.gather(*(lock.acquire(blocking=False) for lock in self.locks))
        expect(all(acquired), "a free lock could not be acquired")
        found = look()
        await asyncio.gather(*(lock.release() for lock in self.locks))
        return found


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


def _in_threads(locks: Sequence[Any], work: Callable[[Any], _T]) -> list[_T]:
    """Run the work for every lock at a time, each in a thread of its own."""
    with ThreadPoolExecutor(len(locks)) as threads:
        return list(threads.map(work, locks))
