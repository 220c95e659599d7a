"""The core in pure Python: the specification of `threads.pyx`, and the pipe for every socket that is not plain.

It serves where there is no compiled core (no compiler, PyPy, Windows), TLS sockets, and sockets that gevent or eventlet
have patched, because it touches the socket only through the socket object's methods. The five rules at the top of
`threads.pyx` hold here word for word, and so does what `threads.pxd` says of senders. One thing is weaker:
Python may raise KeyboardInterrupt between any two steps. While a caller waits, that is harmless; in the few
microseconds outside of its waits nobody can know what was done, so there it breaks the connection, and every caller is
told.

Shared fields: `_mutex` guards what is marked so; "reader" means the one thread for which `_reading` was set, "sender"
the one for which `_sending` was. `_touching` keeps them from using the socket at once, which TLS would not survive, and
from using one that is closed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import hiredis

from redislock_fast._pipe.base import (
    NOT_ASKED,
    NOT_ENOUGH,
    UNSENT_LIMIT_BYTES,
    UNSENT_SILENCE_S,
    Args,
    Bulk,
    Forked,
    Lost,
    NoReply,
    OnPush,
    OnReply,
    Reply,
    is_answer,
    is_answer_to,
    new_reader,
)
from redislock_fast._util.fork import forget_in_child

__all__ = ["Mailbox", "Pipe", "encode"]

_INBOX_BYTES = 65536
_STALE_AFTER_S = 0.001
_SLICE_S = 0.05
_FAR_S = 0.00015

_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def encode(args: Args) -> bytes:
    """The bytes of one request.

    Args:
        args: the command's words: bytes, str (sent as UTF-8) or int (sent in decimal).

    Returns:
        A RESP array of bulk strings.

    Raises:
        TypeError: for a word of another type.
        OverflowError: for an int beyond 64 bits.
    """
    parts = [b"*%d\r\n" % len(args)]
    for word in args:
        if type(word) is bytes:
            text = word
        elif type(word) is int:
            if not -(1 << 63) <= word < 1 << 63:
                raise OverflowError("an int in a request has at most 64 bits")
            text = b"%d" % word
        elif type(word) is str:
            text = word.encode()
        else:
            raise TypeError(f"a request is made of bytes, str and int, not {type(word).__name__}")
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


def _joined(requests: list[Args] | Bulk) -> tuple[bytes, int]:
    """The bytes of many requests, and how many they are."""
    one_by_one = requests.requests() if isinstance(requests, Bulk) else requests
    if not one_by_one:
        raise ValueError("no requests")
    return b"".join(map(encode, one_by_one)), len(one_by_one)


class _State(Enum):
    WAITING = 0
    DONE = 1
    LOST = 2
    UNSENT = 3
    LEAD = 4
    ABANDONED = 5


class _Slot:
    __slots__ = (
        "begins",
        "ends",
        "many",
        "messages",
        "on_reply",
        "replies",
        "state",
        "subscription",
        "waits",
        "wake",
        "wanted",
    )

    def __init__(self, state: _State, wanted: int = 1, messages: Sequence[object] = ()) -> None:
        self.state = state  # mutex
        self.wanted = wanted  # reader, once queued; how many replies are still to come
        self.replies: list[Reply] = []  # reader until DONE, then its owner
        self.messages = messages  # of the mailbox that is waited for
        self.on_reply: OnReply | None = None  # fixed once queued; who is given what a post is answered
        self.many = False  # fixed once queued; whether there are many requests
        self.subscription: Args | None = None  # fixed once queued; a request that is no part of many
        self.begins = 0  # mutex
        self.ends = 0  # mutex
        self.waits = False  # its owner; True where an exception out of nowhere does no harm
        self.wake: threading.Lock | None = None  # made by the owner before the slot is queued

    def make_wake(self) -> None:
        """Under the mutex, before the slot is queued: what its owner will sleep on."""
        self.wake = threading.Lock()
        self.wake.acquire()

    def end(self, state: _State) -> None:
        """Under the mutex: the wait is over."""
        self.state = state
        if self.wake is not None and self.wake.locked():
            self.wake.release()

    def fail(self, state: _State) -> None:
        """Under the mutex: the connection broke. Who sleeps is woken, also where that was about to be done."""
        self.end(state if self.state in (_State.WAITING, _State.LEAD) else self.state)


class Pipe:
    """One connection that many threads call at once; see `base.Pipe` for the contract of each method.

    Args:
        owner: what owns the socket: its `disconnect()` closes it.
        sock: a connected stream socket, or what has a socket's methods.
    """

    def __init__(self, owner: Any, sock: socket.socket) -> None:
        sock.settimeout(0)
        self._owner = owner
        self._sock = sock
        self.on_push: OnPush | None = None
        self._mutex = threading.RLock()  # so that who is interrupted can let go of both
        self._touching = threading.RLock()
        self._parser = new_reader()  # reader
        self._inbox = bytearray(_INBOX_BYTES)  # reader
        self._slots: deque[_Slot] = deque()  # mutex; requests without a reply, oldest first
        self._listeners: dict[_Slot, None] = {}  # mutex; mailboxes that are waited for, the oldest wait first
        self._reading = False  # mutex
        self._sending = False  # mutex
        self._callers_send = False  # mutex
        self._far = True  # mutex
        self._timed = 0  # mutex; while far: the end of the request whose reply is timed; 0 for none
        self._timed_at_s = 0.0  # mutex
        self._dead = False  # mutex; read without it as a hint
        self._forked = False  # set once, in a forked child
        self._queued = bytearray()  # mutex, its size read without as a hint; requests that nobody has begun to send
        self._leaving = b""  # sender, else reader; what is being sent
        self._accepted = 0  # mutex; bytes ever queued
        self._offered = 0  # mutex; bytes that were ever made leaving
        self._answerable = 0  # reader; bytes that had left when it last received
        self._sent = 0  # sender, else reader; bytes ever sent
        self._heard_s = time.monotonic()  # reader; read by anybody as a hint
        forget_in_child(self)

    def forget(self) -> None:
        """In a forked child: refuse every call. Other threads of the parent may have held the locks at the fork."""
        self._forked = self._dead = True
        self._mutex = threading.RLock()
        self._touching = threading.RLock()

    @property
    def broken(self) -> bool:
        """True once every further call raises `Lost(sent=False)`."""
        return self._dead

    @property
    def silence_s(self) -> float:
        """For how long requests have been under way without a byte coming back."""
        return time.monotonic() - self._heard_s

    def call(self, args: Args, timeout_s: float) -> Reply:
        """Send one request and wait for its reply."""
        slot = _Slot(_State.WAITING)
        slot.subscription = args
        self._run(slot, timeout_s, encode(args))
        return slot.replies[0]

    def ask(self, args: Args, timeout_s: float, inside: set[int]) -> object:
        """`call`, by a thread that is inside meanwhile; NOT_ASKED where it is already."""
        thread = threading.get_ident()
        if thread in inside:
            return NOT_ASKED
        try:
            inside.add(thread)
            return self.call(args, timeout_s)
        finally:
            inside.discard(thread)

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> list[Reply]:
        """Send requests in one piece and wait for all their replies."""
        request, count = _joined(requests)
        slot = _Slot(_State.WAITING, count)
        slot.many = True
        self._run(slot, timeout_s, request)
        return slot.replies

    def _run(self, slot: _Slot, timeout_s: float, request: bytes | None) -> None:
        deadline = time.monotonic() + timeout_s if timeout_s >= 0 else None
        try:
            if self._listen(slot) if request is None else self._queue(request, slot):
                self._lead(slot, deadline)
            else:
                self._follow(slot, deadline)
        except (Lost, NoReply):
            self._check_forked()
            raise
        except Forked:
            raise
        except BaseException:
            if not slot.waits and not self._forked:
                self._break()
            raise
        self._check_forked()

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        """Send one request behind all that were sent before; nobody waits for its reply."""
        slot = _Slot(_State.ABANDONED)
        slot.subscription = args
        self._post(slot, encode(args), on_reply)

    def post_many(self, requests: list[Args] | Bulk, on_replies: OnReply) -> None:
        """Send requests in one piece; nobody waits for their replies."""
        request, count = _joined(requests)
        slot = _Slot(_State.ABANDONED, count)
        slot.many = True
        self._post(slot, request, on_replies)

    def _post(self, slot: _Slot, request: bytes, on_reply: OnReply | None) -> None:
        slot.on_reply = on_reply
        try:
            if self._queue(request, slot):
                self._hand_over()
        except Lost:
            raise
        except BaseException:
            self._break()
            raise

    def close(self) -> None:
        """Break the pipe: who still waits gets `Lost`."""
        try:
            with self._mutex:
                idle = not self._reading and not self._dead
                if idle:
                    self._reading = True
            if idle:
                self._fail()
                with self._mutex:
                    self._reading = False
            elif not self._dead:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, who fails every slot
        except BaseException:
            self._break()
            raise

    def mailbox(self) -> Mailbox:
        """A new mailbox."""
        return Mailbox(self)

    def _queue(self, request: bytes, slot: _Slot) -> bool:
        """Queue a request. Returns whether the caller is to read."""
        sends = False
        self._check_forked()
        if len(self._queued) > UNSENT_LIMIT_BYTES and self.silence_s > UNSENT_SILENCE_S:
            self.close()
            raise Lost(False, "the server is silent, and too much waits to be sent")
        with self._mutex:
            if self._dead:
                raise Lost(False, "the connection is closed")
            lead = not self._reading
            if not self._slots and not (lead and slot.state is _State.WAITING):
                self._heard_s = time.monotonic()  # but who waits looks first how long the pipe was idle
            if lead:
                self._reading = True
            else:
                if slot.state is _State.WAITING:
                    slot.make_wake()
                if self._callers_send and not self._sending:
                    self._sending = sends = True
            slot.begins = self._accepted
            self._accepted += len(request)
            slot.ends = self._accepted
            if self._far and not self._timed and not slot.many:
                self._timed = slot.ends
                self._timed_at_s = time.monotonic()
            self._queued += request
            self._slots.append(slot)
        if sends:
            self._send_queue()
        return lead

    def listen(self, slot: _Slot, timeout_s: float) -> None:
        """Wait for a mailbox's next message, which stays there."""
        self._run(slot, timeout_s, None)

    def told(self, slot: _Slot) -> None:
        """A message was put into the mailbox that this slot waits, or waited, for."""
        try:
            with self._mutex:
                if slot.state is _State.WAITING:
                    slot.end(_State.DONE)
        except BaseException:
            self._break()
            raise

    def _listen(self, slot: _Slot) -> bool:
        """Begin to wait for a mailbox. Returns whether the caller is to read."""
        with self._mutex:
            if self._dead:
                raise Lost(False, "the connection is closed")
            lead = not self._reading
            if lead:
                self._reading = True
            else:
                slot.make_wake()
            self._listeners[slot] = None
            if slot.messages:
                slot.end(_State.DONE)
        return lead

    def _lead(self, slot: _Slot, deadline: float | None) -> None:
        try:
            if self._alone(slot):
                if time.monotonic() - self._heard_s > _STALE_AFTER_S:
                    self._look_for_eof()
                    self._check_forked()
                self._heard_s = time.monotonic()
            while slot.state is not _State.DONE:
                if slot.state in (_State.LOST, _State.UNSENT):
                    raise Lost(slot.state is _State.LOST, "the connection broke")
                if self._take_queue():
                    self._send()
                if self._receive():
                    if deadline is not None and self._heard_s >= deadline and slot.state is _State.WAITING:
                        raise NoReply("replies came in time, but not this one")
                else:
                    self._wait(slot, deadline)
        except OSError as error:
            self._fail()
            raise Lost(slot.state is not _State.UNSENT, str(error)) from error
        finally:
            harmless, slot.waits = slot.waits, False
            if not self._forked:
                self._give_up(slot)
                self._hand_over()
            slot.waits = harmless

    def _follow(self, slot: _Slot, deadline: float | None) -> None:
        lead = False
        assert slot.wake is not None
        try:
            slot.waits = True
            while not slot.wake.acquire(timeout=_sleep_s(deadline)):
                self._check_forked()
                if deadline is not None and time.monotonic() >= deadline:
                    raise NoReply("no reply in time")
            slot.waits = False
            with self._mutex:
                lead = slot.state is _State.LEAD
                if lead:
                    slot.state = _State.DONE if slot.messages else _State.WAITING
        finally:
            harmless, slot.waits = slot.waits, False
            if not lead and not self._forked and self._give_up(slot) is _State.LEAD:
                self._hand_over()
            slot.waits = harmless
        if lead:
            self._lead(slot, deadline)
        elif slot.state is not _State.DONE:
            raise Lost(slot.state is _State.LOST, "the connection broke")

    def _check_forked(self) -> None:
        """Wherever a signal handler may have run: the call of one that has forked is the parent's."""
        if self._forked:
            raise Forked

    def _alone(self, slot: _Slot) -> bool:
        with self._mutex:
            return len(self._slots) == 1 and self._slots[0] is slot

    def _take_queue(self) -> bool:
        """Reader: make what is queued what is leaving. Returns whether there is any, for the reader to send."""
        with self._mutex:
            sends = not self._sending and self._load()
            self._callers_send = not sends and self._is_idle()
            return sends

    def _may_block(self) -> bool:
        """Reader: let callers send for themselves. Returns False when something is to be sent first."""
        with self._mutex:
            oldest = _oldest_waiting(self._slots)
            idle = self._far or oldest is None or oldest.ends > self._offered  # not sent: no reply will come
            sends = idle and not self._sending and self._load()
            self._callers_send = idle and not sends
            return not sends

    def _is_idle(self) -> bool:
        """Under the mutex: whether the next reply is not about to come."""
        return self._far or _oldest_waiting(self._slots) is None

    def _load(self) -> bool:
        """Sender, else reader; under the mutex: make what is queued what is leaving. Returns whether anything is."""
        if not self._leaving and self._queued:
            self._leaving = bytes(self._queued)
            self._queued.clear()
            self._offered = self._accepted
        return self._leaving != b""

    def _send_queue(self) -> None:
        """Sender: send until nothing is queued. Without room, or after an error, it is the reader's."""
        stuck = False
        while True:
            with self._mutex:
                if stuck or self._dead or not self._load():
                    self._sending = False
                    self._callers_send = self._callers_send and not stuck and self._is_idle()
                    return
            try:
                stuck = not self._send()
            except OSError:
                stuck = True

    def _send(self) -> bool:
        """Sender, else reader: send what is leaving, as far as there is room. Returns False without any."""
        try:
            with self._touching:
                gone = self._sock.send(self._leaving)
        except _WOULD_BLOCK:
            return False
        self._leaving = self._leaving[gone:]
        self._sent += gone
        return True

    def _receive(self, sends_early: bool = True) -> bool:
        """Receive once and complete the slots whose replies have come. Returns False when nothing came."""
        try:
            with self._touching:
                got = self._sock.recv_into(self._inbox)
        except _WOULD_BLOCK:
            return False
        if got:
            self._parser.feed(self._inbox, 0, got)  # type: ignore[arg-type]  # any buffer will do
            self._heard_s = time.monotonic()
            self._send_early(sends_early)
            self._deliver()
            self._note_round_trip()
        else:
            self._fail()
        return True

    def _send_early(self, sends: bool) -> None:
        """Reader, before it delivers what has come: note what can be answered by that, and send what is queued."""
        with self._mutex:
            self._answerable = self._offered if self._sending else self._sent  # a sender counts what it sends later
            sends = sends and not self._sending and self._load()
        if sends:
            with contextlib.suppress(OSError):  # which the next turn meets
                self._send()

    def _note_round_trip(self) -> None:
        """Reader: a server that has answered within `_FAR_S` is near."""
        with self._mutex:
            if self._timed and (not self._slots or self._slots[0].begins >= self._timed):
                self._far = self._heard_s - self._timed_at_s > _FAR_S
                self._timed = 0

    def _wait(self, slot: _Slot, deadline: float | None) -> None:
        """Reader: wait until the socket is ready, unless something is to be sent first."""
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise NoReply("nothing came in time")
        # In slices, so that what a sender found no room for is not kept waiting for this reply.
        left_s = _SLICE_S if left_s is None else min(left_s, _SLICE_S)
        sends = not self._may_block()
        slot.waits = True
        try:
            if hasattr(select, "poll"):
                poller = select.poll()
                poller.register(self._sock, select.POLLIN | (select.POLLOUT if sends else 0))
                poller.poll(left_s * 1000 + 1)
            else:
                select.select([self._sock], [self._sock] if sends else [], [], left_s)
        except ValueError as error:  # who was interrupted has closed it
            self._check_forked()
            raise OSError(str(error)) from error
        self._check_forked()
        slot.waits = False

    def _look_for_eof(self) -> None:
        """Before anything is sent after a pause: a connection closed meanwhile executes nothing."""
        try:
            self._receive(sends_early=False)
        except OSError:
            self._fail()

    def _deliver(self) -> None:
        try:
            while True:
                reply = self._parse()
                if reply is NOT_ENOUGH:
                    return
                if type(reply) is not hiredis.PushNotification:
                    self._complete(reply)
                else:
                    self._take_push(reply)
        except hiredis.ProtocolError:
            self._fail()
        except BaseException:
            self._fail()
            raise

    def _parse(self) -> Any:
        """The next reply or push; NOT_ENOUGH for none."""
        try:
            return self._parser.gets()
        except Exception as error:  # TypeError for a map whose key is a list, MemoryError for an array of billions
            raise hiredis.ProtocolError(str(error)) from None

    def _take_push(self, push: list[Reply]) -> None:
        """A push answers the oldest request if that is the subscription that it tells of."""
        if is_answer(push):
            with self._mutex:
                asked = bool(self._slots) and is_answer_to(push, self._slots[0].subscription)
            if not asked:
                raise hiredis.ProtocolError("a subscription that was not asked for")
            self._complete(push)
        elif self.on_push is not None:
            self.on_push(push)
            self._check_forked()

    def _complete(self, reply: Reply) -> None:
        """Give the oldest slot its reply, or one of its replies."""
        with self._mutex:
            if not self._slots:
                raise hiredis.ProtocolError("a reply without a request")
            slot = self._slots[0]
            if slot.begins >= self._answerable if slot.many else slot.ends > self._answerable:
                raise hiredis.ProtocolError("a reply before its request has left")
            slot.replies.append(reply)
            slot.wanted -= 1
            if not slot.wanted:
                if slot.state is _State.WAITING:
                    slot.end(_State.DONE)
                del self._slots[0]
        if not slot.wanted and slot.on_reply is not None:
            slot.on_reply(slot.replies if slot.many else reply)
            self._check_forked()

    def _give_up(self, slot: _Slot) -> _State:
        with self._mutex:
            state = slot.state
            if state in (_State.WAITING, _State.LEAD):
                slot.state = _State.ABANDONED
            self._listeners.pop(slot, None)
        return state

    def _hand_over(self) -> None:
        """Give reading to the oldest caller that waits, else to a listener.

        What is queued is sent first, unless a caller of a near server reads on: it sends that as soon as it wakes up.
        """
        stuck = False
        while True:
            with self._mutex:
                self._callers_send = False
                heir = _oldest_waiting(self._slots)
                if not (self._is_idle() and not (stuck or self._dead or self._sending) and self._load()):
                    heir = heir or _oldest_waiting(self._listeners)
                    if heir is None:
                        self._reading = False
                        return
                    self._callers_send = self._is_idle() and not stuck  # until the new reader has woken up
                    heir.end(_State.LEAD)
                    return
            try:
                stuck = not self._send()
            except OSError:
                stuck = True  # the next reader will meet the error

    def _break(self) -> None:
        """After an interrupt, which may have come anywhere: before Python 3.11, also just before a lock was let go."""
        for lock in (self._mutex, self._touching):
            with contextlib.suppress(RuntimeError):  # this thread has it no more
                while True:
                    lock.release()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._fail()

    def _fail(self) -> None:
        """Break the pipe and fail every slot, each with what is known of it. Not in a forked child."""
        self._check_forked()
        with self._mutex:
            self._dead = True
            slots, self._slots = self._slots, deque()
            for slot in slots:
                slot.fail(_State.LOST if slot.begins < self._sent or self._sending else _State.UNSENT)
            for slot in self._listeners:
                slot.fail(_State.UNSENT)
        with self._touching:
            self._owner.disconnect()


