"""When a request is sent again, and how long its reply may take: one policy for threads, event loops and clusters.

Nothing here waits, sends or receives. An `Attempts` belongs to the caller that executes the operation.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    TimeoutError,  # noqa: A004
)

from redislock_fast._pipe.base import NOT_ASKED, ConnectionBroken, Forked, NoReply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import NOAUTH, Exchange, NotExecuted, Redirected, Refused
from redislock_fast._util.redis_py import RetryPolicy
from redislock_fast._util.times import FOREVER_S, GRACE_S, clock

__all__ = ["FINAL", "TRANSIENT", "Attempts", "is_settled_by", "reply_within_s"]

FINAL = (AuthenticationError, AuthorizationError, Refused, Redirected, Forked)
"""Errors that no further attempt at the same server can mend."""

TRANSIENT = (ConnectionBroken, NoReply, NotExecuted, ConnectionError, TimeoutError)
"""Errors after which an `Attempts` says whether to try again. Some of `FINAL` are subclasses: check those first."""


def reply_within_s(limit_s: float, reply_s: float) -> float:
    """How long to wait for the reply to a request that leaves now, in seconds.

    Args:
        limit_s: how long the caller waits, in seconds from 0; a request under way may take `GRACE_S` more.
        reply_s: how long the server may take for a reply, in seconds; below 0: forever.
    """
    bounded_s = limit_s + GRACE_S
    return bounded_s if reply_s < 0 else min(reply_s, bounded_s)


class Attempts:
    """The attempts of one operation: how much time is left for them, and when the next one starts.

    Args:
        retry: the retry policy of the connection pool or of the cluster client.
        limit_s: how long the caller waits at most, in seconds, from now on; below 0: its time ended so long ago; None:
            `retry` and `reply_s` alone count.
        reply_s: how long the server may take for a reply, in seconds; below 0: forever.

    Attributes:
        deadline: when the caller's time ends, in the clock's seconds; None: never.
        failures: how many attempts have failed.
    """

    failures = 0
    _pause_s: float | None = None
    _error: Exception | None = None

    def __init__(self, retry: RetryPolicy, limit_s: float | None, reply_s: float = -1.0) -> None:
        self._retry = retry
        self._reply_s = reply_s
        self.deadline = None if limit_s is None or limit_s > FOREVER_S else clock() + limit_s

    def left_s(self) -> float | None:
        """How much of the caller's time is left, in seconds; below 0 when it is up, None forever."""
        return None if self.deadline is None else self.deadline - clock()

    @property
    def ends_at(self) -> float | None:
        """When the caller stops waiting for what is under way, in the clock's seconds; None: never."""
        return None if self.deadline is None else self.deadline + GRACE_S

    def bounded_s(self) -> float | None:
        """How long the caller waits for what is under way, in seconds from 0; None forever."""
        return None if self.deadline is None else max(self.deadline + GRACE_S - clock(), 0.0)

    def timeout_s(self, now: float) -> float:
        """How long to wait for the reply to a request that leaves now, in seconds; below 0 forever."""
        deadline = self.deadline
        if deadline is None:
            return self._reply_s
        return max(reply_within_s(deadline - now, self._reply_s), 0.0)

    def note_failure(self, trouble: Exception, error: Exception) -> None:
        """Decide after a failed attempt whether there is another one.

        Args:
            trouble: the error; one of `TRANSIENT`.
            error: what the caller gets if there is no other attempt.
        """
        self._pause_s = self.pause_s(trouble)
        self._error = error

    def go_on(self) -> None:
        """Try again at once after a failure that does not count."""
        self._pause_s, self._error = 0.0, None

    def next_pause_s(self) -> float:
        """How long to wait before the next attempt, in seconds.

        Raises:
            Exception: the error of the last failure, where there is no other attempt. Call this outside of the `except`
                clause, so that the error has no context.
        """
        error, self._error = self._error, None
        if self._pause_s is None and error is not None:
            try:
                raise error
            finally:
                del error  # or this frame and the error would keep each other, and the connection, alive
        return self._pause_s or 0.0

    def pause_s(self, trouble: Exception) -> float | None:
        """Count a failure. Returns how long to wait before the next attempt, in seconds; None to give up."""
        self.failures += 1
        retries = self._retry.retries
        if isinstance(trouble, NotExecuted):
            if trouble.code == NOAUTH:  # one new connection is worth a try
                retries = 1
            elif self.deadline is not None:  # a server that answers "later" is asked until the caller's time ends
                retries = -1
        return self._if_allowed(retries, self._retry.delay_s(self.failures), self.ends_at)

    def _if_allowed(self, retries: int, pause_s: float, ends_at: float | None) -> float | None:
        """The pause; None if the retries are used up, or the time is up before the pause is over."""
        if 0 <= retries < self.failures or (ends_at is not None and clock() + pause_s >= ends_at):
            return None
        return pause_s


def is_settled_by(operation: Exchange, capabilities: Capabilities, came: list[Any]) -> bool:
    """Take the outcome of a first request that the caller has sent itself. Returns whether the operation is finished.

    Args:
        operation: whose request it was.
        capabilities: of the connection on which it left.
        came: the reply and the error, one of them None. The list is emptied.

    Raises:
        BaseException: the error; and whatever `Exchange.feed` raises.
    """
    reply, interruption = came
    came.clear()  # an error keeps the frames that it came through: none of them may keep the error
    if interruption is not None:
        try:
            raise interruption
        finally:
            del interruption
    return reply is not NOT_ASKED and operation.feed(reply, capabilities)
