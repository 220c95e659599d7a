"""The contestants of the bench: the calls that all lock libraries share, their names, and the check of a lock.

`bench.contestants.libraries` makes the contestants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import redis
    import redis.asyncio

LEASE_S = 10
"""The timeout of every lock: whole seconds, as python-redis-lock accepts nothing finer."""

SLEEP_S = 0.1
"""How long a poller sleeps between two attempts: the default of redis-py."""


@dataclass(frozen=True)
class Options:
    """The options of all locks of a measurement.

    Attributes:
        lease_s: the timeout of every lock, in whole seconds.
        sleep_s: how long a poller sleeps between two attempts, for libraries with such an option.
    """

    lease_s: int = LEASE_S
    sleep_s: float = SLEEP_S


class AnyLock(Protocol):
    """The calls that the locks of all libraries share."""

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock; without `blocking`, return False at once when it is held."""

    def release(self) -> None:
        """Release the lock."""

    def __enter__(self) -> object:
        """Acquire the lock, and wait for it."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> object:
        """Release the lock."""


class AnyAsyncLock(Protocol):
    """The calls that the asyncio locks of all libraries share."""

    async def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock; without `blocking`, return False at once when it is held."""

    async def release(self) -> None:
        """Release the lock."""


class AnyBatch(Protocol):
    """Many locks at a time, with no more around the calls of the library than a service has."""

    def acquire(self, names: Sequence[str], /) -> int:
        """Acquire all locks that are free, and return their number."""

    def release(self) -> int:
        """Release the acquired locks, and return how many were still held."""


@dataclass(frozen=True)
class Contestant:
    """One library.

    Attributes:
        name: in the table and in `--only`.
        version: the installed one.
        make: makes a lock from a name, as the documentation of the library proposes.
        key_of: the key of a lock on the server, from its name.
        make_async: as `make`, for asyncio; None when the bench measures none.
        make_batch: makes a batch; None when the bench measures none.
        linger_s: how long a key may stay on the server after the release of its lock, in seconds.
        of_processes: the contestants that processes are of, in turn; empty: all are of this one.
    """

    name: str
    version: str
    make: Callable[[redis.Redis, str], AnyLock]
    key_of: Callable[[str], str]
    make_async: Callable[[redis.asyncio.Redis, str], AnyAsyncLock] | None = None
    make_batch: Callable[[redis.Redis], AnyBatch] | None = None
    linger_s: float = 0.0
    of_processes: tuple[str, ...] = ()

    def name_for(self, process: int) -> str:
        """The contestant of a process, by the number of the process."""
        return self.of_processes[process % len(self.of_processes)] if self.of_processes else self.name


class AbsentError(Exception):
    """A contestant, a server or a tool is not available here; the message says why."""


class CheckFailedError(Exception):
    """A contestant is not a correct lock, so its figures mean nothing."""


REDIS_PY = "redis-py"
OURS = "redislock_fast"
OURS_POLLING = "redislock_fast-poll"
OURS_LINGERING = "redislock_fast-linger"
HALF_LINGERING = "redislock_fast-half"
"""Each other process is of `OURS_LINGERING`, the rest of `OURS`."""

LINGER_S = 0.05
"""The option `linger` of `OURS_LINGERING`."""

AUTO_RENEW = "auto_renew"
REENTRANT = "reentrant"
FENCING = "fencing"
WITH_OPTION = (AUTO_RENEW, REENTRANT, FENCING)
"""The package's locks with one option that a bool turns on, by the option's name."""

PYTHON_REDIS_LOCK = "python-redis-lock"
POTTERY = "pottery"
PEERS = (PYTHON_REDIS_LOCK, POTTERY)
BARE_SOCKETS = "bare-sockets"
BARE_HOLDINGS = "bare-holdings"
LOCAL = "local"
"""Locks of one process, which need no server."""

BARE = (BARE_SOCKETS, BARE_HOLDINGS)
"""The contestants of `bench.contestants.bare`: the requests of a lock on plain sockets."""

FLOOR = "floor"
"""The yardstick of one thread: the blocking floor of `bench.workloads.floor`."""

SERVER_LIMIT = "redis-benchmark"
"""The yardstick of batches: the load generator of `bench.workloads.server_limit`."""


_CONTENDED = b"+"  # behind the value of a key that another lock with linger wants
_LOOK_S = 0.002  # between two looks whether a key is gone
_GIVING_BACK_S = 2.0  # at most, after a key has lingered, on a busy machine


def is_left(keys: Callable[[], object], linger_s: float) -> bool:
    """Whether a key is left behind. Waits for keys that linger.

    Args:
        keys: says whether there are keys now.
        linger_s: how long keys may stay, in seconds; 0: not at all.
    """
    give_up_s = time.monotonic() + linger_s + _GIVING_BACK_S
    while keys():
        if not linger_s or time.monotonic() > give_up_s:
            return True
        time.sleep(_LOOK_S)
    return False


def check(key: str, holder: AnyLock, rival: AnyLock, witness: redis.Redis, linger_s: float = 0.0) -> None:
    """Check on an independent connection that a lock excludes others while it is held.

    Args:
        key: of the lock on the server.
        holder: the lock.
        rival: another lock of the same name.
        witness: a plain client that no contestant uses.
        linger_s: how long the key may stay after a release, in seconds.

    Raises:
        CheckFailedError: at the first violation.
    """

    def is_there() -> bool:
        return is_left(lambda: witness.exists(key), linger_s)

    def expect(right: object, complaint: str) -> None:
        if not right:
            raise CheckFailedError(complaint)

    expect(not is_there(), f"the key {key!r} was left behind")
    expect(holder.acquire(blocking=False), "a free lock could not be acquired")
    value = witness.get(key)
    expect(value, f"acquired, but there is no key {key!r}")
    ttl_ms = witness.pttl(key)
    expect(0 < ttl_ms <= (LEASE_S + linger_s) * 1000, f"held for {ttl_ms} ms instead of {LEASE_S} s")
    expect(not rival.acquire(blocking=False), "two holders at a time")
    after = witness.get(key)
    if linger_s and isinstance(after, bytes):
        after = after.removesuffix(_CONTENDED)
    expect(after == value, "a failed acquire changed the holder's key")
    holder.release()
    expect(not is_there(), f"released, but the key {key!r} is still there")
    expect(rival.acquire(blocking=False), "a released lock could not be acquired by another")
    rival.release()
    expect(not is_there(), f"released by another, but the key {key!r} is still there")
