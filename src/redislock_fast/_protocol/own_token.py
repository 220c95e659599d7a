"""Takes a lock by the caller's own token: a caller that finds the lock held with its token has it already.

With the id of a request or a job as the token, an acquire is idempotent beyond one call: a worker that gets the job
again continues with the lock that its first try took.

Such a caller waits by a ticket, a token that is made for this waiting: the queue could not tell two owners of one token
apart. When the lock is granted to the ticket, `Redeem` puts the caller's token in its place.
"""

from __future__ import annotations

from typing import Any

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire, Reacquire
from redislock_fast._protocol.operation import Refused
from redislock_fast._protocol.scripts import REDEEM
from redislock_fast._util.tokens import CONTENDED_FLAG, is_ours

_MAX_RENEWALS = 3
"""A lock may end between being found held and being renewed. After so many times, the acquire fails."""

LOST, TAKEN, HELD = range(3)
"""The verdicts of redeem.lua and acquire_fenced.lua: another's or free; taken by the request; held with the token."""


class AcquireOwn(Acquire):
    """Take the lock if it is free, or held with this very token: then its lease begins anew.

    A lock that is found held is reacquired, which changes nothing that does not hold the token. `sent_at` is then the
    time of the reacquire. An attempt of unknown outcome makes no difference: the lock that is found may be an older one
    with little of its ttl left.

    Where the server refuses the reacquire or the reading, the lock counts as another's, as for `Acquire`. After a SET
    of unknown outcome, that is an error: the lock may be ours, or may become ours.

    `unsettled` is about the SETs alone, since a reacquire sets no missing key. An acquire that ends with an error does
    not touch a lock that was held before under the same token: that has its old lease or a new one (without a ttl,
    where this acquire asked for none). A key that this acquire may have set is cleaned up by its `claim` alone.

    Attributes:
        claim: the keys that attempts of its server transport with this key and token have taken; None while no
            transport drives it.
    """

    _took = False
    _renewal: Reacquire | None = None
    _renewals_left = _MAX_RENEWALS

    def request(self, capabilities: Capabilities, now: float) -> Args:
        if self._renewal is not None:
            return self._renewal.request(capabilities, now)
        return super().request(capabilities, now)

    def plain_replies(self) -> tuple[Reply, type | None]:
        return super().plain_replies()[0], None  # any value may be our own token

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        if self._renewal is not None:
            return self._renewed(self._renewal, reply, capabilities)
        finished = super().feed(reply, capabilities)
        if self.holder is None:
            self._took = self.result
            return finished
        self.result = False
        is_flagged = is_ours(self.token) and self.holder == self.token + CONTENDED_FLAG
        if not is_flagged and self.holder != self.token:
            return True
        self._renewal = Reacquire(self.key, self.token, self.ttl_ms, contended=is_flagged)
        return False

    @property
    def took(self) -> bool:
        return self._took

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # its claim does the cleanup
        return []

    def note_unanswered(self, sent: bool) -> None:
        if self._renewal is None and not self._looking:
            super().note_unanswered(sent)

    def _renewed(self, renewal: Reacquire, reply: Reply, capabilities: Capabilities) -> bool:
        try:
            if not renewal.feed(reply, capabilities):
                return False
        except Refused:
            if self.unsettled:
                raise
            return True
        if renewal.result:
            self.result = True
            self.sent_at = renewal.sent_at
            return True
        self.holder = self._renewal = None
        self._looking = False
        self._renewals_left -= 1
        return self._renewals_left == 0


class Redeem(AcquireOwn):
    """Put a caller's own token in the place of the ticket to which the lock was granted, with the whole ttl.

    Idempotent: a lock that is held with the token after an attempt of unknown outcome was taken by that attempt, or by
    another owner of the token; either way the caller has it.

    Args:
        ticket: the token to which the lock was granted.
    """

    def __init__(self, key: bytes, token: bytes, ttl_ms: int | None, ticket: bytes) -> None:
        super().__init__(key, token, ttl_ms)
        self._ticket = ticket

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        if not self.sent_at:
            self.sent_at = now
        return self.script(REDEEM, self._ticket, self.ttl_ms or 0)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # as above
        if not self._is_answer(reply):
            self.go_on_with_text(reply)
            return False
        answer: Any = reply
        self._took = answer[0] == TAKEN
        self.result = answer[0] != LOST
        self._note(answer)
        return True

    @staticmethod
    def _is_answer(reply: Reply) -> bool:
        """Whether the script returns this."""
        return reply in ([LOST], [TAKEN], [HELD])

    def _note(self, answer: list[int]) -> None:
        """Note what the answer tells beside the verdict."""
