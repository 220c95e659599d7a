"""The waiters on one connection, and how a push from the server reaches the waiter that it is for.

A `WaiterRegistry` routes the messages of one connection by token. A `KeyQueue` has the waiters of one
lock on that connection. A `Waiter` has the state of one waiter. A waiter is registered before the server is told about
it, so that no message comes too early.

Leases: the server grants a lock to a waiter later than any moment at which it said that the lock is not the waiter's.
So the lease of a grant counts from the last such moment (`since`) before the message came. A reply to one waiter about
a lock is true for all waiters of the same key queue.

Thread safety: `take_push` runs in the thread or loop that reads the connection, for all its callers. Any thread may
register and remove a waiter. There is no mutex: a signal handler may interrupt a thread at any line, and wait for a
lock itself, for which the reader is needed. So each step is one atomic method of a dict or set, and another thread may
go on after any of them.

- `WaiterRegistry._by_token` alone decides which waiter gets a message.
- A `KeyQueue` is shared by the waiters of one lock that come while others are there. One that comes just as the last
  one leaves may have a key queue of its own beside that of later ones: both have a poller, which costs superfluous
  health checks, and a message about the key goes to the waiters of both.
- The times of a key queue are assigned as a whole; a stale one causes one superfluous request. A missed update of
  `handed_over` or `_waits` causes one superfluous attempt or health check.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

import hiredis

from redislock_fast._lease.owner import Owner
from redislock_fast._pipe.base import Args, ConnectionBroken, Malformed, OnReply, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.queue import (
    AGAIN,
    FOREIGN,
    GIVE_UP,
    MOST_KEYS,
    WANTED,
    LeaveQueue,
    Subscriptions,
    join_answer,
)
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import CONTENDED_FLAG, PLAIN, TOKEN_BYTES, TokenSource, is_ours, kind_of

BROKEN: Final = "broken"
"""The message that no other message can come on this connection."""

CHECK: Final = "check"
"""The message that something about the lock has changed, so that the waiter asks the server."""

RECKON: Final = "reckon"
"""The message that the next health check is due sooner than was known."""

_interval_of = attrgetter("interval_s")

_EXPIRY_S = 0.005
"""How long after the end of its ttl a key is certainly gone."""

_MOST_PUT_OFF = 4
"""By how many intervals the first health check is put off at most: a fault is found so much later."""

_ANSWER_S = 1.0
"""After how long a posted request without a reply is sent again, so that the waiter gets its error."""


class Grant(NamedTuple):
    """The message that the lock is the waiter's.

    Attributes:
        value: the lock's new value.
        since: from when on the lease counts, in the clock's seconds.
        arrival: the server's time of the arrival in the queue that led to it; empty if a reply said it.
    """

    value: bytes
    since: float
    arrival: bytes = b""

    def note(self, owner: Owner, token: bytes, ttl_ms: int | None) -> None:
        """Make the waiter the owner."""
        owner.expiry = (token, None if ttl_ms is None else self.since + ttl_ms / 1000)
        owner.contended = None if self.value is token and is_ours(token) else token
        owner.hold(token)


# Hot path: a call of Python and three slices less save 6 us of the 80 us of a hand-over, with cold CPU caches.
_new_grant: Callable[[tuple[bytes, float, bytes]], Grant] = partial(tuple.__new__, Grant)
_TOKEN = slice(TOKEN_BYTES)
_VALUE = slice(TOKEN_BYTES + 1)
_ARRIVAL = slice(TOKEN_BYTES + 1, None)


def _forget_if_many(of_keys: set[bytes] | dict[bytes, float]) -> None:
    if len(of_keys) >= MOST_KEYS:
        of_keys.clear()


class Node(Protocol):
    """The part of a server transport that a waiter uses."""

    def is_current(self, waiter: Waiter) -> bool:
        """Whether requests for the waiter's lock still leave on the waiter's connection."""

    def new_token(self, key: bytes, kind: bytes = PLAIN) -> bytes:
        """A new token of this kind for a request about this lock."""

    def post(self, connection: Any, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request on one of its connections; see `_pipe.base.Pipe.post`."""


