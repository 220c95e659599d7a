"""Renewal for threads: one thread for each server, while locks are held there whose options need it.

Thread safety: the renewer's thread alone uses the schedule, except `list_holding`, and assigns `looks_at`. Any thread
appends a record to `_changed`, or lists a holding, then reads `looks_at`, and where that is too late, appends its own
time to `_asked` and wakes the renewer's thread. That one first sets `looks_at` to `math.inf`, and then looks at the
records and holdings. So it sees what was changed, or is asked. `_woken` is a lock of the system, which each thread may
release: the renewer's thread sleeps on it. Of the threads that could start one, the one that takes out the entry of
`_may_start` does; a thread that ends puts it back, and then looks once more. Of two threads that were started because
of an interrupt, one takes the entry of `_may_work`.

There is no mutex: a signal handler may interrupt a thread at any line, and wait for a lock that another thread cannot
release without this renewer; and an interrupt must not leave it taken.

Each `on_lost` callback runs in a thread of its own: it may block, so no renewal and no other callback may wait for it.
In a pool, blocked callbacks would use up the threads, and a thread would keep the locks that a callback has acquired.

A C extension that holds the GIL delays renewal, too: see docs/how-to/holding.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from redislock_fast._lease.callbacks import in_callback
from redislock_fast._lease.holding import Holding
from redislock_fast._lease.lease import DUE_AFTER, Lease
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._renewal.schedule import (
    ON_LOST_FAILED,
    Record,
    RenewalBatch,
    Schedule,
    due_at,
    endangered,
    late_entries,
    record_of,
    renew_leases,
    warn_of_drop,
)
from redislock_fast._transport.base import Registry
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._transport.threads.starting import start_thread
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LossReason, shown_held
from redislock_fast._util.times import clock

logger = logging.getLogger(__name__)

_MOST_CHANGED = 1024
"""After so many changes, the thread looks at them: they take memory."""

_LINGER_S = 1.0  # how long the thread lives on with nothing to do: longer than a thread takes to start


def _renew_on_server(transport: ThreadServerTransport, due: list[Lease], losses: list[LeaseLoss]) -> None:
    drive(transport, renew_leases(due, losses))


class Renewer(patching.Adaptable):
    """Renews the leases on one server, and watches for their loss.

    Args:
        transport: of the server, or of several. It is referenced weakly, so that it goes with the last lock on it.
        burst: renews a batch of leases there.
    """

    def __init__(self, transport: Any, burst: RenewalBatch = _renew_on_server) -> None:
        self._transport = weakref.ref(transport)
        self._renewal_batch = burst
        self.forget()
        fork.forget_in_child(self)
        patching.adapt_later(self)

    def forget(self) -> None:
        """In a forked child: drop all leases, which the parent renews."""
        self._schedule = Schedule()
        self._changed: deque[Record] = deque()
        self._asked: deque[float] = deque()
        self._make_locks()

    def _make_locks(self) -> None:
        self._woken = threading.Lock()
        self._woken.acquire()
        self._may_start = [None]
        self._may_work = [None]
        self._schedule.looks_at = math.inf

    def wake(self) -> None:
        """Wake the thread, if it sleeps."""
        try:  # noqa: SIM105  # `suppress` is Python code, which an interrupt may end before the release
            self._woken.release()
        except RuntimeError:  # it is awake already
            pass

    def adapt(self) -> None:
        self._make_locks()

    def resume(self) -> None:
        if self._changed or self._schedule.has_listed or self._schedule.next_at() is not None:
            self._look_by(0.0)

    def keep(self, lease: Lease, side: Any = None) -> None:
        """Renew a lease and watch it from now on, or from its new time on.

        Args:
            lease: the lease.
            side: as for `Record`.

        Raises:
            RuntimeError: no thread can be started for that.
        """
        self._changed.append(self._record_of(lease, side))
        self._look_by(due_at(lease, clock()))

    def _record_of(self, lease: Lease, side: Any) -> Record:  # noqa: ARG002  # of tasks alone
        return record_of(lease, self._dropped)

    def list_holding(self, holding: Holding, ttl_ms: int, sent_at: float, side: Any = None) -> None:
        """Look at a holding in time: the request that began its lease of `ttl_ms` milliseconds left at `sent_at`.

        Raises:
            RuntimeError: as for `keep`.
        """
        holding.renewer, holding.listed_ms = self if side is None else side, ttl_ms
        look_by = self._schedule.list_holding(holding, sent_at + DUE_AFTER * ttl_ms / 1000)
        if look_by is not None:
            self._look_by(look_by)

    def let_go(self, lease: Lease) -> None:
        """Stop the renewal of a lease, forever."""
        record = record_of(lease, self._dropped)
        record.is_over = True
        self.forget_soon(record)

    def _dropped(self, record: Record) -> None:
        if sys.is_finalizing() or not record.was_dropped():
            return
        self.forget_soon(record)
        self.drop(record.key, record.token, record.entry)

    def forget_soon(self, record: Record) -> None:
        """Have the thread take a record out of the schedule when it looks next, or now if there are many."""
        self._changed.append(record)
        if len(self._changed) >= _MOST_CHANGED:
            self._ask(0.0)

    def _look_by(self, look_by: float) -> None:
        """Have a thread look by then at what was changed before this call."""
        if look_by < self._schedule.looks_at:
            self._start()
            self._ask(look_by)

    def _ask(self, look_by: float) -> None:
        try:
            self._asked.append(look_by)
            self.wake()
        except BaseException:  # an interrupt
            self.wake()
            raise

    def _takes_start(self) -> bool:
        try:
            self._may_start.pop()
        except IndexError:
            return False
        return True

    def _start(self) -> None:
        """Start a thread if there is none."""
        if not self._takes_start():
            return
        try:
            start_thread("renewal", self._work)
        except BaseException:  # none can be started; or an interrupt, perhaps just after it was started
            self._may_start[:] = [None]
            raise

    def drop(self, key: bytes, token: bytes, entry: Any) -> None:
        """Clean up a lock whose object was dropped without a release, and warn."""
        self._clean_up([entry])
        warn_of_drop(key, token)

    def _clean_up(self, entries: list[Any]) -> None:
        transport = self._transport()
        if transport is not None and entries:
            with contextlib.suppress(RedisError):  # a cluster without a node for the key: the lock ends with its ttl
                transport.clean_up(entries)

    @staticmethod
    def report_loss(lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss."""
        report_loss(lease, reason)

    @staticmethod
    def report_loss_elsewhere(lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss without the caller, for which it may wait."""
        report_losses_in_threads([LeaseLoss(lease, reason)])

    @patching.own_thread
    def _work(self) -> None:
        in_force = patching.in_force
        is_left = True
        while is_left:
            try:
                self._may_work.pop()
            except IndexError:
                return
            try:
                self._schedule.looks_at = clock() + _LINGER_S
                self._sleep(in_force)
                self._look_again_and_again(in_force)
            finally:
                self._schedule.looks_at = math.inf
                self._may_work[:] = self._may_start[:] = [None]
            if patching.in_force is not in_force:  # `resume` starts another thread
                return
            # What a thread has changed that has seen this one working:
            is_left = (len(self._changed) > 0 or self._schedule.has_listed) and self._takes_start()

    def _look_again_and_again(self, in_force: Any) -> None:
        schedule = self._schedule
        was_idle = False
        while patching.in_force is in_force:
            schedule.looks_at = math.inf  # before it looks: a thread that changes something now asks for another look
            self._asked.clear()
            is_idle = not (schedule.has_listed or self._changed)
            for lease, side in schedule.take_listed():
                self._keep_listed(lease, side)
            self._take_changes()
            lease = None  # type: ignore[assignment]  # else it would live until another lease is due
            due = schedule.take(clock())
            if due:
                self._renew(due)
            else:
                next_at = schedule.next_at()
                is_idle = is_idle and next_at is None
                if is_idle and was_idle:
                    self._rest()
                    return
                was_idle = is_idle
                schedule.looks_at = clock() + _LINGER_S if next_at is None else next_at
                self._sleep(in_force)
            del due  # as above

    def _keep_listed(self, lease: Lease, side: Any) -> None:
        self._record_of(lease, side)
        self._add(lease)

    def _rest(self) -> None:
        """Nothing is renewed: the thread is about to end."""

    def _take_changes(self) -> None:
        for _ in range(len(self._changed)):
            record = self._changed[0]
            lease = None if record.is_over else record()
            if lease is not None:
                self._add(lease)
            elif self._has(record):
                self._schedule.remove(record)
            self._changed.popleft()  # last, so that an interrupt loses no record

    def _has(self, record: Record) -> bool:  # noqa: ARG002  # of tasks alone
        """Whether the record belongs to this renewer's schedule."""
        return True

    def _add(self, lease: Lease) -> None:
        """Schedule a lease, instead of at its earlier time."""
        record = lease.record
        if not record.is_over:
            self._schedule.add(record, due_at(lease, clock()), (lease.ttl_ms or 0) / 3000)

    def _sleep(self, in_force: Any) -> None:
        """Sleep until it is time to look, until an earlier time for which another thread asks, or until a patch."""
        schedule = self._schedule
        while patching.in_force is in_force:
            while self._asked:
                schedule.looks_at = min(schedule.looks_at, self._asked.popleft())
            left_s = schedule.looks_at - clock()
            if left_s <= 0:
                return
            self._woken.acquire(timeout=min(left_s, threading.TIMEOUT_MAX))

    def _renew(self, due: list[Lease]) -> None:
        transport = self._transport()
        if transport is None:
            return
        losses: list[LeaseLoss] = []
        try:
            due = self._to_renew(due, losses)
            self._report_dangers(due)
            self._renewal_batch(transport, due, losses)
        except Exception:  # a bug of ours must not end all renewal
            logger.exception("Locks could not be renewed.")
        late = late_entries(losses)
        self._report_dangers(due)
        for lease in due:
            self._add(lease)
        self._clean_up(late)
        self._report_losses(losses)

    def _to_renew(self, due: list[Lease], losses: list[LeaseLoss]) -> list[Lease]:  # noqa: ARG002  # of tasks alone
        """Those of the leases that are to be renewed. The others are scheduled anew, or lost and added to `losses`."""
        return due

    def _report_losses(self, losses: list[LeaseLoss]) -> None:
        report_losses_in_threads(losses)

    def _report_dangers(self, leases: list[Lease]) -> None:
        """Call `on_danger` for those in danger, each in a thread of its own, or here if need be."""
        for lease in endangered(leases):
            if not _is_started(_call, "on_danger", lease):
                _call("on_danger", lease)


def report_losses_in_threads(losses: list[LeaseLoss]) -> None:
    """Call `on_lost` for each loss, in a thread of its own, without waiting for any of them.

    Where no thread can be started, the callback runs in the thread that would have started it.
    """
    losses = [loss for loss in losses if loss.lease.options.on_lost is not None]
    if losses and not _is_started(_report_each, losses):
        _report_each(losses)


def _report_each(losses: list[LeaseLoss]) -> None:
    """Call `on_lost` for the last loss, after starting threads for the others: many take too long for the renewer."""
    waiting = [loss for loss in losses[:-1] if not _is_started(report_loss, *loss)]
    for loss in [*waiting, losses[-1]]:
        report_loss(*loss)


def _is_started(work: Callable[..., None], *args: Any) -> bool:
    """Start a thread for a callback; False where none can be started. As a daemon, it does not delay the exit."""
    try:
        start_thread("lost", work, *args)
    except RuntimeError:
        return False
    return True


def call_on_wanted(lease: Lease) -> None:
    """Call `on_wanted` for a lock that another caller waits for, in a thread of its own.

    Where no thread can be started, it is not called: this is the thread that reads for all callers, which must not
    wait for what users' code waits for.
    """
    _is_started(_call, "on_wanted", lease)


def _call(what: str, lease: Lease) -> None:
    """Call this callback with the lock of a lease. An exception of the callback is logged."""
    lock, callback = lease.lock(), getattr(lease.options, what)
    if callback is None or lock is None:
        return
    try:
        callback(lock)
    except Exception:
        logger.exception("%s failed for the %s.", what, shown_held(lease.key, lease.token))


def report_loss(lease: Lease, reason: LossReason) -> None:
    """Call `on_lost` for a loss. An exception of the callback is logged."""
    lock = lease.lock()
    on_lost = lease.options.on_lost
    if on_lost is None or lock is None:
        return
    try:
        with in_callback(lease):
            on_lost(lock, reason)
    except Exception:
        logger.exception(ON_LOST_FAILED, shown_held(lease.key, lease.token), reason)


_renewers: Registry[Renewer] = Registry()


def renewer_of(transport: Any, burst: RenewalBatch = _renew_on_server) -> Renewer:
    """The one renewer of a transport."""
    return _renewers.get(id(transport)) or _renewers.add(transport, lambda transport: Renewer(transport, burst))
