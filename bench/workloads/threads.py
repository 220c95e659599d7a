"""The workload of `python -m bench throughput --mode threads` and `--mode crowd`: many threads on one client.

Each thread has a lock with a name of its own, so no thread waits for the lock of another. All threads start at once. A
pair that is under way at the end of the time is finished and counts, and so does its time.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import redis

from bench.contestants import AnyLock, CheckFailedError, Contestant, is_left
from bench.measuring.costs import Meter
from bench.measuring.rounds import Entrant, Sample, Scene

COUNTS = (4, 16, 64)
"""The numbers of threads; each is a row."""

CROWDS = (100, 1000)
"""The numbers of threads of `--mode crowd`."""

CLEANUP_LIMIT_S = 2.0
"""How long a contestant may take to clean up after acquires that have failed."""

_T = TypeVar("_T")


def entrants_of(contestant: Contestant, scene: Scene, counts: Sequence[int] = COUNTS) -> list[Entrant]:
    """Make the rows of a contestant, one for each number of threads."""

    def entrant(count: int) -> Entrant:
        crew = Crew(contestant, scene, count)
        return Entrant(contestant.name, contestant.name, f"{count} threads", crew.measure, crew.check, count)

    return [entrant(count) for count in counts]


@dataclass(frozen=True)
class Turns:
    """The pairs of all threads, and how long their operations took.

    Attributes:
        pairs: of all threads together.
        seconds: from the start to the end of the last thread.
        acquires_s: how long each acquire took.
        releases_s: how long each release took.
        pairs_s: how long each pair took.
    """

    pairs: int
    seconds: float
    acquires_s: Sequence[float]
    releases_s: Sequence[float]
    pairs_s: Sequence[float]

    @property
    def pairs_per_s(self) -> float:
        """Of all threads together."""
        return self.pairs / self.seconds

    @property
    def latencies_s(self) -> list[float]:
        """Of every acquire and every release."""
        return [*self.acquires_s, *self.releases_s]


def take_turns(locks: Sequence[AnyLock], seconds: float, at_start: Callable[[], None] = lambda: None) -> Turns:
    """Acquire and release each lock in a thread of its own.

    Args:
        locks: of different names.
        seconds: for how long, from the moment when all threads are ready.
        at_start: called once, when all threads are ready.

    Raises:
        CheckFailedError: when a lock is not acquired.
    """
    acquires_s, releases_s, pairs_s = array("d"), array("d"), array("d")
    began_all = deadline = 0.0

    def start() -> None:
        nonlocal began_all, deadline
        at_start()
        began_all = time.perf_counter()
        deadline = began_all + seconds

    ready = threading.Barrier(len(locks), action=start)

    def work(lock: AnyLock) -> tuple[int, float]:
        acquire, release = lock.acquire, lock.release
        pairs = 0
        ready.wait()
        now = time.perf_counter()
        while now < deadline or not pairs:  # a thread may come late on a busy machine
            began = now
            if not acquire():
                raise CheckFailedError("a free lock was not acquired")
            acquired = time.perf_counter()
            release()
            now = time.perf_counter()
            acquires_s.append(acquired - began)
            releases_s.append(now - acquired)
            pairs_s.append(now - began)
            pairs += 1
        return pairs, now

    done = _each(locks, work)
    seconds_all = max(ended for _, ended in done) - began_all
    return Turns(sum(pairs for pairs, _ in done), seconds_all, acquires_s, releases_s, pairs_s)


class Crew:
    """A number of threads, each with a lock of its own, on one client.

    No other crew uses the client, so all of its connections come from this number of threads.
    """

    def __init__(self, contestant: Contestant, scene: Scene, count: int) -> None:
        names = [f"{scene.prefix}:{index}" for index in range(count)]
        self._client_name = f"{scene.prefix}:{contestant.name}:{count}"
        client = redis.Redis.from_url(scene.url, client_name=self._client_name, max_connections=count)
        self._locks = [contestant.make(client, name) for name in names]
        self._keys = [contestant.key_of(name) for name in names]
        self._witness = scene.witness
        self._linger_s = contestant.linger_s

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the locks for some seconds, from the moment when all threads are ready."""
        meter = Meter(self._witness)
        turns = take_turns(self._locks, seconds, meter.start)
        client_cpu_us, server_cpu_us = meter.read(turns.pairs)
        return Sample(
            turns.pairs_per_s,
            turns.latencies_s,
            self._connections(),
            client_cpu_us,
            server_cpu_us,
            acquires_s=turns.acquires_s,
            pairs_s=turns.pairs_s,
        )

    def acquire_within(self, limit_s: float, tries: int) -> int:
        """Acquire each lock several times with a time limit, in all threads at a time, at random moments.

        Args:
            limit_s: the `blocking_timeout`, in seconds.
            tries: acquires of each lock.

        Returns:
            How many acquires succeeded. All locks are released.
        """

        def work(lock: Any) -> int:
            taken = 0
            for _ in range(tries):
                time.sleep(random.uniform(0, limit_s))
                with contextlib.suppress(redis.RedisError):
                    if lock.acquire(blocking_timeout=limit_s):
                        taken += 1
                        lock.release()
            return taken

        taken = sum(_each(self._locks, work))
        give_up = time.monotonic() + CLEANUP_LIMIT_S
        while self._witness.exists(*self._keys) and time.monotonic() < give_up:
            time.sleep(0.001)  # the cleanup of an acquire that failed runs in the background
        return taken

    def check(self) -> None:
        """Check on an independent connection that all locks are held at a time, and none after the release.

        Raises:
            CheckFailedError: unless there is a key for each lock, with a token of its own.
        """
        tokens: set[bytes | str | None] = set()
        all_hold = threading.Barrier(len(self._locks), action=lambda: tokens.update(self._witness.mget(self._keys)))

        def hold(lock: AnyLock) -> None:
            try:
                if not lock.acquire(blocking=False):
                    raise CheckFailedError("a free lock could not be acquired")
            finally:
                all_hold.wait()  # the other threads wait for this one, even if it failed
            lock.release()

        if self._are_left():
            raise CheckFailedError("keys were left behind")
        _each(self._locks, hold)
        if len(tokens - {None}) != len(self._keys):
            raise CheckFailedError(f"{len(self._keys)} threads hold a lock, with {len(tokens - {None})} tokens")
        if self._are_left():
            raise CheckFailedError("released, but keys are still there")

    def _are_left(self) -> bool:
        return is_left(lambda: self._witness.exists(*self._keys), self._linger_s)

    def _connections(self) -> int:
        return sum(client["name"] == self._client_name for client in self._witness.client_list())


def _each(locks: Sequence[AnyLock], work: Callable[[AnyLock], _T]) -> list[_T]:
    """Run the work for every lock at a time, each in a thread of its own."""
    with ThreadPoolExecutor(len(locks)) as threads:
        return list(threads.map(work, locks))
