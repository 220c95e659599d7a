"""The operations that number a lock's holders: state machines, as those of `commands.py` are.

A number is given once, to one holder, and is higher than all before it: under the lock, by a script, from a counter
beside the lock that never expires. Kleppmann's "How to do distributed locking" calls it a fencing token. Asked again,
the holder gets the number that he has. Without scripts there are no numbers.
"""

from __future__ import annotations

from typing import Any

import hiredis

from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.commands import Acquire, Refused, TokenOperation
from redislock_fast._protocol.keys import fence_key
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.scripts import ACQUIRE_FENCED

__all__ = ["AcquireFenced", "AcquireOwnFenced", "Fence"]

_TAKEN = 1
_HELD = 2


def _request(operation: TokenOperation, ttl_ms: bytes | int) -> Args:
    name, body = (b"EVAL", ACQUIRE_FENCED.text) if operation.with_text else (b"EVALSHA", ACQUIRE_FENCED.sha)
    return (name, body, 2, operation.key, fence_key(operation.key), operation.token, ttl_ms)


def _answer(operation: TokenOperation, reply: Reply) -> list[Any] | None:
    """What the script returned: verdict, value, and with a number that too; None when it is to be sent whole."""
    if isinstance(reply, hiredis.ReplyError):
        if operation.error_code(reply) == "NOSCRIPT":
            return None
        raise Refused(str(reply))
    answer: Any = reply
    kinds = list(map(type, reply)) if type(reply) is list else []
    numbers = [int] if kinds and answer[0] in (_TAKEN, _HELD) else []
    if kinds in ([int, bytes, *numbers], [int, type(None), *numbers]) and 0 <= answer[0] <= _HELD:
        return list(answer)
    raise Malformed(reply)


class AcquireFenced(Acquire):
    """Take the lock if it is free, and get a number.

    Idempotent: as `Acquire`, and the number of a token that holds the lock does not change.

    `fence` is the number of the lock that was taken, or found held with this token: ours where `result` is True.
    """

    fence = 0

    def request(self, dialect: Dialect, now: float) -> Args:  # noqa: ARG002  # the same for every server
        if not self.sent_at:
            self.sent_at = now
        return _request(self, self.ttl_ms or 0)

    def feed(self, reply: Reply, dialect: Dialect) -> bool:  # noqa: ARG002  # likewise
        answer = _answer(self, reply)
        if answer is None:
            return False
        verdict, self.holder = answer[:2]
        # Found with our token, it is ours by an attempt of unknown outcome; else by another who has the same token.
        self.result = verdict == _TAKEN or (verdict == _HELD and self.unsettled)
        if verdict in (_TAKEN, _HELD):
            self.fence = answer[2]
        return True


class AcquireOwnFenced(AcquireOwn, AcquireFenced):
    """Take the lock by the caller's own token, and get a number.

    A lock that is found held with the token keeps its number: its holder goes on. One that is taken gets a new number,
    though the same token may have held it before: that holder has lost it, and may not know.
    """


class Fence(TokenOperation):
    """Number the holder of a lock that was taken without a number: one that was handed over.

    Idempotent: the number of a token that holds the lock does not change. So the token must be one that has never had
    a number before.

    `result` is False when the lock is not held with the token any more. `fence` is the number when it is True.
    """

    fence = 0

    def request(self, dialect: Dialect, now: float) -> Args:  # noqa: ARG002  # the same for every server, at any time
        return _request(self, b"")

    def feed(self, reply: Reply, dialect: Dialect) -> bool:  # noqa: ARG002  # likewise
        answer = _answer(self, reply)
        if answer is None:
            return False
        self.result = answer[0] == _HELD
        if self.result:
            self.fence = answer[2]
        return True
