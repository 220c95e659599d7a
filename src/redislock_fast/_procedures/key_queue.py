"""The waiters of one lock on one connection, and which of them asks the server for all."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar

from redislock_fast._util.times import clock

__all__ = ["CHECK", "KeyQueue"]

CHECK: Final = "check"
"""The message that something about the lock has changed, so that the waiter asks the server."""

_interval_of = attrgetter("interval_s")


class Member(Protocol):
    """The part of a `waiters.Waiter` that a key queue uses."""

    token: bytes
    interval_s: float
    asked_at: float
    mailbox: Any


AnyWaiter = TypeVar("AnyWaiter", bound=Member)


class KeyQueue(Generic[AnyWaiter]):
    """The waiters of one lock on one connection, and those of them that are in the server's queue.

    One waiter in the queue, the poller, makes the health checks for all: the waiter with the shortest interval; of
    several, the last that has joined, since it stays longest.

    Thread safety: everything is changed under the registry's mutex. `poller` is read without it: a stale one
    causes one superfluous health check, and the next poller gets a message.

    Args:
        mutex: the registry's.
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

    __slots__ = ("_mutex", "checked_at", "ends_at", "is_watched", "poller", "put_off_s", "queue", "since", "waiters")

    def __init__(self, mutex: Any, put_off_s: float) -> None:
        self._mutex = mutex
        self.waiters: dict[bytes, AnyWaiter] = {}
        self.queue: dict[bytes, AnyWaiter] = {}
        self.poller: AnyWaiter | None = None
        self.since = 0.0
        self.checked_at = clock()
        self.put_off_s = put_off_s
        self.ends_at: float | None = None
        self.is_watched = False

    def enqueue(self, waiter: AnyWaiter) -> None:
        """Note that the waiter is in the queue, unless it has been removed from the registry meanwhile."""
        with self._mutex:
            if self.waiters.get(waiter.token) is waiter:
                self.queue[waiter.token] = waiter
                if self.poller is None or waiter.interval_s <= self.poller.interval_s:
                    self.poller = waiter

    def dequeue(self, waiter: AnyWaiter) -> None:
        """Note that the waiter is not in the queue any more. Another one becomes the poller."""
        with self._mutex:
            next_poller = self.succeed(waiter)
        if next_poller is not None:
            next_poller.mailbox.tell(CHECK)

    def succeed(self, waiter: AnyWaiter) -> AnyWaiter | None:
        """Remove the waiter from the queue. Returns the new poller, if there is one. To be used under the mutex."""
        if self.queue.get(waiter.token) is not waiter:
            return None
        del self.queue[waiter.token]
        if self.poller is not waiter:
            return None
        self.poller = next_poller = min(reversed(self.queue.values()), key=_interval_of, default=None)
        return next_poller

    def contended(self) -> list[AnyWaiter]:
        """The waiters that are in the queue now, in order."""
        with self._mutex:
            return list(self.queue.values())

    def concerned(self) -> list[AnyWaiter]:
        """The waiters that ask when the key has changed: those in the queue have the poller ask for them.

        A waiter whose posted request has no reply yet hears from that.
        """
        with self._mutex:
            return [
                waiter
                for waiter in self.waiters.values()
                if waiter is self.poller or not (waiter.asked_at or waiter.token in self.queue)
            ]

    def all(self) -> list[AnyWaiter]:
        """The waiters of the lock."""
        with self._mutex:
            return list(self.waiters.values())
