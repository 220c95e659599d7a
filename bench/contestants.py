"""The contestants: every lock library that the bench compares, behind the calls that they share.

Rules: the same server, lease and blocking behaviour for all; a contestant's own calls are timed,
never a wrapper around them. A library that is not installed is left out, not an error. Must not
know: how anything is timed or printed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid1

if TYPE_CHECKING:
    import redis
    import redis.asyncio

LEASE_S = 10
"""The timeout of every lock: whole seconds, since python-redis-lock knows no finer ones."""

SLEEP_S = 0.1
"""How long whoever polls for a lock sleeps between two looks: the default of redis-py."""


@dataclass(frozen=True)
class Terms:
    """What all the locks of a measurement are made with.

    Attributes:
        lease_s: the timeout of every lock, in whole seconds.
        sleep_s: how long whoever polls sleeps, where the library lets one say so.
    """

    lease_s: int = LEASE_S
    sleep_s: float = SLEEP_S


class AnyLock(Protocol):
    """What all the libraries' locks have in common."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock; without `blocking`, answer False at once where somebody holds it."""

    def release(self) -> None:
        """Give it back."""

    def __enter__(self) -> object:
        """Take it, waiting for it."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> object:
        """Give it back."""


class AnyAsyncLock(Protocol):
    """What the libraries' locks for asyncio have in common."""

    async def acquire(self, *, blocking: bool = True) -> bool:
        """Take the lock; without `blocking`, answer False at once where somebody holds it."""

    async def release(self) -> None:
        """Give it back."""


class AnyBatch(Protocol):
    """Many locks at a time, with as little around the library's own calls as a service has."""

    def acquire(self, names: Sequence[str], /) -> int:
        """Take all that are free, and answer how many that are."""

    def release(self) -> int:
        """Give back what was taken, and answer how many were still held."""


@dataclass(frozen=True)
class Contestant:
    """One library.

    Attributes:
        name: what the table and `--only` call it.
        version: the version that is installed.
        make: makes its lock of a name, as its documentation tells a service to.
        key_of: the key under which its lock of a name lies on the server.
        make_async: the same as `make` for asyncio, where the bench knows how.
        make_batch: makes its batch, where the bench knows how.
    """

    name: str
    version: str
    make: Callable[[redis.Redis, str], AnyLock]
    key_of: Callable[[str], str]
    make_async: Callable[[redis.asyncio.Redis, str], AnyAsyncLock] | None = None
    make_batch: Callable[[redis.Redis], AnyBatch] | None = None


class AbsentError(Exception):
    """Somebody cannot take part here; the message says why."""


class CheckFailedError(Exception):
    """A contestant broke the promise of a lock: its figures mean nothing."""


REDIS_PY = "redis-py"
OURS = "redislock_fast"
OURS_POLLING = "redislock_fast-poll"
PYTHON_REDIS_LOCK = "python-redis-lock"
PEERS = (PYTHON_REDIS_LOCK, "pottery")
BARE_SOCKETS = "bare-sockets"
BARE_HOLDINGS = "bare-holdings"
BARE = (BARE_SOCKETS, BARE_HOLDINGS)
"""Those of `bench.bare`: the same bytes, and hardly anything else."""


def _redis_py(terms: Terms) -> Contestant:
    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s)
        return lock

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        lock: AnyAsyncLock = client.lock(name, timeout=terms.lease_s, sleep=terms.sleep_s)
        return lock

    return Contestant(REDIS_PY, version("redis"), make, str, make_async, _PipelineBatch)


