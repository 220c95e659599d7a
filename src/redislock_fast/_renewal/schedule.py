"""Renewal: schedules leases, and renews all leases that are due on one server in one batch.

Rules: a renewal is compare-only and never recreates a lost lock. It is retried until the lease ends. A lost lock stays
lost: requests that may still be executed for it are cleaned up. There is one renewer for each server, so a frozen
server delays no renewal on another one.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from redislock_fast._lease.holding import Holding
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.prolonging import mutex
from redislock_fast._procedures.loss import (
    LeaseLoss,
    Verdict,
    attempt_renewal,
    find_out_why,
    ignoring_errors,
    limit_s,
    renewable,
)
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import shown_held
from redislock_fast._util.times import clock

_MOST_AT_ONCE = 1024
"""How many requests of a renewal batch are under way at once, as in a batch of locks."""

_random = random.SystemRandom()  # a user may have seeded the module's own, and forked processes have it alike

_MOST_LISTED = 1024
"""After so many new entries, the renewer looks at the holdings: they take memory, and most are over."""

_GRAIN = 1 / 8
"""Leases that are due within this part of an interval are renewed together."""


RenewalBatch: TypeAlias = "Callable[[Any, list[Lease], list[LeaseLoss]], Any]"
"""Renews the leases that are due on a transport, and adds losses to the list. For a loop, it returns a coroutine."""


class Record(weakref.ref[Lease]):
    """A schedule's reference to a lease: enough to clean up when the lock object was dropped.

    Attributes:
        entry: what must be cleaned up then.
        key: the lock's name on the wire.
        token: the lock's token.
        pid: the process that may clean up.
        side: the renewer of the owner's event loop, where a thread renews the lease for that; None: in all other cases.
            The loop assigns None where no thread can be started, and the thread where it cannot connect.
        ticks: when the lease is due, in the schedule's milliseconds; None: it is not scheduled.
        is_over: whether the lease has ended for the renewer.
    """

    __slots__ = ("entry", "is_over", "key", "pid", "side", "ticks", "token")

    def __new__(cls, lease: Lease, dropped: Callable[[Any], None], side: Any = None) -> Record:  # noqa: ARG004  # below
        """Make a weak reference that calls `dropped`."""
        return super().__new__(cls, lease, dropped)

    def __init__(self, lease: Lease, dropped: Callable[[Any], None], side: Any = None) -> None:  # noqa: ARG002  # above
        self.side = side
        self.entry = lease.entry
        self.key = lease.key
        self.token = lease.token
        self.pid = os.getpid()
        self.ticks: int | None = None
        self.is_over = False

    def was_dropped(self) -> bool:
        """Whether the lease ended because its lock object was dropped, in this process.

        In a forked child, the leases of the parent's other threads are dropped before the fork is noted in the child.
        """
        if self.is_over or self.pid != os.getpid():
            return False
        self.is_over = True
        return True


def record_of(lease: Lease, dropped: Callable[[Any], None], side: Any = None) -> Record:
    """The renewer's reference to a lease. It is made now, unless another thread has just made it."""
    fresh = None if lease.record is not None else Record(lease, dropped, side)
    with mutex.lock:
        if fresh is not None and lease.record is None:
            fresh.is_over = lease.over
            lease.record = fresh
        record: Record = lease.record
    return record


def replace_record(lease: Lease, dropped: Callable[[Any], None], side: Any) -> Record:
    """Make a new reference to a lease whose present one is of a renewer that has ended. Returns the former one."""
    fresh = Record(lease, dropped, side)
    with mutex.lock:
        former: Record = lease.record
        former.is_over = True
        fresh.is_over = lease.over or lease.loss is not None
        lease.record = fresh
    return former


ON_LOST_FAILED = "on_lost failed for the %s, which was lost (%s)."
"""What is logged then: `shown_held`, and the reason."""


def warn_of_drop(key: bytes, token: bytes) -> None:
    """Warn that a lock object or a permit was dropped. Where warnings are errors, this raises."""
    warnings.warn(f"{shown_held(key, token)} was dropped without a release", ResourceWarning, stacklevel=2)


