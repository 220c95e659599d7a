"""Who holds what: the token and lease of a lock object, by thread, by task, or shared.

`lock.local` is one of these; other projects read and set `lock.local.token`, as on redis-py's.

Who may touch what: a `ThreadOwner` is each thread's own. A `SharedOwner` belongs to whoever has the lock, as
`thread_local=False` asks for; each attribute is assigned as a whole. A `PendingOwner` is one acquire's own. What tasks
hold is in `task_owner.py`.
"""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.prolonging import Prolonging, Prolongings, mutex
from redislock_fast._protocol import commands
from redislock_fast._protocol.commands import Extend, Reacquire
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._lease.lease import Lease
    from redislock_fast._lease.majority_lease import MajorityLease
    from redislock_fast._protocol.majority import MajorityRound
    from redislock_fast._util.times import Limit

__all__ = ["Owner", "PendingOwner", "SharedOwner", "ThreadOwner", "current_task", "twin_of"]


def current_task() -> asyncio.Task[Any] | None:
    """The running task; None outside of tasks."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


class Owner:
    """What one owner holds: the defaults below until it acquires.

    Attributes:
        token: the lock's, None where it is not held.
        expiry: a token, and until when its lease is certainly valid in the clock's seconds; None if it does not expire.
        attempt: the last acquire; by no means the asker's own where the holding is shared.
        brought: the token that the caller of an overridden `do_acquire` has brought himself.
        releasing: the token of a release whose outcome is unknown, and which left while the lease was valid.
        contended: the token of a lock behind which somebody waited when it was granted.
        retries: how often the last acquire polled again.
        prolongings: the requests under way that prolong the lease; None before the first one.
        booked: the lease as they have left it.
        fence: the number of what is held, where it was asked for.
        lease: what is known of what is held on terms.
        quorum: what a Redlock holds under the token.
        round: a Redlock's last operation.
        limit: the deadline of the acquire under way, where an overridden `do_acquire` makes its attempts.
        forgotten_by: where a task's holding stood that was tidied away; who has acquired then calls `hold`.
    """

    if not TYPE_CHECKING:  # mypy takes it for a promise that a holding has no attributes
        __slots__ = ()  # 16 bytes less in each ThreadHolding

    token: bytes | None = None
    expiry: tuple[bytes | None, float | None] = (None, None)
    attempt: commands.Acquire | None = None
    releasing: bytes | None = None
    contended: bytes | None = None
    brought: bytes | None = None
    retries = 0
    prolongings: Prolongings | None = None
    booked: tuple[bytes | None, float | None] | None = None
    fence: int | None = None
    lease: Lease | None = None
    quorum: MajorityLease | None = None
    round: MajorityRound | None = None
    limit: Limit | None = None
    forgotten_by: dict[Any, Any] | None = None

    def expires_at(self, token: bytes) -> float | None:
        """Until when the lease of this token is certainly valid; None where it does not expire or is not known."""
        owner, expires_at = self.expiry
        return expires_at if owner == token else None

    def hold(self, token: bytes | None) -> None:
        """The lock was acquired. A release of unknown outcome was of an earlier holding, by the caller's own token."""
        if token == self.releasing:
            self.releasing = None
        self.token = token

    def begin_prolonging(self, token: bytes, ttl_ms: int | None, added_ms: int = 0) -> Prolonging:
        """A request begins that prolongs the lease of this token: it sets a ttl, or (None) adds to it.

        Others who share the holding may do so at the same time. `prolonged` ends that.
        """
        with mutex.lock:
            book = self.prolongings
            if book is None or book.token != token or not book.under_way:
                book = self.prolongings = Prolongings(token, self.expires_at(token))
            elif self.expiry is not self.booked:  # acquired again with the same token, or renewed
                self._book_others(book)
            one = book.begin(clock(), None if ttl_ms is None else ttl_ms / 1000, added_ms / 1000)
            self._note_lease(book)
            return one

    def prolonged(self, one: Prolonging, operation: Extend | Reacquire, added_ms: int = 0) -> None:
        """The request has ended: it was executed, or not, or nobody knows."""
        with mutex.lock:
            book = self.prolongings
            if book is None or one not in book.under_way:  # of another token by now
                return
            if self.expiry is not self.booked:
                self._book_others(book)
            book.under_way.remove(one)
            if one.ttl_s is not None:
                if operation.result or operation.unsettled:
                    book.set(one, operation.sent_at, operation.result)
            elif operation.result:
                assert isinstance(operation, Extend)
                book.add(one, added_ms / 1000, operation.expires_at, operation.may_cut)
            self._note_lease(book)

    def _book_others(self, book: Prolongings) -> None:
        ends_at = self.expires_at(book.token)
        if ends_at is not None:
            book.cut(ends_at)

    def _note_lease(self, book: Prolongings) -> None:
        lease = book.token, book.ends_at
        # Of another token by now, or not known: then nothing is noted.
        if book.token == self.token and book.ends_at is not None and lease != self.expiry:
            self.expiry = lease
        self.booked = self.expiry

    def note_release(self, operation: commands.Release) -> None:
        """A release has failed, and may have been executed."""
        if operation.may_be_done:
            self.releasing = operation.token

    def is_released(self, operation: commands.Release) -> bool:
        """Whether a release with a verdict, or one before it of unknown outcome, has found the lock held."""
        was_sent = self.releasing == operation.token  # also by another who shares the holding, in the meantime
        if was_sent:
            self.releasing = None
        return operation.result or was_sent

    def mine(self) -> Owner:
        """The holding of whoever asks."""
        return self

    def held(self) -> Owner:
        """The holding that whoever asks may release."""
        return self


class ThreadOwner(Owner, threading.local):
    """What each thread holds."""

    if not TYPE_CHECKING:
        __slots__ = ()


class SharedOwner(Owner, SimpleNamespace):
    """What everybody who has the lock object holds together."""

    __repr__ = object.__repr__  # a SimpleNamespace shows its attributes: the token


class PendingOwner(Owner):
    """What an acquire under way has got: nobody else may release it, or take it for his own, before it is complete.

    Args:
        owner: whose acquire it is.
    """

    def __init__(self, owner: Owner) -> None:
        self.token = owner.token
        self.lease = owner.lease

    def publish(self, owner: Owner) -> None:
        """It is complete."""
        owner.expiry = self.expiry
        owner.contended = self.contended
        owner.fence = self.fence
        owner.lease = self.lease
        owner.hold(self.token)


def twin_of(lock: Any) -> Any:
    """A second handle on a lock: same client, same token."""
    kind: Any = type(lock)
    twin = kind.__new__(kind)
    vars(twin).update(vars(lock))
    return twin
