"""Renewal for tasks: one renewer for each server and event loop, which has a thread renew off the loop where it can.

What it renews by itself, it renews with a timer of the loop and a task for each batch: leases with `auto_renew="loop"`,
Redlocks, and those of clients as which no thread can connect. So it does with leases that are only watched.

Thread safety: everything belongs to the loop's thread, except that any thread may call `let_go` and `dropped`:
these use atomic methods of dict alone, and hand the loop what must be sent. Any thread may call `drop`, too. The thread
of `off_loop.py` uses `watch` by its own rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import sys
import weakref
from collections.abc import Coroutine
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from redislock_fast._lease.callbacks import in_callback
from redislock_fast._lease.holding import Holding
from redislock_fast._lease.lease import DUE_AFTER, Lease
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._renewal.off_loop import LoopWatch, OffLoopRenewer
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
from redislock_fast._transport.loop.driver import AsyncTransport, drive
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LockLostError, LossReason, shown_held
from redislock_fast._util.times import clock

logger = logging.getLogger(__name__)


def _renew_on_server(transport: AsyncTransport, due: list[Lease], losses: list[LeaseLoss]) -> Coroutine[Any, Any, None]:
    return drive(transport, renew_leases(due, losses))


class LoopRenewer:
    """Renews the leases of one loop's tasks on one server, and watches for their loss.

    Args:
        transport: of the server, or of several. It is referenced weakly, so that it goes with the last lock on it.
        loop: the running loop.
        burst: renews a batch of leases there.
        off_loop: renews leases in a thread; None: no thread can.

    Attributes:
        watch: by which that thread finds out whether the loop runs.
    """

    def __init__(
        self,
        transport: weakref.ref[Any],
        loop: asyncio.AbstractEventLoop,
        burst: RenewalBatch,
        off_loop: OffLoopRenewer | None,
    ) -> None:
        self.watch = LoopWatch(loop)
        self._off_loop = off_loop
        self._transport = transport
        self._loop = loop
        self._generation = fork.generation()
        self._renewal_batch = burst
        self._schedule = Schedule()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Future[Any]] = set()  # the loop itself does not keep them alive

    def keep(self, lease: Lease) -> None:
        """Renew a lease and watch it from now on, or from its new time on."""
        if self._off_loop is not None and lease.options.is_off_loop and _may_leave(lease):
            try:
                self._off_loop.keep(lease, self)
            except RuntimeError:  # no thread can be started
                lease.record.side = None
            else:
                return
        record = record_of(lease, self.dropped)
        if record.is_over:
            return
        if self._schedule.add(record, due_at(lease, clock()), (lease.ttl_ms or 0) / 3000):
            self._set_timer()

    def list_holding(self, holding: Holding, ttl_ms: int, sent_at: float) -> None:
        """Look at a holding in time: the request that began its lease of `ttl_ms` milliseconds left at `sent_at`."""
        held = holding.held
        if self._off_loop is not None and held is not None and held[4].is_off_loop:
            try:
                self._off_loop.list_holding(holding, ttl_ms, sent_at, self)
            except RuntimeError:  # as above
                pass
            else:
                return
        holding.renewer, holding.listed_ms = self, ttl_ms
        look_by = self._schedule.list_holding(holding, sent_at + DUE_AFTER * ttl_ms / 1000)
        if look_by is not None:
            self._look_by(look_by)

    def let_go(self, lease: Lease) -> None:
        """Stop the renewal of a lease, forever."""
        record = record_of(lease, self.dropped)
        record.is_over = True
        self._remove(record)

    def _remove(self, record: Record) -> None:
        if record.side is None or self._off_loop is None:
            self._schedule.remove(record)
        else:
            self._off_loop.forget_soon(record)

    def dropped(self, record: Record) -> None:
        """Clean up what a dropped lease has left, and warn. From any thread."""
        if sys.is_finalizing() or not record.was_dropped():
            return
        self._remove(record)  # it may be the last reference to other objects
        self.drop(record.key, record.token, record.entry)

    def drop(self, key: bytes, token: bytes, entry: Any) -> None:
        """Clean up a lock whose object was dropped without a release, and warn."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: its lock ends with its ttl
            self._loop.call_soon_threadsafe(self._clean_up, [entry])
        warn_of_drop(key, token)

    def _clean_up(self, entries: list[Any]) -> None:
        transport = self._transport()
        if transport is not None and entries:
            with contextlib.suppress(RedisError):  # a cluster without a node for the key: the lock ends with its ttl
                transport.clean_up(entries)

    def _set_timer(self) -> None:
        next_at = self._schedule.next_at()
        if next_at is not None and next_at < self._schedule.looks_at:
            self._look_by(next_at)

    def _look_by(self, look_by: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._schedule.looks_at = look_by
        self._timer = self._loop.call_later(max(look_by - clock(), 0.0), self._wake)

    def _wake(self) -> None:
        if self._generation != fork.generation():  # a forked child runs its parent's loop
            return
        self._timer = None
        self._schedule.looks_at = math.inf
        for lease, _ in self._schedule.take_listed():
            self.keep(lease)
        due = self._schedule.take(clock())
        transport = self._transport()
        if due and transport is not None:
            losses: list[LeaseLoss] = []
            self._report_dangers(due)
            burst = self._run(self._renewal_batch(transport, due, losses))
            burst.add_done_callback(partial(self._settle, due, losses))
        self._set_timer()

    def _run(self, work: Any) -> asyncio.Future[Any]:
        task: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _settle(self, due: list[Lease], losses: list[LeaseLoss], burst: asyncio.Future[Any]) -> None:
        """Finish a renewal batch, also one that was cancelled with all the loop's tasks, perhaps before it began."""
        fault = None if burst.cancelled() else burst.exception()
        if fault is not None:  # a bug of ours must not end all renewal
            logger.error("Locks could not be renewed.", exc_info=fault)
        late = late_entries(losses)
        self._report_dangers(due)
        for lease in due:
            self.keep(lease)
        self._clean_up(late)
        self.report_losses(losses)

    def report_losses(self, losses: list[LeaseLoss]) -> None:
        """Tell of each loss."""
        for lease, reason in losses:
            self.report_loss(lease, reason)

    def report_loss(self, lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss, and cancel the holding task where that is asked for.

        A task that has found out the loss itself, by a call, is not cancelled, nor is one that is releasing.
        """
        lock, on_lost, holder = lease.lock(), lease.options.on_lost, lease.task
        if on_lost is not None and lock is not None:
            try:
                with in_callback(lease):
                    answer = on_lost(lock, reason)
                    if inspect.isawaitable(answer):
                        self._run(_logged(answer, lease, reason))
            except Exception:
                logger.exception(ON_LOST_FAILED, shown_held(lease.key, lease.token), reason)
        task = None if holder is None or lease.over else holder()
        if lease.options.cancel_on_lost and task is not None and task is not asyncio.current_task():
            name = None if lock is None else lock.name
            text = f"The {shown_held(lease.key, lease.token)} was lost while it was held"
            task.cancel(LockLostError(text, lock_name=name, reason=reason))

    report_loss_elsewhere = report_loss
    """The same: a callback for tasks never waits in its caller."""

    def call_on_wanted(self, lease: Lease) -> None:
        """Call `on_wanted` for a lock that another caller waits for."""
        self._call("on_wanted", lease)

    def _report_dangers(self, leases: list[Lease]) -> None:
        """Call `on_danger` for those of the leases that are in danger."""
        for lease in endangered(leases):
            self._call("on_danger", lease)

    def report_danger(self, lease: Lease) -> None:
        """Call `on_danger` for a lease that was in danger when the loop was asked to tell."""
        if lease.loss is None and not lease.over:
            self._call("on_danger", lease)

    def _call(self, what: str, lease: Lease) -> None:
        """Call this callback with the lock of a lease."""
        lock, callback = lease.lock(), getattr(lease.options, what)
        if callback is None or lock is None:
            return
        try:
            answer = callback(lock)
            if inspect.isawaitable(answer):
                self._run(_awaited(what, answer, lease))
        except Exception:
            logger.exception("%s failed for the %s.", what, shown_held(lease.key, lease.token))


def _may_leave(lease: Lease) -> bool:
    """Whether a thread may renew the lease: not where the loop has taken it over."""
    return lease.record is None or lease.record.side is not None


async def _awaited(what: str, answer: Any, lease: Lease) -> None:
    try:
        await answer
    except Exception:
        logger.exception("%s failed for the %s.", what, shown_held(lease.key, lease.token))


async def _logged(answer: Any, lease: Lease, reason: LossReason) -> None:
    try:
        await answer
    except Exception:
        logger.exception(ON_LOST_FAILED, shown_held(lease.key, lease.token), reason)


class _LoopRenewers:
    """The renewers of one transport, by loop."""

    def __init__(self, transport: Any, burst: RenewalBatch) -> None:
        self._transport = weakref.ref(transport)
        self._renewal_batch = burst
        self._renewers: dict[asyncio.AbstractEventLoop, LoopRenewer] = {}
        # In greenlets, a thread of ours would wait for what the loop does.
        is_of_server = burst is _renew_on_server and not patching.is_patched()
        self._beside = transport.new_beside() if is_of_server else None
        self._off_loop = None if self._beside is None else OffLoopRenewer(self._beside)
        fork.forget_in_child(self)

    def forget(self) -> None:
        """In a forked child: drop all leases, which the parent renews."""
        self._renewers = {}

    def of_running_loop(self) -> LoopRenewer:
        loop = asyncio.get_running_loop()
        renewer = self._renewers.get(loop)
        if renewer is None:
            for other in list(self._renewers):
                if other.is_closed():
                    self._renewers.pop(other, None)
            fresh = LoopRenewer(self._transport, loop, self._renewal_batch, self._off_loop)
            renewer = self._renewers.setdefault(loop, fresh)
            transport = self._transport()
            if self._beside is not None and transport is not None:
                transport.of_running_loop().at_end(self._beside)
        return renewer


_renewers: Registry[_LoopRenewers] = Registry()


def renewer_of(transport: Any, burst: RenewalBatch = _renew_on_server) -> LoopRenewer:
    """The one renewer of a transport and the running loop."""
    renewers = _renewers.get(id(transport))
    if renewers is None:
        renewers = _renewers.add(transport, lambda transport: _LoopRenewers(transport, burst))
    return renewers.of_running_loop()
