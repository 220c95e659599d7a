"""What `Redlock` for threads and for asyncio share of holding on terms: renewal, loss, whoever finds it out.

Without terms there is no tenure, and a Redlock is what `redlock.py` says. With terms, the tenure says until when the
lock is held; what the lease says is true while its holder prolongs it himself, and no longer.

Nothing here takes a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref

from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.majority_lease import QuorumLease
from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding
from redislock_fast._lease.telling import end_telling
from redislock_fast._lease.tenure import Tenure
from redislock_fast._procedures.keeper import Keeper
from redislock_fast._procedures.redlock import RedlockBase
from redislock_fast._procedures.redlock_renewal import QuorumTenure, reason_of_round
from redislock_fast._procedures.steps import Ask, Steps
from redislock_fast._protocol.majority import AcquireRound, TakenRound
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock, drift_s

__all__ = ["KeepingRedlockBase"]


class KeepingRedlockBase(RedlockBase, Keeper):
    """A Redlock that may be held on terms. The parameters stand on the classes that users name."""

    # ---- validity ----

    def _valid_until(self, local: Holding) -> float:
        tenure = self._tenure_of(local)
        if tenure is None:
            return super()._valid_until(local)
        return -math.inf if tenure.loss is not None else tenure.deadline

    # ---- acquire ----

    def _acquiring_on_terms(
        self,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        attempts: list[AcquireRound],
        task: asyncio.Task[object] | None = None,
    ) -> Steps:
        """Attempt until the lock is held or the time is up, and keep it. Returns whether it is held.

        Args:
            local: the caller's holding.
            sleep: as for `acquire`, and so the others.
            blocking: likewise.
            blocking_timeout: likewise.
            attempts: gets the last one.
            task: the task that holds, to be cancelled for a loss; None in threads.
        """
        lease: QuorumLease | None = yield from self._acquiring(local, sleep, blocking, blocking_timeout, attempts)
        if lease is None:
            return False
        if self._terms is not None:
            try:
                self._begin(self._terms, local, lease, task)
            except BaseException:  # no thread can be started: the lock is not held
                self._undo_unnoticed(local, attempts)
                raise
        local.quorum = lease
        local.hold(lease.token)
        return True

    def _begin(self, terms: Terms, local: Holding, lease: QuorumLease, task: asyncio.Task[object] | None) -> None:
        """Before the lease is noted: who shares the holding must not release what has no tenure yet."""
        before, local.tenure = local.tenure, None
        end_telling(self)
        if before is not None:
            self._end_lost(before, LossReason.DELETED)
        local.tenure = tenure = QuorumTenure(self, self._keys, lease, self._ttl_ms, terms, self._quorum)
        tenure.task = None if task is None else weakref.ref(task)
        self._keep(tenure)

    def _forget(self, local: Holding, token: bytes) -> None:
        tenure = local.tenure
        if tenure is not None and tenure.token == token:
            self._let_go(tenure)
            tenure.end()
            local.tenure = None
        super()._forget(local, token)

    # ---- release, extend, reacquire ----

    def _lease(self, local: Holding, verb: str) -> QuorumLease:
        self._refuse_in_callback(verb, local)
        return super()._lease(local, verb)

    def _releasing(self, local: Holding) -> Steps:
        self._refuse_in_callback("release", local)
        tenure, lease = self._tenure_of(local), local.quorum
        if tenure is None or lease is None:
            yield from super()._releasing(local)
            return
        self._let_go(tenure)
        if not tenure.end():
            self._forget(local, tenure.token)
            raise self._lost_error("release", tenure)
        if tenure.expires_at is not None:
            lease.times = (lease.valid_until, min(lease.ends_at, tenure.expires_at))
        try:
            yield from super()._releasing(local)
        except LockNotOwnedError as error:
            yield from self._raising_lost("release", tenure, error, by_release=True)

    def _prolonging(self, local: Holding, lease: QuorumLease, verb: str, ttl_ms: int) -> Steps:
        tenure = self._tenure_of(local)
        if tenure is None:
            yield from super()._prolonging(local, lease, verb, ttl_ms)
            return
        if tenure.loss is not None:
            raise self._lost_error(verb, tenure)
        try:
            with tenure.prolonged_by_hand(local, ttl_ms):
                lease.times = (tenure.deadline, lease.ends_at)
                try:
                    prolonged = yield from self._setting_lease(local, lease, ttl_ms)
                finally:  # as a lease of the usual ttl that is valid as long
                    local.lease = (lease.token, lease.valid_until + drift_s(self._ttl_ms / 1000))
        except GeneratorExit:  # the task was dropped: whoever collects garbage runs this, outside of the loop
            raise
        except BaseException:
            if tenure.loss is None:
                self._keep(tenure)  # it may have made the lease shorter
            raise
        if not prolonged or tenure.loss is not None:  # what was told of meanwhile does not come back
            self._quorum.undo([tenure.entry])
            yield from self._raising_lost(verb, tenure)
        self._keep(tenure)

    # ---- loss ----

    def _raising_lost(
        self, verb: str, tenure: Tenure, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> Steps:
        """Find out why the lock was lost, and tell, unless that has been done, or another has given the lock back."""
        self._let_go(tenure)
        if tenure.loss is None and (by_release or not tenure.over):
            reason = yield from self._finding_out(tenure)
            if tenure.lose(reason, by_release):
                self._tell(tenure, reason)
        raise (self._lost(verb) if tenure.loss is None else self._lost_error(verb, tenure)) from error

    def _finding_out(self, tenure: Tenure) -> Steps:
        """Why it is lost. Sends `GET name` where the lease has not ended."""
        if clock() >= tenure.deadline:
            return LossReason.EXPIRED
        round_ = TakenRound(self._keys, tenure.token, self._limit_s)
        with contextlib.suppress(Exception):  # then nobody knows
            yield Ask(round_)
        return reason_of_round(round_)
