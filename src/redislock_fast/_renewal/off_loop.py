"""Renewal for tasks off their event loop: a thread for each server renews, and the loop tells of what was lost.

A loop that is busy for longer than a ttl keeps its locks by that. The thread asks the loop, with each renewal, whether
it runs (`LoopWatch`): the locks of a loop that is closed, or has not answered for `max_stall`, are renewed no more.
Decision 0023 has the reasons.

Thread safety: as in `threads.py`. A lease, its holding and its record may be used by the owner's loop and the renewer's
thread at once, as by the threads of an owner and of a renewer: by the rules in `_lease/lease.py` and
`_lease/holding.py`.
Nothing else of the loop is touched in the thread; `call_soon_threadsafe` hands over what the loop must tell.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from redislock_fast._lease.lease import Lease
from redislock_fast._procedures.loss import LeaseLoss, lose
from redislock_fast._renewal.schedule import Record, endangered, record_of, replace_record
from redislock_fast._renewal.threads import Renewer
from redislock_fast._transport.beside import Beside
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock


class LoopWatch:
    """Finds out, for a renewer's thread, whether an event loop runs.

    Thread safety: one renewer's thread at a time calls `stalled_s`. It assigns `_asked_at` where that is None, and only
    the loop assigns None then, once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_at: float | None = None  # when the loop was asked, in the clock's seconds; None: it has answered

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed: it will never run again."""
        return self._loop.is_closed()

    @property
    def is_running(self) -> bool:
        """Whether the loop runs, or is stuck in what it runs. One that is stopped may run again."""
        return self._loop.is_running()

    def stalled_s(self, now: float) -> float:
        """How long the loop has certainly not run, in seconds. Asks it again where it has answered."""
        if self._asked_at is None:
            self._asked_at = now
            self.call(self._answer)
        asked_at: float | None = self._asked_at  # the loop may have answered meanwhile
        return 0.0 if asked_at is None else now - asked_at

    def _answer(self) -> None:
        self._asked_at = None

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call a function. A loop that is closed calls nothing any more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)


class _Side(Protocol):
    """The renewer of a loop, as far as the thread needs it.

    Attributes:
        watch: of the loop.
    """

    watch: LoopWatch

    def keep(self, lease: Lease) -> None:
        """Renew a lease, in the loop or off it."""

    def dropped(self, record: Record) -> None:
        """Clean up what a dropped lease has left."""

    def report_losses(self, losses: list[LeaseLoss]) -> None:
        """Tell of losses, in the loop."""

    def report_danger(self, lease: Lease) -> None:
        """Call `on_danger`, in the loop."""


class OffLoopRenewer(Renewer):
    """Renews the leases that the tasks of any event loop have on one server.

    Args:
        beside: the server. It is referenced weakly.
    """

    def __init__(self, beside: Beside) -> None:
        super().__init__(beside)

    def keep(self, lease: Lease, side: Any = None) -> None:
        """As `Renewer.keep`. A lease of a loop that is closed goes on in this one, where its lock is used."""
        record: Record | None = lease.record
        if record is not None and record.side is not None and record.side.watch.is_closed:
            self.forget_soon(replace_record(lease, side.dropped, side))
        super().keep(lease, side)

    def _record_of(self, lease: Lease, side: _Side) -> Record:
        return record_of(lease, side.dropped, side)

    def _keep_listed(self, lease: Lease, side: _Side) -> None:
        if lease.options.is_off_loop:
            super()._keep_listed(lease, side)
        else:  # the owner has listed its holding for another lock object
            side.watch.call(side.keep, lease)

    def _has(self, record: Record) -> bool:
        return record.side is not None  # else the loop has taken the lease over

    def forget(self) -> None:
        super().forget()
        self._accepted: deque[Record] = deque()

    def _add(self, lease: Lease) -> None:
        """Schedule a lease; offer it to the loop, where the thread has failed and could never connect."""
        side = lease.record.side
        if side is not None:
            super()._add(lease)
            if self._is_for_loop(lease):
                side.watch.call(self._accept, lease.record)

    def _is_for_loop(self, lease: Lease) -> bool:
        beside = self._transport()
        return lease.troubled and beside is not None and not beside.has_connected and not lease.record.is_over

    def _accept(self, record: Record) -> None:
        """In the loop, which runs: have the thread give the lease up. Until then, the thread tries on."""
        self._accepted.append(record)
        self._ask(0.0)

    def _take_changes(self) -> None:
        super()._take_changes()
        for _ in range(len(self._accepted)):
            lease = self._accepted.popleft()()
            if lease is not None and lease.record.side is not None and self._is_for_loop(lease):
                side = lease.record.side
                self._schedule.remove(lease.record)
                lease.record.side = None
                side.watch.call(side.keep, lease)

    def _rest(self) -> None:
        beside = self._transport()
        if beside is not None:
            beside.rest()

    def _to_renew(self, due: list[Lease], losses: list[LeaseLoss]) -> list[Lease]:
        """Those whose loop runs, as far as is known; and those that are lost by the clock."""
        now = clock()
        to_renew: list[Lease] = []
        for lease in due:
            record = lease.record
            side = record.side
            if side is None:  # as above
                continue
            watch: LoopWatch = side.watch
            if watch.is_closed:
                record.is_over = True  # nobody holds it any more: it ends with its ttl
            elif now >= lease.deadline:
                to_renew.append(lease)
            elif not watch.is_running:
                self._schedule.add(record, lease.retry_at(now), (lease.ttl_ms or 0) / 3000)
            elif watch.stalled_s(now) >= lease.max_stall_s:
                lose(lease, LossReason.STALLED, losses)
            else:
                to_renew.append(lease)
        return to_renew

    def _report_losses(self, losses: list[LeaseLoss]) -> None:
        by_side: dict[_Side, list[LeaseLoss]] = defaultdict(list)
        for loss in losses:
            by_side[loss.lease.record.side].append(loss)
        for side, its_losses in by_side.items():
            side.watch.call(side.report_losses, its_losses)

    def _report_dangers(self, leases: list[Lease]) -> None:
        for lease in endangered(leases):
            side: _Side = lease.record.side
            side.watch.call(side.report_danger, lease)
