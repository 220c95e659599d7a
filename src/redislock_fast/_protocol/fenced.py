"""The operations that number a lock's holders, for fencing; see `operation.py` for their rules.

A number is given once, to one holder, and is higher than all numbers before it. A script gives it, from a counter that
never expires, while the lock is held. A holder that asks again gets the same number. Without scripts there are no
numbers. (Kleppmann, "How to do distributed locking", calls the number a fencing token.)
"""

from __future__ import annotations

from typing import Any

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.keys import fence_key
from redislock_fast._protocol.operation import TokenOperation
from redislock_fast._protocol.own_token import HELD, TAKEN, AcquireOwn, Redeem
from redislock_fast._protocol.scripts import ACQUIRE_FENCED


def fence_given(reply: object) -> int | None:
    """The number, where this reply to an `AcquireFenced` means that the lock was free and is ours; else None."""
    if type(reply) is list and len(reply) == 3 and reply[0] == TAKEN and reply[1] is None and type(reply[2]) is int:
        return reply[2]
    return None


MANY = 64
"""How many numbers the holder of a key that may linger gets at once, one for each holding in its process."""


def _request(operation: TokenOperation, ttl_ms: bytes | int, numbers: int) -> Args:
    name, body = (b"EVAL", ACQUIRE_FENCED.text) if operation.with_text else (b"EVALSHA", ACQUIRE_FENCED.sha)
    count = () if numbers == 1 else (numbers,)
    return (name, body, 2, operation.key, fence_key(operation.key), operation.token, ttl_ms, *count)


def _answer(operation: TokenOperation, reply: Reply) -> list[Any] | None:
    """The script's verdict, the lock's value and, unless it is another's, the number; None: send the whole script."""
    answer: Any = reply
    kinds = list(map(type, reply)) if type(reply) is list else []
    numbers = [int] if kinds and answer[0] in (TAKEN, HELD) else []
    if kinds in ([int, bytes, *numbers], [int, type(None), *numbers]) and 0 <= answer[0] <= HELD:
        return list(answer)
    operation.go_on_with_text(reply)
    return None


def _first_request(
    capabilities: Capabilities,  # noqa: ARG001  # the same for every server
    key: bytes,
    token: bytes,
    ttl_ms: int | None,
) -> tuple[Args, Reply]:
    """The first request. The reply that means that the lock is ours has a number: `fence_given` recognises it."""
    return (b"EVALSHA", ACQUIRE_FENCED.sha, 2, key, fence_key(key), token, ttl_ms or 0), None


class AcquireFenced(Acquire):
    """Take the lock if it is free, and get a number.

    Idempotent: as `Acquire`, and the number of a token that holds the lock does not change.

    `fence` is the number of the lock that was taken, or found held with this token: ours where `result` is True. Of
    several `numbers`, it is the first.
    """

    fence = 0
    numbers = 1

    first_request = _first_request

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        if not self.sent_at:
            self.sent_at = now
        return _request(self, self.ttl_ms or 0, self.numbers)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        answer = _answer(self, reply)
        if answer is None:
            return False
        verdict, self.holder = answer[:2]
        # Found with our token, the lock is ours by an attempt of unknown outcome; else another holder has the same
        # token.
        self.result = verdict == TAKEN or (verdict == HELD and self.unsettled)
        if verdict in (TAKEN, HELD):
            self.fence = answer[2]
        return True


class AcquireManyFenced(AcquireFenced):
    """Take the lock if it is free, and get `MANY` numbers."""

    numbers = MANY


class AcquireOwnFenced(AcquireOwn, AcquireFenced):
    """Take the lock by the caller's own token, and get a number.

    A lock that is found held with the token keeps its number: its holder goes on. A lock that is taken gets a new
    number, even if the same token has held it before: that holder has lost it and may not know.
    """


class RedeemFenced(Redeem, AcquireFenced):
    """Put a caller's own token in the place of the ticket, and get a number.

    The holder is a new one, so its number is new, even if the same token has held the lock before.
    """

    def request(self, capabilities: Capabilities, now: float) -> Args:
        name, body, _, *rest = super().request(capabilities, now)
        return (name, body, 2, self.key, fence_key(self.key), *rest[1:])

    @staticmethod
    def _is_answer(reply: Reply) -> bool:
        """Whether the script returns this."""
        if not isinstance(reply, list) or len(reply) != 2:
            return reply == [0]
        return reply[0] in (TAKEN, HELD) and type(reply[1]) is int

    def _note(self, answer: list[int]) -> None:
        """Note the number."""
        if self.result:
            self.fence = answer[1]


class Fence(TokenOperation):
    """Number the holder of a lock that was taken without a number, by a hand-over.

    Idempotent: the number of a token that holds the lock does not change. So the token must have had no number before.

    `result` is whether the lock is still held with the token; then `fence` is the number, of several `numbers` the
    first.
    """

    fence = 0

    def __init__(self, key: bytes, token: bytes, numbers: int = 1) -> None:
        super().__init__(key, token)
        self.numbers = numbers

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server, at any time
        return _request(self, b"", self.numbers)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server, at any time
        answer = _answer(self, reply)
        if answer is None:
            return False
        self.result = answer[0] == HELD
        if self.result:
            self.fence = answer[2]
        return True
