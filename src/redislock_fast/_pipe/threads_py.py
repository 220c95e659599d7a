"""The pipe of threads in Python: the readable twin of `threads.pyx`, and the pipe for what that cannot drive.

It uses the socket object's methods alone, so it serves where there is no compiled core (no compiler, PyPy, Windows),
and sockets that gevent or eventlet have patched. The five rules at the top of `threads.pyx` hold here, too, with one
difference: callers never send. The reader, here called the lead, is the only one to use the socket, and callers ring
for it where it sleeps. One thing is weaker: Python may raise KeyboardInterrupt between any two steps. While a caller
waits, that is harmless. Where the lead is at work, the state of the pipe is then unknown, so the interrupt breaks the
connection, and every caller gets an error.

Thread safety: there is no mutex. A signal handler or finalizer may run between any two steps of a thread and wait for
another thread's call. So a thread that is not the lead may stop anywhere, for any time, and keeps nobody waiting. What
threads share are `_arrived`, `_listeners`, `_lead` and the claim of each slot. They are changed by single methods of
deque and dict that are atomic in every build of Python, and that order what two threads do with the same object.

- There is one lead at most. It becomes so by the entry in `_lead`, which `setdefault` gives to the first slot where
  there is none, or by the claim of its own slot, which the lead before it has made LEAD. It stays so until it removes
  the entry, or has made such a claim itself. After that claim it touches nothing that is the lead's. The entry names
  the lead before the heir until the heir has run: to all others, it only says that there is a lead.
- Each slot is claimed once. So an heir that gives up at the same moment either is not made the lead, or learns from its
  own claim that it is, and hands on.
- Nothing that has arrived is forgotten: who adds a slot to `_arrived` or `_listeners` tries to become the lead
  afterwards. The lead that removes the entry looks at both afterwards. If the first fails to become the lead, it came
  before the removal, so the other sees its slot. A caller that becomes the lead looks at both before it sleeps, and
  every `_SLICE_S` after that.
- What becomes of a request is decided by the lead alone. Its owner is roused after that, and looks before it sleeps.
- A broken pipe still has leads: each of them fails what has arrived since.

A comment at each field of a slot, a mailbox or the outbox says who may use it: "lead" is the thread that leads, "owner"
the thread that made the slot, "any" any thread, by atomic methods alone.

A handler that runs in the lead itself and waits for another thread's call waits for itself, as in the compiled pipe.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol

import hiredis

from redislock_fast._pipe.base import (
    NOT_ASKED,
    NOT_ENOUGH,
    READER_HAS_ENDED,
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
from redislock_fast._pipe.resp_py import encode, joined, next_reply
from redislock_fast._util import fork

_INBOX_BYTES = 65536
_STALE_AFTER_S = 0.001

_SLICE_S = 0.05
"""The longest sleep of a thread that must look for signals, or for room to send, in seconds."""

_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Raised by a socket that has nothing to read, or no room."""


_RECORD_BYTES = 16384
"""The most that a record of TLS carries."""


class State(Enum):
    """The state of a slot; see `threads.pxd`."""

    WAITING = 0
    DONE = 1
    LOST = 2
    UNSENT = 3
    LEAD = 4
    ABANDONED = 5


