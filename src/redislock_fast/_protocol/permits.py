"""The operations on a semaphore: acquire and release a permit, resize, and read. See `operation.py` for their rules.

A permit's token says that it is one (`is_permit`), so the operations of a waiter and of a renewal are those of locks:
`operation.py` sends the semaphore's scripts for it. All of them are scripts: a server that forbids scripts has no
semaphores.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import hiredis

from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import HANDED_OVER, Acquire
from redislock_fast._protocol.keys import permit_keys
from redislock_fast._protocol.operation import Refused, TokenOperation
from redislock_fast._protocol.queue import MOVING
from redislock_fast._protocol.report import MOST_WAITERS, pairs
from redislock_fast._protocol.scripts import ACQUIRE_PERMIT, RELEASE_PERMIT, RESIZE
from redislock_fast._util.errors import shown

logger = logging.getLogger("redislock_fast.semaphore")

_differing: set[tuple[bytes, int, int]] = set()
"""What was logged: the key, the caller's limit and the operator's. They are few, since an operator has set each."""

_GOES_ON = 3
"""The reply of resize.lua that asks for another request."""


def _request(sha: bytes, key: bytes, *args: bytes | int) -> Args:
    return (b"EVALSHA", sha, 4, key, *permit_keys(key), *args)


class AcquirePermit(Acquire):
    """Take a permit if one is free and nobody waits for it.

    Idempotent: a token that has a permit keeps it, and its end never moves back. So the lease counts from the first
    request.

    Attributes:
        limit: how many may hold, unless an operator has set that; see `acquire_permit`.
    """

    limit: int

    @classmethod
    def terms(cls, ttl_ms: int | None) -> bytes:
        return b"%d/%d" % (ttl_ms or 0, cls.limit)

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        if not self.sent_at:
            self.sent_at = now
        return self.queue_script(ACQUIRE_PERMIT, self.ttl_ms or 0, self.limit)

    def plain_replies(self) -> tuple[Reply, type | None]:
        return 1, int

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if type(reply) is int and reply in (0, 1):
            self.result = reply == 1
            return True
        if isinstance(reply, list) and [*map(type, reply)] == [int, int] and reply[0] in (0, 1):
            self.result = reply[0] == 1
            self._log_other_limit(reply[1])  # type: ignore[arg-type]  # checked above
            return True
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        code = self.queue_error_code(reply)
        if code not in ("NOSCRIPT", MOVING):
            raise Refused(str(reply))
        return code == MOVING  # the keys move to another node: it cannot be had for now

    def _log_other_limit(self, limit: int) -> None:
        """Log once that an operator's limit is in force instead of the caller's."""
        entry = (self.key, self.limit, limit)
        if entry not in _differing:
            _differing.add(entry)
            text = "The semaphore %s: the limit that an operator has set is in force, %d, not the caller's, %d."
            logger.warning(text, shown(self.key), limit, self.limit)


@lru_cache(256)
def acquire_permit(limit: int) -> type[AcquirePermit]:
    """The `AcquirePermit` of a caller with this limit."""

    def request(
        capabilities: Capabilities,  # noqa: ARG001  # the same for every server
        key: bytes,
        token: bytes,
        ttl_ms: int | None,
    ) -> tuple[Args, Reply]:
        return _request(ACQUIRE_PERMIT.sha, key, token, ttl_ms or 0, limit), 1

    class AcquirePermitOf(AcquirePermit):
        first_request = request

    AcquirePermitOf.limit = limit
    return AcquirePermitOf


def _release_request(
    capabilities: Capabilities,  # noqa: ARG001  # the same for every server
    key: bytes,
    token: bytes,
    contended: bool,
) -> tuple[Args, Reply]:
    return _request(RELEASE_PERMIT.sha, key, token), HANDED_OVER if contended else 1


class ReleasePermit(TokenOperation):
    """Give a permit back, and hand it over to the first waiter. Parameters and attributes are those of `Release`.

    Idempotent: if the token is not found after an attempt of unknown outcome that left while the lease was valid, that
    attempt was executed.

    While the keys move to another node of a cluster, the permit is removed, and a health check of a waiter hands over.
    """

    handed_over: bool | None = None
    first_request = _release_request
    _is_moving = False

    def __init__(
        self,
        key: bytes,
        token: bytes,
        expires_at: float | None,
        unsettled: bool = False,
        contended: bool = False,  # noqa: ARG002  # one script releases either way
    ) -> None:
        super().__init__(key, token)
        self.expires_at = expires_at
        self.unsettled = self.valid = unsettled

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        if not self.unsettled:
            self.valid = self.expires_at is None or now < self.expires_at
        return (b"ZREM", self.key, self.token) if self._is_moving else self.queue_script(RELEASE_PERMIT)

    @property
    def may_be_done(self) -> bool:
        return self.result or (self.unsettled and self.valid)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if type(reply) is int and 0 <= reply <= HANDED_OVER:
            self.handed_over = reply == HANDED_OVER
            self.result = reply > 0 or (self.unsettled and self.valid)
            return True
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        code = self.queue_error_code(reply)
        if code in ("NOSCRIPT", "WRONGTYPE", MOVING):
            self._is_moving = code == MOVING
            return code == "WRONGTYPE"
        raise Refused(str(reply))


def operators_limit(key: bytes, value: bytes | None) -> int | None:
    """The operator's limit of a semaphore by what its key has; None where none is set.

    Raises:
        Refused: it is no number. An acquire says so, too.
    """
    if value is not None and not value.isdigit():
        raise Refused(f"the limit of the semaphore {shown(key)} is no number, resize sets or removes it")
    return None if value is None else int(value)


class _Asking(TokenOperation):
    """An operation on the whole semaphore, which concerns no token."""

    of_semaphore = True

    def __init__(self, key: bytes) -> None:
        super().__init__(key, b"")


class Resize(_Asking):
    """Set the operator's limit, or remove it, and hand over what is free by it. Idempotent.

    Args:
        limit: how many may hold; None: as many as each caller says.
    """

    def __init__(self, key: bytes, limit: int | None) -> None:
        super().__init__(key)
        self._limit: bytes | int = b"" if limit is None else limit

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        name, body = (b"EVAL", RESIZE.text) if self.with_text else (b"EVALSHA", RESIZE.sha)
        return (name, body, 4, self.key, *permit_keys(self.key), self._limit)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if type(reply) is int and 1 <= reply <= _GOES_ON:
            self.result = reply != _GOES_ON
            return self.result
        self.go_on_with_text(reply)
        return False


class ReadPermits(_Asking):
    """Read who has permits, who waits, and the operator's limit. `result` is whether any permit is held.

    It is read in one piece, but not at one moment.

    Attributes:
        limit: the operator's; None: each caller says its own.
        holders: tokens with the ends of their permits in the server's milliseconds, the first to end first.
        queue: tokens with their arrivals in the server's microseconds, the first to be served first.
        waiting: how many are in the queue.
        time_ms: the server's time, in milliseconds.
        listing: the reply to `CLIENT LIST`; None where the user may not send it.
    """

    is_pipeline = True
    limit: int | None = None
    holders: list[tuple[bytes, float]]
    queue: list[tuple[bytes, float]]
    waiting = 0
    time_ms = 0.0
    listing: bytes | None = None

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:  # noqa: ARG002  # the same for every server
        queue, _, limit = permit_keys(self.key)
        return [
            (b"ZRANGE", self.key, 0, -1, b"WITHSCORES"),
            (b"TIME",),
            (b"GET", limit),
            (b"ZCARD", queue),
            (b"ZRANGE", queue, 0, MOST_WAITERS - 1, b"WITHSCORES"),
            (b"CLIENT", b"LIST"),
        ]

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        *needed, listing = replies
        for reply in needed:
            if isinstance(reply, hiredis.ReplyError):
                self.error_code(reply)  # raises the errors that are to be tried again
                raise Refused(str(reply))
        holders, time, limit, waiting, queue = needed
        try:
            seconds, microseconds = map(int, time)  # type: ignore[arg-type]  # checked by this
            self.time_ms = seconds * 1000 + microseconds / 1000
            self.limit = operators_limit(self.key, limit)  # type: ignore[arg-type]  # as above
            self.waiting = int(waiting)  # type: ignore[arg-type]  # as above
            self.queue = pairs(queue)  # type: ignore[arg-type]  # as above
            self.holders = [one for one in pairs(holders) if one[1] > self.time_ms]  # type: ignore[arg-type]  # as above
        except (AttributeError, TypeError, ValueError):
            raise Malformed(replies) from None  # the error may quote a token
        self.listing = listing if isinstance(listing, bytes) else None
        self.result = len(self.holders) > 0
        return True
