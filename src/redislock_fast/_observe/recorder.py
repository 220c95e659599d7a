"""The metrics of all locks of the process: which ones there are, and how the reports of locks become their values.

`redislock_fast.prometheus` and `redislock_fast.otel` each give a `Recorder` an output.
"""

from __future__ import annotations

import contextlib
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from redislock_fast._lease.metrics import ObserverByKind, report_waiting
from redislock_fast._lease.prolonging import mutex
from redislock_fast._observe.libraries import call_library
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LossReason

if TYPE_CHECKING:
    from redislock_fast._lease.metrics import WaitMode


class Metric(NamedTuple):
    """One metric, by its names in OpenTelemetry.

    Attributes:
        name: the name.
        kind: what it is.
        unit: in UCUM's notation.
        labels: the names of its labels.
        text: what it measures.
    """

    name: str
    kind: Literal["histogram", "counter", "gauge"]
    unit: str
    labels: tuple[str, ...]
    text: str

    @property
    def prometheus_name(self) -> str:
        """The name that OpenTelemetry's own exporter gives it in Prometheus, without `_total`."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == "s" else "")


_OF = ("name", "kind")

ACQUIRE = Metric(
    "redislock.acquire.duration", "histogram", "s", (*_OF, "result"), "From the call of acquire to its result"
)
HOLD = Metric("redislock.hold.duration", "histogram", "s", _OF, "From the acquire to the release")
HELD = Metric("redislock.held", "gauge", "{lock}", _OF, "Locks and permits that this process holds")
WAITING = Metric("redislock.waiting", "gauge", "{caller}", _OF, "Callers in this process that wait for a lock")
LOST = Metric("redislock.lost", "counter", "{lock}", (*_OF, "reason"), "Locks that were lost before their release")
RENEWAL_FAILURES = Metric("redislock.renewal.failures", "counter", "{renewal}", _OF, "Renewals that got no reply")
HAND_OVERS = Metric(
    "redislock.handovers", "counter", "{handover}", _OF, "Waits that ended because the holder handed the lock over"
)
WAITS = Metric("redislock.waits", "counter", "{wait}", (*_OF, "mode"), "Completed waits, by mode")

METRICS = (ACQUIRE, HOLD, HELD, WAITING, LOST, RENEWAL_FAILURES, HAND_OVERS, WAITS)

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The bounds of the histograms' buckets, in seconds."""

_AT_ONCE = 256
_MOST_NAMES = 100
_KEPT_LABELS = 1024
_OTHER = "other"
_PREFIX = re.compile("[^:{]*")


def prefix_of(name: str) -> str:
    """The part of a lock's name before the first `:` or `{`: "invoice" for "invoice:17"."""
    found = _PREFIX.match(name)
    return "" if found is None else found.group()


