"""The workload of `python -m bench throughput --mode threads`: many threads on one client.

Rules: each thread has a lock of its own name, so none ever waits for another's lock, only for the
client, the interpreter and the server; all start at once; what one thread has under way when time
is up counts for the latencies, not for the rate. Must not know: rounds, or how a contestant works.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

import redis

from bench.contestants import AnyLock, CheckFailedError, Contestant
from bench.rounds import REUSED, Entrant, Sample

COUNTS = (4, 16, 64)
"""How many threads there are, in one row each."""

_T = TypeVar("_T")


def lock_names(prefix: str) -> list[str]:
    """The names of all the locks."""
    return [f"{prefix}:{index}" for index in range(max(COUNTS))]


def entrants_of(contestant: Contestant, url: str, prefix: str, witness: redis.Redis) -> list[Entrant]:
    """A contestant's rows, one for each count of threads.

    Args:
        contestant: the library.
        url: the server's.
        prefix: of the locks' names, and of the names by which the server knows the clients.
        witness: a plain client that no contestant uses.
    """

    def entrant(count: int) -> Entrant:
        crew = _Crew(contestant, url, prefix, count, witness)
        return Entrant(contestant.name, contestant.name, REUSED, crew.measure, crew.check, count)

    return [entrant(count) for count in COUNTS]


def extra_summary(entrant: Entrant) -> dict[str, Any]:
    """What there is to say about a row beside its rates, over all of its rounds."""
    percentiles_s = statistics.quantiles(chain.from_iterable(sample.latencies_s for sample in entrant.samples), n=100)
    return {
        "latency_p50_ms": 1000 * percentiles_s[49],
        "latency_p99_ms": 1000 * percentiles_s[98],
        "connections": max(sample.connections or 0 for sample in entrant.samples),
    }


class _Crew:
    """So many threads, each with its own lock, on one client.

    The client is the crew's own: what it has connected, this count of threads made it connect.
    """

    def __init__(self, contestant: Contestant, url: str, prefix: str, count: int, witness: redis.Redis) -> None:
        names = lock_names(prefix)[:count]
        self._client_name = f"{prefix}:{contestant.name}:{count}"
        client = redis.Redis.from_url(url, client_name=self._client_name, max_connections=count)
        self._locks = [contestant.make(client, name) for name in names]
        self._keys = [contestant.key_of(name) for name in names]
        self._witness = witness

    def measure(self, seconds: float) -> Sample:
        """Take and give back the locks, for so long after the last thread is ready."""
        deadline = 0.0

        def start() -> None:
            nonlocal deadline
            deadline = time.perf_counter() + seconds

        ready = threading.Barrier(len(self._locks), action=start)

        def work(lock: AnyLock) -> list[float]:
            acquire, release = lock.acquire, lock.release
            latencies_s: list[float] = []
            ready.wait()
            began = time.perf_counter()
            while True:
                if not acquire():
                    raise CheckFailedError("a free lock was not acquired")
                release()
                now = time.perf_counter()
                latencies_s.append(now - began)
                if now >= deadline:
                    return latencies_s
                began = now

        latencies_s = _each(self._locks, work)
        in_time = sum(len(of_thread) - 1 for of_thread in latencies_s)
        return Sample(in_time / seconds, list(chain.from_iterable(latencies_s)), self._connections())

    def check(self) -> None:
        """Hold all the locks at a time, and see through an independent connection that they are held, and gone after.

        Raises:
            CheckFailedError: unless there is a key for each, with a token of its own.
        """
        tokens: set[bytes | str | None] = set()
        all_hold = threading.Barrier(len(self._locks), action=lambda: tokens.update(self._witness.mget(self._keys)))

        def hold(lock: AnyLock) -> None:
            try:
                if not lock.acquire(blocking=False):
                    raise CheckFailedError("a free lock could not be acquired")
            finally:
                all_hold.wait()  # failed or not: the others wait for this thread
            lock.release()

        if self._witness.exists(*self._keys):
            raise CheckFailedError("keys were left behind")
        _each(self._locks, hold)
        if len(tokens - {None}) != len(self._keys):
            raise CheckFailedError(f"{len(self._keys)} threads hold a lock, with {len(tokens - {None})} tokens")
        if self._witness.exists(*self._keys):
            raise CheckFailedError("released, but keys are still there")

    def _connections(self) -> int:
        return sum(client["name"] == self._client_name for client in self._witness.client_list())


def _each(locks: Sequence[AnyLock], work: Callable[[AnyLock], _T]) -> list[_T]:
    """Do the work with every lock, all at a time, each in a thread of its own."""
    with ThreadPoolExecutor(len(locks)) as threads:
        return list(threads.map(work, locks))
