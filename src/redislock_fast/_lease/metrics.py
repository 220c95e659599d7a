"""`Metrics`: the calls by which a lock reports its acquisitions, failures, losses and releases."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from redislock_fast._util.errors import LossReason

__all__ = ["FailureMetrics", "Metrics", "report"]

logger = logging.getLogger(__name__)


class Metrics(Protocol):
    """Gets each acquisition and each release of a lock.

    Called after the server's reply, by the thread or in the event loop that acquires or releases, and by many threads
    at once. An implementation must be quick, and must neither block nor raise.
    """

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """A lock was acquired.

        Args:
            name: the lock's name, as it was given to the lock.
            seconds: from the call until the lock was acquired, waiting included.
            attempts: the number of attempts; 1 where the lock was free.
        """

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """A lock was released.

        Args:
            name: the lock's name, as it was given to the lock.
            hold_s: from the acquire to the release, in seconds.
            success: False where the lock was lost before: it expired, was deleted, or has another owner.
        """


class FailureMetrics(Metrics, Protocol):
    """Gets failures and losses, too. A lock calls these methods where its `metrics` has them."""

    def record_failure(self, name: str | bytes, seconds: float, attempts: int, error: BaseException | None) -> None:
        """A lock was not acquired.

        Args:
            name: the lock's name, as it was given to the lock.
            seconds: from the call until it was given up, waiting included.
            attempts: the number of attempts.
            error: what `acquire` raised, also KeyboardInterrupt or CancelledError; None where it returned False, since
                another owner had the lock.
        """

    def record_loss(self, name: str | bytes, hold_s: float, reason: LossReason) -> None:
        """A lock was found to be lost: by the clock, by a renewal, or by a release or extend.

        A release of a lost lock is recorded by `record_release`, too.

        Args:
            name: the lock's name, as it was given to the lock.
            hold_s: from the acquire until the loss was found out, in seconds.
            reason: why.
        """


def report(metrics: Any, method: str, *args: Any) -> None:
    """Call a method of a user's `metrics`, if it has that. An error is logged: it must not cost the lock."""
    call = getattr(metrics, method, None)
    if call is not None:
        try:
            call(*args)
        except Exception:
            logger.exception("metrics failed.")
