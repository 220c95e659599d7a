"""`patch()`: redis-py's clients make our locks, without a change to their callers."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
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

# The clients whose method `lock` is replaced, and redis-py's own method of each.
_CLIENTS: tuple[Any, ...] = (redis.client.Redis, redis.cluster.RedisCluster)
_ASYNC_CLIENTS: tuple[Any, ...] = (redis.asyncio.client.Redis, redis.asyncio.cluster.RedisCluster)
_METHODS: dict[Any, Callable[..., Any]] = {client: client.lock for client in _CLIENTS + _ASYNC_CLIENTS}
_PIPELINES = (
    *(redis.client.Pipeline, redis.cluster.ClusterPipeline),
    *(redis.asyncio.client.Pipeline, redis.asyncio.cluster.ClusterPipeline),
)


def patch() -> None:
    """Let `client.lock()` of redis-py's clients return `redislock_fast.Lock`, or `redislock_fast.asyncio.Lock`.

    `client.lock()` takes every parameter of these classes. `redis.lock.Lock` and `redis.asyncio.lock.Lock` become ours,
    too, for later imports. A `lock_class` that a caller passes still counts. A pipeline's `lock()` still returns
    redis-py's lock, with a RuntimeWarning: a pipeline executes the commands of a lock later. Calling it twice does no
    harm.
    """
    from redislock_fast import asyncio  # noqa: PLC0415  # a third of the import time, which few users need

    _put(_PLACES, Lock)
    _put(_ASYNC_PLACES, asyncio.Lock)
    for client in _CLIENTS:
        client.lock = _taking_options(_METHODS[client], Lock, _ORIGINAL)
    for client in _ASYNC_CLIENTS:
        client.lock = _taking_options(_METHODS[client], asyncio.Lock, _ASYNC_ORIGINAL)


def unpatch() -> None:
    """Restore redis-py's classes. Locks that were made meanwhile stay ours."""
    _put(_PLACES, _ORIGINAL)
    _put(_ASYNC_PLACES, _ASYNC_ORIGINAL)
    for client, method in _METHODS.items():
        client.lock = method


def _taking_options(method: Callable[..., Any], ours: type, redis_pys: type) -> Callable[..., Any]:
    """A client's `lock` that passes on the parameters that redis-py's method does not have."""
    signature = inspect.signature(method)
    known = frozenset(signature.parameters)

    @functools.wraps(method)
    def lock(client: Any, *args: Any, **settings: Any) -> Any:
        is_pipeline = isinstance(client, _PIPELINES)
        if settings.keys() <= known and not is_pipeline:
            return method(client, *args, **settings)
        options = {name: settings.pop(name) for name in settings.keys() - known}
        call = signature.bind(client, *args, **settings)
        lock_class = call.arguments.get("lock_class")
        if lock_class is None and is_pipeline:
            warnings.warn("the lock of a pipeline is redis-py's: use the client itself", RuntimeWarning, stacklevel=2)
            lock_class = redis_pys
        call.arguments["lock_class"] = functools.partial(ours if lock_class is None else lock_class, **options)
        return method(*call.args, **call.kwargs)

    return lock


def _put(places: tuple[Any, ...], lock_class: type) -> None:
    for place in places:
        place.Lock = lock_class
