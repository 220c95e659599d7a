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

A handler that runs in the lead itself and waits for another thread's call waits for itself, as in the compiled pipe.
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
from redislock_fast._pipe.queues_py import Bell, Mailbox, Outbox, Slot, State, has_any, oldest, receive, sleep_s
from redislock_fast._pipe.resp_py import encode, joined, next_reply
from redislock_fast._util import fork

_INBOX_BYTES = 65536
_STALE_AFTER_S = 0.001


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
        while not slot.is_over:
            if slot.is_lead:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                raise NoReply("no reply in time")
            slot.sleep(sleep_s(deadline))
            self._check_forked()
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
