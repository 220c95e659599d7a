"""The costs of locks beside time: CPU of the client and of the server, and memory of a lock object.

The requests of a meter to the server are not counted.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import redis

_LOCKS = 1000


class Meter:
    """Measures the CPU time of this process and of servers; their witnesses have no other request under way."""

    def __init__(self, witnesses: Sequence[redis.Redis]) -> None:
        self._witnesses = witnesses
        self._server_s = sum(map(server_cpu_s, witnesses))
        self._client_s = time.process_time()

    def read(self) -> tuple[float, float]:
        """The CPU time of the client and of the servers since this was made, in seconds."""
        client_s = time.process_time() - self._client_s
        return client_s, sum(map(server_cpu_s, self._witnesses)) - self._server_s


def server_cpu_s(witness: redis.Redis) -> float:
    """The CPU time that the server has used since it started."""
    used = witness.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def connections_of(witness: redis.Redis, client_name: str) -> int:
    """The number of connections with this name to the server."""
    return sum(client["name"] == client_name for client in witness.client_list())


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
