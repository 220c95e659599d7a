"""The operations on an election's record: note who leads, and read it. See `operation.py` for their rules.

The record counts only while the lock is held with the token whose id it has. So a leader that has ended is never shown,
whoever has noted it, and the record needs no ttl.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hiredis

from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.keys import leader_key
from redislock_fast._protocol.operation import Refused, TokenOperation
from redislock_fast._protocol.queue import TRACK_NEXT
from redislock_fast._protocol.report import Connections, ProcessDetails
from redislock_fast._protocol.scripts import LEAD
from redislock_fast._util.tokens import token_id_of, without_flag


@dataclass(frozen=True)
class Leader:
    """The leader at one moment. There is no token in it.

    Attributes:
        term: the number of its term, higher than those of all earlier leaders.
        value: what it has given as its `value`; None where it has given none.
        process: its process; None where that is not known.
        since_s: for how long it has been leading, in seconds, by the server's clock; None where that is not known.
    """

    term: int
    value: str | None
    process: ProcessDetails | None
    since_s: float | None


class NoteLeader(TokenOperation):
    """Note who leads. `result` is whether the lock is still held with the token.

    Idempotent: a token has one term, and notes it once.
    """

    def __init__(self, key: bytes, token: bytes, term: int, value: bytes) -> None:
        super().__init__(key, token)
        self._record = (token_id_of(token).encode(), term, value)

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        name, body = (b"EVAL", LEAD.text) if self.with_text else (b"EVALSHA", LEAD.sha)
        return (name, body, 2, self.key, leader_key(self.key), self.token, *self._record)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if type(reply) is int and reply in (0, 1):
            self.result = reply == 1
            return True
        self.go_on_with_text(reply)
        return False


class ReadLeader(TokenOperation):
    """Read who leads. `result` is whether anyone does, as far as it has been noted; then `leader` says who.

    It is read in one piece, but not at one moment: between two leaders, it may find none. The record is read first: it
    changes after the lock, so a leader that was noted by then is found for as long as it leads.

    Args:
        key: the election's name on the wire.
        with_process: whether the leader's process is asked for, which costs the server some time.
    """

    is_pipeline = True
    leader: Leader | None = None

    def __init__(self, key: bytes, with_process: bool) -> None:
        super().__init__(key, b"")
        self._with_process = with_process

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:  # noqa: ARG002  # the same for every server
        requests: list[Args] = [
            (b"HMGET", leader_key(self.key), b"id", b"term", b"value", b"since"),
            (b"GET", self.key),
        ]
        return [*requests, (b"TIME",), (b"CLIENT", b"LIST")] if self._with_process else requests

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        record, held, *more = replies
        for reply in (record, held):
            if isinstance(reply, hiredis.ReplyError):
                self.error_code(reply)  # raises the errors that are to be tried again
                raise Refused(str(reply))
        known = [None if isinstance(reply, hiredis.ReplyError) else reply for reply in more] or [None, None]
        try:
            self._note(held, record, *known)
        except (AttributeError, TypeError, ValueError):
            raise Malformed(replies) from None  # the error may quote a token
        self.result = self.leader is not None
        return True

    def _note(self, held: Any, record: Any, time: Any, listing: Any) -> None:
        """Note the leader of the record, if it is the one that holds the lock."""
        id_, number, value, since = record
        token = b"" if held is None else without_flag(held)
        if not token or id_ != token_id_of(token).encode():
            return
        since_s = None
        if time is not None:
            seconds, microseconds = map(int, time)
            since_s = max(seconds + (microseconds - int(since)) / 1e6, 0.0)
        process = Connections(listing if isinstance(listing, bytes) else None).participant(token).process
        self.leader = Leader(int(number), value.decode() or None, process, since_s)


class WatchLeader(ReadLeader):
    """Read who leads, and have the server push a message when another leader is noted next.

    Attributes:
        denied: whether the server does not push one.
    """

    uses_queue = True
    denied = False

    def __init__(self, key: bytes) -> None:
        super().__init__(key, with_process=False)

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:
        reading = super().request(capabilities, now)
        self.denied = not capabilities.queues
        return reading if self.denied else [*TRACK_NEXT, *reading]

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:
        armed, read = replies[:-2], replies[-2:]
        for reply in armed:
            if isinstance(reply, hiredis.ReplyError):
                self.error_code(reply)  # raises the errors that are to be tried again
                self.denied = True
            elif reply != b"OK":
                raise Malformed(armed)
        return super().feed(read, capabilities)
