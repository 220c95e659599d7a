"""The lease of a lock that is held on options, from its acquire until it is released or lost.

A lease belongs to the owner that has acquired, and ends with the lock object or the thread. The renewer has only weak
references, so it does not keep a dropped lock alive.

Thread safety: the owner and the renewer change `expires_at`, `ceiling`, `loss`, `over`, `busy` and `touched` under
`mutex`, and read them without it. Callers that share a lock object change `_releasing` in the same way. Only the
renewer changes `renewing`, `troubled` and `endangered`. Everything else is the owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.kept import KeptKey
from redislock_fast._lease.metrics import Counted, Reports, end_count, report, report_end_later
from redislock_fast._lease.options import Options
from redislock_fast._lease.prolonging import mutex
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock, drift_s

_RENEWED_AT = 2 / 3  # the part of a lease that is left when it is renewed: enough time for two more attempts
_JITTER = 0.1
DUE_AFTER = 1 - _RENEWED_AT - _JITTER / 3
"""The part of a lease before whose end the renewer need not act."""

_LATE = 1 / 2  # the part of the ttl by which a renewal must be late to be worth a warning
_DANGER = 1 / 3
"""The part of the ttl that is left when `on_danger` is called: three attempts or more have failed by then, and what it
stops has the time of as many. Kubernetes' leaders give up with 5 of 15 s left, by default."""

_MOST_STALLED = 3
"""For how many ttls an event loop may not run, by default, until its locks are renewed no more."""

_RETRY = 0.1  # the part of the ttl between two attempts
_UNANSWERED = (LossReason.EXPIRED, LossReason.SERVER_GONE)


class _Expiring(Protocol):
    """The owner, as far as its lease needs it."""

    expiry: tuple[bytes | None, float | None]