class Count:
    """A counter, which any thread may increase.

    Attributes:
        value: the number.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def add(self, number: int) -> None:
        """Increase it."""
        with mutex.lock:
            self.value += number


class Durations:
    """A histogram by `BOUNDS_S`, to which any thread may add.

    Durations are sorted into the buckets some hundred at a time, which takes a tenth of what each would take alone.

    Thread safety: any thread adds to the end of `_new`, which is one operation. Durations are taken from its beginning
    before `_sorted` is replaced, both under `mutex`. So where that is the same as before `_new` was copied, nothing in
    the copy was taken.
    """

    __slots__ = ("_new", "_sorted")

    def __init__(self) -> None:
        self._new: list[float] = []
        self._sorted: tuple[list[int], float] = ([0] * (len(BOUNDS_S) + 1), 0.0)

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        new = self._new
        new.append(seconds)
        if len(new) >= _AT_ONCE:
            self._sort_in()

    def _sort_in(self) -> bool:
        """Sort into the buckets what is there. Returns False where another thread, or a signal handler, was faster."""
        numbers, sum_s = before = self._sorted
        new = sorted(self._new)
        upto = [0, *(bisect_right(new, bound) for bound in BOUNDS_S), len(new)]
        numbers = [number + end - begin for number, begin, end in zip(numbers, upto, upto[1:], strict=False)]
        after, count = (numbers, sum_s + sum(new)), len(new)
        with mutex.lock:
            is_first = self._sorted is before
            if is_first:
                del self._new[:count]
                self._sorted = after
        return is_first

    def forget(self) -> None:
        """In a forked child: leave to the parent what is not sorted. The list is another one: see `_util/fork.py`."""
        self._new = []

    def read(self) -> tuple[list[int], float]:
        """How many durations are in each bucket, the last one without a bound, and their sum in seconds."""
        while not self._sort_in():
            pass
        return self._sorted


class Output(Protocol):
    """Where the values go, by `call_library`. Labels are given in the order of `Metric.labels`."""

    @property
    def sets_gauges(self) -> bool:
        """Whether it needs each value of a gauge at once; else it reads them when it is read, or has them set then."""

    def observer(self, metric: Metric, labels: tuple[str, ...]) -> Callable[[float], object]:
        """The function that adds a value to a histogram. May be asked for more than once."""

    def count(self, metric: Metric, labels: tuple[str, ...], number: int = 1) -> None:
        """Add a number to a counter, which is there afterwards: also by 0."""

    def set(self, metric: Metric, labels: tuple[str, ...], value: int) -> None:
        """Set a gauge. The caller is in `call_library` already."""


_Observer: TypeAlias = Callable[[float], object]


class _Observers(dict["str | None", _Observer]):
    """What the durations of one `name` are added to: of acquires, by the result; of holdings, by None.

    Each is asked for when there is a first duration: it is exposed from then on.
    """

    def __init__(self, output: Output, labels: tuple[str, str]) -> None:
        self._output = output
        self._labels = labels

    def __missing__(self, result: str | None) -> _Observer:
        metric, labels = (HOLD, self._labels) if result is None else (ACQUIRE, (*self._labels, result))
        observer = self[result] = self._output.observer(metric, labels)
        return observer


class _Holdings:
    """The `Holdings` of one `name`."""

    def __init__(
        self, begin: Callable[[int], object], end: Callable[[int], object], observers: Mapping[str | None, _Observer]
    ) -> None:
        self.begin = begin
        self.end = end
        self._observers = observers

    @cached_property
    def acquired(self) -> _Observer:
        return self._observers["acquired"]

    @cached_property
    def released(self) -> _Observer:
        return self._observers[None]


class Recorder(ObserverByKind, patching.Adaptable):
    """Records the reports of locks. Another one records those of semaphores, for the same output.

    A gauge is the number of holdings or waits that have begun and not ended, each by its serial: one that is reported
    twice, since an interrupt came in between, counts once.

    Thread safety: any thread may report. Each change of a dict or set is one operation. `_mutex` is held while an
    output's gauge is set, which is after the change, so that the last value is the right one.

    Args:
        output: where the values go.
        name_template: makes the label `name` of a lock's name, always the same. There are 100 values at most; then it
            is "other".
        kind: of what it records.
    """

    def __init__(
        self,
        output: Output,
        name_template: Callable[[str], str] = prefix_of,
        kind: Literal["lock", "semaphore"] = "lock",
    ) -> None:
        self._kind = kind
        self.of_semaphores = self if kind == "semaphore" else Recorder(output, name_template, "semaphore")
        self._output = output
        self._name_template = name_template
        self._observers: dict[str, _Observers] = {}
        self._holdings: dict[str, _Holdings] = {}
        self._gauges: dict[Metric, dict[str, set[int]]] = {HELD: {}, WAITING: {}}
        self._new_cache()
        self._mutex = threading.RLock()
        self._is_stale = False
        fork.forget_in_child(self)
        patching.adapt_later(self)

    def adapt(self) -> None:
        self._mutex = threading.RLock()

    def forget(self) -> None:
        """In a forked child: nothing is held, and nobody waits. The output hears of it with the next change."""
        self._mutex = threading.RLock()
        self._new_cache()
        self._gauges = {metric: {label: set() for label in list(counts)} for metric, counts in self._gauges.items()}
        for label, holdings in list(self._holdings.items()):
            holdings.begin, holdings.end = self._counters(label)
        self._is_stale = True

    def _new_cache(self) -> None:
        self._label = lru_cache(_KEPT_LABELS)(self._find_label)

    def values(self, metric: Metric) -> list[tuple[tuple[str, str], int]]:
        """The values of a gauge by its labels, also those of semaphores."""
        fork.generation()  # has the parent's forgotten in a child
        report_waiting()
        return [
            ((label, recorder._kind), len(serials))  # noqa: SLF001  # of this very class
            for recorder in (self, self.of_semaphores)
            for label, serials in list(recorder._gauges[metric].items())  # noqa: SLF001  # as above
        ]

    def refresh(self) -> None:
        """Set all gauges of the output, also those of semaphores."""
        fork.generation()
        report_waiting()
        for recorder in (self, self.of_semaphores):
            call_library(recorder._set_all)  # noqa: SLF001  # of this very class

    def _set_all(self) -> None:
        with self._mutex:
            for metric, counts in self._gauges.items():
                for label, serials in list(counts.items()):  # a signal handler may report
                    self._output.set(metric, (label, self._kind), len(serials))
            self._is_stale = False

    def _set(self, metric: Metric, label: str) -> None:
        with self._mutex:
            if self._is_stale:
                self._set_all()
            self._is_stale = True  # an interrupt may come before it is set
            self._output.set(metric, (label, self._kind), len(self._gauges[metric][label]))
            self._is_stale = False

    def _find_label(self, name: str | bytes) -> str:
        label = str(self._name_template(name.decode(errors="replace") if isinstance(name, bytes) else str(name)))
        if label not in self._observers and len(self._observers) >= _MOST_NAMES:
            label = _OTHER
        if label not in self._observers:
            self._begin_counts(label)
            self._observers.setdefault(label, _Observers(self._output, (label, self._kind)))
        return label

    def _begin_counts(self, label: str) -> None:
        """Expose at 0 what alerts take the increase of: there is none from a counter that begins at 1."""
        for reason in LossReason:
            self._output.count(LOST, (label, self._kind, reason.name.lower()), 0)
        self._output.count(RENEWAL_FAILURES, (label, self._kind), 0)

    def _begin(self, metric: Metric, label: str, serial: int) -> None:
        self._gauges[metric].setdefault(label, set()).add(serial)
        if self._output.sets_gauges:
            call_library(self._set, metric, label)

    def _end(self, metric: Metric, label: str, serial: int) -> bool:
        """Returns whether it had begun, and had not ended before."""
        was_counted = False
        try:
            with contextlib.suppress(KeyError):
                self._gauges[metric].setdefault(label, set()).remove(serial)
                was_counted = True
            if self._output.sets_gauges:
                call_library(self._set, metric, label)
        except BaseException:  # an interrupt may come before any line, and be logged as an error of the output
            self._gauges[metric][label].discard(serial)
            self._is_stale = True
            raise
        return was_counted

    def holdings_of(self, name: str | bytes) -> _Holdings:
        """What is done with the holdings of a name."""
        label = self._label(name)
        holdings = self._holdings.get(label)
        if holdings is None:
            holdings = self._holdings[label] = _Holdings(*self._counters(label), self._observers[label])
        return holdings

    def _counters(self, label: str) -> tuple[Callable[[int], object], Callable[[int], object]]:
        """What counts a holding with this label, and what counts it no more."""
        if self._output.sets_gauges:
            return partial(self._begin, HELD, label), partial(self._end, HELD, label)
        held = self._gauges[HELD].setdefault(label, set())
        return held.add, held.discard

    # ---- reports ----

    def record_failure(self, name: str | bytes, seconds: float, attempts: int, error: BaseException | None) -> None:  # noqa: ARG002
        """Record an acquire that has not got the lock."""
        result = "not_acquired" if error is None else "error" if isinstance(error, Exception) else "cancelled"
        self._observers[self._label(name)][result](seconds)

    def record_skip(self, name: str | bytes, seconds: float) -> None:
        """Record a run of `once` that was skipped."""
        self._observers[self._label(name)]["skipped"](seconds)

    def record_loss(self, name: str | bytes, hold_s: float, reason: LossReason) -> None:  # noqa: ARG002
        """Record a loss."""
        self._output.count(LOST, (self._label(name), self._kind, reason.name.lower()))

    def record_wait_started(self, name: str | bytes, serial: int) -> None:
        """Record that a caller waits."""
        self._begin(WAITING, self._label(name), serial)

    def record_wait_ended(self, name: str | bytes, serial: int, mode: WaitMode, handed_over: bool) -> None:
        """Record that a caller waits no more."""
        label = self._label(name)
        if self._end(WAITING, label, serial):
            self._output.count(WAITS, (label, self._kind, mode))
            if handed_over:
                self._output.count(HAND_OVERS, (label, self._kind))

    def record_renewal_failure(self, name: str | bytes) -> None:
        """Record a renewal that got no reply."""
        self._output.count(RENEWAL_FAILURES, (self._label(name), self._kind))
