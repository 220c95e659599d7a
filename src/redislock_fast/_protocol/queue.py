"""The operations of a waiter: join the key queue, leave it, and watch a lock whose holder will not hand it over.

See `operation.py` for their rules. Where the server does not know or does not allow a command, they end `denied`, and
the waiter polls.
"""

from __future__ import annotations

from typing import Any

import hiredis

from redislock_fast._pipe.base import Args, Malformed, OnReply, Reply, is_answer_to
from redislock_fast._protocol.capabilities import Capabilities, native_release
from redislock_fast._protocol.commands import Release
from redislock_fast._protocol.keys import channel_beside, permit_keys, queue_keys
from redislock_fast._protocol.operation import Refused, TokenOperation
from redislock_fast._protocol.scripts import FOR_PERMITS, LEAVE, RELEASE, WAIT
from redislock_fast._util.tokens import CONTENDED_FLAG, MARKER, PERMIT, identifier_of, is_ours, is_permit, kind_of

UNTRIED = "UNTRIED"
"""Stands for an error code where the request is not sent, because the server might close the connection for it."""

MOVING = "TRYAGAIN"
"""The error code of a cluster's node for a script with several keys while their slot moves to another node."""

_GRANTED = [int, bytes]
_QUEUED = [int, bytes, int, int, int]

FOREIGN = 2
"""The verdict of wait.lua: the lock is another's, which will not hand it over."""

WANTED = b"wanted "
"""The message to a holder that another process wants its key: this, and the lock's name."""

GIVE_UP = b"give up "
"""The message to a holder that its lock is taken from it: this, the lock's token, and its name."""

_HAS_PERMIT = 2
"""What wait.lua says of the other waiter that is not in the queue, and has a permit."""

AGAIN = 3
"""The verdict of wait.lua: the request is to be sent again."""


def join_request(
    key: bytes, token: bytes, terms: bytes | int, publish: bytes, channel: bytes, awake_ms: int, kept_ms: int
) -> Args:
    """The first request of a `JoinQueue` without `look_for`."""
    if is_permit(token):
        sha, keys = FOR_PERMITS[WAIT.sha].sha, permit_keys(key)
        return (b"EVALSHA", sha, 4, key, *keys, token, terms, publish, channel, awake_ms, kept_ms, b"")
    return (b"EVALSHA", WAIT.sha, 3, key, *queue_keys(key), token, terms, publish, channel, awake_ms, kept_ms, b"")


def join_answer(reply: Any) -> list[Any]:
    """The reply to a `JoinQueue` that is no error, as wait.lua returns it.

    Raises:
        Malformed: the reply has another shape.
    """
    kinds = list(map(type, reply)) if type(reply) is list else []
    if (kinds == _GRANTED and reply[0] == 1) or (kinds == _QUEUED and reply[0] in (0, FOREIGN)) or reply == [AGAIN]:
        answer: list[Any] = reply
        return answer
    raise Malformed(reply)


class JoinQueue(TokenOperation):
    """Take the lock, or join its queue. Idempotent: a waiter in the queue keeps its place.

    Args:
        terms: what is wanted; see `Acquire.terms`.
        publish: the command that reaches the waiter.
        channel: on which the waiter listens.
        awake_ms: for how long the waiter's process counts as awake.
        kept_ms: for how long the queue is kept.
        look_for: the token of another waiter: the script says whether that is still in the queue, and removes waiters
            at the head whose process does not count as awake. Empty: it does neither.

    Attributes:
        denied: the code of the error where the server refuses; MOVING: it refuses for now; UNTRIED: it was not asked.
        result: whether the lock is ours, by this request or an earlier one.
        value: the lock's value, where it is another's.
        left_ms: its ttl in milliseconds; -1 for none.
        foreign: whether its holder will not hand it over.
        arrival: the server's time where we are new in the queue, else 0.
        is_there: whether the waiter of `look_for` is in the queue, or has a permit.
        has_permit: whether it has one.
        sent_at: the time of the last request.
    """

    uses_queue = True
    denied = ""
    sent_at = 0.0
    value = b""
    left_ms = -1
    foreign = False
    arrival = 0
    is_there = True
    has_permit = False

    def __init__(
        self,
        key: bytes,
        token: bytes,
        terms: bytes | int,
        publish: bytes,
        channel: bytes,
        awake_ms: int,
        kept_ms: int,
        look_for: bytes,
    ) -> None:
        super().__init__(key, token)
        self._words = (terms, publish, channel, awake_ms, kept_ms, look_for)

    def request(self, capabilities: Capabilities, now: float) -> Args:
        self.sent_at = now
        self.denied = "" if capabilities.queues else UNTRIED
        return (b"GET", self.key) if self.denied else self.queue_script(WAIT, *self._words)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if self.denied:
            return True
        if isinstance(reply, hiredis.ReplyError):
            code = self.queue_error_code(reply)
            self.denied = "" if code == "NOSCRIPT" else code
            if code == MOVING:
                self.unsettled = True  # an earlier request may have joined the queue
            return self.denied != ""
        answer = join_answer(reply)
        if answer == [AGAIN]:
            return False
        self.value = answer[1]
        self.result = answer[0] == 1
        if not self.result:
            self.foreign = answer[0] == FOREIGN
            self.left_ms = answer[2]
            self.arrival = answer[3]
            self.is_there = answer[4] != 0
            self.has_permit = answer[4] == _HAS_PERMIT
        return True

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # either way
        # Of two requests that left, the first may still be executed when no waiter has this token any more.
        return [(self.key, self.token)] if self.unsettled else []


