"""The costs of locks beside time: CPU of the client and of the server, and memory of a lock object.

The requests of a meter to the server are not counted.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis

_LOCKS = 1000


class Meter:
    """Measures the CPU time of this process and of servers; their witnesses have no other request under way."""

    def __init__(self, *witnesses: redis.Redis) -> None:
        self._witnesses = witnesses
        self._client_s = self._server_s = 0.0

    def start(self) -> None:
        """Start counting."""
        self._server_s = sum(map(server_cpu_s, self._witnesses))
        self._client_s = time.process_time()

    def read(self, pairs: int) -> dict[str, Any]:
        """The CPU time since `start`, for each of these pairs, by the names that `Sample` has for it."""
        client_s = time.process_time() - self._client_s
        server_s = sum(map(server_cpu_s, self._witnesses)) - self._server_s
        return {"client_cpu_us": 1e6 * client_s / pairs, "server_cpu_us": 1e6 * server_s / pairs}


def server_cpu_s(witness: redis.Redis) -> float:
    """The CPU time that the server has used since it started."""
    used = witness.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def bytes_per_lock(make: Callable[[str], object]) -> float:
    """The bytes of memory of a lock object, as the allocators of Python count them.

    The locks are made in a new thread: the table of thread-local objects of a thread grows in steps, and in a new
    thread it is empty for every contestant.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_bytes_per_lock, make).result()


def _bytes_per_lock(make: Callable[[str], object]) -> float:
    names = [f"bench:memory:{index}" for index in range(_LOCKS)]
    locks: list[object] = [None] * _LOCKS
    make(names[0])  # allocates the memory that all locks share
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
