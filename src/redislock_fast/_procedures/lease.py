"""The lease of a lock that is held on options, of any kind of lock: how it is reentered, reported, lost and ended.

Nothing here acquires or releases a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import Any, Protocol

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.callbacks import lease_of_callback
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.metrics import end_count, report, report_call, report_later
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner, ThreadOwners, current_task
from redislock_fast._lease.task_owner import TaskOwners
from redislock_fast._protocol.steps import Steps
from redislock_fast._util.errors import LockLostError, LossReason, noted, shown, shown_held
from redislock_fast._util.times import clock

logger = logging.getLogger(__name__)

UNLOCKED = "Cannot release a lock that's not owned or is already unlocked."


class LeaseLock(Protocol):
    """A lock, as far as its lease concerns it: a `Lock` or a `Redlock`."""

    @property
    def name(self) -> Any:
        """The key."""

    @property
    def _owners(self) -> Any:
        """The owners of all callers."""

    def remaining(self) -> float:
        """How long the caller's lease is certainly still valid, in seconds; see the public classes."""

    def _held(self) -> Owner:
        """The owner whose lock the caller may use."""

    def _mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""

    def _let_go(self, lease: Lease) -> None:
        """Have the renewer drop the lease."""

    def _report_loss(self, lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss, and cancel the owner's task, as the options say."""

    def _report_former_loss(self, lease: Lease, reason: LossReason) -> None:
        """Report the loss of an earlier lease, which the next acquire has found out."""

    def _is_meant(self, token: Any, held: bytes) -> bool:
        """Whether an acquire with this token, which may be None, may mean the held lock."""

    def _find_out_why(self, lease: Lease) -> Steps:
        """Returns why the lease was lost."""

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        """The error for a lock that is not held any more and has no lease."""


def describe(lock: LeaseLock) -> str:
    """The name and, for the caller, whether the lock is held and for how long. Never the token. Sends nothing."""
    left_s = lock.remaining()
    state = "not held" if left_s <= 0 else "held" if left_s == math.inf else f"held, {left_s:.3f} s left"
    return f"<{type(lock).__name__} {lock.name!r}: {state}>"


def not_entered(name: Any) -> LockError:
    """The error of a `with` whose lock was not acquired."""
    error = LockError("Unable to acquire lock within the time specified", lock_name=name)
    return noted(error, f"of the lock {shown(name)}")


def would_wait_for_itself(name: Any, owner: str) -> LockError:
    """The error of an acquire by the thread or task that holds the lock, without a ttl or renewed."""
    text = f"this {owner} holds the lock {shown(name)} and would wait for itself; reentrant=True lets it enter again"
    return LockError(text, lock_name=name)


def refuse_in_callback(lock: LeaseLock, verb: str, owner: Owner) -> None:
    """Refuse an operation in a callback for a loss: a lock that others hold by this object is not the callback's.

    Raises:
        LockLostError: the callback has not acquired the lock again, and the owner's lease is not the lost one.
    """
    lost = lease_of_callback(lock)
    if lost is not None and (owner.held_lease is not lost or owner is not lock._mine()):
        raise lost_error(lock, verb, lost)


def unlocked_error(lock: LeaseLock, message: str) -> LockError:
    """The error for a caller that holds nothing, and that may use no other task's lock.

    It is logged, too, where the caller is a task that has never held the lock, or outside of tasks: the errors of
    heartbeat tasks, timers and signal handlers are often lost.
    """
    owners = lock._owners
    if isinstance(owners, TaskOwners):
        count = owners.count()
        if count > 1:
            message += f" ({count} other tasks have acquired it by this object: one of them could be meant)"
        if not owners.has_held:
            logger.warning("The lock %s is refused to a task that has not acquired it: %s", shown(lock.name), message)
    note = f"of the lock {shown(lock.name)}, which this lock object does not hold"
    if isinstance(owners, ThreadOwners):
        note += " for this thread. If another thread has acquired it, thread_local=False lets all threads use it"
    return noted(LockError(message, lock_name=lock.name), note)


def end_lost(lock: LeaseLock, lease: Lease, reason: LossReason) -> None:
    """End a lease that was lost, and report the loss once. `reason` counts where the lease has not expired."""
    lock._let_go(lease)
    if clock() >= lease.deadline:
        reason = LossReason.EXPIRED
    if lease.lose(reason):
        lock._report_former_loss(lease, reason)


def raise_lost(
    lock: LeaseLock, verb: str, lease: Lease, error: LockNotOwnedError | None = None, by_release: bool = False
) -> Steps:
    """Find out why the lock was lost, report the loss once, and raise it.

    Where another caller that shares the lock object has released the lock, nothing is reported.

    Raises:
        redis.exceptions.LockNotOwnedError: always.
    """
    lock._let_go(lease)
    if lease.loss is None and (by_release or not lease.over):
        try:
            reason = yield from lock._find_out_why(lease)
        except GeneratorExit:  # the task was dropped: this may be any thread
            raise
        except BaseException:  # cancelled or interrupted: the lock is lost all the same
            report_loss(lock, lease, LossReason.SERVER_GONE, by_release)
            raise
        report_loss(lock, lease, reason, by_release)
    raise (lock._not_owned(verb) if lease.loss is None else lost_error(lock, verb, lease)) from error


def report_loss(lock: LeaseLock, lease: Lease, reason: LossReason, by_release: bool) -> None:
    """Note and report that the lock is lost, unless that was done before."""
    if lease.lose(reason, by_release):
        lock._report_loss(lease, reason)


def lost_error(lock: LeaseLock, verb: str, lease: Lease) -> LockLostError:
    reason = lease.loss or LossReason.EXPIRED
    if lease.task is not None and lease.task() is current_task():  # it knows now: it need not be cancelled
        lease.task = None
    text = f"Cannot {verb} the {shown_held(lock.name, lease.token)}, which was lost: {reason}"
    return LockLostError(text, lock_name=lock.name, reason=reason)


def reenter(lock: LeaseLock, owner: Owner, token: Any = None) -> bool:
    """Acquire a reentrant lock once more. Returns False where this thread or task does not hold it.

    A lock whose release was called is not held, though that may have failed: the server may have executed it.
    """
    lease = owner.held_lease
    if lease is None or lease.over or not lease.options.reentrant or not lock._is_meant(token, lease.token):
        return False
    if lease.is_lost():
        if lease_of_callback(lock) is lease:
            return False
        raise lost_error(lock, "reenter", lease)
    lease.depth += 1
    return True


def leave_once(lock: LeaseLock, lease: Lease) -> bool:
    """Release a lock that was entered more than once. Returns False where it was not."""
    if lease.depth > 1 and lease_of_callback(lock) is not lease:
        lease.depth -= 1
        return True
    return False


# ---- reports ----


def report_failure(
    lock: LeaseLock, options: Options, attempts: int, asked_at: float, error: BaseException | None
) -> None:
    """Report that the lock was not acquired, after so many attempts, for metrics."""
    is_dropped = isinstance(error, GeneratorExit)  # the garbage collector drops the task
    send, asked_s = report_later if is_dropped else report, clock() - asked_at
    send(options.observers, "record_failure", lock.name, asked_s, attempts, error)
    if not is_dropped:
        why = "" if error is None else type(error).__name__
        report_call(options, "did not acquire {} for", lock.name, asked_s, None, why)


def report_release(lock: LeaseLock, lease: Lease, released: bool) -> None:
    """Report how long the lock was held, for metrics and the adaptive ttl."""
    held_s = clock() - lease.acquired_at
    if lease.options.adaptive is not None:
        lease.options.adaptive.observe(lock.name, held_s)
    lease.report_release(held_s, released)
    what = "released {}, held for" if released else "released {}, which was lost before, held for"
    report_call(lease.options, what, lock.name, held_s, lease.token)


def say_why(lock: LeaseLock, error: BaseException | None) -> None:
    """Set the loss of the lock as the cause of the CancelledError that it has led to."""
    if not isinstance(error, asyncio.CancelledError) or error.__cause__ is not None:
        return
    lease = lock._held().lease
    if lease is not None and lease.options.cancel_on_lost and lease.loss is not None:
        error.__cause__ = lost_error(lock, "hold on to", lease)


def forget_lease(owner: Owner, lease: Lease) -> None:
    """End a lease without a release of the lock, in the owner's event loop or outside of any."""
    lease.end()
    lock = lease.lock()
    if lock is not None:
        with suppress(RuntimeError):  # no loop runs here: the renewer drops what is over when it looks next
            lock._let_go(lease)
    end_count(lease)
    owner.lease = None