class Slot:
    """One call, post or wait for a message: its request, its replies and, where its owner waits, how that ends.

    Two things are decided about it, each by one atomic step:

    - `state`, by the lead alone: what became of the request.
    - the claim, by whoever is first: the lead makes it LEAD, so that the owner is the lead from then on; its owner
      makes it ABANDONED, and is not made the lead any more. It never changes again.

    Args:
        waits: whether its owner waits.
        request: what is to be sent; None for nothing.
        wanted: the number of replies.
        messages: of the mailbox, where it waits for one.
    """

    __slots__ = (
        "_claim",
        "_wake",
        "begins",
        "ends",
        "harmless",
        "heir",
        "is_named",
        "many",
        "messages",
        "on_reply",
        "replies",
        "request",
        "state",
        "subscription",
        "wanted",
    )

    def __init__(
        self, waits: bool, request: bytes | None = None, wanted: int = 1, messages: deque[object] | None = None
    ) -> None:
        self.request = request  # fixed
        self.messages = messages  # fixed
        self.on_reply: OnReply | None = None  # fixed once queued; called with the reply to a post
        self.many = False  # fixed once queued; whether there are many requests
        self.subscription: Args | None = None  # fixed once queued; the request, where it is a single one
        self.state = State.WAITING  # lead; its owner reads it
        self.wanted = wanted  # lead; the number of replies still to come
        self.replies: list[Reply] = []  # lead until DONE, then its owner
        self.begins = 0  # lead
        self.ends = 0  # lead
        self.harmless = False  # owner; whether an interrupt is harmless now
        self.heir: Slot | None = None  # owner; whom it has last wanted to hand the lead to
        self.is_named = False  # owner; whether it is or was the one that `Pipe._lead` names
        self._claim = {} if waits else {"": State.ABANDONED}  # any
        self._wake: threading.Lock | None = None  # made by the owner before the slot is queued; any thread releases it

    def make_wake(self) -> None:
        """Owner, before the slot is queued: make the lock on which it will sleep."""
        wake = threading.Lock()
        wake.acquire()
        self._wake = wake

    def sleep(self, timeout_s: float) -> None:
        """Owner: sleep until it is roused, or the time is up."""
        assert self._wake is not None
        self._wake.acquire(timeout=timeout_s)

    def rouse(self) -> None:
        """Any thread, after it has changed something: have the owner look."""
        if self._wake is not None:
            with contextlib.suppress(RuntimeError):  # it is awake, and looks before it sleeps
                self._wake.release()

    def claim(self, state: State) -> State:
        """Any thread: claim it, as LEAD or ABANDONED. Returns what the first claim made it."""
        return self._claim.setdefault("", state)

    @property
    def is_lead(self) -> bool:
        """Whether its owner was made the lead."""
        return self._claim.get("") is State.LEAD

    @property
    def may_lead(self) -> bool:
        """Whether its owner waits, and may be made the lead."""
        return self.state is State.WAITING and not self._claim

    @property
    def is_over(self) -> bool:
        """Whether what its owner waits for is there, or will not come."""
        return self.state is not State.WAITING or (self.messages is not None and has_any(self.messages))

    def end(self, state: State) -> None:
        """Lead: note what became of the request, and rouse its owner."""
        if self.state is State.WAITING:
            self.state = state
        self.rouse()


def has_any(queue: deque[Any]) -> bool:
    """Whether there is anything in it: by a method that is atomic, and so orders this among what others append."""
    try:
        queue[0]
    except IndexError:
        return False
    return True


def oldest(slots: Iterable[Slot]) -> Slot | None:
    """The first slot whose owner may be made the lead; None for none."""
    for slot in slots:
        if slot.may_lead:
            return slot
    return None


def sleep_s(deadline: float | None) -> float:
    """How long a follower may sleep: the main thread in slices, since some signals do not interrupt its sleep."""
    left_s = -1.0 if deadline is None else max(deadline - time.monotonic(), 0)
    if threading.get_ident() != threading.main_thread().ident or 0 <= left_s <= _SLICE_S:
        return left_s
    return _SLICE_S


class Bell:
    """Wakes the lead that sleeps on the socket. A missed ring costs `_SLICE_S`.

    Any thread may ring as long as it lives: its sockets are closed when it is collected.
    """

    _ends: tuple[socket.socket, ...] = ()

    def __init__(self) -> None:
        self._ends = self._heard, self._rung = socket.socketpair()
        for end in self._ends:
            end.settimeout(0)

    def __del__(self) -> None:
        for end in self._ends:  # at the end of the interpreter, too
            end.close()

    def ring(self) -> None:
        """Wake the lead, now or when it next sleeps."""
        with contextlib.suppress(OSError):  # no room: it has rung often enough
            self._rung.send(b"\0")

    def wait(self, sock: socket.socket, wants_room: bool, left_s: float) -> None:
        """Sleep until it rings, or the socket has something to read, or room where that is wanted, or the time is up.

        It sleeps for `_SLICE_S` at most.
        """
        left_s = min(left_s, _SLICE_S)
        if hasattr(select, "poll"):
            poller = select.poll()
            poller.register(sock, select.POLLIN | (select.POLLOUT if wants_room else 0))
            poller.register(self._heard, select.POLLIN)
            has_rung = self._heard.fileno() in dict(poller.poll(left_s * 1000 + 1))
        else:
            readers, writers = [sock, self._heard], [sock] if wants_room else []
            has_rung = self._heard in select.select(readers, writers, [], left_s)[0]
            for _ in readers[1:] + writers:  # eventlet wakes the greenlet once more for each that was ready, too
                time.sleep(0)
        if has_rung:
            with contextlib.suppress(*_WOULD_BLOCK):
                self._heard.recv(64)


