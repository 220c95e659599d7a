"""The schedule of renewals: what is due when; and what a renewal leaves behind.

Rules: no server, no chance.
"""

from __future__ import annotations

import logging
import weakref

import pytest

from redislock_fast import LossReason
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._procedures.loss import LeaseLoss, Verdict, attempting
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.steps import Do
from redislock_fast._renewal.schedule import Record, Schedule, late_entries, renewing
from redislock_fast._util.times import clock

INTERVAL_S = 10 / 3
TERMS = Options(auto_renew=True)


class _Handle:
    """Stands where a tenure has its lock: something to refer to weakly."""


HANDLE = _Handle()


def lease(ends_at: float = 10.0, options: Options = TERMS) -> Lease:
    """One that is looked after."""
    held = Lease(weakref.ref(HANDLE), b"name", b"token", 10_000, ends_at, options)
    held.record = Record(held, lambda _record: None)
    return held


def test_what_is_due_is_taken_once() -> None:
    schedule, held = Schedule(), lease()
    schedule.add(held.record, 5.0, INTERVAL_S)
    assert schedule.take(1.0) == []
    assert schedule.take(5.0) == [held]
    assert (schedule.take(5.0), schedule.next_at()) == ([], None)


@pytest.mark.parametrize("interval_s", [3.3, 1200.0])
def test_what_is_due_soon_is_not_due_before_its_time(interval_s: float) -> None:
    schedule = Schedule()
    held = lease()
    assert [] == schedule.take(100_000.0)
    assert schedule.add(held.record, 100_000.02, interval_s)
    assert [] == schedule.take(100_000.019)
    assert [held] == schedule.take(100_000.021)


def test_what_is_due_at_about_the_same_time_is_taken_together() -> None:
    schedule, helds = Schedule(), [lease() for _ in range(3)]
    for number, held in enumerate(helds):
        schedule.add(held.record, 5.15 + number / 100, INTERVAL_S)
    assert schedule.take(5.2) == helds


def test_what_came_before_its_time_comes_at_its_time_next() -> None:
    """Else it would come over and over."""
    schedule, held = Schedule(), lease()
    schedule.add(held.record, 5.1, INTERVAL_S)
    early_at = schedule.next_at()
    assert early_at is not None
    assert early_at < 5.1
    assert schedule.take(early_at) == [held]
    schedule.add(held.record, 5.1, INTERVAL_S)
    assert schedule.next_at() == 5.1
    assert (schedule.take(5.0999), schedule.take(5.1)) == ([], [held])


def test_what_is_scheduled_anew_comes_at_its_new_time_only() -> None:
    schedule, held = Schedule(), lease()
    schedule.add(held.record, 5.0, INTERVAL_S)
    schedule.add(held.record, 9.0, INTERVAL_S)
    assert (schedule.take(8.0), schedule.take(9.0)) == ([], [held])


def test_what_is_removed_or_dropped_does_not_come() -> None:
    schedule, removed, dropped = Schedule(), lease(), lease()
    schedule.add(removed.record, 5.0, INTERVAL_S)
    schedule.add(dropped.record, 5.0, INTERVAL_S)
    schedule.remove(removed.record)
    del dropped
    assert (schedule.take(9.0), schedule.next_at()) == ([], None)


@pytest.mark.parametrize("fails_at", [1, 2], ids=["looking for the server", "renewing"])
def test_error_that_somebody_keeps_keeps_no_tenure(fails_at: int) -> None:
    """redis-py's errors keep one another alive; a dropped lock was renewed until the next collection of garbage."""
    held = lease(clock() + 10)
    losses: list[LeaseLoss] = []
    error = ConnectionError("no server")
    steps = renewing([held], losses)
    next(steps)
    if fails_at == 2:
        steps.send([[0]])
    with pytest.raises(StopIteration):
        steps.throw(error)
    left = weakref.ref(held)
    assert (held.troubled, losses) == (True, [])
    del held, steps
    assert left() is None


def test_renewal_that_succeeds_after_the_lease_does_not_revive_it() -> None:
    held = lease(clock() + 10)
    losses: list[LeaseLoss] = []
    steps = renewing([held], losses)
    next(steps)
    step = steps.send([[0]])
    assert step.method == "execute"
    step.args[0].request(Capabilities(), clock())
    assert step.args[0].feed([1], Capabilities())
    held.expires_at = clock()
    with pytest.raises(StopIteration):
        steps.send(None)
    assert losses == [(held, LossReason.EXPIRED)]
    assert held.is_lost()


@pytest.mark.parametrize(
    ("auto_renew", "reason", "is_left"),
    [
        (True, LossReason.EXPIRED, True),
        (True, LossReason.SERVER_GONE, True),
        (True, LossReason.TAKEN, False),
        (False, LossReason.EXPIRED, False),
    ],
)
def test_lost_lease_is_cleaned_up_where_a_renewal_may_yet_be_executed(
    auto_renew: bool, reason: LossReason, is_left: bool
) -> None:
    held = lease(options=Options(auto_renew=auto_renew))
    assert late_entries([LeaseLoss(held, reason)]) == ([(b"name", b"token")] if is_left else [])
    assert held.record.is_over


def test_first_and_last_failure_of_a_series_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held = lease(clock() + 60.0)
    for verdict in (Verdict(None, None), Verdict(None, None), Verdict(True, clock() + 60.0), Verdict(True, None)):
        steps = attempting([held], Do("execute", ReadHolder(b"name"), 1.0), lambda: [verdict], [])  # noqa: B023 - called at once
        next(steps)
        with pytest.raises(StopIteration):
            next(steps)
    assert [
        "1 locks, such as 'name', could not be renewed. It is tried again until their leases end.",
        "1 locks, such as 'name', are renewed again.",
    ] == caplog.messages
