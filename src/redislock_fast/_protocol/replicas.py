"""Waiting until replicas have a lock; see `operation.py` for the rules.

`WAIT` counts the replicas that have acknowledged all that its own connection has written (redis.io and valkey.io). So a
reacquire is sent before it, which follows the acquire in the stream to the replicas, whichever connection sent that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hiredis

from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.operation import Refused

if TYPE_CHECKING:
    from redislock_fast._protocol.claims import Claim
    from redislock_fast._protocol.operation import FirstOutcome


class Replicate:
    """Begin the lease of a held lock anew, and wait until enough replicas have it.

    The server holds its reply back for up to `wait_ms`, and with it every later reply on the same connection.
    Idempotent: a lock that is not held with this token is left alone.

    Args:
        contended: whether the lock is known to have the contended flag.
        wanted: how many replicas must have it.
        wait_ms: how long to wait for them, counted from the first request.

    Attributes:
        held: whether the lock was still held with the token.
        replicas: how many had it.
        result: whether it was held, and enough had it.
        sent_at: the time of the first request: the lease counts from there.
    """

    is_pipeline = True
    uses_queue = False
    claim: Claim | None = None
    first_outcome: FirstOutcome | None = None

    def __init__(
        self, key: bytes, token: bytes, ttl_ms: int | None, contended: bool, wanted: int, wait_ms: int
    ) -> None:
        self._reacquire = Reacquire(key, token, ttl_ms, contended)
        self._reacquire.with_text = True  # on NOSCRIPT, the WAIT after it would wait for nothing
        self._wanted = wanted
        self._wait_ms = wait_ms
        self.replicas = 0
        self.result = self.unsettled = False

    @property
    def key(self) -> bytes:
        return self._reacquire.key

    @property
    def held(self) -> bool:
        return self._reacquire.result

    @property
    def sent_at(self) -> float:
        return self._reacquire.sent_at

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:
        reacquire = self._reacquire.request(capabilities, now)
        left_ms = self._wait_ms - int((now - self.sent_at) * 1000)
        return [reacquire, (b"WAIT", self._wanted, max(left_ms, 1))]  # 0 would mean forever

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:
        reacquired, counted = replies
        if not self._reacquire.feed(reacquired, capabilities):
            return False
        if isinstance(counted, hiredis.ReplyError):
            raise Refused(str(counted))
        if type(counted) is not int:
            raise Malformed(counted)
        if self.held:
            self.replicas = counted
            self.result = counted >= self._wanted
        return True

    def note_unanswered(self, sent: bool) -> None:
        self.unsettled = self.unsettled or sent
        self._reacquire.note_unanswered(sent)

    def takes(self) -> list[tuple[bytes, bytes]]:
        return []

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # it sets no key that is not there
        return []
