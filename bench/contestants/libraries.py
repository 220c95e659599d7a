"""Every lock library that the bench compares, as a contestant.

All have the same server, lease and blocking behaviour. The calls of the library itself are timed, without a wrapper
around them. A library that is not installed is left out: it is no error.
"""

from __future__ import annotations

import asyncio
import logging
import platform
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import uuid1

from bench.contestants import (
    BARE_HOLDINGS,
    BARE_SOCKETS,
    HALF_LINGERING,
    LEASE_S,
    LINGER_S,
    LOCAL,
    OURS,
    OURS_LINGERING,
    OURS_POLLING,
    POTTERY,
    PYTHON_REDIS_LOCK,
    REDIS_PY,
    WITH_OPTION,
    AbsentError,
    AnyAsyncLock,
    AnyBatch,
    AnyLock,
    Contestant,
    Options,
)

if TYPE_CHECKING:
    import redis
    import redis.asyncio


_USUAL_TERMS = Options()


def _redis_py(terms: Options) -> Contestant:
    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s)
        return lock

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        lock: AnyAsyncLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s)
        return lock

    return Contestant(REDIS_PY, version("redis"), make, str, make_async, _PipelineBatch)


class _PipelineBatch:
    """Many locks of redis-py at a time, as a service can have them: the requests of its `Lock` in a pipeline.

    All locks have one token, which is the cheapest way.
    """

    def __init__(self, client: redis.Redis) -> None:
        from redis.lock import Lock  # noqa: PLC0415 - `find` imports it

        self._pipeline = client.pipeline(transaction=False)
        self._release_sha = client.script_load(Lock.LUA_RELEASE_SCRIPT)
        self._token = b""
        self._taken: list[str] = []

    def acquire(self, names: Sequence[str], /) -> int:
        self._token = uuid1().hex.encode()
        for name in names:
            self._pipeline.set(name, self._token, nx=True, px=LEASE_S * 1000)
        answers = self._pipeline.execute()
        self._taken = [name for name, taken in zip(names, answers, strict=True) if taken]
        return len(self._taken)

    def release(self) -> int:
        for name in self._taken:
            self._pipeline.evalsha(self._release_sha, 1, name, self._token)
        return sum(self._pipeline.execute())


class _OurBatch:
    """A batch of the package."""

    def __init__(self, client: redis.Redis) -> None:
        from redislock_fast import Locker  # noqa: PLC0415 - `find` imports it

        self._locker = Locker(client)
        self._batch: Any = None

    def acquire(self, names: Sequence[str], /) -> int:
        self._batch = self._locker.acquire_many(names, timeout=LEASE_S)
        return len(self._batch.acquired)

    def release(self) -> int:
        return sum(self._batch.release().values())


def _ours(terms: Options) -> Contestant:
    from redislock_fast import Lock, __version__  # noqa: PLC0415 - `find` imports it
    from redislock_fast.asyncio import Lock as AsyncLock  # noqa: PLC0415

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s, lock_class=Lock)
        return lock

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        lock: AnyAsyncLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s, lock_class=AsyncLock)
        return lock

    return Contestant(
        OURS,
        __version__,
        make,
        str,
        make_async,
        _OurBatch if hasattr(__import__("redislock_fast"), "Locker") else None,
    )


def _ours_with(name: str, settings: dict[str, Any], terms: Options) -> Contestant:
    from redislock_fast import Lock, __version__  # noqa: PLC0415 - `find` imports it
    from redislock_fast.asyncio import Lock as AsyncLock  # noqa: PLC0415

    choice: dict[str, Any] = {"timeout": terms.lease_s, "sleep": terms.sleep_s, **settings}

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = Lock(client, name, **choice)
        return lock

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        lock: AnyAsyncLock = AsyncLock(client, name, **choice)
        return lock

    return Contestant(name, __version__, make, str, make_async)


def _ours_lingering(terms: Options) -> Contestant:
    from redislock_fast import Lock, __version__  # noqa: PLC0415 - `find` imports it
    from redislock_fast.asyncio import Lock as AsyncLock  # noqa: PLC0415

    lock_class, async_lock_class = partial(Lock, linger=LINGER_S), partial(AsyncLock, linger=LINGER_S)

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s, lock_class=lock_class)
        return lock

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        lock: AnyAsyncLock = client.lock(
            name,
            timeout=terms.lease_s,
            sleep=terms.sleep_s,
            lock_class=async_lock_class,  # type: ignore[arg-type]  # its stub: a class
        )
        return lock

    return Contestant(OURS_LINGERING, __version__, make, str, make_async, linger_s=LINGER_S)


