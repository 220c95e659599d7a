"""The goals of the project for locks under contention, each beside its figure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contestants import BARE, OURS, PYTHON_REDIS_LOCK, REDIS_PY

_GAP_P50_BOUNDS_MS = {8: 0.12, 32: 0.13, 64: 0.15}
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, "<=": operator.le, ">=": operator.ge}

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A bound for a figure.

    Attributes:
        about: the name of the figure.
        figure: its value; None when it was not measured.
        sign: one of "<", "<=" and ">=".
        bound: the right side of the comparison.
        bare: the same figure of each of `contestants.BARE`.
    """

    about: str
    figure: float | None
    sign: str
    bound: float
    bare: Sequence[float | None] = ()

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.figure is None:
            return "not measured"
        return "met" if _SIGNS[self.sign](self.figure, self.bound) else "MISSED"


def goals_of(rows: Rows) -> list[Goal]:
    """All goals, with the figures of these rows."""

    def goal(about: str, figure_of: Callable[[str], float | None], sign: str, bound: float) -> Goal:
        return Goal(about, figure_of(OURS), sign, bound, tuple(map(figure_of, BARE)))

    def figures(figure: str, **where: int) -> Callable[[str], float | None]:
        return lambda name: _figure(rows, name, figure, where)

    goals = []
    for processes, bound_ms in _GAP_P50_BOUNDS_MS.items():
        row = f"{processes} processes"
        gaps = figures("gap_p50_ms", processes=processes)
        goals += [
            goal(f"{row}: gap p50, ms", gaps, "<", bound_ms),
            goal(f"{row}: gap p50 : python-redis-lock's", _divided_by(gaps, PYTHON_REDIS_LOCK), "<", 1 / 3),
            goal(f"{row}: Jain", figures("jain", processes=processes), ">=", 0.99),
            goal(f"{row}: client commands", figures("commands", processes=processes), "<=", 3),
        ]
    waits = figures("wait_p99_ms", processes=32)
    goals += [
        goal("32 processes: gap p99, ms", figures("gap_p99_ms", processes=32), "<", 0.5),
        goal("32 processes: redis-py's wait p99 : ours", lambda name: _ratio(waits(REDIS_PY), waits(name)), ">=", 30),
    ]
    crews: list[tuple[dict[str, int], str, float]] = [
        ({"threads": 16}, "16 threads", 1.5),
        ({"tasks": 1000}, "1,000 tasks", 15),
    ]
    for crew, row, times in crews:
        rates = _divided_by(figures("acquisitions_per_s", **crew), REDIS_PY)
        goals += [
            goal(f"{row}: acquisitions/s : redis-py's", rates, ">=", times),
            goal(f"{row}: Jain", figures("jain", **crew), ">=", 0.99),
        ]
    return goals


def _divided_by(figures: Callable[[str], float | None], peer: str) -> Callable[[str], float | None]:
    return lambda name: _ratio(figures(name), figures(peer))


def _figure(rows: Rows, contestant: str, figure: str, where: Mapping[str, int]) -> float | None:
    for row in rows:
        if row["contestant"] == contestant and all(row[name] == value for name, value in where.items()):
            value: float | None = row[figure]
            return value
    return None


def _ratio(figure: float | None, base: float | None) -> float | None:
    return figure / base if figure is not None and base else None
