"""The errors of a lock that was lost, or was not acquired as asked."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any, TypeVar

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._util.tokens import is_permit

_Error = TypeVar("_Error", bound=BaseException)


def shown(name: Any) -> str:
    """A lock's name in quotes, as a str, for errors and logs."""
    return repr(name.decode(errors="backslashreplace") if isinstance(name, bytes) else str(name))


def shown_held(name: Any, token: bytes) -> str:
    """What is held with this token, in words: the lock of this name, or a permit of the semaphore."""
    return f"{'permit of the semaphore' if is_permit(token) else 'lock'} {shown(name)}"


def noted(error: _Error, note: str) -> _Error:
    """The error with a note, which tracebacks show, once. Before Python 3.11, errors have no notes.

    The text of an error that redis-py has, too, stays redis-py's, for those who compare it.
    """
    if sys.version_info >= (3, 11) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


class LossReason(str, Enum):
    """Why a lock is not held any more although no holder released it."""

    EXPIRED = "expired"
    """Its lease ended, since it was not renewed, or this process was suspended for too long."""

    TAKEN = "taken by another"
    """The key holds another holder's token."""

    DELETED = "deleted"
    """The key, or a permit, was removed before its time by DEL, FLUSHALL, eviction or a server that lost its data."""

    SERVER_GONE = "server gone"
    """The server could not be reached, or did not renew the lock, until the lease ended."""

    STALLED = "event loop stalled"
    """Its event loop did not run for `max_stall`, so the lock was not renewed any more."""

    def __str__(self) -> str:
        """The reason in words."""
        return self.value


class LockLostError(LockNotOwnedError):
    """The lock was lost while it was held.

    Attributes:
        reason: why.
    """

    def __init__(self, message: str, lock_name: Any = None, reason: LossReason = LossReason.EXPIRED) -> None:
        super().__init__(message, lock_name=lock_name)
        self.args = (message,)  # redis-py does so since 7.2: else `str` shows all that the class was called with
        self.reason = reason


class NotReplicatedError(LockError):
    """Too few replicas had the lock in time, so it was released again.

    Attributes:
        replicas: how many had it.
    """

    def __init__(self, message: str, lock_name: Any = None, replicas: int = 0) -> None:
        super().__init__(message, lock_name=lock_name)
        self.args = (message,)  # as above
        self.replicas = replicas
