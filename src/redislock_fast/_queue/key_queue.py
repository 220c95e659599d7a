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
    several, the newest, since it stays longest.

    Thread safety: any thread uses it, without a mutex, by atomic methods of dict; see `waiters.py`.

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
        self.waiters: dict[bytes, AnyWaiter] = {}
        self.queue: dict[bytes, AnyWaiter] = {}
        self.poller: AnyWaiter | None = None
        self.since = 0.0
        self.checked_at = clock()
        self.put_off_s = put_off_s
        self.ends_at: float | None = None
        self.is_watched = False

    def enqueue(self, waiter: AnyWaiter) -> None:
        """Note that the waiter is in the queue, unless it has been removed meanwhile."""
        self.queue[waiter.token] = waiter
        poller = self.poller
        if poller is None or waiter.interval_s <= poller.interval_s:
            self.poller = waiter
        if self.waiters.get(waiter.token) is not waiter:
            self.dequeue(waiter)

    def dequeue(self, waiter: AnyWaiter) -> None:
        """Note that the waiter is not in the queue any more. Another one becomes the poller."""
        if self.queue.get(waiter.token) is waiter:
            self.queue.pop(waiter.token, None)
        if self.poller is waiter:
            next_poller = self._choose_poller()
            if next_poller is not None:
                next_poller.mailbox.put(CHECK)

    def _choose_poller(self) -> AnyWaiter | None:
        """Have one of those in the queue be the poller. Returns it; None where the queue is empty."""
        while True:
            self.poller = chosen = min(reversed(list(self.queue.values())), key=_interval_of, default=None)
            if chosen is None:
                if not self.queue:
                    return None
            elif self.queue.get(chosen.token) is chosen:
                return chosen

    def contended(self) -> list[AnyWaiter]:
        """The waiters that are in the queue now, in order."""
        return list(self.queue.values())

    def concerned(self) -> list[AnyWaiter]:
        """The waiters that ask when the key has changed: those in the queue have the poller ask for them.

        A waiter whose posted request has no reply yet learns it from that.
        """
        return [
            waiter
            for waiter in self.all()
            if waiter is self.poller or not (waiter.asked_at or waiter.token in self.queue)
        ]

    def all(self) -> list[AnyWaiter]:
        """The waiters of the lock."""
        return list(self.waiters.values())