class Waiter:
    """One waiter on one connection, with its state, which belongs to the thread or task that waits.

    Attributes:
        key: the lock.
        registry: the registry of the connection.
        node: the transport of the lock's server.
        key_queue: the key queue of the lock.
        mailbox: the messages for the waiter: `put` adds one, and never waits.
        connection: the connection.
        channel: the channel of its messages; None where the connection may not subscribe, or not use the queue.
        since: the last moment at which the lock was certainly not the waiter's.
        arrival: the server's time of its last arrival in the queue; 0 while only a posted request has joined it.
        asked_at: when the posted request without a reply was sent; 0 where there is none.
        until: until when it listens before it asks the server.
        taken_at: when it was registered, in the clock's seconds.
        waited_s: how long it took until a message granted the lock, in seconds; 0 if a health check found the grant.
        gives_up_at: when it stops waiting, in the clock's seconds.
        interval_s: the interval of health checks that it asks for, in seconds.
        refused: whether the server has said that another owner has the lock.
    """

    __slots__ = (
        "arrival",
        "asked_at",
        "channel",
        "connection",
        "gives_up_at",
        "interval_s",
        "key",
        "key_queue",
        "mailbox",
        "node",
        "refused",
        "registry",
        "since",
        "taken_at",
        "token",
        "until",
        "waited_s",
    )

    def __init__(
        self,
        registry: WaiterRegistry,
        key_queue: KeyQueue,
        key: bytes,
        token: bytes,
        mailbox: Any,
        connection: Any,
        node: Node,
        channel: bytes | None,
    ) -> None:
        self.registry = registry
        self.node = node
        self.connection = connection
        self.key = key
        self.token = token
        self.key_queue = key_queue
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
        return self.key_queue.queue.get(self.token) is self

    @property
    def is_watcher(self) -> bool:
        """Whether the waiter watches, for all of its key queue, a lock whose holder will not hand it over."""
        return self.key_queue.poller is self

    # ---- when to ask the server ----

    def due_at(self) -> float | None:
        """When the next health check is due; None while another waiter makes it."""
        key_queue, interval_s = self.key_queue, self.interval_s
        due_at = key_queue.checked_at + interval_s + min(key_queue.put_off_s, _MOST_PUT_OFF * interval_s)
        if self.asked_at:
            now = clock()
            unanswered_at = self.asked_at + interval_s + _ANSWER_S
            if due_at <= now:
                due_at = self.asked_at + interval_s
            return min(due_at, unanswered_at) if due_at > now else unanswered_at
        if key_queue.poller is not self:
            return None
        ends_at = key_queue.ends_at
        if ends_at is not None and key_queue.checked_at < ends_at + _EXPIRY_S < due_at:
            return ends_at + _EXPIRY_S
        return due_at

    def is_due(self) -> bool:
        """Whether the waiter is to make a health check now; if so, the next one is due an interval later."""
        now = clock()
        due_at = self.due_at()
        if due_at is None or now < due_at:
            return False
        self.key_queue.checked_at = now
        self.key_queue.put_off_s = 0.0
        return True

    def listen_s(self, deadline: float | None) -> float:
        """How long to listen from now on, in seconds.

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
        """How long to go on listening after `listen_s`, in seconds: another waiter may make the health checks."""
        if self.asked_at or self.key_queue.poller is self or not self.is_queued:
            return 0.0
        return max(self.gives_up_at - clock(), 0.0)

    # ---- requests and replies ----

    def post_wait(self, request: Args, deadline: float | None) -> float | None:
        """Send a request to join the queue, without waiting for the reply. Returns `listen_s`; None if that failed."""
        self.asked_at = clock()
        self.registry.is_tried = True
        try:
            self.node.post(self.connection, request, self.answer)
        except ConnectionBroken:
            return None
        return self.listen_s(deadline)

    def answer(self, reply: Reply) -> None:
        """Take the reply to a posted request. Where it is not the usual reply, the waiter gets a message.

        Raises:
            Malformed: no server sends such a reply.
        """
        asked_at, self.asked_at = self.asked_at, 0.0
        self.registry.is_proven = True
        if isinstance(reply, hiredis.ReplyError):
            self.mailbox.put(CHECK)
            return
        answer = join_answer(reply)
        verdict = answer[0]
        if verdict == 1:
            self.mailbox.put(Grant(answer[1], self.since))
        elif verdict == AGAIN:
            self.mailbox.put(CHECK)
        else:
            self.note(answer[1], asked_at, answer[2])
            self.reckon()
            if verdict == FOREIGN and self.is_watcher and not self.key_queue.is_watched:
                self.mailbox.put(CHECK)

    def note(self, value: bytes, asked_at: float, left_ms: int) -> None:
        """Note that the server has said that another owner has the lock.

        Args:
            value: the lock's value; empty for a semaphore, of which others may hold permits at the same time.
            asked_at: when the request was sent, in the clock's seconds.
            left_ms: the lock's ttl in milliseconds; below 0 for none.
        """
        key_queue = self.key_queue
        self.refused = True
        key_queue.enqueue(self)
        key_queue.ends_at = None if left_ms < 0 else clock() + left_ms / 1000
        poller = key_queue.poller
        if poller is not None and poller is not self:
            poller.reckon()
        self.since = max(self.since, asked_at)
        if not value:  # it says nothing about other waiters
            return
        other = key_queue.waiters.get(value) or key_queue.waiters.get(value.removesuffix(CONTENDED_FLAG))
        if other is None:
            key_queue.since = max(key_queue.since, asked_at)
        elif other is not self:  # the message for that waiter has been missed, or is about to come
            other.mailbox.put(CHECK)

    def reckon(self) -> None:
        """Wake the waiter if the lease of the lock's owner ends before the waiter would ask the server."""
        ends_at = self.key_queue.ends_at
        if ends_at is not None and ends_at + _EXPIRY_S < self.until:
            self.mailbox.put(RECKON)

    def accepts(self, message: object) -> TypeGuard[Grant]:
        """Whether the message is a grant for the waiter's present place in the queue, not for an earlier one."""
        return type(message) is Grant and (not self.arrival or float(message.arrival or 0) >= self.arrival)

    def withdraw(self) -> None:
        """Leave the queue by a request on the same connection, after the waiter's own requests, and without waiting."""
        if self.channel is not None:
            leave = LeaveQueue(self.key, self.token)
            kind = kind_of(self.token)
            leave.with_text = kind not in self.registry.has_left
            with contextlib.suppress(ConnectionBroken):
                self.node.post(self.connection, leave.request(self.registry.capabilities, 0.0))
            self.registry.has_left.add(kind)  # after that: another waiter's request must not overtake the text

    # ---- the other waiters of the lock ----

    def oldest(self) -> Waiter | None:
        """The waiter that has been in the queue for longest."""
        return next(iter(self.key_queue.contended()), None)

    def wake_others(self) -> None:
        """Have the other waiters in the queue ask the server."""
        for waiter in self.key_queue.contended():
            if waiter is not self:
                waiter.mailbox.put(CHECK)