def _sleep_s(deadline: float | None) -> float:
    """How long a follower may sleep: the main thread in slices, for signals that do not interrupt it."""
    left_s = -1.0 if deadline is None else max(deadline - time.monotonic(), 0)
    if threading.get_ident() != threading.main_thread().ident or 0 <= left_s <= _SLICE_S:
        return left_s
    return _SLICE_S


def _oldest_waiting(slots: Iterable[_Slot]) -> _Slot | None:
    for slot in slots:
        if slot.state is _State.WAITING:
            return slot
    return None


class Mailbox:
    """Where one thread waits for what a pipe's `on_push` tells it; see `base.Mailbox`.

    Args:
        pipe: what is driven meanwhile.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._messages: deque[object] = deque()  # added to by anybody, taken from by who waits
        self._waiting = threading.Lock()
        self._slot = _Slot(_State.DONE)  # of the last wait; replaced before it is looked whether there are messages

    def tell(self, message: object) -> None:
        """Put a message in."""
        self._messages.append(message)
        self._pipe.told(self._slot)

    def wait(self, timeout_s: float, soon: bool = False) -> object:  # noqa: ARG002  # nothing spins here
        """Wait for the next message and take it out, driving the socket whenever it is this thread's turn to."""
        if not self._waiting.acquire(blocking=False):
            raise RuntimeError("another thread waits for this mailbox")
        try:
            if not self._messages:
                self._slot = _Slot(_State.WAITING, messages=self._messages)
                with contextlib.suppress(Lost):
                    self._pipe.listen(self._slot, timeout_s)
            if not self._messages:
                raise Lost(False, "the connection broke")
            # An interrupt comes after a call, if at all: with `popleft` it would take the message along.
            message = self._messages[0]
            del self._messages[0]
        finally:
            self._waiting.release()
        return message
