"""One holding of a lock on terms: what is known of it from its acquire until it is given back or lost.

A tenure belongs to the holding of the thread or task that acquired: with the lock object, or the thread, it goes. Who
renews it has only weak references, so nobody keeps alive what nobody holds.

Who may touch what: `expires_at`, `ceiling`, `loss`, `over`, `busy` and `touched` are changed under `mutex`, by the
holder and by who renews, and read without it. `_releasing` is for holders who share a lock object, likewise. `renewing`
and `troubled` are changed by who renews alone. Everything else is the holder's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner
from redislock_fast._lease.prolonging import mutex
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock, drift_s

__all__ = ["Lease"]

_RENEWED_AT = 2 / 3  # what is left of a lease when it is renewed: two more attempts fit in before it ends
_JITTER = 0.1
_RETRY = 0.1  # of the ttl, between two attempts
_UNANSWERED = (LossReason.EXPIRED, LossReason.SERVER_GONE)


class Lease:
    """One holding of a lock.

    Args:
        lock: the lock object.
        key: its name on the wire.
        token: its token.
        ttl_ms: its ttl; None: it does not expire.
        expires_at: until when the lease is certainly valid, in the clock's seconds.
        options: how it is held.

    Attributes:
        lock: a weak reference.
        begun: when it began, in the clock's seconds.
        depth: how often it was entered.
        loss: why it was lost.
        over: whether it is given back, or about to be.
        contended: whether the lock is known to be marked.
        renewing: whether a renewal is under way.
        busy: how many prolongations by its holder are under way.
        touched: whether its holder has begun to prolong it himself since the last renewal began.
        ceiling: until when the lease is valid by a renewal that may be executed behind what the holder does himself;
            `math.inf` where there is none.
        troubled: whether the last renewal got no answer.
        task: the holding task, where it is to be cancelled.
        record: what who renews it knows it by.
    """

    __slots__ = (
        "__weakref__",
        "_margin_s",
        "_releasing",
        "begun",
        "busy",
        "ceiling",
        "contended",
        "depth",
        "expires_at",
        "key",
        "lock",
        "loss",
        "options",
        "over",
        "record",
        "renewing",
        "task",
        "token",
        "touched",
        "troubled",
        "ttl_ms",
    )

    def __init__(
        self, lock: Any, key: bytes, token: bytes, ttl_ms: int | None, expires_at: float | None, options: Options
    ) -> None:
        self.lock = weakref.ref(lock)
        self.key = key
        self.token = token
        self.ttl_ms = ttl_ms
        self.expires_at = expires_at
        self._margin_s = drift_s((ttl_ms or 0) / 1000)
        self.options = options
        self.begun = clock()
        self.depth = 1
        self.loss: LossReason | None = None
        self.over = False
        self._releasing: object = None
        self.contended = False
        self.renewing = False
        self.busy = 0
        self.touched = False
        self.ceiling = math.inf
        self.troubled = False
        self.task: weakref.ref[asyncio.Task[Any]] | None = None
        self.record: Any = None

    # ---- validity ----

    @property
    def deadline(self) -> float:
        """Until when it counts as held, in the clock's seconds: less than the lease, for clocks that drift."""
        return math.inf if self.expires_at is None else self.expires_at - self._margin_s

    def is_lost(self) -> bool:
        """Whether it was lost, as far as is known without asking the server."""
        return self.loss is not None or clock() >= self.deadline

    @property
    def is_endless(self) -> bool:
        """Whether it is held until its holder gives it back."""
        return self.options.auto_renew and self.options.max_hold_s is None and not self.over and not self.is_lost()

    @property
    def is_watched(self) -> bool:
        """Whether it is to be looked after while it is held."""
        return self.options.watches and self.ttl_ms is not None

    def lose(self, reason: LossReason, by_release: bool = False) -> bool:
        """Note that it is lost. Returns whether that is news.

        Args:
            reason: why.
            by_release: whether its release has found that out; else, what is released is not lost any more.
        """
        with mutex.lock:
            if self.loss is not None or (self.over and not by_release):
                return False
            self.loss = reason
            return True

    def end(self) -> bool:
        """Give it back. Returns False where it has been lost."""
        with mutex.lock:
            self.over = True
            return self.loss is None

    def begin_release(self, release: object) -> bool:
        """This release is to be sent. Returns False where another is under way, or has had its verdict."""
        with mutex.lock:
            if self._releasing is None:
                self._releasing = release
            return self._releasing is release

    def release_failed(self, release: object) -> None:
        """If this one was sent, nobody knows whether it was executed: it can be called again."""
        with mutex.lock:
            if self._releasing is release:
                self._releasing = None

    @property
    def entry(self) -> Any:
        """What its transport needs to undo it."""
        return self.key, self.token

    def may_be_left(self, reason: LossReason) -> bool:
        """Whether something of it may stand on the server although it was lost, as by a renewal that comes late."""
        return self.options.auto_renew and reason in _UNANSWERED

    # ---- renewal ----

    def _ends_at(self) -> float:
        """When it is not renewed any more."""
        return math.inf if self.options.max_hold_s is None else self.begun + self.options.max_hold_s

    def renewal_ms(self, now: float) -> int | None:
        """The ttl that a renewal sets now; None where it would prolong nothing."""
        if not self.options.auto_renew or self.ttl_ms is None or self.expires_at is None:
            return None
        ttl_ms = min(self.ttl_ms, int((self._ends_at() - now) * 1000)) if self.options.max_hold_s else self.ttl_ms
        return ttl_ms if ttl_ms > 0 and now + ttl_ms / 1000 > self.expires_at else None

    def due_at(self, now: float, chance: float) -> float:
        """When to look after it next, in the clock's seconds.

        Args:
            now: the clock's time.
            chance: a random number from 0 to 1, so that many processes do not renew all at once.
        """
        deadline = self.deadline
        if self.expires_at is None or self.ttl_ms is None:
            return deadline
        share = _RENEWED_AT + _JITTER / 3 * (2 * chance - 1)
        due = self.expires_at - share * self.ttl_ms / 1000
        return min(due, deadline) if self.renewal_ms(max(now, due)) is not None else deadline

    def retry_at(self, now: float) -> float:
        """When to try again after a renewal that got no answer."""
        return min(now + _RETRY * (self.ttl_ms or 0) / 1000, self.deadline)

    def begin_renewal(self, now: float) -> int | None:
        """The ttl that a renewal sets now; None where none is to be sent."""
        with mutex.lock:
            if self.busy or self.renewing or self.over or self.loss is not None:
                return None
            ttl_ms = self.renewal_ms(now)
            if ttl_ms is not None:
                self.renewing = True
                self.touched = False
                self.ceiling = min(self.ceiling, now + ttl_ms / 1000)
            return ttl_ms

    def renewed(self, expires_at: float, certainly: bool) -> None:
        """Note what a renewal did, or may yet do.

        Args:
            expires_at: until when the lease is valid by it.
            certainly: whether it was executed.
        """
        with mutex.lock:
            if self.loss is not None:
                return
            if certainly and not self.touched:
                self.expires_at = expires_at
                self.ceiling = math.inf
            elif self.expires_at is not None:
                self.expires_at = min(expires_at, self.expires_at)

    @contextlib.contextmanager
    def prolonged_by_hand(self, owner: Owner, new_ttl_ms: int | None) -> Iterator[None]:
        """While its holder extends or reacquires it himself: no renewal begins.

        One that is under way, or got no answer, may be executed before or behind it: of both leases, only the shorter
        is certain. So it is of the old lease and the new one, until the holder has his answer.

        Args:
            owner: the holding; its lease is taken over in the end.
            new_ttl_ms: the ttl that is set instead of the old one; None: something is added to that.
        """
        begun = False
        try:
            with mutex.lock:
                begun = True
                if not (self.renewing or self.troubled):
                    self.ceiling = math.inf
                self.busy += 1
                self.touched = True
                if self.busy == 1 and owner.expiry != (self.token, self.expires_at):  # else theirs tells what they do
                    owner.expiry = (self.token, self.expires_at)
                if new_ttl_ms is not None and self.expires_at is not None:
                    self.expires_at = min(self.expires_at, clock() + new_ttl_ms / 1000)
            yield
        except LockNotOwnedError:
            owner.expiry = (self.token, self.expires_at)  # the new ttl may have been set, and have ended, before
            raise
        finally:
            if begun:
                with mutex.lock:
                    self.busy -= 1
                    token, expires_at = owner.expiry
                    if self.loss is None and token == self.token and expires_at is not None:
                        self.expires_at = min(expires_at, self.ceiling)
