"""Figures with goals: each is that of one row, or its ratio to that of another, beside its bound."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contention.workload import Workload
from bench.contestants import OURS, PYTHON_REDIS_LOCK, REDIS_PY
from bench.measuring import report
from bench.measuring.report import three_digits

_SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A bound for a figure."""

    workload: str  # of both rows
    figure: str  # its key in the rows
    sign: str  # one of "<", "<=" and ">="
    bound: float  # the right side of the comparison; nan where there is none
    base: str | None = None  # the contestant of the other row; None: the figure itself is meant
    contestant: str = OURS  # of the row
    base_workload: str | None = None  # of the other row, where it is another one

    @property
    def about(self) -> str:
        """The figure in words."""
        return f"{self.contestant}, {self.workload}: {self.figure}" + (f" : {self.base}" if self.base else "")

    def verdict(self, figure: float | None) -> str:
        """Whether this figure meets the goal."""
        if figure is None:
            return "not measured"
        return "-" if math.isnan(self.bound) else "met" if _SIGNS[self.sign](figure, self.bound) else "MISSED"

    def of(self, rows: Rows) -> tuple[float | None, float | None, float | None]:
        """The figure in these rows, and the two that it is the ratio of."""
        found = {(row["contestant"], row["workload"]): row for row in rows}
        own = found.get((self.contestant, self.workload), {}).get(self.figure)
        if self.base is None:
            return own, own, None
        base = found.get((self.base, self.base_workload or self.workload), {}).get(self.figure)
        return (own / base if own is not None and base else None), own, base


def print_goals(title: str, goals: Sequence[Goal], rows: Rows) -> None:
    """Print the table of the goals, with the figures of these rows."""
    cells = []
    for goal in goals:
        figure, own, base = goal.of(rows)
        bound = "-" if math.isnan(goal.bound) else f"{goal.sign} {three_digits(goal.bound)}"
        is_, of, to = map(three_digits, (figure, own, base))
        cells.append((goal.about, goal.verdict(figure), is_, bound, of, to))
    report.table(title, ("figure", "", "is", "goal", "of", ":"), cells, words=2)


_GAP_P50_BOUNDS_MS = {8: 0.12, 32: 0.13, 64: 0.15}
PROCESSES = tuple(map(Workload, _GAP_P50_BOUNDS_MS))
THREADS = Workload(1, threads=16, hold_ms=0, think_ms=0)
TASKS = Workload(1, tasks=1000, hold_ms=0, think_ms=0)
"""The workloads of `GOALS`."""

GOALS = (
    *(Goal(of.label, "gap_p50_ms", "<", _GAP_P50_BOUNDS_MS[of.processes]) for of in PROCESSES),
    *(Goal(of.label, "gap_p50_ms", "<", 1 / 3, PYTHON_REDIS_LOCK) for of in PROCESSES),
    *(Goal(of.label, "jain", ">=", 0.99) for of in (*PROCESSES, THREADS, TASKS)),
    *(Goal(of.label, "commands", "<=", 3) for of in PROCESSES),
    Goal(PROCESSES[1].label, "gap_p99_ms", "<", 0.5),
    Goal(PROCESSES[1].label, "wait_p99_ms", ">=", 30, OURS, REDIS_PY),
    Goal(THREADS.label, "acquisitions_per_s", ">=", 1.5, REDIS_PY),
    Goal(TASKS.label, "acquisitions_per_s", ">=", 15, REDIS_PY),
)
"""The goals of the project for locks under contention: `python -m bench contention --preset goals`."""
