"""What a server knows about a lock: its holder, its queue, and whose connections they are. Tokens never leave here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import hiredis

from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.identity import read_introduction
from redislock_fast._protocol.keys import fence_key, queue_keys
from redislock_fast._protocol.operation import Refused, TokenOperation
from redislock_fast._util.tokens import (
    identifier_of,
    is_held_with,
    is_of_connection,
    stem_of,
    token_id_of,
    without_flag,
)

MOST_WAITERS = 100

_KINDS: tuple[type, ...] = (int, list, int, list, list, bytes)
"""The expected types of the replies after that to `GET`."""

_MADE_HERE = re.compile(rb"rlf:[0-9a-f]{32}")

_GONE = -2
"""What `PTTL` answers for a key that is not there."""


@dataclass(frozen=True)
class ProcessDetails:
    """A process, as it has told the server.

    Attributes:
        host: its host's name, without the domain, 30 characters at most.
        pid: its number there.
        program: its script or package, 30 characters at most.
        address: from where it is connected, as the server sees it: host and port.
        connected_s: for how long that connection has been there, in seconds.
    """

    host: str
    pid: int
    program: str
    address: str
    connected_s: int


@dataclass(frozen=True)
class Participant:
    """The holder of a lock, or a waiter in its queue.

    Attributes:
        kind: "redislock_fast" for tokens that this package has made; "unknown" for others, such as redis-py's, a
            caller's own or a Redlock's.
        identifier: of the connection by which it acquired the lock, or joined the queue; None for "unknown". It is no
            secret.
        process: its process; None where that is not known.
        alive: whether its process is connected to the server; None where that is not known.
        waited_s: for how long it has been in the queue, in seconds, by the server's clock; None for the holder.
        token_id: of its token: the first 12 digits of the token's SHA-256, which name this holding, as the token does,
            and release nothing; None for a key that is no string.
    """

    kind: Literal["redislock_fast", "unknown"]
    identifier: str | None = None
    process: ProcessDetails | None = None
    alive: bool | None = None
    waited_s: float | None = None
    token_id: str | None = None


@dataclass(frozen=True)
class LockReport:
    """A lock at one moment. There is no token in it.

    Attributes:
        holder: the holder; None: the lock is free.
        ttl_s: for how much longer the lock is held, in seconds, unless it is released or prolonged; None: without end,
            or free.
        contended: whether waiters are in the queue, or were while this holder had the lock.
        fence: the holder's fencing number; None: it has none.
        waiting: how many are in the queue; None where that is not known. Waiters that poll are not in it.
        waiters: the first of them, in the order in which they get the lock, 100 at most.
    """

    holder: Participant | None
    ttl_s: float | None
    contended: bool
    fence: int | None
    waiting: int | None
    waiters: tuple[Participant, ...]

    @property
    def held(self) -> bool:
        """Whether the lock is held."""
        return self.holder is not None


class Connections:
    """The connections that `CLIENT LIST` shows, by what they have told the server.

    Args:
        listing: the reply; None where it is not known.
    """

    def __init__(self, listing: bytes | None) -> None:
        rows = [dict(field.partition(b"=")[::2] for field in row.split(b" ")) for row in (listing or b"").splitlines()]
        self._knows_libraries = any(b"lib-name" in row for row in rows)
        self._by_identifier: dict[bytes, ProcessDetails] = {}
        self._by_stem: dict[bytes, ProcessDetails] = {}
        for row in rows:
            told = read_introduction(row.get(b"lib-name", b"")) or read_introduction(row.get(b"name", b""))
            if told is not None:
                age, address = row.get(b"age", b""), row.get(b"addr", b"").decode(errors="replace")
                connected_s = int(age) if age.isdigit() else 0
                identifier, host, pid, program = told
                details = ProcessDetails(host, pid, program, address, connected_s)
                self._by_identifier[identifier] = self._by_stem[stem_of(identifier)] = details

    def participant(self, token: bytes, waited_s: float | None = None) -> Participant:
        """Whose token it is. The connection may be another one by now, of the same process."""
        if not _MADE_HERE.fullmatch(token):  # nothing of another's token may be shown
            return Participant("unknown", waited_s=waited_s, token_id=token_id_of(token) if token else None)
        identifier = identifier_of(token)
        process = self._by_identifier.get(identifier) or self._by_stem.get(stem_of(identifier))
        is_gone = process is None and self._knows_libraries and is_of_connection(identifier)
        alive = True if process is not None else False if is_gone else None
        return Participant("redislock_fast", identifier.decode(), process, alive, waited_s, token_id_of(token))


class ReadReport(TokenOperation):
    """Read the lock, its queue, its fence and the list of connections. `result` is whether the lock is held.

    What the server does not allow is missing in the report, except the lock's value. It is read in one piece, but not
    at one moment.
    """

    is_pipeline = True
    report: LockReport

    def __init__(self, key: bytes) -> None:
        super().__init__(key, b"")

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:  # noqa: ARG002  # at any time
        requests: list[Args] = [(b"GET", self.key), (b"PTTL", self.key)]
        if capabilities.queues:
            queue, _ = queue_keys(self.key)
            requests += [
                (b"HMGET", fence_key(self.key), b"token", b"number"),
                (b"ZCARD", queue),
                (b"ZRANGE", queue, 0, MOST_WAITERS - 1, b"WITHSCORES"),
                (b"TIME",),
                (b"CLIENT", b"LIST"),
            ]
        return requests

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        value = self._value(replies[0])
        try:
            self._note(value, *map(_known, replies[1:], _KINDS))
        except (TypeError, ValueError):
            raise Malformed(replies) from None  # the error may quote a token
        return True

    def _value(self, reply: Reply) -> bytes | None:
        """The lock's value; None for a free one, empty for a key that is no string."""
        if isinstance(reply, hiredis.ReplyError):
            if self.error_code(reply) == "WRONGTYPE":
                return b""
            raise Refused(str(reply))
        if reply is not None and type(reply) is not bytes:
            raise Malformed(reply)
        return reply

    def _note(
        self,
        value: bytes | None,
        ttl_ms: int | None,
        noted: list[Any] | None = None,
        waiting: int | None = None,
        entries: list[Any] | None = None,
        time: list[Any] | None = None,
        listing: bytes | None = None,
    ) -> None:
        """Make the report of what is known."""
        self.result = value is not None and ttl_ms != _GONE
        held = value if self.result else None
        token = without_flag(held or b"")
        connections = Connections(listing)
        queue = pairs(entries or [])
        self.report = LockReport(
            holder=None if held is None else connections.participant(token),
            ttl_s=None if held is None or ttl_ms is None or ttl_ms < 0 else ttl_ms / 1000,
            contended=bool(queue) or (held is not None and held != token),
            fence=None if held is None or noted is None else _fence(held, *noted),
            waiting=waiting,
            waiters=tuple(connections.participant(waiter, _age_s(arrival_us, time)) for waiter, arrival_us in queue),
        )


def _known(reply: Reply, kind: type) -> Any:
    """The reply; None where the server did not allow the request, or the slot of the lock moves."""
    if reply is None or isinstance(reply, hiredis.ReplyError):
        return None
    if type(reply) is not kind:
        raise Malformed(reply)
    return reply


def _fence(value: bytes, token: Any, number: Any) -> int | None:
    """The number, where it is that of the holder."""
    if token is None or number is None or not is_held_with(value, token):
        return None
    return int(number)


def pairs(entries: list[Any]) -> list[tuple[bytes, float]]:
    """Tokens and arrivals in the server's microseconds, in RESP2 one after the other, in RESP3 in pairs."""
    if entries and isinstance(entries[0], list):
        return [(token, float(score)) for token, score in entries]
    return [(token, float(score)) for token, score in zip(entries[::2], entries[1::2], strict=True)]


def _age_s(arrival_us: float, time: list[Any] | None) -> float | None:
    if time is None:
        return None
    seconds, microseconds = map(int, time)
    return max(seconds + (microseconds - arrival_us) / 1e6, 0.0)
