"""What the project has promised of its locks under contention, each promise beside its figure.

Rules: a promise about a row that was not measured has no figure. Must not know: how the figures came about.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contestants import OURS, PYTHON_REDIS_LOCK, REDIS_PY

_GAP_P50_BOUNDS_MS = {8: 0.12, 32: 0.13, 64: 0.15}
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A promise.

    Attributes:
        about: which figure.
        figure: what it is; None where it was not measured.
        sign: one of "<", "<=" and ">=".
        bound: what it is to be.
    """

    about: str
    figure: float | None
    sign: str
    bound: float

    @property
    def verdict(self) -> str:
        """Whether it is kept."""
        if self.figure is None:
            return "not measured"
        return "met" if _SIGNS[self.sign](self.figure, self.bound) else "MISSED"


def goals_of(rows: Rows) -> list[Goal]:
    """All promises, with the figures of these rows."""
    goals = []
    for processes, bound_ms in _GAP_P50_BOUNDS_MS.items():
        row = f"{processes} processes"
        ours, peer = (_figure(rows, name, "gap_p50_ms", processes=processes) for name in (OURS, PYTHON_REDIS_LOCK))
        goals += [
            Goal(f"{row}: gap p50, ms", ours, "<", bound_ms),
            Goal(f"{row}: gap p50 : python-redis-lock's", _ratio(ours, peer), "<", 1 / 3),
            Goal(f"{row}: Jain", _figure(rows, OURS, "jain", processes=processes), ">=", 0.99),
            Goal(f"{row}: client commands", _figure(rows, OURS, "commands", processes=processes), "<=", 3),
        ]
    waits = [_figure(rows, name, "wait_p99_ms", processes=32) for name in (REDIS_PY, OURS)]
    goals += [
        Goal("32 processes: gap p99, ms", _figure(rows, OURS, "gap_p99_ms", processes=32), "<", 0.5),
        Goal("32 processes: redis-py's wait p99 : ours", _ratio(*waits), ">=", 30),
    ]
    crews: list[tuple[dict[str, int], str, float]] = [
        ({"threads": 16}, "16 threads", 1.5),
        ({"tasks": 1000}, "1,000 tasks", 15),
    ]
    for crew, row, times in crews:
        rates = [_figure(rows, name, "acquisitions_per_s", **crew) for name in (OURS, REDIS_PY)]
        goals += [
            Goal(f"{row}: acquisitions/s : redis-py's", _ratio(*rates), ">=", times),
            Goal(f"{row}: Jain", _figure(rows, OURS, "jain", **crew), ">=", 0.99),
        ]
    return goals


def _figure(rows: Rows, contestant: str, figure: str, **where: int) -> float | None:
    for row in rows:
        if row["contestant"] == contestant and all(row[name] == value for name, value in where.items()):
            value: float | None = row[figure]
            return value
    return None


def _ratio(figure: float | None, base: float | None) -> float | None:
    return figure / base if figure is not None and base else None