def receive(sock: socket.socket, inbox: bytearray) -> int | None:
    """Receive into the inbox. Returns the number of bytes; 0 at the end of the stream, None for nothing to read."""
    try:
        return sock.recv_into(inbox)
    except _WOULD_BLOCK:
        return None


class Outbox:
    """Lead: the bytes that a pipe is to send.

    Args:
        over_tls: whether the socket is one with TLS. There, a record that finds no room may have left in part, and must
            be given again as it was.
    """

    def __init__(self, over_tls: bool) -> None:
        self._most = _RECORD_BYTES if over_tls else None
        self.queued = bytearray()  # any thread reads its size as a hint; requests that are not leaving
        self.leaving = memoryview(b"")  # the bytes that are being sent
        self.accepted = 0  # bytes ever queued
        self.offered = 0  # bytes ever moved into leaving
        self.sent = 0  # bytes ever sent; over TLS, those that may have left

    def put(self, slot: Slot) -> None:
        """Queue the request of a slot."""
        assert slot.request is not None
        slot.begins = self.accepted
        self.accepted += len(slot.request)
        slot.ends = self.accepted
        self.queued += slot.request

    def send(self, sock: socket.socket) -> None:
        """Send what is queued, as far as there is room."""
        if not self.leaving and self.queued:
            self.leaving = memoryview(bytes(self.queued))
            self.queued.clear()
            self.offered = self.accepted
        with contextlib.suppress(*_WOULD_BLOCK):
            while self.leaving:
                some = self.leaving[: self._most]
                if self._most is not None:
                    self.sent = self.offered - len(self.leaving) + len(some)
                self.leaving = self.leaving[sock.send(some) :]
                self.sent = self.offered - len(self.leaving)


class _Pipe(Protocol):
    """The part of a pipe that a mailbox uses."""

    def listen(self, slot: Slot, timeout_s: float) -> None:
        """Wait for a mailbox's next message, which stays there."""


