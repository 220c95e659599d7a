"""Every lock library that the bench compares, as a contestant.

All have the same server, lease and blocking behaviour. The calls of the library itself are timed, without a wrapper
around them. A library that is not installed is left out: it is no error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from uuid import uuid1

from bench import contestants
from bench.contestants import LEASE_S, LINGER_S, OURS, REDIS_PY, AbsentError, Contestant, semaphores


def _redis_py(lease_s: int) -> Contestant:
    def make(client: Any, name: str) -> Any:
        return client.lock(name, timeout=lease_s)

    return Contestant(REDIS_PY, version("redis"), make, make_async=make, make_batch=_PipelineBatch)


class _PipelineBatch:
    """Many locks of redis-py at a time, as a service can have them: the requests of its `Lock` in a pipeline.

    All locks have one token, which is the cheapest way.
    """

    def __init__(self, client: Any) -> None:
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

    def __init__(self, client: Any) -> None:
        from redislock_fast import Locker  # noqa: PLC0415 - `find` imports it

        self._locker = Locker(client)
        self._batch: Any = None

    def acquire(self, names: Sequence[str], /) -> int:
        self._batch = self._locker.acquire_many(names, timeout=LEASE_S)
        return len(self._batch.acquired)

    def release(self) -> int:
        return sum(self._batch.release().values())


def _ours(name: str, settings: Mapping[str, Any], lease_s: int, of_processes: tuple[str, ...] = ()) -> Contestant:
    import redislock_fast.asyncio  # noqa: PLC0415 - a child of `bench guard` has the package of another tree

    def maker(lock_class: Any) -> Callable[[Any, str], Any]:
        made = partial(lock_class, **settings) if settings else lock_class
        return lambda client, name: client.lock(name, lock_class=made, timeout=lease_s)

    makers = maker(redislock_fast.Lock), str, maker(redislock_fast.asyncio.Lock)
    batch = _OurBatch if hasattr(redislock_fast, "Locker") else None
    others: dict[str, Any] = {"linger_s": settings.get("linger", 0.0), "of_processes": of_processes}
    return Contestant(name, redislock_fast.__version__, *makers, batch, **others)


def _python_redis_lock(lease_s: int) -> Contestant:
    from redis_lock import Lock  # noqa: PLC0415 - optional

    # It logs a warning for every acquire that fails, and the check makes one fail in every round.
    logging.getLogger("redis_lock.acquire").setLevel(logging.ERROR)
    make = partial(Lock, expire=lease_s)
    return Contestant(contestants.PYTHON_REDIS_LOCK, version("python-redis-lock"), make, "lock:{}".format)


def _pottery(lease_s: int) -> Contestant:
    from pottery import Redlock  # noqa: PLC0415 - optional

    def make(client: Any, name: str) -> Any:
        return Redlock(key=name, masters={client}, auto_release_time=lease_s)

    return Contestant(contestants.POTTERY, version("pottery"), make, "redlock:{}".format)


def _bare_sockets(lease_s: int) -> Contestant:
    from bench.contestants import bare  # noqa: PLC0415 - it needs the package

    make, make_async = partial(bare.BareLock, lease_s=lease_s), partial(bare.AsyncBareLock, lease_s=lease_s)
    return Contestant(contestants.BARE_SOCKETS, "-", make, make_async=make_async)


_HALF = (contestants.OURS_LINGERING, OURS)
_FACTORIES: dict[str, tuple[str, Callable[[int], Contestant]]] = {
    REDIS_PY: ("redis", _redis_py),
    OURS: ("redislock_fast", partial(_ours, OURS, {})),
    contestants.OURS_POLLING: ("redislock_fast", partial(_ours, contestants.OURS_POLLING, {"wait": "poll"})),
    contestants.OURS_LINGERING: ("redislock_fast", partial(_ours, contestants.OURS_LINGERING, {"linger": LINGER_S})),
    contestants.HALF_LINGERING: ("redislock_fast", partial(_ours, contestants.HALF_LINGERING, {}, of_processes=_HALF)),
    contestants.PYTHON_REDIS_LOCK: ("redis_lock", _python_redis_lock),
    contestants.POTTERY: ("pottery", _pottery),
    contestants.BARE_SOCKETS: ("redislock_fast", _bare_sockets),
}

NAMES = tuple(_FACTORIES)
"""All contestants that are locks."""


def find(name: str, lease_s: int = LEASE_S) -> Contestant:
    """Make the contestant of this name, a lock's or a semaphore's, whose locks have this timeout, in whole seconds.

    Raises `AbsentError` when its library is not installed.
    """
    if name not in _FACTORIES:
        return semaphores.find(name, lease_s)
    package, make = _FACTORIES[name]
    if not find_spec(package):
        raise AbsentError("not installed")
    return make(lease_s)


def find_all(
    names: Iterable[str], absent: dict[str, str], lease_s: int = LEASE_S, for_asyncio: bool = False
) -> list[Contestant]:
    """Find those that are there and have such locks; the reason for each other one goes to `absent`."""
    found = []
    for name in names:
        try:
            contestant = find(name, lease_s)
            contestant.maker(for_asyncio)
        except AbsentError as reason:
            absent[name] = str(reason)
        else:
            found.append(contestant)
    return found
