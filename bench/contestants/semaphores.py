"""Semaphores as contestants, with the calls of a lock: ours, and what a user would pick beside it.

pottery has none. The slots of a process that dies are lost to a `BLPOP_LIST`, and those of `REDIS_SEMAPHORE` come back
only where it was given `stale_client_timeout`, at which it takes them from the living, too.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench.contestants import LEASE_S, AbsentError, Contestant

SEMAPHORE = "semaphore"
REDIS_SEMAPHORE = "redis-semaphore"
BLPOP_LIST = "BLPOP list"
LOCKS_IN_TURN = "locks in turn"
RIVALS = (REDIS_SEMAPHORE, BLPOP_LIST, LOCKS_IN_TURN)

LIMIT = 4
"""How many may hold one, unless `find` is told otherwise."""

_PAUSE_S = 0.1  # after all locks were found held, as redis-py's lock does


def find(name: str, lease_s: int = LEASE_S, limit: int = LIMIT) -> Contestant:
    """Make the contestant of this name; raises `AbsentError` when its library is not installed."""
    if name == SEMAPHORE:
        import redislock_fast.asyncio  # noqa: PLC0415 - a child of `bench guard` has the package of another tree

        both: Any = redislock_fast, redislock_fast.asyncio
        make, make_async = (partial(of.Semaphore, limit=limit, timeout=lease_s) for of in both)
        return Contestant(name, redislock_fast.__version__, make, make_async=make_async, limit=limit)
    if name == REDIS_SEMAPHORE and not find_spec("redis_semaphore"):
        raise AbsentError("not installed")
    rivals: dict[str, Any] = {
        REDIS_SEMAPHORE: _redis_semaphore,
        BLPOP_LIST: _BlpopList,
        LOCKS_IN_TURN: partial(_LocksInTurn, lease_s=lease_s),
    }
    return Contestant(name, "-", partial(rivals[name], limit=limit), limit=limit)


def _redis_semaphore(client: Any, name: str, limit: int) -> Any:
    from redis_semaphore import Semaphore  # noqa: PLC0415 - optional

    return Semaphore(client, limit, name)  # its `acquire` returns a token, which is never empty


class _BlpopList:
    """A list of slots: an acquire takes one out, a release puts it back."""

    def __init__(self, client: Any, name: str, limit: int) -> None:
        self._client, self._name = client, name
        if client.set(f"{name}:made", 1, nx=True):
            client.rpush(name, *range(limit))

    def acquire(self) -> bool:
        self._slot = self._client.blpop([self._name])[1]
        return True

    def release(self) -> None:
        self._client.rpush(self._name, self._slot)


class _LocksInTurn:
    """A lock of redis-py for each slot: an acquire tries one after the other, and pauses where all are held."""

    def __init__(self, client: Any, name: str, limit: int, lease_s: int) -> None:
        self._locks = [client.lock(f"{name}:{slot}", timeout=lease_s, blocking=False) for slot in range(limit)]

    def acquire(self) -> bool:
        while (free := next((lock for lock in self._locks if lock.acquire()), None)) is None:
            time.sleep(_PAUSE_S)
        self._taken = free
        return True

    def release(self) -> None:
        self._taken.release()