class Schedule:
    """The leases of one renewer, by the time when they are due.

    An acquire that needs no lease only lists its holding. The renewer looks at the holdings before any of them is due,
    and adds the leases of those that are still held.

    Ticks are milliseconds of the clock. Leases that are due at about the same time share a tick, so that adding and
    removing take one dict operation, and leases are renewed in batches.

    Thread safety: the renewer's thread uses it, or that of its loop. A finalizer may interrupt that thread; it only
    adds or removes a record of its own. In another thread, it may remove one. Any thread may call `list_holding`: it
    first appends the holding and then reads `looks_at`, while the renewer first sets `looks_at` to `math.inf` and then
    looks at the holdings. So the renewer sees the holding, or is woken.

    Attributes:
        looks_at: when the renewer will next take the leases that are due, in the clock's seconds; `math.inf`: never.
    """

    def __init__(self) -> None:
        self._due: dict[int, dict[int, Record]] = {}  # by tick, and by the record's id
        self._ticks: list[int] = []  # a heap; at some, nothing may be due any more
        self._taken = 0  # the tick up to which all records were taken
        self._listed: deque[weakref.ref[Holding]] = deque()
        self.looks_at = math.inf

    def list_holding(self, holding: Holding, look_by: float) -> float | None:
        """Have the renewer look at a holding. Returns until when it must be woken for that; None: it looks in time."""
        self._listed.append(weakref.ref(holding))
        if len(self._listed) >= _MOST_LISTED:
            look_by = clock()
        return look_by if look_by < self.looks_at else None

    @property
    def has_listed(self) -> bool:
        """Whether there are holdings that the renewer has not looked at."""
        return len(self._listed) > 0

    def take_listed(self) -> Iterator[tuple[Lease, Any]]:
        """The leases of the listed holdings that have not ended and have no record, and who renews each."""
        for _ in range(len(self._listed)):
            holding = self._listed[0]()
            lease = None if holding is None else holding.lease_to_renew()
            if holding is not None and lease is not None and lease.record is None:
                yield lease, holding.renewer
            self._listed.popleft()  # last, so that an interrupt loses no holding

    def add(self, record: Record, due_at: float, interval_s: float) -> bool:
        """Schedule a record, instead of at its earlier time. Returns whether the renewer must be woken."""
        self.remove(record)
        grain = 1 << max(int(interval_s * 1000 * _GRAIN).bit_length() - 1, 0)
        ticks = max(int(due_at * 1000) // grain * grain, 0)
        if ticks <= self._taken:  # rounded down, it would be taken again and again before its time
            ticks = math.ceil(due_at * 1000)
        record.ticks = ticks
        if ticks not in self._due:
            heapq.heappush(self._ticks, ticks)
        self._due.setdefault(ticks, {})[id(record)] = record
        return ticks < self.looks_at * 1000

    def remove(self, record: Record) -> None:
        """Remove a record from the schedule."""
        if record.ticks is not None:
            self._due.get(record.ticks, {}).pop(id(record), None)
            record.ticks = None

    def take(self, now: float) -> list[Lease]:
        """Remove the leases that are due now from the schedule. Returns them."""
        due: list[Lease] = []
        self._taken = int(now * 1000)
        while self._ticks and self._ticks[0] <= self._taken:
            for record in list(self._due.pop(heapq.heappop(self._ticks), {}).values()):  # `remove` may have found it
                record.ticks = None
                lease = record()
                if lease is not None:
                    due.append(lease)
        return due

    def next_at(self) -> float | None:
        """When the next lease is due, in the clock's seconds; None: never."""
        while self._ticks and not self._due.get(self._ticks[0]):
            self._due.pop(heapq.heappop(self._ticks), None)
        return self._ticks[0] / 1000 if self._ticks else None


def late_entries(losses: list[LeaseLoss]) -> list[Any]:
    """End all lost locks for the renewer. Returns the entries of those for which a renewal may still be executed."""
    for lease, _ in losses:
        lease.record.is_over = True
    return [lease.record.entry for lease, reason in losses if lease.may_be_left(reason)]


def due_at(lease: Lease, now: float) -> float:
    """When a lease is due next, in the clock's seconds."""
    if lease.troubled or lease.busy or lease.renewing:
        return lease.retry_at(now)
    return lease.due_at(now, _random.random())


def endangered(leases: list[Lease]) -> list[Lease]:
    """Those of which `on_danger` must be told now: before they are renewed, and after that."""
    now = clock()
    return [lease for lease in leases if lease.is_in_danger(now)]


# ---- renewal batches ----


def renew_leases(leases: list[Lease], losses: list[LeaseLoss]) -> Steps:
    """Renew those of the due leases that can be renewed. Adds leases that are found to be lost to `losses`, once."""
    open_ones = renewable(leases, losses)
    if not open_ones:
        return
    parts: Sequence[Sequence[int]] | None = None
    with ignoring_errors():
        parts = yield Do("split", [lease.key for lease in open_ones], limit_s(open_ones, clock()))
    if parts is None:
        for lease in open_ones:
            lease.troubled = True
        return
    for part in parts:
        for at in range(0, len(part), _MOST_AT_ONCE):
            yield from _renew_batch([open_ones[index] for index in part[at : at + _MOST_AT_ONCE]], losses)


def _renew_batch(leases: list[Lease], losses: list[LeaseLoss]) -> Steps:
    """Renew leases of one server."""
    now = clock()
    asked = _requests(leases, now)
    if not asked:
        return
    operation = Pipeline([reacquire for _, reacquire in asked])

    def verdicts() -> list[Verdict]:
        unanswered = set(operation.unfinished)
        return [_verdict(reacquire, index in unanswered) for index, (_, reacquire) in enumerate(asked)]

    gone = yield from attempt_renewal(
        [lease for lease, _ in asked], Do("execute", operation, limit_s(leases, now)), verdicts, losses
    )
    for lease, reacquire in asked:
        lease.contended = reacquire.contended
    if gone:
        yield from find_out_why(gone, losses)


def _requests(leases: list[Lease], now: float) -> list[tuple[Lease, Reacquire]]:
    asked: list[tuple[Lease, Reacquire]] = []
    for lease in leases:
        ttl_ms = lease.begin_renewal(now)
        if ttl_ms is not None:
            asked.append((lease, Reacquire(lease.key, lease.token, ttl_ms, lease.contended)))
    return asked


def _verdict(reacquire: Reacquire, is_unanswered: bool) -> Verdict:
    expires_at = reacquire.sent_at + (reacquire.ttl_ms or 0) / 1000 if reacquire.sent_at else None
    return Verdict(None if is_unanswered else reacquire.result, expires_at)
