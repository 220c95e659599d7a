"""Ways to keep many locks renewed: with the package, and as a service with redis-py can do it.

Each is a context that holds all locks and renews each lock about every third of its ttl. redis-py renews no lock by
itself, so one thread or task calls `reacquire()` on one lock after the other: 10,000 locks are too many for a thread
each. A lost lease is ignored; the measurement counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from bench.contestants import OURS, REDIS_PY, CheckFailedError

Holder = Callable[[str, Sequence[str], float], AbstractContextManager[None]]
"""Called with the URL of the server, the names of the locks and their ttl in seconds."""


@contextmanager
def _ours(url: str, names: Sequence[str], ttl_s: float) -> Iterator[None]:
    with redis.Redis.from_url(url) as client:
        locks = [redislock_fast.Lock(client, name, timeout=ttl_s, auto_renew=True) for name in names]
        _acquire(locks)
        try:
            yield
        finally:
            _release(locks)


@contextmanager
def _redis_py(url: str, names: Sequence[str], ttl_s: float) -> Iterator[None]:
    with redis.Redis.from_url(url) as client:
        locks = [client.lock(name, timeout=ttl_s, thread_local=False) for name in names]
        _acquire(locks)
        ended = threading.Event()

        def renew() -> None:
            pause_s = ttl_s / 3
            while not ended.wait(pause_s):
                began = time.monotonic()
                for lock in locks:
                    with contextlib.suppress(LockNotOwnedError):
                        lock.reacquire()
                pause_s = began + ttl_s / 3 - time.monotonic()

        renewing = threading.Thread(target=renew, name="renews")
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            _release(locks)


def _acquire(locks: Sequence[Any]) -> None:
    for lock in locks:
        if not lock.acquire(blocking=False):
            raise CheckFailedError("a free lock was not acquired")


def _release(locks: Sequence[Any]) -> None:
    """Release the locks that are still held."""
    for lock in locks:
        with contextlib.suppress(LockNotOwnedError):
            lock.release()


# ---- asyncio ----


@contextmanager
def _loop() -> Iterator[Callable[[Coroutine[Any, Any, None]], Any]]:
    """Run a loop in a thread of its own. Yields the function that starts a task in it."""
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever, name="loop")
    running.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        running.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@contextmanager
def _ours_in_tasks(url: str, names: Sequence[str], ttl_s: float) -> Iterator[None]:
    with _loop() as start:
        client = redis.asyncio.Redis.from_url(url)
        settings: dict[str, Any] = {"timeout": ttl_s, "auto_renew": True, "thread_local": False}
        locks = [redislock_fast.asyncio.Lock(client, name, **settings) for name in names]
        start(_acquire_in_task(locks)).result()
        try:
            yield
        finally:
            start(_release_in_task(locks, client)).result()


@contextmanager
def _redis_py_in_tasks(url: str, names: Sequence[str], ttl_s: float) -> Iterator[None]:
    with _loop() as start:
        client = redis.asyncio.Redis.from_url(url)
        locks = [client.lock(name, timeout=ttl_s, thread_local=False) for name in names]
        start(_acquire_in_task(locks)).result()
        ended = threading.Event()

        async def renew() -> None:
            pause_s = ttl_s / 3
            while not ended.is_set():
                await asyncio.sleep(pause_s)
                began = time.monotonic()
                for lock in locks:
                    with contextlib.suppress(LockNotOwnedError):
                        await lock.reacquire()
                pause_s = max(began + ttl_s / 3 - time.monotonic(), 0.0)

        renewing = start(renew())
        try:
            yield
        finally:
            ended.set()
            renewing.result()
            start(_release_in_task(locks, client)).result()


async def _acquire_in_task(locks: Sequence[Any]) -> None:
    for lock in locks:
        if not await lock.acquire(blocking=False):
            raise CheckFailedError("a free lock was not acquired")


async def _release_in_task(locks: Sequence[Any], client: redis.asyncio.Redis) -> None:
    for lock in locks:
        with contextlib.suppress(LockNotOwnedError):
            await lock.release()
    await client.aclose()


HOLDERS: dict[tuple[str, str], Holder] = {
    (OURS, "threads"): _ours,
    (REDIS_PY, "threads"): _redis_py,
    (OURS, "asyncio"): _ours_in_tasks,
    (REDIS_PY, "asyncio"): _redis_py_in_tasks,
}
"""By contestant and by the kind of owner of the locks."""
