"""What a contestant is: the calls that all lock libraries share, the names of the contestants, and the check of a lock.

`bench.libraries` makes the contestants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

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
"""The contestants of `bench.bare`: the requests of a lock on plain sockets."""

FLOOR = "floor"
"""The yardstick of one thread: the blocking floor of `bench.floor`."""

SERVER_LIMIT = "redis-benchmark"
"""The yardstick of batches: the load generator of `bench.server_limit`."""


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