class KeyQueue:
    """The waiters of one lock on one connection, and those of them that are in the server's queue.

    One waiter in the queue, the poller, makes the health checks for all: the waiter with the shortest interval; of
    several, the newest, since it stays longest.

    Thread safety: any thread uses it, without a mutex, by atomic methods of dict; see above.

    - Who adds a waiter to `queue` looks afterwards whether it is still in `waiters`. Who removes a waiter removes it
      from `waiters` first. So none stays in `queue` that has left.
    - Who adds a waiter looks at `poller` afterwards. Who replaces a poller that has left looks at `queue` afterwards.
      So a queue with waiters has a poller that is in it. Where two threads choose at once, it may be one with a longer
      interval, until the next reply.

    Args:
        put_off_s: how much longer than an interval the first health check may be put off, in seconds.

    Attributes:
        waiters: the waiters by token.
        queue: those of them that are in the queue by the server's replies, in order.
        poller: the poller; None where no waiter is in the queue.
        since: the last moment at which certainly none of them had the lock, in the clock's seconds.
        checked_at: when the last health check was made, in the clock's seconds.
        put_off_s: as above; 0 once a health check was made.
        ends_at: when the lease of the lock's owner ends, in the clock's seconds; None where that is not known.
        is_watched: whether the server is to tell of the next change of the key, or one waiter is asking it to.
    """

    __slots__ = ("checked_at", "ends_at", "is_watched", "poller", "put_off_s", "queue", "since", "waiters")

    def __init__(self, put_off_s: float) -> None:
        self.waiters: dict[bytes, Waiter] = {}
        self.queue: dict[bytes, Waiter] = {}
        self.poller: Waiter | None = None
        self.since = 0.0
        self.checked_at = clock()
        self.put_off_s = put_off_s
        self.ends_at: float | None = None
        self.is_watched = False

    def enqueue(self, waiter: Waiter) -> None:
        """Note that the waiter is in the queue, unless it has been removed meanwhile."""
        self.queue[waiter.token] = waiter
        poller = self.poller
        if poller is None or waiter.interval_s <= poller.interval_s:
            self.poller = waiter
        if self.waiters.get(waiter.token) is not waiter:
            self.dequeue(waiter)

    def dequeue(self, waiter: Waiter) -> None:
        """Note that the waiter is not in the queue any more. Another one becomes the poller."""
        if self.queue.get(waiter.token) is waiter:
            self.queue.pop(waiter.token, None)
        if self.poller is waiter:
            next_poller = self._choose_poller()
            if next_poller is not None:
                next_poller.mailbox.put(CHECK)

    def _choose_poller(self) -> Waiter | None:
        """Have one of those in the queue be the poller. Returns it; None where the queue is empty."""
        while True:
            self.poller = chosen = min(reversed(list(self.queue.values())), key=_interval_of, default=None)
            if chosen is None:
                if not self.queue:
                    return None
            elif self.queue.get(chosen.token) is chosen:
                return chosen

    def contended(self) -> list[Waiter]:
        """The waiters that are in the queue now, in order."""
        return list(self.queue.values())

    def concerned(self) -> list[Waiter]:
        """The waiters that ask when the key has changed: those in the queue have the poller ask for them.

        A waiter whose posted request has no reply yet learns it from that.
        """
        return [
            waiter
            for waiter in self.all()
            if waiter is self.poller or not (waiter.asked_at or waiter.token in self.queue)
        ]

    def all(self) -> list[Waiter]:
        """The waiters of the lock."""
        return list(self.waiters.values())


