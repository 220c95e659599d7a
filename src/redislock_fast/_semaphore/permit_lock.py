"""What the lock objects on which permits stand have in common, for threads and tasks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.acquire import give_back
from redislock_fast._protocol.permits import ReadPermits, Resize
from redislock_fast._protocol.report import Connections, Participant
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import LossReason, noted, shown

_MOST = 1 << 53
"""All limits are below it: from there on, the numbers of Lua are no whole ones."""


@dataclass(frozen=True)
class SemaphoreReport:
    """A semaphore at one moment. There is no token in it.

    Attributes:
        limit: how many may hold: the operator's limit, or else that of the caller who asks.
        held: how many permits are held. It may exceed `limit` after an operator has lowered that.
        waiting: how many are in the queue. Waiters that poll are not in it.
        holders: by permit, its holder; the first is the one whose permit ends first, unless it is renewed.
        next_end_s: when that is, in seconds from now; None where none is held.
        waiters: the first of those in the queue, in the order in which they get permits, 100 at most.
    """

    limit: int
    held: int
    waiting: int
    holders: tuple[Participant, ...]
    next_end_s: float | None
    waiters: tuple[Participant, ...]


def check_handle(lock: Any, handle: Any) -> None:
    """Check that a handle is of the semaphore of this lock object.

    Raises:
        TypeError: it is no handle.
        ValueError: it is of another name.
    """
    from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # few need it, and it takes a millisecond

    if not isinstance(handle, Handle):
        raise TypeError(f"attach needs a handle that detach has returned, not {type(handle).__name__}")
    if lock._transport.encoding.key_of(handle.name) != lock._key:  # noqa: SLF001  # as its own class would
        raise ValueError(f"the handle is of {shown(handle.name)}, not of the semaphore {shown(lock.name)}")


def clean_up(locks: list[Any]) -> None:
    """Release the permit of the lock object in the background: nobody will do it. Empties the list."""
    while locks:
        lock = locks.pop()
        owner = lock._owners.owner  # noqa: SLF001  # as its own class would
        token = owner.token
        if token is not None:
            give_back(lock, owner, token)


def limit_of(limit: Any, name: Any) -> int:
    """A limit as an int.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below 1, or above what a server's scripts can count.
    """
    try:
        most = operator.index(limit)
    except TypeError:
        raise TypeError(f"the limit of the semaphore {shown(name)} must be a whole number, not {limit!r}") from None
    if not 1 <= most < _MOST or isinstance(limit, bool):
        raise ValueError(f"the limit of the semaphore {shown(name)} must be 1 or more, and below 2**53, not {limit!r}")
    return most


def not_granted(name: Any) -> LockError:
    """The error of a caller that got no permit in time."""
    error = LockError("Unable to acquire a permit within the time specified", lock_name=name)
    return noted(error, f"of the semaphore {shown(name)}")


def no_permit(name: Any, caller: str) -> LockError:
    """The error of a release by a caller that has no permit."""
    text = f"Cannot release the semaphore {shown(name)}: this {caller} has no permit of it"
    return LockError(text, lock_name=name)


def with_permit(callback: Any) -> Any:
    """A callback of a permit's lock object, which calls the user's with the permit; None for None."""
    if not callable(callback):
        return callback  # None, or what is refused by the lock
    call: Callable[..., Any] = callback

    def called(lock: Any, *reason: LossReason) -> Any:
        permit = lock.permit()
        return None if permit is None else call(permit, *reason)

    return called


def ignore_loss(permit: Any, reason: LossReason) -> None:
    """The `on_lost` of permits that have none and are not renewed: so they are watched, and released when dropped."""


class SoleOwner(Owner):
    """The owner of a lock object that one caller has at a time, whichever thread or task that is."""

    __slots__ = ()

    @property
    def owner(self) -> Owner:
        """Itself, as `ThreadOwners` have one for each thread."""
        return self


def not_held(name: Any, verb: str) -> LockNotOwnedError:
    """The error for a permit that the server does not have any more."""
    error = LockNotOwnedError(f"Cannot {verb} a permit that's no longer owned", lock_name=name)
    return noted(error, f"of the semaphore {shown(name)}")


def resize(key: bytes, limit: int | None) -> Steps:
    """Set or remove the operator's limit."""
    yield Do("execute", Resize(key, limit))


def read_status(key: bytes, own: int) -> Steps:
    """Read a semaphore's holders and waiters. Returns a `SemaphoreReport`."""
    reading = ReadPermits(key)
    yield Do("execute", reading)
    connections = Connections(reading.listing)
    now_us = reading.time_ms * 1000
    return SemaphoreReport(
        limit=own if reading.limit is None else reading.limit,
        held=len(reading.holders),
        waiting=reading.waiting,
        holders=tuple(connections.participant(token) for token, _ in reading.holders),
        next_end_s=(reading.holders[0][1] - reading.time_ms) / 1000 if reading.holders else None,
        waiters=tuple(
            connections.participant(token, max(now_us - arrival_us, 0.0) / 1e6) for token, arrival_us in reading.queue
        ),
    )
