"""`patch()`: redis-py's clients make our locks, without a caller being touched.

Must not know: how locks work.
"""

from __future__ import annotations

from typing import Any

import redis.client
import redis.cluster
import redis.lock

from redislock_fast.lock import Lock

__all__ = ["patch", "unpatch"]

# Where redis-py's own code looks the class up, each under the name "Lock".
_PLACES: tuple[Any, ...] = (redis.lock, redis.client, redis.cluster)
_ORIGINAL = redis.lock.Lock


def patch() -> None:
    """Let `client.lock()` of `redis.Redis` and `redis.RedisCluster` return `redislock_fast.Lock`.

    `redis.lock.Lock` is ours then, too, for imports that come later. A `lock_class` that a caller gives still counts.
    Calling it twice does no harm.
    """
    for place in _PLACES:
        place.Lock = Lock


def unpatch() -> None:
    """Take `patch` back. Locks that were made meanwhile go on as they are."""
    for place in _PLACES:
        place.Lock = _ORIGINAL