class WaiterRegistry(Subscriptions):
    """The waiters of one connection; gives them the server's messages.

    Args:
        capabilities: the capabilities of the connection's server.
        tokens: makes the tokens of requests that leave on the connection.

    Attributes:
        capabilities: the same.
        new_token: that of `tokens`.
        on_wanted: called with the key that another process wants; None where no key of this connection lingers.
        on_give_up: called with a key and the token that is to give it up; None as before.
        has_left: the kinds of tokens for which the text of the script for leaving the queue has been sent.
        key_queues: by key, the waiters of a lock.
        handed_over: the keys of locks whose last release here handed them over.
    """

    def __init__(self, capabilities: Capabilities, tokens: TokenSource) -> None:
        super().__init__(capabilities, tokens.identifier)
        self.capabilities = capabilities
        self.on_wanted: Callable[[bytes], object] | None = None
        self.on_give_up: Callable[[bytes, bytes], object] | None = None
        self.new_token = tokens.new_token
        self.has_left: set[bytes] = set()
        self.key_queues: dict[bytes, KeyQueue] = {}
        self._by_token: dict[bytes, Waiter] = {}  # of two waiters with one token, the first
        self.handed_over: set[bytes] = set()
        self._waits: dict[bytes, float] = {}  # by key: the last waiter's `waited_s`

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt would probably fail. A caller that joins the queue instead gets a free lock, too.

        True while a waiter of this connection is in the queue, and once after each hand-over: a caller that releases a
        lock with waiters and acquires it again at once needs fewer commands so. Only once, because otherwise the
        queue's script would take a lock forever that no other caller wants any more.

        Args:
            key: the lock.
            is_patient: whether the caller has time to wait for the script's reply.
        """
        key_queue = self.key_queues.get(key)
        if key_queue is not None and key_queue.queue:
            return True
        if is_patient and key in self.handed_over:
            self.handed_over.discard(key)
            return True
        return False

    @property
    def has_waiters(self) -> bool:
        """Whether a caller waits on the connection."""
        return len(self.key_queues) > 0

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """Note that the lock was released: a waiter has it now, or no waiter was in the queue."""
        if not handed_over:
            self.handed_over.discard(key)
        elif key not in self.handed_over and self.channel_of(key) is not None:
            _forget_if_many(self.handed_over)
            self.handed_over.add(key)

    def take(self, key: bytes, token: bytes, mailbox: Any, connection: Any, node: Node) -> Waiter | None:
        """Register a waiter. Returns None where the connection has not tried to subscribe yet."""
        channel = self.channel_of(key)
        if channel is None:
            if not self.has_tried(key):
                return None
            channel = self.channel_of(key)  # again: another thread may have subscribed between the two looks
        key_queue = self.key_queues.get(key)
        if key_queue is None:
            key_queue = self.key_queues.setdefault(key, KeyQueue(self._waits.get(key, 0.0)))
            _forget_if_many(self._waits)
        waiter = key_queue.waiters[token] = Waiter(self, key_queue, key, token, mailbox, connection, node, channel)
        self.key_queues.setdefault(key, key_queue)  # again: the last waiter may have left it just before this one came
        self._by_token.setdefault(token, waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        key, key_queue, token = waiter.key, waiter.key_queue, waiter.token
        if self._by_token.get(token) is waiter:
            self._by_token.pop(token, None)
        if key_queue.waiters.get(token) is waiter:
            key_queue.waiters.pop(token, None)
        key_queue.dequeue(waiter)
        if not key_queue.waiters and self.key_queues.get(key) is key_queue:
            self.key_queues.pop(key, None)
            if key_queue.waiters:  # another has come meanwhile
                self.key_queues.setdefault(key, key_queue)
        if waiter.waited_s is not None:
            self._waits[key] = waiter.waited_s

    def take_push(self, push: list[Reply]) -> None:
        """Take a push from the server, and give the message in it to the waiters that it is for.

        Raises:
            Malformed: no server sends such a push.
        """
        kind: Any = push[0] if push else None
        if kind == b"message" or kind == b"smessage":  # noqa: PLR1714  # mostly the first
            text: Any = push[-1]
            if len(push) != 3 or type(text) is not bytes:
                raise Malformed(push)
            waiter = self._by_token.get(text[_TOKEN])
            if waiter is not None:
                since = max(waiter.since, waiter.key_queue.since)
                waiter.mailbox.put(_new_grant((text[_VALUE], since, text[_ARRIVAL])))
            elif text.startswith(WANTED) and self.on_wanted is not None:
                self.on_wanted(text[len(WANTED) :])
            elif text.startswith(GIVE_UP) and self.on_give_up is not None:
                token = text[len(GIVE_UP) : len(GIVE_UP) + TOKEN_BYTES]
                self.on_give_up(text[len(GIVE_UP) + TOKEN_BYTES :], token)
        elif kind == b"invalidate":
            keys: Any = push[-1]
            if len(push) != 2 or not (keys is None or type(keys) is list):
                raise Malformed(push)
            self._take_change(keys)
        elif kind == b"sunsubscribe":  # the slot has moved
            channel: Any = push[1] if len(push) == 3 else None
            if type(channel) is not bytes:
                raise Malformed(push)
            self.note_end(channel)
            self._put(BROKEN, [waiter for waiter in self._waiters() if waiter.channel == channel])
        elif type(kind) is not bytes:
            raise Malformed(push)

    def _take_change(self, keys: list[Any] | None) -> None:
        """Tell the waiters that keys have changed; None: all keys are gone, and all waiters must join again."""
        changed = [waiter.key_queue for waiter in self._waiters() if keys is None or waiter.key in keys]
        for key_queue in changed:
            key_queue.is_watched = False
        for key_queue in dict.fromkeys(changed):
            self._put(CHECK, key_queue.all() if keys is None else key_queue.concerned())

    def put_all(self, message: object) -> None:
        """Give a message to all waiters."""
        self._put(message, self._waiters())

    def _waiters(self) -> list[Waiter]:
        return list(self._by_token.values())

    @staticmethod
    def _put(message: object, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            waiter.mailbox.put(message)
