"""The pipe of threads in Python: the readable twin of `threads.pyx`, and the pipe for sockets that are not plain.

It uses the socket object's methods alone, so it serves where there is no compiled core (no compiler, PyPy, Windows),
TLS sockets, and sockets that gevent or eventlet have patched. The five rules at the top of `threads.pyx` and the rules
for senders in `threads.pxd` hold here, too. It wakes all callers at once: its reader needs the GIL as they do, and
completes their slots one by one. One thing is weaker: Python may raise KeyboardInterrupt between any two
steps. While a caller waits, that is harmless. At any other time the state of the pipe is then unknown, so the interrupt
breaks the connection, and every caller gets an error.

Thread safety: a comment at each field says which thread may use it: "mutex" is `_mutex`, "reader" the one thread for
which `_reading` was set, "sender" the one for which `_sending` was. `_touching` keeps them from using the socket at
once, which TLS does not allow, and from using a socket that is closed.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import Any

import hiredis

from redislock_fast._pipe.base import (
    NOT_ASKED,
    NOT_ENOUGH,
    UNSENT_LIMIT_BYTES,
    UNSENT_SILENCE_S,
    Args,
    Bulk,
    ConnectionBroken,
    Forked,
    NoReply,
    OnPush,
    OnReply,
    Reply,
    is_answer,
    is_answer_to,
    new_reader,
)
from redislock_fast._pipe.queues_py import Mailbox, Outbox, Slot, State, oldest_waiting, receive, sleep_s, wait_ready
from redislock_fast._pipe.resp_py import encode, joined, next_reply
from redislock_fast._util import fork

__all__ = ["Mailbox", "Pipe"]

_INBOX_BYTES = 65536
_STALE_AFTER_S = 0.001
_FAR_S = 0.00015


class Pipe:
    """One connection that many threads call at once; see `base.Pipe` for the contract of each method.

    Args:
        owner: what owns the socket: its `disconnect()` closes it.
        sock: a connected stream socket, or an object with its methods.
    """

    def __init__(self, owner: Any, sock: socket.socket) -> None:
        sock.settimeout(0)
        self._owner = owner
        self._sock = sock
        self.on_push: OnPush | None = None
        self._mutex = threading.RLock()  # an RLock, so that an interrupted thread can release both
        self._touching = threading.RLock()
        self._parser = new_reader()  # reader
        self._inbox = bytearray(_INBOX_BYTES)  # reader
        self._slots: deque[Slot] = deque()  # mutex; requests without a reply, oldest first
        self._listeners: dict[Slot, None] = {}  # mutex; the slots of waiting mailboxes, oldest first
        self._reading = False  # mutex
        self._sending = False  # mutex
        self._callers_send = False  # mutex
        self._far = True  # mutex
        self._timed = 0  # mutex; while far: the end of the request whose reply is timed; 0 for none
        self._timed_at_s = 0.0  # mutex
        self._dead = False  # mutex; read without it as a hint
        self.closed_by_peer = False  # set by the reader before `_dead`
        self._interrupted = False  # set once, by an interrupted thread before it wakes the reader
        self._has_forgotten = False  # set once, in a forked child
        self._outbox = Outbox()  # see its fields
        self._answerable = 0  # reader; bytes that had left when it last received
        self._heard_s = time.monotonic()  # reader; any thread reads it as a hint
        fork.forget_in_child(self)

    def forget(self) -> None:
        """In a forked child: refuse every call. Another thread of the parent may have held the locks at the fork."""
        self._has_forgotten = self._dead = True
        self._mutex = threading.RLock()
        self._touching = threading.RLock()

    @property
    def broken(self) -> bool:
        return self._forked or self._dead

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._heard_s

    def call(self, args: Args, timeout_s: float) -> Reply:
        slot = Slot(State.WAITING)
        slot.subscription = args
        self._run(slot, timeout_s, encode(args))
        return slot.replies[0]

    def ask(self, args: Args, timeout_s: float, inside: set[int]) -> object:
        thread = threading.get_ident()
        if thread in inside:
            return NOT_ASKED
        try:
            inside.add(thread)
            return self.call(args, timeout_s)
        finally:
            inside.discard(thread)

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> list[Reply]:
        request, count = joined(requests)
        slot = Slot(State.WAITING, count)
        slot.many = True
        self._run(slot, timeout_s, request)
        return slot.replies

    def _run(self, slot: Slot, timeout_s: float, request: bytes | None) -> None:
        deadline = time.monotonic() + timeout_s if timeout_s >= 0 else None
        try:
            if self._listen(slot) if request is None else self._queue(request, slot):
                self._lead(slot, deadline)
            else:
                self._follow(slot, deadline)
        except (ConnectionBroken, NoReply):
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
        slot = Slot(State.ABANDONED)
        slot.subscription = args
        self._post(slot, encode(args), on_reply)

    def post_many(self, requests: list[Args] | Bulk, on_replies: OnReply) -> None:
        request, count = joined(requests)
        slot = Slot(State.ABANDONED, count)
        slot.many = True
        self._post(slot, request, on_replies)

    def _post(self, slot: Slot, request: bytes, on_reply: OnReply | None) -> None:
        slot.on_reply = on_reply
        try:
            if self._queue(request, slot):
                self._hand_over()
        except ConnectionBroken:
            raise
        except BaseException:
            self._break()
            raise

    def close(self) -> None:
        if self._forked:
            return
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
                    self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which fails every slot
        except BaseException:
            self._break()
            raise

    def close_idle(self) -> bool:
        with self._mutex:
            idle = not (self._reading or self._dead or self._slots)
            if idle:
                self._reading = True
        if idle:
            try:
                self._fail()
                with self._mutex:
                    self._reading = False
            except BaseException:
                self._break()
                raise
        return idle

    def mailbox(self) -> Mailbox:
        return Mailbox(self)

    def _queue(self, request: bytes, slot: Slot) -> bool:
        """Queue a request. Returns whether the caller is to read."""
        sends = False
        self._check_forked()
        if len(self._outbox.queued) > UNSENT_LIMIT_BYTES and self.silence_s > UNSENT_SILENCE_S:
            self.close()
            raise ConnectionBroken(False, "the server is silent, and too much waits to be sent")
        with self._mutex:
            if self._dead:
                raise ConnectionBroken(False, "the connection is closed")
            lead = not self._reading
            if not self._slots and not (lead and slot.state is State.WAITING):
                self._heard_s = time.monotonic()  # a caller that waits first needs the idle time
            if lead:
                self._reading = True
            else:
                if slot.state is State.WAITING:
                    slot.make_wake()
                if self._callers_send and not self._sending:
                    self._sending = sends = True
            self._outbox.put(request, slot)
            if self._far and not self._timed and not slot.many:
                self._timed = slot.ends
                self._timed_at_s = time.monotonic()
            self._slots.append(slot)
        if sends:
            self._send_queue()
        return lead

    def listen(self, slot: Slot, timeout_s: float) -> None:
        """Wait for a mailbox's next message, which stays there."""
        self._run(slot, timeout_s, None)

    def told(self, slot: Slot) -> None:
        """Note that a message was put into the mailbox for which this slot waits or waited."""
        try:
            with self._mutex:
                if slot.state is State.WAITING:
                    slot.end(State.DONE)
        except BaseException:
            self._break()
            raise

    def _listen(self, slot: Slot) -> bool:
        """Begin to wait for a mailbox. Returns whether the caller is the reader."""
        with self._mutex:
            if self._dead:
                raise ConnectionBroken(False, "the connection is closed")
            lead = not self._reading
            if lead:
                self._reading = True
            else:
                slot.make_wake()
            self._listeners[slot] = None
            if slot.messages:
                slot.end(State.DONE)
        return lead

    def _lead(self, slot: Slot, deadline: float | None) -> None:
        try:
            with self._mutex:
                alone = len(self._slots) == 1 and self._slots[0] is slot
            if alone:
                if time.monotonic() - self._heard_s > _STALE_AFTER_S:
                    self._look_for_eof()
                    self._check_forked()
                self._heard_s = time.monotonic()
            while slot.state is not State.DONE:
                if slot.state in (State.LOST, State.UNSENT):
                    raise ConnectionBroken(slot.state is State.LOST, "the connection broke")
                if self._take_queue():
                    self._send()
                if self._receive():
                    if deadline is not None and self._heard_s >= deadline and slot.state is State.WAITING:
                        raise NoReply("replies came in time, but not this one")
                else:
                    self._wait(slot, deadline)
        except OSError as error:
            self._fail(by_peer=True)
            raise ConnectionBroken(slot.state is not State.UNSENT, str(error)) from error
        finally:
            harmless, slot.waits = slot.waits, False
            if not self._forked:
                self._give_up(slot)
                self._hand_over()
            slot.waits = harmless

    def _follow(self, slot: Slot, deadline: float | None) -> None:
        lead = False
        assert slot.wake is not None
        try:
            slot.waits = True
            while not slot.wake.acquire(timeout=sleep_s(deadline)):
                self._check_forked()
                if deadline is not None and time.monotonic() >= deadline:
                    raise NoReply("no reply in time")
            slot.waits = False
            with self._mutex:
                lead = slot.state is State.LEAD
                if lead:
                    slot.state = State.DONE if slot.messages else State.WAITING
        finally:
            harmless, slot.waits = slot.waits, False
            if not lead and not self._forked and self._give_up(slot) is State.LEAD:
                self._hand_over()
            slot.waits = harmless
        if lead:
            self._lead(slot, deadline)
        elif slot.state is not State.DONE:
            raise ConnectionBroken(slot.state is State.LOST, "the connection broke")

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child: all here is the parent's."""
        fork.generation()  # has all forget in a child
        return self._has_forgotten

    def _check_forked(self) -> None:
        """Raise `Forked` in a forked child. Called wherever a signal handler may have run: its call is the parent's."""
        if self._forked:
            raise Forked

    def _take_queue(self) -> bool:
        """Reader: load what is queued for sending. Returns whether there is any, for the reader to send."""
        with self._mutex:
            sends = not self._sending and self._outbox.load()
            self._callers_send = not sends and self._is_idle()
            return sends

    def _may_block(self) -> bool:
        """Reader: let callers send for themselves. Returns False when the reader has something to send first."""
        with self._mutex:
            oldest = oldest_waiting(self._slots)
            idle = self._far or oldest is None or oldest.ends > self._outbox.offered  # not sent: no reply will come
            sends = idle and not self._sending and self._outbox.load()
            self._callers_send = idle and not sends
            return not sends

    def _is_idle(self) -> bool:
        """Under the mutex: whether no reply is expected soon."""
        return self._far or oldest_waiting(self._slots) is None

    def _send_queue(self) -> None:
        """Sender: send until nothing is queued. Without room, or after an error, the reader sends the rest."""
        stuck = False
        while True:
            with self._mutex:
                if stuck or self._dead or not self._outbox.load():
                    self._sending = False
                    self._callers_send = self._callers_send and not stuck and self._is_idle()
                    return
            try:
                stuck = not self._send()
            except OSError:
                stuck = True

    def _send(self) -> bool:
        """Sender, else reader: send what is leaving, as far as there is room. Returns False without any."""
        with self._touching:
            return self._outbox.send(self._sock)

    def _receive(self, sends_early: bool = True) -> bool:
        """Receive once and complete the slots whose replies have come. Returns False when nothing came."""
        with self._touching:
            got = receive(self._sock, self._inbox)
        if got is None:
            return False
        if got:
            self._parser.feed(self._inbox, 0, got)  # type: ignore[arg-type]  # any buffer will do
            self._heard_s = time.monotonic()
            self._send_early(sends_early)
            self._deliver()
            self._note_round_trip()
        else:
            self._fail(by_peer=True)
        return True

    def _send_early(self, sends: bool) -> None:
        """Reader, before it delivers: note which requests the received bytes can answer, and send what is queued."""
        with self._mutex:
            # A sender counts what it sends later.
            self._answerable = self._outbox.offered if self._sending else self._outbox.sent
            sends = sends and not self._sending and self._outbox.load()
        if sends:
            with contextlib.suppress(OSError):  # the next turn meets the error
                self._send()

    def _note_round_trip(self) -> None:
        """Reader: a server that has answered within `_FAR_S` is near."""
        with self._mutex:
            if self._timed and (not self._slots or self._slots[0].begins >= self._timed):
                self._far = self._heard_s - self._timed_at_s > _FAR_S
                self._timed = 0

    def _wait(self, slot: Slot, deadline: float | None) -> None:
        """Reader: wait until the socket is ready, unless there is something to send first."""
        left_s = 1.0 if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise NoReply("nothing came in time")
        sends = not self._may_block()
        slot.waits = True
        try:
            wait_ready(self._sock, sends, left_s)
        except ValueError as error:  # an interrupted thread has closed it
            self._check_forked()
            raise OSError(str(error)) from error
        self._check_forked()
        slot.waits = False

    def _look_for_eof(self) -> None:
        """Look for a close before sending after a pause: a connection that was closed meanwhile executes nothing."""
        try:
            self._receive(sends_early=False)
        except OSError:
            self._fail(by_peer=True)

    def _deliver(self) -> None:
        try:
            while True:
                reply = next_reply(self._parser)
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

    def _take_push(self, push: list[Reply]) -> None:
        """Take a push: the reply to the oldest request if that is its subscription, else for `on_push`."""
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
                if slot.state is State.WAITING:
                    slot.end(State.DONE)
                del self._slots[0]
        if not slot.wanted and slot.on_reply is not None:
            slot.on_reply(slot.replies if slot.many else reply)
            self._check_forked()

    def _give_up(self, slot: Slot) -> State:
        with self._mutex:
            state = slot.state
            if state in (State.WAITING, State.LEAD):
                slot.state = State.ABANDONED
            self._listeners.pop(slot, None)
        return state

    def _hand_over(self) -> None:
        """Hand reading on to the oldest caller that waits, else to a listener.

        Queued requests are sent first, unless a caller of a near server becomes the reader, which sends them at once.
        """
        stuck = False
        while True:
            with self._mutex:
                self._callers_send = False
                heir = oldest_waiting(self._slots)
                if not (self._is_idle() and not (stuck or self._dead or self._sending) and self._outbox.load()):
                    heir = heir or oldest_waiting(self._listeners)
                    if heir is None:
                        self._reading = False
                        return
                    self._callers_send = self._is_idle() and not stuck  # until the new reader has woken up
                    heir.end(State.LEAD)
                    return
            try:
                stuck = not self._send()
            except OSError:
                stuck = True  # the next reader will meet the error

    def _break(self) -> None:
        """Break the pipe after an interrupt, which before Python 3.11 may also come just before a lock is released."""
        self._interrupted = True
        for lock in (self._mutex, self._touching):
            with contextlib.suppress(RuntimeError):  # this thread does not hold it
                while True:
                    lock.release()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._fail()

    def _fail(self, by_peer: bool = False) -> None:
        """Break the pipe and fail every slot with what is known of it. Not in a forked child."""
        self._check_forked()
        with self._mutex:
            self.closed_by_peer = by_peer and not self._interrupted
            self._dead = True
            slots, self._slots = self._slots, deque()
            for slot in slots:
                slot.fail(State.LOST if slot.begins < self._outbox.sent or self._sending else State.UNSENT)
            for slot in self._listeners:
                slot.fail(State.UNSENT)
        with self._touching:
            self._owner.disconnect()
