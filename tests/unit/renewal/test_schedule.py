"""The schedule of renewals: what is due when, what it must not cost, and what a renewal leaves behind.

Rules: no server, no chance.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from redislock_fast import LossReason
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._procedures.loss import LeaseLoss, Verdict, attempt_renewal
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.steps import Do
from redislock_fast._renewal import threads as renewer
from redislock_fast._renewal.schedule import Record, Schedule, late_entries, renew_leases
from redislock_fast._renewal.threads import Renewer, report_losses_in_threads
from redislock_fast._transport.threads import starting
from redislock_fast._util.times import clock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import FAR_S, LATE, Callers, queue_up, sent_by

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
    steps = renew_leases([held], losses)
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
    steps = renew_leases([held], losses)
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
        steps = attempt_renewal([held], Do("execute", ReadHolder(b"name"), 1.0), lambda: [verdict], [])  # noqa: B023 - called at once
        next(steps)
        with pytest.raises(StopIteration):
            next(steps)
    assert [
        "1 locks, such as 'name', could not be renewed. It is tried again until their leases end.",
        "1 locks, such as 'name', are renewed again.",
    ] == caplog.messages


# Costs that a renewed lock does not have: needless requests, and needless wake-ups of the renewer


TOKEN = b"rlf:" + b"0" * 32
MARKED = TOKEN + b"+"
NATIVE = Capabilities([[b"delifeq"], None, [b"lmpop"]])


class Holder:
    """Something that can be referred to weakly."""


def values_sent(lease: Lease, held: bytes) -> list[bytes]:
    """The values that one renewal compares with the key, request by request, where the server has this value."""
    values: list[bytes] = []
    steps = renew_leases([lease], [])
    assert next(steps).method == "split"
    step = steps.send([[0]])
    assert step.method == "execute"
    assert isinstance(step.args[0], Pipeline)
    finished = False
    while not finished:
        requests: Any = step.args[0].request(NATIVE, clock())
        values.append(requests[0][2])
        finished = step.args[0].feed([b"OK" if values[-1] == held else None], NATIVE)
    with pytest.raises(StopIteration):
        next(steps)
    return values


def test_a_mark_is_found_once() -> None:
    holder = Holder()
    lease = Lease(weakref.ref(holder), b"name", TOKEN, 60_000, clock() + 30, Options(auto_renew=True))
    assert values_sent(lease, held=TOKEN) == [TOKEN]
    lease.expires_at = clock() + 30
    assert values_sent(lease, held=MARKED) == [TOKEN, MARKED]
    lease.expires_at = clock() + 30
    assert values_sent(lease, held=MARKED) == [MARKED]


def test_release_hands_over_at_once_what_was_renewed_for_a_waiter(
    valkey: Server, connect: Connect, callers: Callers
) -> None:
    admin = connect(valkey.port)
    name = type(callers).__name__
    holder = callers.contender(callers.client(valkey.port, client_name=name), timeout=1.0, auto_renew=True)
    holder.call("acquire")
    (answer,) = queue_up([callers.contender(callers.client(valkey.port), **LATE)], admin)
    wait_until(lambda: holder.lock._held().lease.contended, "a renewal has found the mark")
    with sent_by(admin, name) as sent:
        holder.release()
        assert answer.result(PATIENCE_S) is True
    assert "DELIFEQ" not in sent.commands
    assert admin.pttl("name") > 1000 * FAR_S / 2


def test_renewer_is_woken_only_for_what_is_due_before_its_next_look() -> None:
    holder = Holder()
    lease = Lease(weakref.ref(holder), b"name", TOKEN, 60_000, clock() + 60, Options(auto_renew=True))
    record = Record(lease, lambda _: None)
    schedule = Schedule()
    assert schedule.add(record, 100.0, 0.001) is True
    schedule.looks_at = 90.0
    assert schedule.add(record, 100.0, 0.001) is False
    assert schedule.add(record, 80.0, 0.001) is True
    schedule.remove(record)
    assert schedule.next_at() is None


# The callbacks of lost leases, where no thread can be started


def loss(holder: Holder, on_lost: Callable[[Any, LossReason], object]) -> LeaseLoss:
    """A lock of the holder is lost."""
    return LeaseLoss(
        Lease(weakref.ref(holder), b"name", b"token", 1000, 0.0, Options(on_lost=on_lost)), LossReason.DELETED
    )


def test_where_one_callback_gets_no_thread_the_others_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    over = threading.Event()
    told: list[Future[bool]] = [Future() for _ in range(3)]
    losses = [loss(holder, lambda *_: told[0].set_result(over.wait(PATIENCE_S)))]
    losses += [loss(holder, lambda *_, number=number: told[number].set_result(True)) for number in (1, 2)]
    real_start = starting.start_thread

    def fail_once(*args: Any) -> None:
        if threading.current_thread().name == "redislock_fast-lost":  # the first thread, which starts the others
            monkeypatch.setattr(renewer, "start_thread", real_start)
            raise RuntimeError("can't start new thread")
        real_start(*args)

    monkeypatch.setattr(renewer, "start_thread", fail_once)
    report_losses_in_threads(losses)
    assert told[1].result(PATIENCE_S)
    over.set()
    assert (told[0].result(PATIENCE_S), told[2].result(PATIENCE_S)) == (True, True)


class _Ending(Renewer):
    """Gets a lease when its thread is about to end.

    Args:
        lease: that one.
        burst: what renews it.
    """

    def __init__(self, lease: Lease, burst: Any) -> None:
        super().__init__(self, burst)
        self._late = [lease]

    def _look_again_and_again(self, in_force: Any) -> None:
        super()._look_again_and_again(in_force)
        if self._late:
            self.keep(self._late.pop())


def test_lease_that_comes_as_the_thread_ends_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewer, "_LINGER_S", 0.0)
    holder = Holder()
    first, late = (
        Lease(weakref.ref(holder), b"name", b"token", 50, clock() + 0.05, Options(auto_renew=True)) for _ in range(2)
    )
    renewed: Future[list[Lease]] = Future()

    def note(_: object, due: list[Lease], _losses: object) -> None:
        for lease in due:
            lease.record.is_over = True
        if late in due:
            renewed.set_result(due)

    ending = _Ending(late, note)
    ending.keep(first)
    assert renewed.result(PATIENCE_S) == [late]


def test_lease_that_another_thread_drops_as_it_comes_is_passed_over() -> None:
    schedule, helds = Schedule(), [lease() for _ in range(3)]

    class Overtaken(Record):
        """One after which another thread removes the next one, which it has found in the schedule before."""

        def __call__(self) -> Lease | None:
            (together,) = found
            together.pop(id(helds[1].record), None)
            return super().__call__()

    helds[0].record = Overtaken(helds[0], lambda _: None)
    for held in helds:
        schedule.add(held.record, 5.0, INTERVAL_S)
    found = list(schedule._due.values())
    assert schedule.take(5.0) == helds
    assert (schedule.take(5.0), schedule.next_at()) == ([], None)