def _half_lingering(terms: Options) -> Contestant:
    return replace(_ours(terms), name=HALF_LINGERING, of_processes=(OURS_LINGERING, OURS))


def _python_redis_lock(terms: Options) -> Contestant:
    from redis_lock import Lock  # noqa: PLC0415 - optional

    # It logs a warning for every acquire that fails, and the check makes one fail in every round.
    logging.getLogger("redis_lock.acquire").setLevel(logging.ERROR)

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = Lock(client, name, expire=terms.lease_s)
        return lock

    return Contestant(PYTHON_REDIS_LOCK, version("python-redis-lock"), make, "lock:{}".format)


def _pottery(terms: Options) -> Contestant:
    from pottery import Redlock  # noqa: PLC0415 - optional

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = Redlock(key=name, masters={client}, auto_release_time=terms.lease_s)
        return lock

    return Contestant(POTTERY, version("pottery"), make, "redlock:{}".format)


def _bare_sockets(terms: Options) -> Contestant:
    from bench.contestants.bare import AsyncBareLock, BareBatch, BareLock  # noqa: PLC0415 - it needs the package

    def make(client: redis.Redis, name: str) -> AnyLock:
        return BareLock(client, name, terms.lease_s)

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        return AsyncBareLock(client, name, terms.lease_s)

    def make_batch(client: redis.Redis) -> AnyBatch:
        return BareBatch(client, terms.lease_s)

    return Contestant(BARE_SOCKETS, "-", make, str, make_async, make_batch)


def _bare_holdings(terms: Options) -> Contestant:
    from bench.contestants.bare import BareHolding  # noqa: PLC0415 - it needs the package

    def make(client: redis.Redis, name: str) -> AnyLock:
        return BareHolding(client, name, terms.lease_s)

    return Contestant(BARE_HOLDINGS, "-", make, str)


class _AsyncLocalLock:
    """A lock of one event loop, first come, first served, and nothing else: it knows no cancel and no timeout."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._is_held = False

    async def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock; without `blocking`, return False at once when it is held."""
        if not self._is_held:
            self._is_held = True
            await asyncio.sleep(0)  # or the first of many tasks would never let another one run
        elif blocking:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        else:
            return False
        return True

    async def release(self) -> None:
        """Release the lock to the task that has waited longest."""
        if self._waiters:
            self._waiters.popleft().set_result(None)
        else:
            self._is_held = False


def _local(_: Options) -> Contestant:
    locks: dict[str, AnyLock] = {}
    async_locks: dict[str, AnyAsyncLock] = {}

    def make(_: redis.Redis, name: str) -> AnyLock:
        return locks.setdefault(name, threading.Lock())

    def make_async(_: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        return async_locks.setdefault(name, _AsyncLocalLock())

    return Contestant(LOCAL, platform.python_version(), make, str, make_async)


_FACTORIES: dict[str, tuple[str, Callable[[Options], Contestant]]] = {
    REDIS_PY: ("redis", _redis_py),
    OURS: ("redislock_fast", _ours),
    OURS_POLLING: ("redislock_fast", partial(_ours_with, OURS_POLLING, {"wait": "poll"})),
    OURS_LINGERING: ("redislock_fast", _ours_lingering),
    HALF_LINGERING: ("redislock_fast", _half_lingering),
    **{name: ("redislock_fast", partial(_ours_with, name, {name: True})) for name in WITH_OPTION},
    PYTHON_REDIS_LOCK: ("redis_lock", _python_redis_lock),
    POTTERY: ("pottery", _pottery),
    BARE_SOCKETS: ("redislock_fast", _bare_sockets),
    BARE_HOLDINGS: ("redislock_fast", _bare_holdings),
}

NAMES = tuple(_FACTORIES)
"""All contestants. `LOCAL`, which has no key, is only a yardstick."""


def find(name: str, terms: Options = _USUAL_TERMS) -> Contestant:
    """Make a contestant.

    Args:
        name: as in `--only`.
        terms: the options of its locks.

    Raises:
        AbsentError: when its library is not installed.
        ImportError: when its library is installed and cannot be imported.
    """
    if name == LOCAL:
        return _local(terms)
    package, make = _FACTORIES[name]
    if not find_spec(package):
        raise AbsentError("not installed")
    return make(terms)
