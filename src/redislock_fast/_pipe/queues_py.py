"""What a thread waits on in the pipe of `threads_py.py`: a slot for replies, or a mailbox for messages.

Field by field, who may touch what stands beside each: "mutex" is the pipe's, "reader" the thread that reads its socket,
"owner" the thread that waits.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Protocol

from redislock_fast._pipe.base import Args, Lost, OnReply, Reply

__all__ = ["SLICE_S", "Mailbox", "Outbox", "Slot", "State", "oldest_waiting", "sleep_s", "wait_ready"]

SLICE_S = 0.05
"""The longest sleep of a thread that must look for signals, or for room to send, in seconds."""


class State(Enum):
    WAITING = 0
    DONE = 1
    LOST = 2
    UNSENT = 3
    LEAD = 4
    ABANDONED = 5


class Slot:
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

    def end(self, state: State) -> None:
        """Under the mutex: the wait is over."""
        self.state = state
        if self.wake is not None and self.wake.locked():
            self.wake.release()

    def fail(self, state: State) -> None:
        """Under the mutex: the connection broke. Who sleeps is woken, also where that was about to be done."""
        self.end(state if self.state in (State.WAITING, State.LEAD) else self.state)


def oldest_waiting(slots: Iterable[Slot]) -> Slot | None:
    """The oldest slot whose owner waits for its reply or message; None for none."""
    for slot in slots:
        if slot.state is State.WAITING:
            return slot
    return None


def sleep_s(deadline: float | None) -> float:
    """How long a follower may sleep: the main thread in slices, for signals that do not interrupt it."""
    left_s = -1.0 if deadline is None else max(deadline - time.monotonic(), 0)
    if threading.get_ident() != threading.main_thread().ident or 0 <= left_s <= SLICE_S:
        return left_s
    return SLICE_S


def wait_ready(sock: socket.socket, wants_room: bool, left_s: float) -> None:
    """Sleep until the socket has something to read, or room where that is wanted, or the time is up."""
    if hasattr(select, "poll"):
        poller = select.poll()
        poller.register(sock, select.POLLIN | (select.POLLOUT if wants_room else 0))
        poller.poll(left_s * 1000 + 1)
    else:
        select.select([sock], [sock] if wants_room else [], [], left_s)


class Outbox:
    """The bytes that a pipe is to send."""

    def __init__(self) -> None:
        self.queued = bytearray()  # mutex, its size read without as a hint; requests that no thread has begun to send
        self.leaving = b""  # sender, else reader; the bytes that are being sent
        self.accepted = 0  # mutex; bytes ever queued
        self.offered = 0  # mutex; bytes that were ever made leaving
        self.sent = 0  # sender, else reader; bytes ever sent

    def put(self, request: bytes, slot: Slot) -> None:
        """Under the mutex: queue the request of a slot."""
        slot.begins = self.accepted
        self.accepted += len(request)
        slot.ends = self.accepted
        self.queued += request

    def load(self) -> bool:
        """Sender, else reader; under the mutex: make what is queued what is leaving. Returns whether anything is."""
        if not self.leaving and self.queued:
            self.leaving = bytes(self.queued)
            self.queued.clear()
            self.offered = self.accepted
        return self.leaving != b""

    def send(self, sock: socket.socket) -> None:
        """Sender, else reader: send what is leaving, as far as there is room."""
        gone = sock.send(self.leaving)
        self.leaving = self.leaving[gone:]
        self.sent += gone


class _Pipe(Protocol):
    """What a mailbox uses of its pipe."""

    def listen(self, slot: Slot, timeout_s: float) -> None:
        """Wait for a mailbox's next message, which stays there."""

    def told(self, slot: Slot) -> None:
        """A message was put into the mailbox that this slot waits, or waited, for."""


class Mailbox:
    """Where one thread waits for what a pipe's `on_push` tells it; see `base.Mailbox`.

    Args:
        pipe: what is driven meanwhile.
    """

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._messages: deque[object] = deque()  # added to by anybody, taken from by who waits
        self._waiting = threading.Lock()
        self._slot = Slot(State.DONE)  # of the last wait; replaced before it is looked whether there are messages

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
                self._slot = Slot(State.WAITING, messages=self._messages)
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
