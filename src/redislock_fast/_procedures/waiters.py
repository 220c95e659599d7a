"""Who waits for what on one connection: where a push from the server finds the waiter it is for.

A `Room` belongs to a connection, a `Line` to one lock in it, a `Seat` to one waiter. A seat is taken before the server
is told that somebody waits, so no message can come too early.

What a waiter may believe: a lock is granted to him after any moment at which the server said that it is not his. So the
lease of a grant counts from the last such moment (`since`) before the message came. What the server tells one waiter of
a line, it tells all of them.

Who may touch what: `hear` runs in the thread or loop that reads the connection. Seats are taken and left by anybody,
under `_mutex`, which a signal handler or finalizer of the same thread may enter again. The times of a line are assigned
as a whole; a stale one makes somebody ask once more than necessary. The set of what was handed over, and the
dict of how long was waited, are used by atomic methods alone, by anybody; a lost note is an attempt or a look more.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol

import hiredis

from redislock_fast._lease.ownership import Holding
from redislock_fast._pipe.base import Args, Lost, Malformed, OnReply, Reply
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.keys import channel_beside
from redislock_fast._protocol.queue import Leave, wait_answer
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import MARK, TOKEN_BYTES

__all__ = ["BROKEN", "LOOK", "RECKON", "Grant", "Line", "Mailbox", "Room", "Seat"]

BROKEN: Final = "broken"
"""Told when the connection is of no more use."""

RECKON: Final = "reckon"
"""Told when something is due sooner than was known."""

LOOK: Final = "look"
"""Told when something about the lock has changed."""

_EXPIRY_S = 0.005
"""A key that ends at some millisecond is certainly gone so much later."""

_MOST_SPARE = 4
"""By how many intervals the first look is put off at most: what is wrong is found so much later then."""

_MOST_KEYS = 1000  # to be remembered: with more, all are forgotten

_ANSWER_S = 1.0
"""A posted wait without a reply for so long is asked again, so that whoever waits learns what is wrong."""


class Grant(NamedTuple):
    """Told when the lock is the waiter's.

    Attributes:
        word: the lock's new value.
        since: since when it can be his.
        arrival: the server's time of the arrival in the queue that led to it; empty for a reply.
    """

    word: bytes
    since: float
    arrival: bytes = b""

    def note(self, local: Holding, token: bytes, ttl_ms: int | None) -> None:
        """Let the waiter hold it."""
        local.lease = (token, None if ttl_ms is None else self.since + ttl_ms / 1000)
        local.queued = token if self.word is not token else None
        local.hold(token)


# A grant comes when other processes have had the caches: a call of Python and three slices less are 6 us of 80 then.
_new_grant: Callable[[tuple[bytes, float, bytes]], Grant] = partial(tuple.__new__, Grant)
_TOKEN = slice(TOKEN_BYTES)
_WORD = slice(TOKEN_BYTES + 1)
_ARRIVAL = slice(TOKEN_BYTES + 1, None)


_interval_of = attrgetter("interval_s")


def _forget_if_many(of_keys: set[bytes] | dict[bytes, float]) -> None:
    if len(of_keys) >= _MOST_KEYS:
        of_keys.clear()


class Mailbox(Protocol):
    """How one waiter is told."""

    def tell(self, message: object) -> None:
        """Leave a message; never waits."""


class Link(Protocol):
    """What a seat needs of its connection."""

    dialect: Dialect


class Node(Protocol):
    """What a waiter needs of the transport of its lock's server."""

    def is_current(self, seat: Seat) -> bool:
        """Whether requests for the waiter's lock still leave on the waiter's connection."""

    def post(self, link: Any, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request on one of its connections; see `_pipe.base.Pipe.post`."""


class Line:
    """The waiters of one lock on one connection.

    One seat of the queue looks for all in it whether all is well: the one with the shortest interval; of several, the
    last that has joined, since it stays longest.

    `watchman` changes under the room's mutex, and is read by anybody without it: a stale one makes somebody look once
    too often, and the seat that follows is told.

    Attributes:
        seats: by token.
        queue: those of them whom the server has said to stand in the queue, in order.
        watchman: who of these looks.
        since: the last moment at which the lock was certainly none of theirs; in the clock's seconds.
        looked_at: when somebody last looked.
        spare_s: how much longer than an interval nobody need look, in seconds; 0 once somebody has.
        ends_at: when the holder's lease ends, as far as is known.
    """

    __slots__ = ("ends_at", "looked_at", "queue", "seats", "since", "spare_s", "watchman")

    def __init__(self, spare_s: float) -> None:
        self.seats: dict[bytes, Seat] = {}
        self.queue: dict[bytes, Seat] = {}
        self.watchman: Seat | None = None
        self.since = 0.0
        self.looked_at = clock()
        self.spare_s = spare_s
        self.ends_at: float | None = None


class Seat:
    """One waiter's place.

    Attributes:
        key: the lock.
        room: the connection's.
        node: the transport of the lock's server.
        line: the lock's.
        mailbox: his.
        link: the connection.
        channel: on which he is told; None where the connection may not subscribe, or not use the queue.
        since: the last moment at which the lock was certainly not his.
        arrival: the server's time of his last arrival in the queue; 0 while only a posted wait has told it.
        asked_at: when a posted wait left whose reply has not come; else 0.
        until: how long he listens before he looks by himself.
        taken_at: when he came, in the clock's seconds.
        waited_s: how long it took until he was told that the lock is his, in seconds; 0 if he found that by looking.
        gives_up_at: when he waits no more, in the clock's seconds.
        interval_s: how often it wants to have looked whether all is well, in seconds.
        refused: whether the server has said that the lock is another's.
    """

    __slots__ = (
        "arrival",
        "asked_at",
        "channel",
        "gives_up_at",
        "interval_s",
        "key",
        "line",
        "link",
        "mailbox",
        "node",
        "refused",
        "room",
        "since",
        "taken_at",
        "token",
        "until",
        "waited_s",
    )

    def __init__(
        self,
        room: Room,
        line: Line,
        key: bytes,
        token: bytes,
        mailbox: Mailbox,
        link: Link,
        node: Node,
        channel: bytes | None,
    ) -> None:
        self.room = room
        self.node = node
        self.link = link
        self.key = key
        self.token = token
        self.line = line
        self.mailbox = mailbox
        self.channel = channel
        self.since = self.taken_at = clock()
        self.waited_s: float | None = None
        self.arrival = 0
        self.asked_at = 0.0
        self.until = self.gives_up_at = self.interval_s = math.inf
        self.refused = False

    @property
    def current(self) -> bool:
        """Whether the connection is still the one on which requests for this lock leave."""
        return self.node.is_current(self)

    @property
    def is_queued(self) -> bool:
        """Whether he is in the queue, as far as is known."""
        return self.line.queue.get(self.token) is self

    def due_at(self) -> float | None:
        """When to look whether all is well; None while another of the line does it."""
        line, interval_s = self.line, self.interval_s
        due_at = line.looked_at + interval_s + min(line.spare_s, _MOST_SPARE * interval_s)
        if self.asked_at:
            now = clock()
            unanswered_at = self.asked_at + interval_s + _ANSWER_S
            if due_at <= now:
                due_at = self.asked_at + interval_s
            return min(due_at, unanswered_at) if due_at > now else unanswered_at
        if line.watchman is not self:
            return None
        ends_at = line.ends_at
        if ends_at is not None and line.looked_at < ends_at + _EXPIRY_S < due_at:
            return ends_at + _EXPIRY_S
        return due_at

    def rest_s(self) -> float:
        """For how long he may sleep on, in seconds, now that it was time for him to look: another may do that now."""
        if self.asked_at or self.line.watchman is self or not self.is_queued:
            return 0.0
        return max(self.gives_up_at - clock(), 0.0)

    def withdraw(self) -> None:
        """Undo what has been sent with this token, behind it on the same connection, and without waiting."""
        if self.channel is not None:
            with contextlib.suppress(Lost):
                self.node.post(self.link, self.room.leaving(self).request(self.link.dialect, 0.0))

    def answer(self, reply: Reply) -> None:
        """The reply to a posted wait has come. Whoever waits is disturbed only if that is not the usual one.

        Raises:
            Malformed: it is none that a wait can have.
        """
        asked_at, self.asked_at = self.asked_at, 0.0
        if isinstance(reply, hiredis.ReplyError):
            self.mailbox.tell(LOOK)
            return
        answer = wait_answer(reply)
        verdict = answer[0]
        if verdict == 0:
            self.note(answer[1], asked_at, answer[2])
            self._have_reckoned(self)
        elif verdict == 1:
            self.mailbox.tell(Grant(answer[1], self.since))
        else:
            self.mailbox.tell(LOOK)

    def note(self, word: bytes, asked_at: float, left_ms: int) -> None:
        """The server has said that the lock is another's, and for how long; the request left at `asked_at`."""
        line = self.line
        self.refused = True
        self.room.enqueue(self)
        line.ends_at = None if left_ms < 0 else clock() + left_ms / 1000
        watchman = line.watchman
        if watchman is not None and watchman is not self:
            self._have_reckoned(watchman)
        self.since = max(self.since, asked_at)
        other = line.seats.get(word) or line.seats.get(word.removesuffix(MARK))
        if other is None:
            line.since = max(line.since, asked_at)
        elif other is not self:  # his message was lost, or is about to come
            other.mailbox.tell(LOOK)

    def _have_reckoned(self, seat: Seat) -> None:
        """Tell a seat of the line if the holder's lease ends before it would look."""
        ends_at = self.line.ends_at
        if ends_at is not None and ends_at + _EXPIRY_S < seat.until:
            seat.mailbox.tell(RECKON)

    def oldest(self) -> Seat | None:
        """Who has been in the queue for longest."""
        return next(iter(self.room.queue_of(self.line)), None)

    def wake_others(self) -> None:
        """Let the others of the queue look."""
        for seat in self.room.queue_of(self.line):
            if seat is not self:
                seat.mailbox.tell(LOOK)

    def leave_queue(self) -> None:
        """Wait in another way."""
        self.room.dequeue(self)


class Room:
    """The waiters on one connection.

    Args:
        dialect: the connection's.

    Attributes:
        publish: the command by which others reach this connection.
        subscribe: the command by which it listens.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._mutex = threading.RLock()
        self._lines: dict[bytes, Line] = {}
        self._by_token: dict[bytes, Seat] = {}  # a token that a caller has brought may come twice: it hears nothing
        self._listener = os.urandom(16).hex().encode()
        self._channel = None if dialect.sharded else b"rlf:" + self._listener
        self._subscribed: dict[bytes, bool] = {}  # by channel: whether that was allowed
        self._has_left = False  # the text of the script for leaving has been sent
        self._handed_over: set[bytes] = set()  # keys of locks that were handed over last when they were released here
        self._waits: dict[bytes, float] = {}  # by key: what the last waiter's `waited_s` was
        self._forbidden: set[bytes] = set()  # keys of locks whose queues this connection may not use
        self.publish = b"spublish" if dialect.sharded else b"publish"
        self.subscribe = b"SSUBSCRIBE" if dialect.sharded else b"SUBSCRIBE"

    def channel_for(self, key: bytes) -> bytes:
        """The channel on which this connection hears of this lock, once it has subscribed."""
        return self._channel or channel_beside(key, self._listener)

    def channel_of(self, key: bytes) -> bytes | None:
        """The same; None where the connection may not listen there, or not use the queue."""
        channel = self._channel or channel_beside(key, self._listener)
        return channel if self._subscribed.get(channel) and key not in self._forbidden else None

    def forbid(self, key: bytes) -> None:
        """The connection may not use this lock's queue."""
        _forget_if_many(self._forbidden)
        self._forbidden.add(key)

    def note_subscription(self, channel: bytes, allowed: bool) -> None:
        """It has been tried."""
        self._subscribed[channel] = allowed

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt would probably fail. Who joins the queue instead gets a free lock, too, but by a script.

        So it is while somebody here is in the queue, and once behind each hand-over: who releases a lock that others
        wait for, and is back at once, needs a third fewer commands. Only once: else a lock that nobody else wants any
        more would be taken by the script for ever. And not for who has little time: that ends while the script's reply
        is on its way, while an attempt would be waited for.
        """
        line = self._lines.get(key)
        if line is not None and line.queue:
            return True
        if is_patient and key in self._handed_over:
            self._handed_over.discard(key)
            return True
        return False

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """The lock was released, and a waiter has it now, or nobody waited."""
        if not handed_over:
            self._handed_over.discard(key)
        elif key not in self._handed_over and self.channel_of(key) is not None:
            _forget_if_many(self._handed_over)
            self._handed_over.add(key)

    def take(self, key: bytes, token: bytes, mailbox: Mailbox, link: Link, node: Node) -> Seat | None:
        """A seat for who waits for this lock with this token; None where it has not been tried yet to subscribe."""
        channel = self._channel or channel_beside(key, self._listener)
        allowed = self._subscribed.get(channel)
        if allowed is None:
            return None
        allowed = allowed and key not in self._forbidden
        with self._mutex:
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = Line(self._waits.get(key, 0.0))
                _forget_if_many(self._waits)
            seat = line.seats[token] = Seat(self, line, key, token, mailbox, link, node, channel if allowed else None)
            self._by_token.setdefault(token, seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """The seat is free."""
        line = seat.line
        token = seat.token
        with self._mutex:
            if self._by_token.get(token) is seat:
                del self._by_token[token]
            if line.seats.get(token) is seat:
                del line.seats[token]
                if not line.seats and self._lines.get(seat.key) is line:
                    del self._lines[seat.key]
            if line.seats:
                heir = self._succeed(seat) if token in line.queue else None
            else:  # or he and his line would keep each other, and be collected in the middle of an acquire
                line.queue.clear()
                line.watchman = heir = None
        if heir is not None:
            heir.mailbox.tell(LOOK)
        if seat.waited_s is not None:
            self._waits[seat.key] = seat.waited_s

    def enqueue(self, seat: Seat) -> None:
        """The seat is in the queue, unless it has been left meanwhile."""
        line, token = seat.line, seat.token
        with self._mutex:
            if line.seats.get(token) is seat:
                line.queue[token] = seat
                if line.watchman is None or seat.interval_s <= line.watchman.interval_s:
                    line.watchman = seat

    def dequeue(self, seat: Seat) -> None:
        """The seat is not in the queue any more; another one looks for the rest."""
        with self._mutex:
            heir = self._succeed(seat)
        if heir is not None:
            heir.mailbox.tell(LOOK)

    @staticmethod
    def _succeed(seat: Seat) -> Seat | None:
        """Take the seat from its queue. Returns who looks for the rest from now on, if that is new. Under `_mutex`."""
        line = seat.line
        if line.queue.get(seat.token) is not seat:
            return None
        del line.queue[seat.token]
        if line.watchman is not seat:
            return None
        line.watchman = heir = min(reversed(line.queue.values()), key=_interval_of, default=None)
        return heir

    def queue_of(self, line: Line) -> list[Seat]:
        """Who is in a lock's queue now."""
        with self._mutex:
            return list(line.queue.values())

    def leaving(self, seat: Seat) -> Leave:
        """What undoes the seat's waiting, to be posted: with the script's text until the server has surely had that."""
        leave = Leave(seat.key, seat.token)
        leave.with_text = not self._has_left
        self._has_left = True
        return leave

    def hear(self, push: list[Reply]) -> None:
        """A push has come.

        Raises:
            Malformed: it is none that a server sends.
        """
        kind: Any = push[0] if push else None
        if kind == b"message" or kind == b"smessage":  # noqa: PLR1714  # mostly the first
            text: Any = push[-1]
            if len(push) != 3 or type(text) is not bytes:
                raise Malformed(push)
            seat = self._by_token.get(text[_TOKEN])
            if seat is not None:
                since = max(seat.since, seat.line.since)
                seat.mailbox.tell(_new_grant((text[_WORD], since, text[_ARRIVAL])))
        elif kind == b"invalidate":
            keys: Any = push[-1]
            if len(push) != 2 or not (keys is None or type(keys) is list):
                raise Malformed(push)
            self._tell(LOOK, [seat for seat in self._seats() if keys is None or seat.key in keys])
        elif kind == b"sunsubscribe":  # the slot has moved
            channel: Any = push[1] if len(push) == 3 else None
            if type(channel) is not bytes:
                raise Malformed(push)
            self._subscribed.pop(channel, None)
            self._tell(BROKEN, [seat for seat in self._seats() if seat.channel == channel])
        elif type(kind) is not bytes:
            raise Malformed(push)

    def tell_all(self, message: object) -> None:
        """Tell everybody who waits here."""
        self._tell(message, self._seats())

    def _seats(self) -> list[Seat]:
        with self._mutex:
            return [seat for line in self._lines.values() for seat in line.seats.values()]

    @staticmethod
    def _tell(message: object, seats: list[Seat]) -> None:
        for seat in seats:
            seat.mailbox.tell(message)
