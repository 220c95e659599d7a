"""What a recorder makes of reports: names by template, bounded in number, and gauges that add up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import SupportsIndex

import pytest

from redislock_fast._lease.holding import Holding
from redislock_fast._lease.options import Options
from redislock_fast._observe import recorder as recorder_module
from redislock_fast._observe.recorder import (
    BOUNDS_S,
    HELD,
    METRICS,
    WAITS,
    Count,
    Durations,
    Metric,
    Recorder,
    prefix_of,
)
from tests.support.helpers import PATIENCE_S, start


class Values:
    """An output that keeps the labels of what it gets."""

    sets_gauges = True

    def __init__(self) -> None:
        self.labels: list[tuple[str, ...]] = []
        self.begun: list[tuple[str, tuple[str, ...]]] = []
        self.gauges: dict[tuple[Metric, str, str], int] = {}

    def observer(self, _metric: Metric, labels: tuple[str, ...]) -> Callable[[float], object]:
        return lambda _: self.labels.append(labels)

    def count(self, metric: Metric, labels: tuple[str, ...], number: int = 1) -> None:
        if number:
            self.labels.append(labels)
        else:
            self.begun.append((metric.name, labels))

    def set(self, metric: Metric, labels: tuple[str, ...], value: int) -> None:
        name, kind = labels
        self.gauges[metric, name, kind] = value


class Unset(Values):
    """One that reads the gauges itself."""

    sets_gauges = False


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("invoice", "invoice"), ("invoice:17", "invoice"), ("a{b}:c", "a"), ("a:b{c}", "a"), ("{tag}:x", ""), ("", "")],
)
def test_a_name_is_recorded_by_its_prefix(name: str, prefix: str) -> None:
    assert prefix_of(name) == prefix


def test_names_are_bounded_in_number() -> None:
    values = Values()
    recorder = Recorder(values)
    for number in range(150):
        recorder.holdings_of(f"name-{number}:1").released(1.0)
    recorder.holdings_of(b"name-3:2").released(1.0)
    assert len(set(values.labels)) == 101
    assert values.labels[99:101] == [("name-99", "lock"), ("other", "lock")]
    assert values.labels[-1] == ("name-3", "lock")


def test_losses_and_failed_renewals_of_each_name_begin_at_0_once() -> None:
    values = Values()
    recorder = Recorder(values)
    for number in (*range(150), *range(150)):
        recorder.holdings_of(f"name-{number}:1").released(1.0)
    names = [*(f"name-{number}" for number in range(100)), "other"]
    reasons = ("expired", "taken", "deleted", "server_gone", "stalled")
    assert values.begun == [
        begun
        for name in names
        for begun in (
            *(("redislock.lost", (name, "lock", reason)) for reason in reasons),
            ("redislock.renewal.failures", (name, "lock")),
        )
    ]


def test_a_template_of_the_users_makes_the_names() -> None:
    values = Values()
    Recorder(values, lambda name: name.upper()).holdings_of(b"a:1").released(1.0)
    assert values.labels == [("A:1", "lock")]


def test_locks_and_semaphores_of_one_name_are_told_apart() -> None:
    values = Values()
    values.sets_gauges = False
    recorder = Recorder(values)
    for kind in (recorder, recorder.of_semaphores):
        kind.holdings_of("a").begin(1)
        kind.record_renewal_failure("a")
    assert values.labels == [("a", "lock"), ("a", "semaphore")]
    assert recorder.values(HELD) == [(("a", "lock"), 1), (("a", "semaphore"), 1)]
    recorder.refresh()
    assert (values.gauges[HELD, "a", "lock"], values.gauges[HELD, "a", "semaphore"]) == (1, 1)


def test_a_gauge_starts_anew_in_a_forked_child() -> None:
    values = Values()
    recorder = Recorder(values)
    recorder.holdings_of("a").begin(1)
    recorder.record_wait_started("b", 2)
    recorder.forget()
    recorder.holdings_of("c").begin(3)
    assert {(metric.name, name): value for (metric, name, _), value in values.gauges.items()} == {
        ("redislock.held", "a"): 0,
        ("redislock.held", "c"): 1,
        ("redislock.waiting", "b"): 0,
    }


def test_an_end_that_is_reported_twice_or_alone_counts_once() -> None:
    values = Values()
    recorder = Recorder(values)
    recorder.holdings_of("a").begin(1)
    recorder.holdings_of("a").begin(2)
    for serial in (1, 1, 7):
        recorder.holdings_of("a").end(serial)
        recorder.record_wait_ended("a", serial, "queue", True)
    assert [(("a", "lock"), 1)] == recorder.values(HELD)
    assert [] == values.labels


class Interrupted(Values):
    """An output that an interrupt strikes."""

    def set(self, metric: Metric, labels: tuple[str, ...], value: int) -> None:
        raise KeyboardInterrupt


def test_an_end_that_is_interrupted_counts() -> None:
    values = Interrupted()
    recorder = Recorder(values)
    holdings = recorder.holdings_of("a")
    for report in (holdings.begin, holdings.end):
        with pytest.raises(KeyboardInterrupt):
            report(1)
    assert [(("a", "lock"), 0)] == recorder.values(HELD)


def test_an_end_that_is_interrupted_is_set_with_the_next_report() -> None:
    values = Values()
    recorder = Recorder(values)
    recorder.holdings_of("a").begin(1)
    values.set = Interrupted().set  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        recorder.holdings_of("a").end(1)
    del values.set
    recorder.holdings_of("b").begin(2)
    assert {name: value for (_, name, _), value in values.gauges.items()} == {"a": 0, "b": 1}


def test_gauges_are_not_set_for_an_output_that_reads_them() -> None:
    values = Values()
    values.sets_gauges = False
    recorder = Recorder(values)
    recorder.holdings_of("a").begin(1)
    assert ({}, [(("a", "lock"), 1)]) == (values.gauges, recorder.values(HELD))


def test_a_name_whose_label_is_known_is_not_looked_at_again() -> None:
    names: list[str] = []

    def template(name: str) -> str:
        names.append(name)
        return name

    recorder = Recorder(Values(), template)
    for name in ("a", b"a", "b", "a", b"a"):
        recorder.holdings_of(name).released(1.0)
        recorder.holdings_of(name).begin(1)
    assert names == ["a", "a", "b"]


def test_many_threads_lose_no_value() -> None:
    durations, count = Durations(), Count()
    each = 5000

    def add() -> None:
        for _ in range(each):
            durations.observe(0.25)
            count.add(2)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers, sum_s = durations.read()
    assert (numbers[BOUNDS_S.index(0.25)], sum(numbers), sum_s) == (4 * each, 4 * each, 0.25 * 4 * each)
    assert count.value == 2 * 4 * each


@pytest.mark.parametrize("count", [1, 1000], ids=["few", "many"])
def test_a_duration_is_in_the_bucket_of_the_least_bound_that_it_does_not_exceed(count: int) -> None:
    durations = Durations()
    for _ in range(count):
        for bound in BOUNDS_S:
            durations.observe(bound)
            durations.observe(bound * 1.01)
    numbers, sum_s = durations.read()
    assert numbers == [count, *[2 * count] * (len(BOUNDS_S) - 1), count]
    assert sum_s == pytest.approx(2.01 * count * sum(BOUNDS_S))


class _New(list[float]):
    """Durations of which some are taken only after another thread has copied them all, to read them."""

    def __init__(self, durations: Durations) -> None:
        super().__init__(durations._new)
        self._durations = durations
        self._was_copied = threading.Event()
        self.reading: Future[object] | None = None

    def __iter__(self) -> Iterator[float]:
        yield from super().__iter__()
        self._was_copied.set()

    def __delitem__(self, part: SupportsIndex | slice) -> None:
        if self.reading is None:
            self._was_copied.clear()
            self.reading = start(self._durations.read)
            assert self._was_copied.wait(PATIENCE_S)
        super().__delitem__(part)


def test_what_another_thread_reads_as_it_is_sorted_in_is_counted_once() -> None:
    durations = Durations()
    for _ in range(3):
        durations.observe(0.25)
    durations._new = new = _New(durations)
    read = [durations.read()]
    assert new.reading is not None
    new.reading.result(PATIENCE_S)
    read.append(durations.read())
    assert [(sum(numbers), sum_s) for numbers, sum_s in read] == [(3, 0.75), (3, 0.75)]


def test_what_is_read_in_the_midst_of_the_sorting_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal handler."""
    durations = Durations()
    read = []

    def interrupted(values: list[float]) -> list[float]:
        monkeypatch.setattr(recorder_module, "sorted", sorted, raising=False)
        new = sorted(values)
        durations.observe(0.25)
        read.append(durations.read())
        return new

    durations.observe(0.25)
    monkeypatch.setattr(recorder_module, "sorted", interrupted, raising=False)
    read.append(durations.read())
    assert [(sum(numbers), sum_s) for numbers, sum_s in read] == [(2, 0.5), (2, 0.5)]


