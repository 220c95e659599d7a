"""The steps that note and read who leads, and what an election's parameters must be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    LockError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from redislock_fast._lease.options import check_callback
from redislock_fast._protocol.leading import NoteLeader, ReadLeader
from redislock_fast._protocol.operation import later_code
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import LockLostError, LossReason, shown
from redislock_fast._util.redis_py import BAD_CREDENTIALS

logger = logging.getLogger("redislock_fast.election")

_MOST_BYTES = 1024

_OUTAGES = (ConnectionError, TimeoutError, ClusterDownError, ReadOnlyError, TryAgainError)
"""The errors of a server that is away for a while. MASTERDOWN is a `ClusterDownError`, too.

So are those for which redis-py has no class, such as NOREPLICAS and BUSY: `later_code` knows them.
"""


class Outage:
    """Goes on where the server is away, and logs that once in a series: `with outage.survived(): ...`.

    Args:
        name: of the election.

    Attributes:
        is_met: whether the server was away in the last block.
    """

    def __init__(self, name: Any) -> None:
        self._name = name
        self.is_met = False

    @contextlib.contextmanager
    def survived(self) -> Iterator[None]:
        """Suppress the error of a server that is away."""
        try:
            yield
        except BAD_CREDENTIALS:
            raise
        except (*_OUTAGES, ResponseError) as error:
            if not isinstance(error, _OUTAGES) and not later_code(str(error)):
                raise
            if not self.is_met:
                what = f"{type(error).__name__}: {error}"  # redis-py's `repr` hides the text
                logger.warning("The election %s waits until its server is there again: %s", shown(self._name), what)
            self.is_met = True
        else:
            self.is_met = False


def encoded(value: Any) -> bytes:
    """A leader's value as bytes.

    Raises:
        TypeError: it is neither a str nor None.
        ValueError: it is too long.
    """
    if not (value is None or isinstance(value, str)):
        raise TypeError(f"the value of an election must be a str, not {type(value).__name__}")
    text = (value or "").encode()
    if len(text) > _MOST_BYTES:
        raise ValueError(f"the value of an election must have {_MOST_BYTES} bytes at most, not {len(text)}")
    return text


def check_callbacks(**callbacks: Any) -> None:
    """Check that each is None or can be called.

    Raises:
        TypeError: one cannot.
    """
    for name, callback in callbacks.items():
        check_callback(name, callback)


def record_leader(lock: Any, value: bytes) -> Steps:
    """Note that the holder of this lock leads.

    Raises:
        LockLostError: it does not hold the lock any more.
    """
    token, term = lock._held().token, lock.fence  # noqa: SLF001  # as its own class would
    note = NoteLeader(lock._key, token, term, value)  # noqa: SLF001  # as above
    yield Do("execute", note, max(lock.remaining(), 0.0))
    if not note.result:
        raise lost(lock.name, LossReason.EXPIRED)


def read_leader(key: bytes, with_process: bool) -> Steps:
    """Read who leads. Returns a `Leader`, or None."""
    read = ReadLeader(key, with_process)
    yield Do("execute", read)
    return read.leader


def lost(name: Any, reason: LossReason) -> LockLostError:
    """The error of a term that has ended against the leader's will."""
    return LockLostError(f"The term of the election {shown(name)} was lost: {reason}", lock_name=name, reason=reason)


def no_term(name: Any, why: str) -> LockError:
    """The error of a term that does not begin."""
    return LockError(f"No term of the election {shown(name)} begins: {why}", lock_name=name)


def give_up(lock: Any) -> None:
    """Let go of a lock whose server does not answer: it is released in the background, for which nobody waits.

    Raises:
        LockLostError: the lock was lost.
    """
    token = lock.detach().token
    with contextlib.suppress(RedisError):  # a cluster without a node for the key: the lock ends with its ttl
        lock._transport.clean_up([(lock._key, token)])  # noqa: SLF001  # as its own class would
