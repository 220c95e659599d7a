"""`patch()`: redis-py's clients make our locks, without a change to their callers."""

from __future__ import annotations

from typing import Any

import redis.asyncio.client
import redis.asyncio.cluster
import redis.asyncio.lock
import redis.client
import redis.cluster
import redis.lock

from redislock_fast.lock import Lock

__all__ = ["patch", "unpatch"]

# The modules in which redis-py's own code finds the classes, each under the name "Lock".
_PLACES: tuple[Any, ...] = (redis.lock, redis.client, redis.cluster)
_ASYNC_PLACES: tuple[Any, ...] = (redis.asyncio.lock, redis.asyncio.client, redis.asyncio.cluster)
_ORIGINAL = redis.lock.Lock
_ASYNC_ORIGINAL = redis.asyncio.lock.Lock


def patch() -> None:
    """Let `client.lock()` of redis-py's clients return `redislock_fast.Lock`, or `redislock_fast.asyncio.Lock`.

    `redis.lock.Lock` and `redis.asyncio.lock.Lock` become ours, too, for later imports. A `lock_class` that a caller
    passes still counts. Calling it twice does no harm.
    """
    from redislock_fast import asyncio  # noqa: PLC0415  # a third of the import time, which few users need

    _put(_PLACES, Lock)
    _put(_ASYNC_PLACES, asyncio.Lock)


def unpatch() -> None:
    """Restore redis-py's classes. Locks that were made meanwhile stay ours."""
    _put(_PLACES, _ORIGINAL)
    _put(_ASYNC_PLACES, _ASYNC_ORIGINAL)


def _put(places: tuple[Any, ...], lock_class: type) -> None:
    for place in places:
        place.Lock = lock_class
