"""The waiters on one connection, and how a push from the server reaches the waiter that it is for.

A `Room` is the waiter registry of one connection: it routes messages by token. A `Line` is the key queue of one lock on
that connection. A `Seat` is one waiter and owns the waiter's state. A waiter is registered before the server is told
about it, so that no message comes too early.

When a grant counts from: the server grants a lock to a waiter later than any moment at which it said that the lock is
not the waiter's. So the lease of a grant counts from the last such moment (`since`) before the message came. What the
server says to one waiter about a lock is true for all waiters of the same key queue.

Who may touch what: `hear` runs in the thread or loop that reads the connection. Any thread may register and remove a
waiter, under the registry's mutex, which a signal handler or finalizer of the same thread may enter again. The times of
a key queue are assigned as a whole; a stale one causes one superfluous request. `Room._handed_over` and `Room._waits`
are used by atomic methods alone, by any thread; a lost note costs one superfluous attempt or health check.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

import hiredis

from redislock_fast._lease.ownership import Holding
from redislock_fast._pipe.base import Args, Lost, Malformed, OnReply, Reply
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.queue import MOST_KEYS, Leave, Subscriptions, wait_answer
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import MARK, TOKEN_BYTES

__all__ = ["BROKEN", "LOOK", "RECKON", "Grant", "Line", "Node", "Room", "Seat"]

BROKEN: Final = "broken"
"""The message that no other message can come on this connection."""

RECKON: Final = "reckon"
"""The message that the next health check is due sooner than was known."""

LOOK: Final = "look"
"""The message that something about the lock has changed, so that the waiter asks the server."""

_EXPIRY_S = 0.005
"""A key with a ttl that ends at some millisecond is certainly gone so much later."""

_MOST_SPARE = 4
"""By how many intervals the first health check is put off at most: a fault is found so much later then."""

_ANSWER_S = 1.0
"""A posted request without a reply for so long is sent again, so that the waiter learns what is wrong."""


class Grant(NamedTuple):
    """The message that the lock is the waiter's.

    Attributes:
        word: the lock's new value.
        since: from when on the lease counts, in the clock's seconds.
        arrival: the server's time of the arrival in the queue that led to it; empty if a reply said it.
    """

    word: bytes
    since: float
    arrival: bytes = b""

    def note(self, local: Holding, token: bytes, ttl_ms: int | None) -> None:
        """Make the waiter the owner."""
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
    if len(of_keys) >= MOST_KEYS:
        of_keys.clear()


class Node(Protocol):
    """What a waiter needs of the transport of its lock's server."""

    def is_current(self, seat: Seat) -> bool:
        """Whether requests for the waiter's lock still leave on the waiter's connection."""

    def post(self, link: Any, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request on one of its connections; see `_pipe.base.Pipe.post`."""


class Line:
    """The waiters of one lock on one connection, and those of them that are in the server's queue.

    One waiter in the queue, the poller, makes the health checks for all: the waiter with the shortest interval; of
    several, the last that has joined, since it stays longest.

    Who may touch what: all is changed under the registry's mutex. `watchman` is read without it: a stale one causes one
    health check too many, and the next poller gets a message.

    Args:
        mutex: the registry's.
        spare_s: how much longer than an interval the first health check may be put off, in seconds.

    Attributes:
        seats: the waiters by token.
        queue: those of them that the server has said to be in the queue, in order.
        watchman: the poller.
        since: the last moment at which the lock was certainly none of theirs; in the clock's seconds.
        looked_at: when the last health check was made.
        spare_s: as above; 0 once a health check was made.
        ends_at: when the lease of the lock's holder ends, as far as is known.
    """

    __slots__ = ("_mutex", "ends_at", "looked_at", "queue", "seats", "since", "spare_s", "watchman")

    def __init__(self, mutex: Any, spare_s: float) -> None:
        self._mutex = mutex
        self.seats: dict[bytes, Seat] = {}
        self.queue: dict[bytes, Seat] = {}
        self.watchman: Seat | None = None
        self.since = 0.0
        self.looked_at = clock()
        self.spare_s = spare_s
        self.ends_at: float | None = None

    def enqueue(self, seat: Seat) -> None:
        """The waiter is in the queue, unless it has been removed from the registry meanwhile."""
        with self._mutex:
            if self.seats.get(seat.token) is seat:
                self.queue[seat.token] = seat
                if self.watchman is None or seat.interval_s <= self.watchman.interval_s:
                    self.watchman = seat

    def dequeue(self, seat: Seat) -> None:
        """The waiter is not in the queue any more; another one becomes the poller."""
        with self._mutex:
            heir = self.succeed(seat)
        if heir is not None:
            heir.mailbox.tell(LOOK)

    def succeed(self, seat: Seat) -> Seat | None:
        """Take the waiter from the queue. Returns the new poller, if there is one. Under the mutex."""
        if self.queue.get(seat.token) is not seat:
            return None
        del self.queue[seat.token]
        if self.watchman is not seat:
            return None
        self.watchman = heir = min(reversed(self.queue.values()), key=_interval_of, default=None)
        return heir

    def queued(self) -> list[Seat]:
        """The waiters that are in the queue now, in order."""
        with self._mutex:
            return list(self.queue.values())


class Seat:
    """One waiter on one connection, with its state, which belongs to the thread or task that waits.

    Attributes:
        key: the lock.
        room: the registry of the connection.
        node: the transport of the lock's server.
        line: the key queue of the lock.
        mailbox: the messages for the waiter: `tell` puts one in, and never waits.
        link: the connection.
        channel: on which its messages come; None where the connection may not subscribe, or not use the queue.
        since: the last moment at which the lock was certainly not the waiter's.
        arrival: the server's time of its last arrival in the queue; 0 while only a posted request has told it.
        asked_at: when a posted request left whose reply has not come; else 0.
        until: until when it listens before it asks the server by itself.
        taken_at: when it was registered, in the clock's seconds.
        waited_s: how long it took until a message granted the lock, in seconds; 0 if a health check found the grant.
        gives_up_at: when it stops waiting, in the clock's seconds.
        interval_s: how often it wants health checks to be made, in seconds.
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
        mailbox: Any,
        link: Any,
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
        """Whether requests for this lock still leave on the waiter's connection."""
        return self.node.is_current(self)

    @property
    def is_queued(self) -> bool:
        """Whether the waiter is in the queue, as far as is known."""
        return self.line.queue.get(self.token) is self

    # ---- when to ask the server ----

    def due_at(self) -> float | None:
        """When the next health check is due; None while another waiter makes it."""
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

    def is_due(self) -> bool:
        """Whether the waiter is to make a health check now; if so, the next one is due an interval later."""
        now = clock()
        due_at = self.due_at()
        if due_at is None or now < due_at:
            return False
        self.line.looked_at = now
        self.line.spare_s = 0.0
        return True

    def listen_s(self, deadline: float | None) -> float:
        """For how long to listen from now on, in seconds.

        Args:
            deadline: when the waiter gives up, in the clock's seconds; None: never.
        """
        until = self.due_at() or math.inf
        if deadline is not None:
            self.gives_up_at = deadline
            until = min(until, deadline)
        self.until = until
        return max(until - clock(), 0.0)

    def rest_s(self) -> float:
        """For how long to listen on once `listen_s` are over, in seconds: another waiter may make the health checks."""
        if self.asked_at or self.line.watchman is self or not self.is_queued:
            return 0.0
        return max(self.gives_up_at - clock(), 0.0)

    # ---- what the server says ----

    def post_wait(self, request: Args, deadline: float | None) -> float | None:
        """Send a request to join the queue, without waiting for the reply. Returns `listen_s`; None if that failed."""
        self.asked_at = clock()
        try:
            self.node.post(self.link, request, self.answer)
        except Lost:
            return None
        return self.listen_s(deadline)

    def answer(self, reply: Reply) -> None:
        """Take the reply to a posted request. The waiter gets a message only if the reply is not the usual one.

        Raises:
            Malformed: the request cannot have such a reply.
        """
        asked_at, self.asked_at = self.asked_at, 0.0
        if isinstance(reply, hiredis.ReplyError):
            self.mailbox.tell(LOOK)
            return
        answer = wait_answer(reply)
        verdict = answer[0]
        if verdict == 0:
            self.note(answer[1], asked_at, answer[2])
            self.reckon()
        elif verdict == 1:
            self.mailbox.tell(Grant(answer[1], self.since))
        else:
            self.mailbox.tell(LOOK)

    def note(self, word: bytes, asked_at: float, left_ms: int) -> None:
        """The server has said that the lock is another's.

        Args:
            word: the lock's value.
            asked_at: when the request left, in the clock's seconds.
            left_ms: the lock's ttl in milliseconds; below 0 for none.
        """
        line = self.line
        self.refused = True
        line.enqueue(self)
        line.ends_at = None if left_ms < 0 else clock() + left_ms / 1000
        watchman = line.watchman
        if watchman is not None and watchman is not self:
            watchman.reckon()
        self.since = max(self.since, asked_at)
        other = line.seats.get(word) or line.seats.get(word.removesuffix(MARK))
        if other is None:
            line.since = max(line.since, asked_at)
        elif other is not self:  # the message for that waiter was lost, or is about to come
            other.mailbox.tell(LOOK)

    def reckon(self) -> None:
        """Wake the waiter if the lease of the lock's holder ends before the waiter would ask the server."""
        ends_at = self.line.ends_at
        if ends_at is not None and ends_at + _EXPIRY_S < self.until:
            self.mailbox.tell(RECKON)

    def accepts(self, message: object) -> TypeGuard[Grant]:
        """Whether the message is a grant of the waiter's present place in the queue, not of one that it has lost."""
        return type(message) is Grant and (not self.arrival or float(message.arrival or 0) >= self.arrival)

    def withdraw(self) -> None:
        """Clean up what was sent with this token, behind it on the same connection, and without waiting."""
        if self.channel is not None:
            leave = Leave(self.key, self.token)
            leave.with_text, self.room.has_left = not self.room.has_left, True
            with contextlib.suppress(Lost):
                self.node.post(self.link, leave.request(self.room.dialect, 0.0))

    # ---- the other waiters of the lock ----

    def oldest(self) -> Seat | None:
        """The waiter that has been in the queue for longest."""
        return next(iter(self.line.queued()), None)

    def wake_others(self) -> None:
        """Have the other waiters in the queue ask the server."""
        for seat in self.line.queued():
            if seat is not self:
                seat.mailbox.tell(LOOK)


class Room(Subscriptions):
    """The waiter registry of one connection.

    Attributes:
        dialect: what the server of the connection understands.
        has_left: whether the text of the script for leaving the queue has been sent.
    """

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect, os.urandom(16).hex().encode())
        self.dialect = dialect
        self.has_left = False
        self._mutex = threading.RLock()
        self._lines: dict[bytes, Line] = {}
        self._by_token: dict[bytes, Seat] = {}  # of two waiters with one token, which callers have brought, the first
        self._handed_over: set[bytes] = set()  # keys of locks that were handed over last when they were released here
        self._waits: dict[bytes, float] = {}  # by key: the last waiter's `waited_s`

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt would probably fail. A caller that joins the queue instead gets a free lock, too.

        True while a waiter of this connection is in the queue, and once after each hand-over: a caller that releases a
        lock with waiters and wants it again at once needs fewer commands so. Only once, because otherwise a lock that
        no other caller wants any more would be taken by the queue's script for ever.

        Args:
            key: the lock.
            is_patient: whether the caller has time: without, its time may be up before the script's reply is there.
        """
        line = self._lines.get(key)
        if line is not None and line.queue:
            return True
        if is_patient and key in self._handed_over:
            self._handed_over.discard(key)
            return True
        return False

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """The lock was released: a waiter has it now, or no waiter was in the queue."""
        if not handed_over:
            self._handed_over.discard(key)
        elif key not in self._handed_over and self.channel_of(key) is not None:
            _forget_if_many(self._handed_over)
            self._handed_over.add(key)

    def take(self, key: bytes, token: bytes, mailbox: Any, link: Any, node: Node) -> Seat | None:
        """Register a waiter. Returns None where the connection has not tried to subscribe yet."""
        channel = self.channel_of(key)
        if channel is None and not self.has_tried(key):
            return None
        with self._mutex:
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = Line(self._mutex, self._waits.get(key, 0.0))
                _forget_if_many(self._waits)
            seat = line.seats[token] = Seat(self, line, key, token, mailbox, link, node, channel)
            self._by_token.setdefault(token, seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """Remove a waiter."""
        line, token = seat.line, seat.token
        heir = None
        with self._mutex:
            if self._by_token.get(token) is seat:
                del self._by_token[token]
            if line.seats.get(token) is seat:
                del line.seats[token]
                if not line.seats and self._lines.get(seat.key) is line:
                    del self._lines[seat.key]
            if line.seats:
                heir = line.succeed(seat)
            else:  # or waiter and key queue would keep each other, and be collected in the middle of an acquire
                line.queue.clear()
                line.watchman = None
        if heir is not None:
            heir.mailbox.tell(LOOK)
        if seat.waited_s is not None:
            self._waits[seat.key] = seat.waited_s

    def hear(self, push: list[Reply]) -> None:
        """Take a push from the server, and give the message in it to the waiters that it is for.

        Raises:
            Malformed: no server sends such a push.
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
            self.note_end(channel)
            self._tell(BROKEN, [seat for seat in self._seats() if seat.channel == channel])
        elif type(kind) is not bytes:
            raise Malformed(push)

    def tell_all(self, message: object) -> None:
        """Give a message to all waiters."""
        self._tell(message, self._seats())

    def _seats(self) -> list[Seat]:
        with self._mutex:
            return [seat for line in self._lines.values() for seat in line.seats.values()]

    @staticmethod
    def _tell(message: object, seats: list[Seat]) -> None:
        for seat in seats:
            seat.mailbox.tell(message)
