"""Batches that are held on options: each lock has a lease of its own, which the renewer renews and watches.

Thread safety: as for the batch, which one thread or task uses at a time. The leases are shared with the renewer, by the
rules in `_lease/lease.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from redislock_fast._batch.plan import BatchLease, Group, Name
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options, check_callback
from redislock_fast._procedures.loss import LeaseLoss, find_out_why, lose
from redislock_fast._protocol.steps import Steps
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock

OnLost = Callable[[Any, Name, LossReason], object]


def batch_options(
    auto_renew: bool, max_hold: float | None, on_lost: OnLost | None, ttl_ms: int | None
) -> Options | None:
    """The options of a batch's locks; None where they make no difference.

    Raises:
        TypeError: `on_lost` cannot be called.
        ValueError: options that do not go together, or an impossible time.
    """
    if not auto_renew and max_hold is None and on_lost is None:
        return None
    check_callback("on_lost", on_lost)
    for_lock = None if on_lost is None else partial(_call_on_lost, on_lost)
    options = Options(auto_renew=auto_renew, max_hold=max_hold, on_lost=for_lock)
    options.observers = ()  # a batch reports nothing else
    options.check(ttl_ms, thread_local=True, for_tasks=False)
    return options


class _BatchLock:
    """One lock of a batch: what its lease refers to.

    Attributes:
        batch: a weak reference to the batch.
        name: as the caller has given it.
        expiry: the token, and until when the lock is certainly held by the batch's last request.
        lease: the lease.
    """

    __slots__ = ("__weakref__", "batch", "expiry", "lease", "name")

    def __init__(self, batch: Any, index: int, expires_at: float | None, options: Options) -> None:
        lease: BatchLease = batch._lease  # noqa: SLF001
        plan = lease.plan
        self.batch = weakref.ref(batch)
        self.name = plan.names[index]
        self.expiry: tuple[bytes | None, float | None] = (lease.token, expires_at)
        self.lease = Lease(weakref.ref(self), plan.keys[index], lease.token, plan.ttl_ms, expires_at, options)


def _call_on_lost(on_lost: OnLost, lock: _BatchLock, reason: LossReason) -> object:
    batch = lock.batch()
    return None if batch is None else on_lost(batch, lock.name, reason)


class BatchWatch:
    """The leases of a batch's locks.

    Args:
        batch: the batch.
        groups: what it holds.
        options: on which it is held.
        renewer: of the batch's server or cluster.
    """

    def __init__(self, batch: Any, groups: Sequence[Group], options: Options, renewer: Any) -> None:
        self._renewer = renewer
        self._locks = {
            index: _BatchLock(batch, index, group.expires_at, options) for group in groups for index in group.indexes
        }
        try:
            for lock in self._locks.values():
                if lock.lease.is_watched:
                    renewer.keep(lock.lease)
        except BaseException:  # no thread can be started: nothing is held
            self._end(self._locks)
            raise

    def note_renewals(self, groups: Sequence[Group]) -> None:
        """Note until when the locks of each group are held by now."""
        for group in groups:
            ends = [self._locks[index].lease.expires_at for index in group.indexes]
            group.expires_at = min((end for end in ends if end is not None), default=None)

    def note_request(self, group: Group) -> None:
        """Note until when the locks of a group are held by the batch's own request."""
        for index in group.indexes:
            lock = self._locks[index]
            lock.expiry = (lock.lease.token, group.expires_at)

    @contextlib.contextmanager
    def prolonged(self, groups: Sequence[Group], new_ttl_ms: int | None) -> Iterator[None]:
        """A context in which the batch extends or reacquires these groups; see `Lease.prolonged_by_hand`."""
        with contextlib.ExitStack() as stack:
            for group in groups:
                for index in group.indexes:
                    lock = self._locks[index]
                    stack.enter_context(lock.lease.prolonged_by_hand(lock, new_ttl_ms))
            yield

    def end(self, groups: Sequence[Group]) -> None:
        """End the renewal of locks that are being released."""
        for group in groups:
            self._end(group.indexes)

    def _end(self, indexes: Any) -> None:
        for index in indexes:
            lease = self._locks[index].lease
            self._renewer.let_go(lease)
            lease.end()

    def held(self, index: int, result: bool) -> bool:
        """Whether a lock was held until now: a lost lock stays lost, whatever its key holds."""
        return result and self._locks[index].lease.loss is None

    def report_losses(self, indexes: Sequence[int]) -> Steps:
        """Find out why locks on one server were lost, and report each loss once."""
        leases = [lease for index in indexes if (lease := self._locks[index].lease).loss is None]
        losses: list[LeaseLoss] = []
        unclear: list[Lease] = []
        for lease in leases:
            self._renewer.let_go(lease)
            if clock() >= lease.deadline:
                lose(lease, LossReason.EXPIRED, losses, by_release=True)
            else:
                unclear.append(lease)
        if unclear:
            yield from find_out_why(unclear, losses, by_release=True)
        for loss in losses:
            self._renewer.report_loss(*loss)