class LeaveQueue(Release):
    """Leave the queue.

    A lock that was granted meanwhile is passed on, or kept: then `result` is True and `value` is its value. With
    `keep`, a lock that is free (its lease ended, or it was deleted) is taken, too, unless another waiter can get it.
    Where the script is forbidden, or the slot moves, a lock that holds the token is released as by `Release`; in a slot
    that moves, a cleanup in the background leaves the queue.

    Args:
        keep: whether a lock that was granted meanwhile, or is free, is kept.
        terms: on which a free lock is taken; see `Acquire.terms`.
    """

    uses_queue = True
    value = b""
    _is_postponed = False

    def __init__(self, key: bytes, token: bytes, keep: bool = False, terms: bytes | int = 0) -> None:
        super().__init__(key, token, None)
        self._step = "leave"
        self._words: tuple[bytes | int, ...] = (b"keep", terms) if keep else (b"pass on",)

    def request(self, capabilities: Capabilities, now: float) -> Args:
        if self._step == "leave":
            if capabilities.queues or is_permit(self.token):
                return self.queue_script(LEAVE, *self._words)
            self._step = "delete"
        return super().request(capabilities, now)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        if self._step != "leave":
            return self._released(reply, capabilities)
        if isinstance(reply, hiredis.ReplyError):
            code = self.queue_error_code(reply)
            if code not in ("NOSCRIPT", "WRONGTYPE"):
                if is_permit(self.token):  # there is no other way: it ends with its ttl
                    self._is_postponed = self.unsettled = code == MOVING
                    return True
                self._step = "delete"
                self._is_postponed = self.unsettled = code == MOVING
            return code == "WRONGTYPE"
        if type(reply) is bytes:
            self.result = True
            self.value = reply
        elif reply is not None:
            raise Malformed(reply)
        return True

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # either way
        return [(self.key, self.token)] if self._is_postponed else []

    def _released(self, reply: Reply, capabilities: Capabilities) -> bool:
        try:
            is_finished = super().feed(reply, capabilities)
        except Refused:
            is_finished = True  # forbidden, too: the lock ends with its ttl
        self.result = False  # not kept
        return is_finished


def cleanup_requests(capabilities: Capabilities, entries: list[tuple[bytes, bytes]]) -> list[Args]:
    """The requests that clean up after all requests for these keys and tokens. They are posted after those.

    A lock that was taken may have got the contended flag since, so it is handed over. Where scripts are forbidden, the
    native commands after that delete the lock. No caller reads the replies.
    """
    requests: list[Args] = []
    known: set[bytes] = set()
    for key, token in entries:
        words, kind = [token], kind_of(token)
        leaves = kind is PERMIT or (capabilities.queues and is_ours(token))
        if leaves:
            leave = LeaveQueue(key, token)
            leave.with_text = kind not in known
            known.add(kind)
            requests.append(leave.request(capabilities, 0.0))
            words.append(token + CONTENDED_FLAG)
        if kind is PERMIT:
            continue
        if capabilities.release is not None:
            requests += [native_release(capabilities, key, value) for value in words]
        elif not leaves:
            requests.append((b"EVAL", RELEASE.text, 1, key, token))
    return requests


TRACK_NEXT: list[Args] = [(b"CLIENT", b"TRACKING", b"ON", b"OPTIN"), (b"CLIENT", b"CACHING", b"YES")]
"""The requests before a read that has the server push a message when what is read changes next."""


class Watch(TokenOperation):
    """Let the server push a message when the lock changes next. `value` is its value now, None for none.

    A read arms it, for one change; an extend counts as a change.
    """

    is_pipeline = True
    uses_queue = True
    denied = False
    value: bytes | None = None

    def __init__(self, key: bytes) -> None:
        super().__init__(key, b"")

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:  # noqa: ARG002  # at any time
        self.denied = not capabilities.queues
        reading = (b"GET", self.key)
        if self.denied:
            return [reading]
        return [*TRACK_NEXT, reading]

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                self.error_code(reply)  # raises the errors that are to be tried again
                self.denied = True
        *armed, value = replies
        if any(reply != b"OK" and not isinstance(reply, hiredis.ReplyError) for reply in armed):
            raise Malformed(armed)
        if value is not None and not isinstance(value, (bytes, hiredis.ReplyError)):
            raise Malformed(value)
        self.value = value if isinstance(value, bytes) else None
        return True