def test_a_name_without_label_is_asked_for_again_and_the_lock_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    planned = [ValueError("planned")]

    def template(name: str) -> str:
        if planned:
            raise planned.pop()
        return name

    options, values = Options(), Values()
    options.observers = (Recorder(values, template),)
    holding = Holding(weakref.ref(values))  # in the place of a lock, of which it takes nothing
    for _ in range(2):
        reports = options.reports_of("a")
        reports.begin(holding, 1.0, 1)
        reports.released(holding, 1.0, True)
    assert values.labels == [("a", "lock", "acquired"), ("a", "lock")]
    assert [record.message for record in caplog.records] == ["metrics failed."]


def test_an_acquire_that_is_interrupted_is_no_error() -> None:
    values = Values()
    recorder = Recorder(values)
    for error in (None, ValueError(), KeyboardInterrupt()):
        recorder.record_failure("a", 1.0, 1, error)
    assert [labels[2] for labels in values.labels] == ["not_acquired", "error", "cancelled"]


def test_prometheus_names_are_those_of_opentelemetrys_exporter() -> None:
    assert {metric.prometheus_name for metric in METRICS} == {
        "redislock_acquire_duration_seconds",
        "redislock_hold_duration_seconds",
        "redislock_held",
        "redislock_waiting",
        "redislock_lost",
        "redislock_renewal_failures",
        "redislock_handovers",
        "redislock_waits",
    }
    assert WAITS.labels == ("name", "kind", "mode")


def test_child_touches_nothing_that_threads_of_its_parent_share() -> None:
    """Without the GIL, the lock of what they contend for may be taken there."""
    recorder, durations = Recorder(Unset()), Durations()
    recorder.holdings_of("name").begin(1)
    (held,), new = recorder._gauges[HELD].values(), durations._new
    recorder.forget()
    durations.forget()
    holdings = recorder.holdings_of("name")
    holdings.begin(2)
    holdings.begin(3)
    holdings.end(3)
    durations.observe(0.1)
    assert (held, new) == ({1}, [])
    assert ([*recorder.values(HELD)], sum(durations.read()[0])) == ([(("name", "lock"), 1)], 1)