class Mailbox:
    """Where one thread waits for the messages that a pipe's `on_push` puts in; see `base.Mailbox`.

    Args:
        pipe: is driven meanwhile.
    """

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._messages: deque[object] = deque()  # any thread adds, the waiting thread takes
        self._waiting: dict[str, object] = {}  # any; the wait that is under way
        self._slot = Slot(waits=False)  # of the last wait; replaced before `_messages` is read

    def put(self, message: object) -> None:
        self._messages.append(message)
        self._slot.rouse()

    def wait(self, timeout_s: float, soon: bool = False) -> object:  # noqa: ARG002  # the twin does not spin
        """Take out the next message. While it waits, the thread may become the lead."""
        wait = object()
        try:
            if self._waiting.setdefault("", wait) is not wait:
                raise RuntimeError("another thread waits for this mailbox")
            if not self._messages:
                self._slot = Slot(waits=True, messages=self._messages)
                with contextlib.suppress(ConnectionBroken):
                    self._pipe.listen(self._slot, timeout_s)
            if not self._messages:
                raise ConnectionBroken(False, "the connection broke")
            # An interrupt comes after a call, if at all: it would make `popleft` lose the message.
            message = self._messages[0]
            del self._messages[0]
        finally:
            if self._waiting.get("") is wait:
                del self._waiting[""]
        return message


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
        self._lead: dict[str, Slot] = {}  # any; has an entry while there is a lead
        self._arrived: deque[Slot] = deque()  # any adds, the lead takes; requests in the order in which they leave
        self._listeners: dict[Slot, None] = {}  # any; the slots of waiting mailboxes, oldest first
        self._parser = new_reader()  # lead
        self._inbox = bytearray(_INBOX_BYTES)  # lead
        self._slots: deque[Slot] = deque()  # lead; requests without a reply, oldest first
        self._outbox = Outbox(over_tls=hasattr(sock, "do_handshake"))  # lead
        self._answerable = 0  # lead; bytes that had left when it last received
        self._heard_s = time.monotonic()  # lead; any thread reads it as a hint
        self._sleeps = False  # a hint; whether the lead sleeps until the bell rings
        self._bell = Bell()  # any
        self._dead = False  # lead; any thread reads it as a hint
        self.closed_by_peer = False  # lead; set before `_dead`
        self._has_ended = False  # lead; whether the socket is closed
        self._has_forgotten = False  # set once, in a forked child
        fork.forget_in_child(self)

    def forget(self) -> None:
        """In a forked child: refuse every call."""
        self._has_forgotten = self._dead = True

    @property
    def broken(self) -> bool:
        return self._forked or self._dead

    @property
    def silence_s(self) -> float:
        return time.monotonic() - self._heard_s

    def call(self, args: Args, timeout_s: float) -> Reply:
        slot = Slot(True, encode(args))
        slot.subscription = args
        self._run(slot, timeout_s)
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
        slot = Slot(True, *joined(requests))
        slot.many = True
        self._run(slot, timeout_s)
        return slot.replies

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        slot = Slot(False, encode(args))
        slot.subscription = args
        slot.on_reply = on_reply
        self._check_open()
        self._bring(slot)

    def post_many(self, requests: list[Args] | Bulk, on_replies: OnReply) -> None:
        slot = Slot(False, *joined(requests))
        slot.many = True
        slot.on_reply = on_replies
        self._check_open()
        self._bring(slot)

    def close(self) -> None:
        if not self.broken:
            self._bring(Slot(False))

    def close_idle(self) -> bool:
        idle = False
        slot = Slot(False)
        try:
            if not self.broken and self._take_lead(slot):
                self._take_arrived()
                idle = not (self._dead or self._slots or oldest(list(self._listeners)))
                if idle:
                    self._fail()
                self._hand_over(slot)
        except BaseException:
            self._mend(slot)
            raise
        return idle

    def mailbox(self) -> Mailbox:
        return Mailbox(self)

    def listen(self, slot: Slot, timeout_s: float) -> None:
        """Wait for a mailbox's next message, which stays there."""
        self._run(slot, timeout_s)

    # ---- callers ----

    def _run(self, slot: Slot, timeout_s: float) -> None:
        """Wait for what the slot is for, as a follower or as the lead."""
        try:
            self._take_part(slot, time.monotonic() + timeout_s if timeout_s >= 0 else None)
        except (ConnectionBroken, NoReply):
            self._check_forked()
            raise
        except Forked:
            raise
        except BaseException:
            self._mend(slot)
            raise
        self._check_forked()

    def _take_part(self, slot: Slot, deadline: float | None) -> None:
        # Not a part of `_run`: an interrupt may come after what a `try` covers, and before its `finally`.
        try:
            self._wait(slot, deadline)
        except (ConnectionBroken, NoReply, Forked):
            raise
        except BaseException:
            if not slot.harmless:
                self._mend(slot)
            raise
        finally:
            self._leave(slot)

    def _wait(self, slot: Slot, deadline: float | None) -> None:
        self._check_open()
        if self._join(slot) or self._follow(slot, deadline):
            self._read(slot, deadline)
        if slot.state in (State.LOST, State.UNSENT):
            raise ConnectionBroken(slot.state is State.LOST, "the connection broke")

    def _check_open(self) -> None:
        """Refuse what cannot be sent: the pipe is broken, or too much waits to be sent."""
        self._check_forked()
        if len(self._outbox.queued) > UNSENT_LIMIT_BYTES and self.silence_s > UNSENT_SILENCE_S:
            self.close()
            raise ConnectionBroken(False, "the server is silent, and too much waits to be sent")
        if self._dead:
            raise ConnectionBroken(False, "the connection is closed")

    def _join(self, slot: Slot) -> bool:
        """Begin to wait. Returns whether the caller is the lead."""
        leads = self._take_lead(slot)
        if not leads:
            slot.make_wake()
        if slot.request is None:
            self._listeners[slot] = None
            return leads or self._take_lead(slot)
        self._arrived.append(slot)
        if leads or self._take_lead(slot):
            return True
        self._ring()
        return False

    def _follow(self, slot: Slot, deadline: float | None) -> bool:
        """Sleep until the wait is over, or the caller is made the lead. Returns whether it is the lead."""
        slot.harmless = True  # also after it was made the lead: it has done nothing yet
        while not slot.is_over:
            if slot.is_lead:
                slot.harmless = False
                return True
            if deadline is not None and time.monotonic() >= deadline:
                raise NoReply("no reply in time")
            slot.sleep(sleep_s(deadline))
            self._check_forked()
            if sys.is_finalizing():
                raise ConnectionBroken(True, READER_HAS_ENDED)
        return False

    def _leave(self, slot: Slot) -> None:
        """End a caller's part: it waits no more, and if it leads, hands that on."""
        if not self._forked:
            self._listeners.pop(slot, None)
            slot.claim(State.ABANDONED)
            if self._leads(slot):
                self._hand_over(slot)

    def _bring(self, slot: Slot) -> None:
        """Have a slot for which nobody waits dealt with: a post; without a request, it closes the pipe."""
        try:
            self._arrived.append(slot)
            self._visit(slot)
        except BaseException:
            self._mend(slot)
            raise

    def _visit(self, slot: Slot) -> None:
        """Have what has arrived dealt with: by this thread where there is no lead. The slot is one that never waits."""
        if self._take_lead(slot):
            self._hand_over(slot)
        else:
            self._ring()

    def _ring(self) -> None:
        """Wake the lead if it sleeps."""
        if self._sleeps:
            self._sleeps = False
            self._bell.ring()

    def _mend(self, slot: Slot) -> None:
        """After an interrupt at any step of a call: break the pipe if the call leads, and do what it may have left."""
        if self._forked:
            return
        if slot.heir is not None and slot.heir.is_lead:
            slot.heir.rouse()
        if self._leads(slot):
            self._fail(is_known=False)
        self._leave(slot)
        self._visit(Slot(False))

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child: all here is the parent's."""
        fork.generation()  # has all forget in a child
        return self._has_forgotten

    def _check_forked(self) -> None:
        """Raise `Forked` in a forked child. Called wherever a signal handler may have run: its call is the parent's."""
        if self._forked:
            raise Forked

    # ---- the lead ----

    def _take_lead(self, slot: Slot) -> bool:
        """Become the lead where there is none. Returns whether this slot's owner is the lead now."""
        return self._lead.setdefault("", slot) is slot

    def _leads(self, slot: Slot) -> bool:
        """Whether this slot's owner, which asks, is the lead."""
        if slot.heir is not None and slot.heir.is_lead:
            return False
        return self._lead.get("") is slot or (slot.is_lead and not slot.is_named)

    def _assume(self, slot: Slot) -> None:
        """Lead, first of all: note who it is."""
        self._lead[""] = slot
        slot.is_named = True

    def _hand_over(self, slot: Slot) -> None:
        """Lead: see to what has arrived, then hand on to the oldest caller that waits, else to a listener."""
        self._assume(slot)
        while True:
            self._take_arrived()
            with contextlib.suppress(OSError):  # the next lead meets the error
                self._send()
            heir = oldest(self._slots) or oldest(list(self._listeners))
            if heir is None:
                self._lead.pop("", None)
                left = has_any(self._arrived) or oldest(list(self._listeners))
                if not left or not self._take_lead(slot):
                    return
            else:
                slot.heir = heir
                if heir.claim(State.LEAD) is State.LEAD:
                    heir.rouse()
                    return

    def _read(self, slot: Slot, deadline: float | None) -> None:
        """Lead: drive the socket until the slot's wait is over."""
        self._assume(slot)
        try:
            self._take_arrived(slot)
            if len(self._slots) == 1 and self._slots[0] is slot:
                if time.monotonic() - self._heard_s > _STALE_AFTER_S:
                    self._look_for_eof()
                    self._check_forked()
                self._heard_s = time.monotonic()
            while True:
                self._take_arrived()
                if self._dead:
                    slot.end(State.UNSENT)
                if slot.is_over:
                    return
                self._send()
                if not self._receive():
                    self._sleep(slot, deadline)
                elif deadline is not None and self._heard_s >= deadline and not slot.is_over:
                    raise NoReply("replies came in time, but not this one")
        except OSError as error:
            self._fail(by_peer=True)
            raise ConnectionBroken(slot.state is State.LOST, str(error)) from error

    def _take_arrived(self, own: Slot | None = None) -> None:
        """Lead: give what has arrived its place. Its own slot does not end the idle time: it still needs that."""
        while self._arrived:
            slot = self._arrived[0]
            if self._dead:
                slot.end(State.UNSENT)
            elif slot.request is None:
                self._fail()  # takes this one, too
                return
            else:
                if not self._slots and slot is not own:
                    self._heard_s = time.monotonic()
                self._outbox.put(slot)
                self._slots.append(slot)
            self._arrived.popleft()

    def _send(self) -> None:
        """Lead: send what is queued, as far as there is room."""
        if not self._dead:
            self._outbox.send(self._sock)

    def _receive(self, sends_early: bool = True) -> bool:
        """Lead: receive once and complete the slots whose replies have come. Returns False when nothing came."""
        got = receive(self._sock, self._inbox)
        if got is None:
            return False
        if got:
            self._parser.feed(self._inbox, 0, got)  # type: ignore[arg-type]  # any buffer will do
            self._heard_s = time.monotonic()
            self._answerable = self._outbox.sent
            if sends_early:
                self._take_arrived()
                with contextlib.suppress(OSError):  # the next turn meets the error
                    self._send()
            self._deliver()
        else:
            self._fail(by_peer=True)
        return True

    def _sleep(self, slot: Slot, deadline: float | None) -> None:
        """Lead: sleep until the socket is ready, or the bell rings."""
        left_s = 1.0 if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            raise NoReply("nothing came in time")
        slot.harmless = self._sleeps = True
        try:
            if not self._arrived:
                self._bell.wait(self._sock, len(self._outbox.leaving) > 0, left_s)
        except ValueError as error:  # its owner has closed it
            slot.harmless = False
            self._check_forked()
            raise OSError(str(error)) from error
        finally:
            self._sleeps = False
        self._check_forked()
        slot.harmless = False

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
            if not (self._slots and is_answer_to(push, self._slots[0].subscription)):
                raise hiredis.ProtocolError("a subscription that was not asked for")
            self._complete(push)
        elif self.on_push is not None:
            self.on_push(push)
            self._check_forked()

    def _complete(self, reply: Reply) -> None:
        """Give the oldest slot its reply, or one of its replies."""
        if not self._slots:
            raise hiredis.ProtocolError("a reply without a request")
        slot = self._slots[0]
        if slot.begins >= self._answerable if slot.many else slot.ends > self._answerable:
            raise hiredis.ProtocolError("a reply before its request has left")
        slot.replies.append(reply)
        slot.wanted -= 1
        if not slot.wanted:
            slot.end(State.DONE)
            self._slots.popleft()  # afterwards: an interrupt fails what is there
            if slot.on_reply is not None:
                slot.on_reply(slot.replies if slot.many else reply)
                self._check_forked()

    def _fail(self, by_peer: bool = False, is_known: bool = True) -> None:
        """Lead: break the pipe and fail every slot with what is known of it. Not in a forked child.

        Args:
            by_peer: whether the server or the network has ended the connection.
            is_known: whether it is known what has been sent: not after an interrupt.
        """
        self._check_forked()
        if self._has_ended:
            return
        if not self._dead:
            self.closed_by_peer = by_peer
            self._dead = True
        sent = self._outbox.sent if is_known else self._outbox.offered
        for slot in self._slots:
            slot.end(State.LOST if slot.begins < sent else State.UNSENT)
        self._slots.clear()
        self._take_arrived()
        for slot in list(self._listeners):
            slot.end(State.UNSENT)
        self._owner.disconnect()
        self._has_ended = True