class Subscribe(TokenOperation):
    """Listen on a channel; `result` says whether the server allows it.

    Attributes:
        is_pushed: whether the reply was a push. Else the server has no pushes, whatever it has answered to `HELLO`: the
            connection takes no other requests any more, as in RESP2.
    """

    uses_queue = True
    is_pushed = False

    def __init__(self, key: bytes, subscribe: bytes, channel: bytes) -> None:
        super().__init__(key, b"")
        self._words = (subscribe, channel)

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # at any time
        # After a reconnect the server may not push any more; it would accept a subscription, and then no other command.
        return self._words if capabilities.push else (b"GET", self.key)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # at any time
        if isinstance(reply, hiredis.ReplyError):
            self.error_code(reply)  # raises the errors that are to be tried again
        elif isinstance(reply, list):
            if not is_answer_to(reply, self._words):
                raise Malformed(reply)
            self.result = True
            self.is_pushed = isinstance(reply, hiredis.PushNotification)
        elif reply is not None and type(reply) is not bytes:
            raise Malformed(reply)
        return True


class AskHolder(TokenOperation):
    """Tell the process of a holder that listens to give a lock up. `result` is whether a process has got the message.

    The process then releases the lock itself, and no other caller of it takes the lock in memory.
    """

    uses_queue = True

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # at any time
        holder = Subscriptions(capabilities, identifier_of(self.token))
        return (holder.publish.upper(), holder.channel_for(self.key), GIVE_UP + self.token + self.key)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if isinstance(reply, hiredis.ReplyError):
            self.error_code(reply)  # raises the errors that are to be tried again
        elif type(reply) is int:
            self.result = reply > 0
        else:
            raise Malformed(reply)
        return True


MOST_KEYS = 1000
"""For how many locks a connection remembers something: with more, all are forgotten."""


class Subscriptions:
    """The channels of one connection.

    Thread safety: any thread uses it, by atomic methods of dict and set alone.

    Args:
        capabilities: what the server of the connection understands.
        identifier: names the connection; no other connection to any server has the same.

    Attributes:
        identifier: the same; a token that its tokens' source makes has it, too.
        publish: the command by which other connections send messages to this one.
        subscribe: the command by which this connection listens.
        is_tried: whether a request of the queue is under way, for which a server may close the connection instead of
            answering it.
        is_proven: whether the server has answered the request to join a queue.
    """

    is_tried = False
    is_proven = False

    def __init__(self, capabilities: Capabilities, identifier: bytes) -> None:
        self.publish = b"spublish" if capabilities.sharded else b"publish"
        self.subscribe = b"SSUBSCRIBE" if capabilities.sharded else b"SUBSCRIBE"
        self.identifier = identifier
        self._channel = None if capabilities.sharded else MARKER + identifier
        self._subscribed: dict[bytes, bool] = {}  # by channel: whether that was allowed
        self._forbidden: set[bytes] = set()  # keys of locks whose queues this connection may not use

    def channel_for(self, key: bytes) -> bytes:
        """The channel of this connection's messages about this lock, once it has subscribed."""
        return self._channel or channel_beside(key, self.identifier)

    def channel_of(self, key: bytes) -> bytes | None:
        """`channel_for`; None where the connection may not listen there, or not use the queue."""
        channel = self._channel or channel_beside(key, self.identifier)
        return channel if self._subscribed.get(channel) and key not in self._forbidden else None

    def has_tried(self, key: bytes) -> bool:
        """Whether the connection has tried to subscribe to the lock's channel."""
        return (self._channel or channel_beside(key, self.identifier)) in self._subscribed

    def note_subscription(self, channel: bytes, allowed: bool) -> None:
        """Note that the connection has tried to subscribe."""
        self._subscribed[channel] = allowed

    def note_end(self, channel: bytes) -> None:
        """Note that the server has ended the subscription."""
        self._subscribed.pop(channel, None)

    def try_queue(self) -> OnReply:
        """Note that a request of the queue is about to be sent. Returns what its reply is to be given to."""
        self.is_tried = True
        return self._note_reply

    def _note_reply(self, _: Reply) -> None:
        self.is_tried = False

    def forbid(self, key: bytes) -> None:
        """Note that the connection may not use this lock's queue."""
        if len(self._forbidden) >= MOST_KEYS:
            self._forbidden.clear()
        self._forbidden.add(key)
