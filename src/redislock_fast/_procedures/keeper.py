"""What `Lock` and `Redlock` share of holding on options: the lease, its renewal, and what is done when it is lost.

Nothing here takes a lock.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.ownership import Holding
from redislock_fast._lease.telling import told_of
from redislock_fast._lease.tenure import Tenure
from redislock_fast._procedures.steps import Steps
from redislock_fast._util.errors import LockLostError, LossReason
from redislock_fast._util.times import clock

__all__ = ["Keeper"]


class Keeper:
    """A lock that has, while it is held on options, a lease beside its token."""

    @property
    @abstractmethod
    def name(self) -> Any:
        """The key."""

    @abstractmethod
    def _held(self) -> Holding:
        """What the caller holds and may release."""

    @abstractmethod
    def _renewer(self) -> Any:
        """The renewer of what is held on this lock's server."""

    @abstractmethod
    def _tell(self, tenure: Tenure, reason: LossReason) -> None:
        """Call back for a loss."""

    @abstractmethod
    def _finding_out(self, tenure: Tenure) -> Steps:
        """Returns why the lease was lost."""

    @abstractmethod
    def _lost(self, verb: str) -> LockNotOwnedError:
        """The error for a lock that is not held any more, where nothing is known of its lease."""

    def _tenure_of(self, local: Holding) -> Tenure | None:
        """The lease of what is held now."""
        tenure = local.tenure
        return tenure if tenure is not None and tenure.token == local.token else None

    def _keep(self, tenure: Tenure) -> None:
        """Renew it, and watch for its loss, as its options say."""
        if tenure.is_watched:
            self._renewer().keep(tenure)

    def _let_go(self, tenure: Tenure) -> None:
        """Renew it no more."""
        if tenure.is_watched:
            self._renewer().let_go(tenure)

    def _tell_of_former(self, tenure: Tenure, reason: LossReason) -> None:
        """Call back for the loss of what was held before the acquire that has found it out."""
        self._tell(tenure, reason)

    def _refuse_in_callback(self, verb: str, local: Holding) -> None:
        """In a callback for a loss, refuse what needs the lock: what others hold by this object is not the callback's.

        Raises:
            LockLostError: the callback has not acquired the lock anew, and `local` is not what was lost.
        """
        told = told_of(self)
        if told is not None and self._tenure_of(local) is not told:
            raise self._lost_error(verb, told)

    def _end_lost(self, tenure: Tenure, reason: LossReason) -> None:
        """End what is held no more, and tell, unless that was told. `reason` is why if its lease has not ended."""
        self._let_go(tenure)
        if clock() >= tenure.deadline:
            reason = LossReason.EXPIRED
        if tenure.lose(reason):
            self._tell_of_former(tenure, reason)

    def _raising_lost(
        self, verb: str, tenure: Tenure, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> Steps:
        """Find out why the lock was lost, and tell, unless that has been done, or another has given the lock back.

        Raises:
            redis.exceptions.LockNotOwnedError: in any case.
        """
        self._let_go(tenure)
        if tenure.loss is None and (by_release or not tenure.over):
            reason = yield from self._finding_out(tenure)
            if tenure.lose(reason, by_release):
                self._tell(tenure, reason)
        raise (self._lost(verb) if tenure.loss is None else self._lost_error(verb, tenure)) from error

    def _lost_error(self, verb: str, tenure: Tenure) -> LockLostError:
        reason = tenure.loss or LossReason.EXPIRED
        return LockLostError(f"Cannot {verb} a lock that was lost: {reason}", lock_name=self.name, reason=reason)

    def _say_why(self, error: BaseException | None) -> None:
        """Give a cancel that the loss of the lock has caused that cause."""
        tenure = self._held().tenure
        if tenure is None or not tenure.terms.cancel_on_lost or tenure.loss is None:
            return
        if isinstance(error, asyncio.CancelledError) and error.__cause__ is None:
            error.__cause__ = self._lost_error("hold on to", tenure)
