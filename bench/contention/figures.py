"""The result of a window, with the turns of the workers in it, and the figures that are computed from them.

An interval in which a lock is held begins just after acquire returned and ends just before release was called, on one
clock. So two intervals of a lock that overlap are two holders at a time. All functions are pure. Times are in seconds,
figures in ms.
"""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappushpop
from itertools import chain, pairwise
from typing import Any, NamedTuple

from bench.measuring.rounds import in_ms, percentile

_CDF_SHARES = (*(count / 100 for count in range(100)), *(0.99 + count / 1000 for count in range(1, 10)), 0.9995, 1.0)

_SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}

MAXIMA = ("gap_max_ms", "wait_max_ms", "starvation_ms", "connections")
TOTALS = ("acquisitions", "violations")
_FIELDS = 4  # of a record


@dataclass(frozen=True)
class Span:
    """A part of a window, by `time.monotonic`."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """The length of the span, in seconds."""
        return self.end_s - self.begin_s

    def __contains__(self, when_s: float) -> bool:
        return self.begin_s <= when_s < self.end_s


@dataclass(frozen=True)
class Window:
    """The result of a window."""

    measured: Span  # the measured part
    watched: Span  # the part in which commands were counted
    records: list[array[float]]  # of all workers, as in `bench.contention.worker.Report`, with those of the warm-up
    # how often clients sent each command in the watched part; None when the server refuses to tell
    commands: Counter[str] | None
    client_cpu_s: float  # CPU time of all processes in the measured part
    server_cpu_s: float  # CPU time of the server in the measured part
    connections: int  # of the processes to the server


class Hold(NamedTuple):
    """One turn of a worker: from when to when it held which lock, and since when it had waited.

    A worker that was still waiting at the end has infinity for the times of the acquire and the release.
    """

    acquired_s: float
    released_s: float
    asked_s: float
    worker: int
    key: int


def holds_of(records: Sequence[array[float]]) -> dict[int, list[Hold]]:
    """All turns, by lock, in the order in which they began."""
    by_key: dict[int, list[Hold]] = {}
    for worker, flat in enumerate(records):
        for at in range(0, len(flat), _FIELDS):
            key, asked_s, acquired_s, released_s = (*flat[at : at + _FIELDS], math.inf, math.inf)[:_FIELDS]
            by_key.setdefault(int(key), []).append(Hold(acquired_s, released_s, asked_s, worker, int(key)))
    for holds in by_key.values():
        holds.sort()
    return by_key


def violations(holds: Sequence[Hold], limit: int = 1) -> int:
    """Count the acquires of a lock that as many others held as may; the holds are of one lock, in order."""
    found = 0
    latest_s = [-math.inf] * limit  # the releases to come, of as many as may hold; a heap
    for hold in holds:
        found += hold.acquired_s < latest_s[0]
        heappushpop(latest_s, hold.released_s)
    return found


def gaps_s(holds: Sequence[Hold], span: Span, limit: int = 1) -> list[float]:
    """The times from each release in the span to the acquire in its place, when a worker was waiting.

    The holds are of one lock, in order. So many may hold it: that many acquires later, the place is taken again.
    """
    asked_s = sorted(hold.asked_s for hold in holds)
    acquired_s = [hold.acquired_s for hold in holds]
    return [
        taken_s - released_s
        for released_s, taken_s in zip(sorted(hold.released_s for hold in holds), acquired_s[limit:], strict=False)
        if released_s in span
        and taken_s < math.inf
        and bisect_right(asked_s, released_s) > bisect_right(acquired_s, released_s)
    ]


def jain(counts: Sequence[int]) -> float:
    """Jain's fairness of the numbers of acquisitions: 1 when all are equal, 1/n when one worker has all."""
    squares = sum(count * count for count in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else math.nan


def longest_without_s(acquired_s: Iterable[float], span: Span) -> float:
    """The longest part of the span without an acquisition of the worker whose acquisitions these are."""
    marks_s = [span.begin_s, *sorted(when_s for when_s in acquired_s if when_s in span), span.end_s]
    return max(later_s - earlier_s for earlier_s, later_s in pairwise(marks_s))


def waits_s(window: Window) -> list[float]:
    """How long each acquire took that began in the measured part, smallest first; all end with it at the latest."""
    span = window.measured
    all_holds = chain.from_iterable(holds_of(window.records).values())
    return sorted(min(hold.acquired_s, span.end_s) - hold.asked_s for hold in all_holds if hold.asked_s in span)


def idle_figures(window: Window) -> dict[str, Any]:
    """The figures of a window in which the lock stayed held."""
    seconds = window.measured.seconds
    return {
        "client_cpu_ms_per_s": 1000 * window.client_cpu_s / seconds,
        "server_cpu_ms_per_s": 1000 * window.server_cpu_s / seconds,
        "commands_per_s": None if window.commands is None else window.commands.total() / seconds,
        "commands_by_name": window.commands,
        "connections": window.connections,
    }


def figures(window: Window, limit: int = 1) -> dict[str, Any]:
    """The figures of a window, in which so many may hold a lock; None for a figure that is not known."""
    by_key = holds_of(window.records)
    measured = window.measured
    of_worker: list[list[float]] = [[] for _ in window.records]
    for holds in by_key.values():
        for hold in holds:
            of_worker[hold.worker].append(hold.acquired_s)
    counts = [sum(when_s in measured for when_s in acquired_s) for acquired_s in of_worker]
    acquisitions = sum(counts)
    watched = sum(when_s in window.watched for acquired_s in of_worker for when_s in acquired_s)
    gaps = sorted(gap_s for holds in by_key.values() for gap_s in gaps_s(holds, measured, limit))
    waits = waits_s(window)
    commands = None if window.commands is None or not watched else window.commands
    return {
        "acquisitions": acquisitions,
        "acquisitions_per_s": acquisitions / measured.seconds,
        **{f"gap_{name}_ms": in_ms(percentile(gaps, share)) for name, share in _SHARES.items()},
        **{f"wait_{name}_ms": in_ms(percentile(waits, share)) for name, share in _SHARES.items()},
        "jain": jain(counts) if acquisitions else None,
        "starvation_ms": in_ms(max(longest_without_s(acquired_s, measured) for acquired_s in of_worker)),
        "commands": commands and commands.total() / watched,
        "commands_by_name": commands and {name: calls / watched for name, calls in commands.most_common()},
        "server_cpu_us": 1e6 * window.server_cpu_s / acquisitions if acquisitions else None,
        "client_cpu_us": 1e6 * window.client_cpu_s / acquisitions if acquisitions else None,
        "connections": window.connections,
        "left_waiting": sum(hold.acquired_s == math.inf for holds in by_key.values() for hold in holds),
        "violations": sum(violations(holds, limit) for holds in by_key.values()),
    }


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all rounds: medians, but the largest of maxima and the sums of counts."""
    together: dict[str, Any] = {}
    for name, value in rounds[0].items():
        known = [figures_[name] for figures_ in rounds if figures_[name] is not None]
        if not known or isinstance(value, dict):
            together[name] = value
        elif name in TOTALS:
            together[name] = sum(known)
        else:
            together[name] = max(known) if name in MAXIMA else statistics.median(known)
    return together


def cdf(ordered_s: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the distribution: values in ms, and the share of values that does not exceed them."""
    return [(1000 * value_s, share) for share in _CDF_SHARES if (value_s := percentile(ordered_s, share)) is not None]


def timeline(window: Window, seconds: float) -> list[tuple[float, float, int]]:
    """The holders of the first lock from the middle of the measured part on: begin and end in ms, and the worker."""
    begin_s = (window.measured.begin_s + window.measured.end_s) / 2
    holds = holds_of(window.records).get(0, ())
    return [
        (1000 * (hold.acquired_s - begin_s), 1000 * (hold.released_s - begin_s), hold.worker)
        for hold in holds
        if hold.released_s >= begin_s and hold.acquired_s < begin_s + seconds
    ]
