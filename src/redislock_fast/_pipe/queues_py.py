"""The parts of `threads_py.Pipe`: a slot for replies, a mailbox for messages, the outbox for requests, and the bell.

Thread safety: a comment at each field says which thread may use it: "lead" is the thread that leads (`threads_py`),
"owner" the thread that made the slot, "any" any thread, by atomic methods alone. There is no mutex.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol

from redislock_fast._pipe.base import Args, ConnectionBroken, OnReply, Reply

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