class _PipelineBatch:
    """What a service with redis-py does that takes many locks at a time: the requests of its `Lock` in a pipeline.

    One token for all, as cheap as it can be had.
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
    """A batch of ours."""

    def __init__(self, client: redis.Redis) -> None:
        from redislock_fast import Locker  # noqa: PLC0415 - `find` imports it

        self._locker = Locker(client)
        self._batch: Any = None

    def acquire(self, names: Sequence[str], /) -> int:
        self._batch = self._locker.acquire_many(names, timeout=LEASE_S)
        return len(self._batch.acquired)

    def release(self) -> int:
        return sum(self._batch.release().values())


def _ours(terms: Terms) -> Contestant:
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


def _ours_polling(terms: Terms) -> Contestant:
    from redislock_fast import Lock, __version__  # noqa: PLC0415 - `find` imports it
    from redislock_fast.asyncio import Lock as AsyncLock  # noqa: PLC0415

    choice: dict[str, Any] = {"timeout": terms.lease_s, "sleep": terms.sleep_s, "wait": "poll"}

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = Lock(client, name, **choice)
        return lock

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        lock: AnyAsyncLock = AsyncLock(client, name, **choice)
        return lock

    return Contestant(OURS_POLLING, __version__, make, str, make_async)


def _python_redis_lock(terms: Terms) -> Contestant:
    from redis_lock import Lock  # noqa: PLC0415 - optional

    # It warns of every acquire that fails, and the check makes one fail in every round.
    logging.getLogger("redis_lock.acquire").setLevel(logging.ERROR)

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = Lock(client, name, expire=terms.lease_s)
        return lock

    return Contestant(PYTHON_REDIS_LOCK, version("python-redis-lock"), make, "lock:{}".format)


def _pottery(terms: Terms) -> Contestant:
    from pottery import Redlock  # noqa: PLC0415 - optional

    def make(client: redis.Redis, name: str) -> AnyLock:
        lock: AnyLock = Redlock(key=name, masters={client}, auto_release_time=terms.lease_s)
        return lock

    return Contestant("pottery", version("pottery"), make, "redlock:{}".format)


def _bare_sockets(terms: Terms) -> Contestant:
    from bench.bare import AsyncBareLock, BareBatch, BareLock  # noqa: PLC0415 - it needs the package

    def make(client: redis.Redis, name: str) -> AnyLock:
        return BareLock(client, name, terms.lease_s)

    def make_async(client: redis.asyncio.Redis, name: str) -> AnyAsyncLock:
        return AsyncBareLock(client, name, terms.lease_s)

    def make_batch(client: redis.Redis) -> AnyBatch:
        return BareBatch(client, terms.lease_s)

    return Contestant(BARE_SOCKETS, "-", make, str, make_async, make_batch)


def _bare_holdings(terms: Terms) -> Contestant:
    from bench.bare import BareHolding  # noqa: PLC0415 - it needs the package

    def make(client: redis.Redis, name: str) -> AnyLock:
        return BareHolding(client, name, terms.lease_s)

    return Contestant(BARE_HOLDINGS, "-", make, str)


_FACTORIES: dict[str, tuple[str, Callable[[Terms], Contestant]]] = {
    REDIS_PY: ("redis", _redis_py),
    OURS: ("redislock_fast", _ours),
    OURS_POLLING: ("redislock_fast", _ours_polling),
    PYTHON_REDIS_LOCK: ("redis_lock", _python_redis_lock),
    "pottery": ("pottery", _pottery),
    BARE_SOCKETS: ("redislock_fast", _bare_sockets),
    BARE_HOLDINGS: ("redislock_fast", _bare_holdings),
}


def find(name: str, terms: Terms = Terms()) -> Contestant:
    """The contestant of that name.

    Args:
        name: as `--only` has it.
        terms: what its locks are made with.

    Raises:
        AbsentError: where its library is not installed, or cannot do it.
        ImportError: where it is installed and cannot be imported.
    """
    package, make = _FACTORIES[name]
    if not find_spec(package):
        raise AbsentError("not installed")
    return make(terms)


def check(key: str, holder: AnyLock, rival: AnyLock, witness: redis.Redis) -> None:
    """Take a lock and give it back, and see through an independent connection that it is one.

    Args:
        key: where its lock lies on the server.
        holder: the lock.
        rival: another lock of the same name, which must not be had meanwhile.
        witness: a plain client that no contestant uses.

    Raises:
        CheckFailedError: at the first thing that is wrong.
    """

    def expect(right: object, complaint: str) -> None:
        if not right:
            raise CheckFailedError(complaint)

    expect(not witness.exists(key), f"the key {key!r} was left behind")
    expect(holder.acquire(blocking=False), "a free lock could not be acquired")
    value = witness.get(key)
    expect(value, f"acquired, but there is no key {key!r}")
    ttl_ms = witness.pttl(key)
    expect(0 < ttl_ms <= LEASE_S * 1000, f"held for {ttl_ms} ms instead of {LEASE_S} s")
    expect(not rival.acquire(blocking=False), "two holders at a time")
    expect(witness.get(key) == value, "a failed acquire changed the holder's key")
    holder.release()
    expect(not witness.exists(key), f"released, but the key {key!r} is still there")
    expect(rival.acquire(blocking=False), "a released lock could not be acquired by another")
    rival.release()
    expect(not witness.exists(key), f"released by another, but the key {key!r} is still there")
