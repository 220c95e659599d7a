"""Acquires and releases locks for as long as is wanted, in all usual ways, and shows that the memory stays the same.

`python -m tests.torture.soak --pairs 10000000` prints how many pairs each way makes, and the resident memory after each
tenth of them. The status is 1 where the last figure is above the second by more than `ALLOWED_KIB`: the first tenth
fills caches and free lists.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import threading
import time
from pathlib import Path

import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server

__all__ = ["ALLOWED_KIB", "soak"]

ALLOWED_KIB = 1024
_PARTS = 10


def _reused(client: redis.Redis, pairs: int) -> None:
    lock = redislock_fast.Lock(client, "reused", timeout=10)
    for _ in range(pairs):
        lock.acquire()
        lock.release()


def _anew(client: redis.Redis, pairs: int) -> None:
    for number in range(pairs):
        with redislock_fast.Lock(client, f"anew:{number % 1000}", timeout=10):
            pass


def _lingering(client: redis.Redis, pairs: int) -> None:
    for number in range(pairs):
        name = f"linger:{number % 10}" if number % 1000 else f"linger:once:{number}"
        with redislock_fast.Lock(client, name, timeout=10, linger=0.05):
            pass


def _batches(client: redis.Redis, pairs: int) -> None:
    names = [f"batch:{number}" for number in range(100)]
    for _ in range(pairs // len(names)):
        redislock_fast.Locker(client).acquire_many(names, 10).release()


def _contended(client: redis.Redis, pairs: int) -> None:
    def work() -> None:
        lock = redislock_fast.Lock(client, "contended", timeout=10, auto_renew=True)
        for _ in range(pairs // 4):
            with lock:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _tasks(client: redis.Redis, pairs: int) -> None:
    port = client.get_connection_kwargs()["port"]

    async def work(client: redis.asyncio.Redis, number: int) -> None:
        for _ in range(pairs // 10):
            async with redislock_fast.asyncio.Lock(client, f"tasks:{number % 5}", timeout=10):
                pass

    async def run() -> None:
        async with redis.asyncio.Redis(port=port) as own_client:
            await asyncio.gather(*(work(own_client, number) for number in range(10)))

    asyncio.run(run())


_SHARES = {_reused: 0.005, _anew: 0.005, _lingering: 0.6, _batches: 0.385, _contended: 0.0025, _tasks: 0.0025}
"""The part of all pairs that each way makes: the slow ways take about as long as the quick ones."""


def _resident_kib() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def soak(port: int, pairs: int) -> list[int]:
    """Acquire and release so often. Returns the resident memory in KiB after each tenth."""
    resident_kib = []
    with redis.Redis(port=port) as client:
        for _ in range(_PARTS):
            for way, share in _SHARES.items():
                way(client, round(pairs * share / _PARTS))
            resident_kib.append(_resident_kib())
            print(f"resident after {len(resident_kib)} of {_PARTS} parts: {resident_kib[-1]:,} KiB", flush=True)
    return resident_kib


def main() -> int:
    """Run as the module's docstring says. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.soak", description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000_000, help="how often to acquire and release")
    parser.add_argument("--server", default="valkey")
    chosen = parser.parse_args()
    for way, share in _SHARES.items():
        print(f"{way.__name__[1:]:10} {round(chosen.pairs * share):12,} pairs", flush=True)
    began = time.monotonic()
    with Server(chosen.server) as server:
        resident_kib = soak(server.port, chosen.pairs)
    print(f"{chosen.pairs:,} pairs in {time.monotonic() - began:.0f} s")
    return 1 if resident_kib[-1] > resident_kib[1] + ALLOWED_KIB else 0


if __name__ == "__main__":
    sys.exit(main())
