"""What locks cost beside time: CPU of the client and of the server, and memory of a lock object.

Rules: one's own questions to the server lie outside what is counted.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import redis

_LOCKS = 1000


class Meter:
    """Counts CPU time from `start` on, of this process and of the server.

    Args:
        witness: a client of the server, on which nothing else is under way.
    """

    def __init__(self, witness: redis.Redis) -> None:
        self._witness = witness
        self._client_s = self._server_s = 0.0

    def start(self) -> None:
        """Begin."""
        self._server_s = server_cpu_s(self._witness)
        self._client_s = time.process_time()

    def read(self, pairs: int) -> tuple[float, float]:
        """Microseconds per pair since then, of this process and of the server.

        Args:
            pairs: how many were done since then.
        """
        client_s = time.process_time() - self._client_s
        server_s = server_cpu_s(self._witness) - self._server_s
        return 1e6 * client_s / pairs, 1e6 * server_s / pairs


def server_cpu_s(witness: redis.Redis) -> float:
    """The CPU time that the server has used since it started."""
    used = witness.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def bytes_per_lock(make: Callable[[str], object]) -> float:
    """Bytes of memory for each of many locks, as Python's allocators count them.

    In a thread of its own: a thread's table of thread-local objects grows in jumps, and here it begins empty for all.

    Args:
        make: makes the lock of a name.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_bytes_per_lock, make).result()


def _bytes_per_lock(make: Callable[[str], object]) -> float:
    names = [f"bench:memory:{index}" for index in range(_LOCKS)]
    locks: list[object] = [None] * _LOCKS
    make(names[0])  # what all locks share
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index, name in enumerate(names):
            locks[index] = make(name)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / _LOCKS