class Lease:
    """The lease of a lock that is held on options.

    Args:
        lock: a weak reference to the lock object.
        key: the lock's name on the wire.
        token: the lock's token.
        ttl_ms: the ttl in milliseconds; None: the lock does not expire.
        expires_at: until when the lease is certainly valid, in the clock's seconds.
        options: the lock's options.
        acquired_at: when the lease began, in the clock's seconds; None: now.

    Attributes:
        depth: how often the owner has acquired the lock.
        loss: why the lease was lost; None where it was not.
        over: whether the lock was released, or is being released.
        contended: whether the lock's value is known to have the contended flag.
        renewing: whether a renewal is under way.
        busy: how many calls of the owner that prolong the lease are under way.
        touched: whether such a call has begun since the last renewal began.
        ceiling: when the lease ends if a renewal of unknown outcome is executed after the owner's own request;
            `math.inf` where there is none.
        wanted: whether another caller was heard to wait for the lock, where its options ask for that.
        troubled: whether the last renewal got no reply.
        endangered: whether `on_danger` was called since the last renewal that got one.
        task: the owner's task, where it is to be cancelled for a loss.
        record: the renewer's reference to the lease.
        cached: the `CachedKey` of a lock with `linger`.
        counted: what counts the lock as held; None: nothing does.
    """

    __slots__ = (
        "__weakref__",
        "_margin_s",
        "_releasing",
        "acquired_at",
        "busy",
        "cached",
        "ceiling",
        "contended",
        "counted",
        "depth",
        "endangered",
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
        "wanted",
    )

    def __init__(
        self,
        lock: weakref.ref[Any],
        key: bytes,
        token: bytes,
        ttl_ms: int | None,
        expires_at: float | None,
        options: Options,
        acquired_at: float | None = None,
    ) -> None:
        self.lock = lock
        self.key = key
        self.token = token
        self.ttl_ms = ttl_ms
        self.expires_at = expires_at
        self._margin_s = drift_s((ttl_ms or 0) / 1000)
        self.options = options
        self.acquired_at = clock() if acquired_at is None else acquired_at
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
        self.endangered = False
        self.wanted = False
        self.task: weakref.ref[asyncio.Task[Any]] | None = None
        self.record: Any = None
        self.cached: KeptKey | None = None
        self.counted: Counted | None = None

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        # The lock object was dropped, or an interrupt came before its end was reported.
        counted = getattr(self, "counted", None)
        if counted is not None and not is_finalizing():
            report_end_later(counted)

    # ---- reports ----

    def report(self, method: str, *args: Any) -> None:
        """Report to what observes the lock; the lock's name comes before the arguments."""
        if self.options.observers:
            lock = self.lock()
            report(self.options.observers, method, self.key if lock is None else lock.name, *args)

    def report_release(self, hold_s: float, success: bool) -> None:
        """Report how long the lock was held, and whether it was until its release: it is not held any more."""
        if self.options.observers:
            reports = self._reports() if self.counted is None else self.counted[0]
            reports.released(self, hold_s, success)

    def _reports(self) -> Reports:
        lock = self.lock()
        return self.options.reports_of(self.key if lock is None else lock.name)

    def report_begin(self, waited_s: float | None = None, attempts: int = 1) -> None:
        """Report that the lock is held; see `Reports.begin`."""
        if self.options.observers:
            self._reports().begin(self, waited_s, attempts)

    # ---- validity ----

    @property
    def deadline(self) -> float:
        """Until when the lock counts as held, in the clock's seconds: less than the lease, since clocks drift."""
        return math.inf if self.expires_at is None else self.expires_at - self._margin_s

    def is_lost(self) -> bool:
        """Whether the lock was lost, as far as is known without asking the server."""
        return self.loss is not None or clock() >= self.deadline

    @property
    def is_endless(self) -> bool:
        """Whether the lock is held until its owner releases it."""
        return self.options.auto_renew and self.options.max_hold_s is None and not self.over and not self.is_lost()

    @property
    def is_watched(self) -> bool:
        """Whether the renewer must watch the lease."""
        return self.options.watches and self.ttl_ms is not None

    def lose(self, reason: LossReason, by_release: bool = False) -> bool:
        """Note that the lock is lost; `by_release`: its own release has found that out.

        Returns False where a loss was noted before, or the lock was released.
        """
        with mutex.lock:
            if self.loss is not None or (self.over and not by_release):
                return False
            self.loss = reason
        if self.cached is not None:
            self.cached.lose(self.token)
        self.report("record_loss", clock() - self.acquired_at, reason)
        end_count(self)
        return True

    def end(self) -> bool:
        """Note that the lock is being released, or given up. Returns False where it was lost."""
        with mutex.lock:
            self.over = True
            if self.record is not None:
                self.record.is_over = True
            return self.loss is None

    def begin_release(self, release: object) -> bool:
        """Note that this release is sent. Returns False where another one is under way, or has succeeded."""
        with mutex.lock:
            if self._releasing is None:
                self._releasing = release
            return self._releasing is release

    def release_failed(self, release: object) -> None:
        """Note that this release has an unknown outcome, so that it can be called again."""
        with mutex.lock:
            if self._releasing is release:
                self._releasing = None

    @property
    def entry(self) -> Any:
        """The entry with which the transport cleans up the lock."""
        return self.key, self.token

    def may_be_left(self, reason: LossReason) -> bool:
        """Whether the server may still have the token after this loss, as a renewal of unknown outcome may leave it."""
        return self.options.auto_renew and reason in _UNANSWERED

    # ---- renewal ----

    def _ends_at(self) -> float:
        """When renewal ends, in the clock's seconds."""
        return math.inf if self.options.max_hold_s is None else self.acquired_at + self.options.max_hold_s

    @property
    def max_stall_s(self) -> float:
        """For how many seconds the owner's event loop may not run until the lease is given up."""
        most_s = self.options.max_stall_s
        return _MOST_STALLED * (self.ttl_ms or 0) / 1000 if most_s is None else most_s

    def renewal_ms(self, now: float) -> int | None:
        """The ttl that a renewal would set now, in milliseconds; None where that would not prolong the lease."""
        if not self.options.auto_renew or self.ttl_ms is None or self.expires_at is None:
            return None
        ttl_ms = min(self.ttl_ms, int((self._ends_at() - now) * 1000)) if self.options.max_hold_s else self.ttl_ms
        return ttl_ms if ttl_ms > 0 and now + ttl_ms / 1000 > self.expires_at else None

    def due_at(self, now: float, chance: float) -> float:
        """When the renewer must act next, in the clock's seconds.

        Args:
            now: the clock's time.
            chance: a random number from 0 to 1, so that many processes do not renew at the same time.
        """
        deadline = self.deadline
        if self.expires_at is None or self.ttl_ms is None:
            return deadline
        share = _RENEWED_AT + _JITTER / 3 * (2 * chance - 1)
        due = self.expires_at - share * self.ttl_ms / 1000
        return min(due, deadline) if self.renewal_ms(max(now, due)) is not None else deadline

    def is_late(self, now: float) -> bool:
        """Whether the renewal that begins now should have begun half a ttl ago, though nothing has failed.

        One that is due at once, for a lease that was attached or that the owner has shortened, is not late.
        """
        if self.troubled or self.touched or self.busy or self.renewal_ms(now) is None:
            return False
        ttl_s, expires_at = (self.ttl_ms or 0) / 1000, self.expires_at or now
        return expires_at - now < (_RENEWED_AT - _LATE) * ttl_s and now - self.acquired_at > _LATE * ttl_s

    def retry_at(self, now: float) -> float:
        """When to try again after a renewal without a reply."""
        retry_at = min(now + _RETRY * (self.ttl_ms or 0) / 1000, self.deadline)
        return min(retry_at, self.danger_at) if now < self.danger_at else retry_at

    @property
    def danger_at(self) -> float:
        """When to call `on_danger` if renewals fail until then, in the clock's seconds; `math.inf`: not any more."""
        if self.options.on_danger is None or self.endangered:
            return math.inf
        return self.deadline - _DANGER * (self.ttl_ms or 0) / 1000

    def is_in_danger(self, now: float) -> bool:
        """Whether `on_danger` must be called now; True once in a series of renewals that fail."""
        if not self.troubled:
            self.endangered = False
        elif self.danger_at <= now < self.deadline and self.loss is None and not self.over:
            self.endangered = True
            return True
        return False

    def begin_renewal(self, now: float) -> int | None:
        """Begin a renewal. Returns the ttl that it sets, in milliseconds; None where none must be sent."""
        ttl_ms = self.renewal_ms(now)
        with mutex.lock:
            if self.busy or self.renewing or self.over or self.loss is not None:
                return None
            if ttl_ms is not None:
                self.renewing = True
                self.touched = False
                if now + ttl_ms / 1000 < self.ceiling:  # noqa: PLR1730  # no call under the mutex
                    self.ceiling = now + ttl_ms / 1000
            return ttl_ms

    def renewed(self, expires_at: float, certainly: bool) -> None:
        """Note a renewal that was executed certainly, or may still be, and by which the lease ends at `expires_at`."""
        with mutex.lock:
            if self.loss is not None:
                return
            if certainly and not self.touched:
                self.expires_at = expires_at
                self.ceiling = math.inf
            elif self.expires_at is not None and expires_at < self.expires_at:
                self.expires_at = expires_at

    @contextlib.contextmanager
    def prolonged_by_hand(self, owner: _Expiring, new_ttl_ms: int | None) -> Iterator[None]:
        """A context in which the owner extends or reacquires the lock: no renewal begins in it.

        A renewal that is under way, or got no reply, may be executed before or after the owner's request, so only the
        shorter one of both leases is certain. For the same reason, only the shorter one of the old and the new lease is
        certain until the owner has a reply.

        Args:
            owner: the owner; the lease ends when its `expiry` says after the request.
            new_ttl_ms: the ttl that the request sets, in milliseconds; None: the request adds to the ttl.
        """
        is_counted = False
        cut_to = math.inf if new_ttl_ms is None else clock() + new_ttl_ms / 1000
        try:
            with mutex.lock:
                if not (self.renewing or self.troubled):
                    self.ceiling = math.inf
                self.busy, is_counted = self.busy + 1, True
                self.touched = True
                # Where others prolong it too, their `expiry` has been set already.
                if self.busy == 1 and owner.expiry != (self.token, self.expires_at):
                    owner.expiry = (self.token, self.expires_at)
                if self.expires_at is not None and cut_to < self.expires_at:
                    self.expires_at = cut_to
            yield
        except LockNotOwnedError:
            owner.expiry = (self.token, self.expires_at)  # the new ttl may have been set, and have ended since
            raise
        finally:
            if is_counted:
                with mutex.lock:
                    self.busy -= 1
                    token, expires_at = owner.expiry
                    if self.loss is None and token == self.token and expires_at is not None:
                        self.expires_at = expires_at if expires_at < self.ceiling else self.ceiling  # noqa: FURB136
