"""The parts of `threads_py.Pipe`: a slot for replies, a mailbox for messages, and the outbox for requests.

Thread safety: a comment at each field says which thread may use it: "mutex" is the pipe's, "reader" the thread that
reads its socket, "sender" a thread that sends for itself (`threads.pxd`), "owner" the thread that waits.
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
from typing import Protocol

from redislock_fast._pipe.base import Args, ConnectionBroken, OnReply, Reply

__all__ = ["Mailbox", "Outbox", "Slot", "State", "oldest_waiting", "receive", "sleep_s", "wait_ready"]

_SLICE_S = 0.05
"""The longest sleep of a thread that must look for signals, or for room to send, in seconds."""

_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Raised by a socket that has nothing to read, or no room."""


class State(Enum):
    """The state of a slot; see `threads.pxd`."""

    WAITING = 0
    DONE = 1
    LOST = 2
    UNSENT = 3
    LEAD = 4
    ABANDONED = 5


class Slot:
    """One caller's place in the pipe: the state of its wait, and its replies."""

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

    def __init__(self, state: State, wanted: int = 1, messages: Sequence[object] = ()) -> None:
        self.state = state  # mutex
        self.wanted = wanted  # reader, once queued; the number of replies still to come
        self.replies: list[Reply] = []  # reader until DONE, then its owner
        self.messages = messages  # of the mailbox, where it waits for one
        self.on_reply: OnReply | None = None  # fixed once queued; called with the reply to a post
        self.many = False  # fixed once queued; whether there are many requests
        self.subscription: Args | None = None  # fixed once queued; the request, where it is a single one
        self.begins = 0  # mutex
        self.ends = 0  # mutex
        self.waits = False  # owner; whether an interrupt is harmless now
        self.wake: threading.Lock | None = None  # made by the owner before the slot is queued

    def make_wake(self) -> None:
        """Under the mutex, before the slot is queued: make the lock on which its owner will sleep."""
        self.wake = threading.Lock()
        self.wake.acquire()

    def end(self, state: State) -> None:
        """Under the mutex: end the wait."""
        self.state = state
        if self.wake is not None and self.wake.locked():
            self.wake.release()

    def fail(self, state: State) -> None:
        """Under the mutex: the connection broke. Wakes the owner also where its wait was about to end."""
        self.end(state if self.state in (State.WAITING, State.LEAD) else self.state)


def oldest_waiting(slots: Iterable[Slot]) -> Slot | None:
    """The oldest slot whose owner waits; None for none."""
    for slot in slots:
        if slot.state is State.WAITING:
            return slot
    return None


def sleep_s(deadline: float | None) -> float:
    """How long a follower may sleep: the main thread in slices, since some signals do not interrupt its sleep."""
    left_s = -1.0 if deadline is None else max(deadline - time.monotonic(), 0)
    if threading.get_ident() != threading.main_thread().ident or 0 <= left_s <= _SLICE_S:
        return left_s
    return _SLICE_S


def wait_ready(sock: socket.socket, wants_room: bool, left_s: float) -> None:
    """Sleep until the socket has something to read, or room where that is wanted, or the time is up.

    It sleeps for `_SLICE_S` at most: bytes for which a sender found no room must not wait for the next reply.
    """
    left_s = min(left_s, _SLICE_S)
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(sock, select.POLLIN | (select.POLLOUT if wants_room else 0))
        poller.poll(left_s * 1000 + 1)
    else:
        select.select([sock], [sock] if wants_room else [], [], left_s)


def receive(sock: socket.socket, inbox: bytearray) -> int | None:
    """Receive into the inbox. Returns the number of bytes; 0 at the end of the stream, None for nothing to read."""
    try:
        return sock.recv_into(inbox)
    except _WOULD_BLOCK:
        return None


class Outbox:
    """The bytes that a pipe is to send."""

    def __init__(self) -> None:
        self.queued = bytearray()  # mutex, its size read without as a hint; requests that no thread has begun to send
        self.leaving = b""  # sender, else reader; the bytes that are being sent
        self.accepted = 0  # mutex; bytes ever queued
        self.offered = 0  # mutex; bytes ever moved into leaving
        self.sent = 0  # sender, else reader; bytes ever sent

    def put(self, request: bytes, slot: Slot) -> None:
        """Under the mutex: queue the request of a slot."""
        slot.begins = self.accepted
        self.accepted += len(request)
        slot.ends = self.accepted
        self.queued += request

    def load(self) -> bool:
        """Sender, else reader; under the mutex: move what is queued into leaving. Returns whether anything is there."""
        if not self.leaving and self.queued:
            self.leaving = bytes(self.queued)
            self.queued.clear()
            self.offered = self.accepted
        return self.leaving != b""

    def send(self, sock: socket.socket) -> bool:
        """Sender, else reader: send what is leaving, as far as there is room. Returns False without any."""
        try:
            gone = sock.send(self.leaving)
        except _WOULD_BLOCK:
            return False
        self.leaving = self.leaving[gone:]
        self.sent += gone
        return True


class _Pipe(Protocol):
    """The part of a pipe that a mailbox uses."""

    def listen(self, slot: Slot, timeout_s: float) -> None:
        """Wait for a mailbox's next message, which stays there."""

    def told(self, slot: Slot) -> None:
        """Note that a message was put into the mailbox for which this slot waits or waited."""


class Mailbox:
    """Where one thread waits for the messages that a pipe's `on_push` tells it; see `base.Mailbox`.

    Args:
        pipe: is driven meanwhile.
    """

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._messages: deque[object] = deque()  # any thread adds, the waiting thread takes
        self._waiting = threading.Lock()
        self._slot = Slot(State.DONE)  # of the last wait; replaced before `_messages` is read

    def tell(self, message: object) -> None:
        self._messages.append(message)
        self._pipe.told(self._slot)

    def wait(self, timeout_s: float, soon: bool = False) -> object:  # noqa: ARG002  # the twin does not spin
        """Take out the next message. While it waits, the thread may become the reader."""
        if not self._waiting.acquire(blocking=False):
            raise RuntimeError("another thread waits for this mailbox")
        try:
            if not self._messages:
                self._slot = Slot(State.WAITING, messages=self._messages)
                with contextlib.suppress(ConnectionBroken):
                    self._pipe.listen(self._slot, timeout_s)
            if not self._messages:
                raise ConnectionBroken(False, "the connection broke")
            # An interrupt comes after a call, if at all: it would make `popleft` lose the message.
            message = self._messages[0]
            del self._messages[0]
        finally:
            self._waiting.release()
        return message
