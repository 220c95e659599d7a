"""The columns of the tables of rows, and how figures are written; a missing figure is a dash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.measuring import report


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        heading: above the column.
        cell: the text for a row that has all figures of the column.
        figures: the keys of the row that the text needs.
        is_wide: whether the column is left out without `--wide`, so that the table fits into 80 columns.
    """

    heading: str
    cell: Callable[..., str]
    figures: tuple[str, ...]
    is_wide: bool = False

    def of(self, row: Mapping[str, Any]) -> str:
        """The text for a row."""
        values = [row[figure] for figure in self.figures]
        return "-" if None in values else self.cell(*values)


_CONTESTANT = Column("contestant", str, ("title",))
_WORKLOAD = Column("workload", str, ("workload",))
_RATE = Column("pairs/s", "{:,.0f}".format, ("median",))
_SPREAD = Column("min - max", "{:,.0f} - {:,.0f}".format, ("min", "max"), is_wide=True)
_TO_REDIS_PY = Column(":\nredis-py", "{:.2f}".format, ("ratio_to_redis_py",))
_CPU = (
    Column("client\nus/pair", "{:.1f}".format, ("client_cpu_us",), is_wide=True),
    Column("server\nus/pair", "{:.1f}".format, ("server_cpu_us",), is_wide=True),
)
_COSTS = (
    Column("p50 ms\nan op", "{:.2f}".format, ("latency_p50_ms",)),
    Column("p99 ms\nan op", "{:.2f}".format, ("latency_p99_ms",)),
    *_CPU,
    Column("conn.", str, ("connections",), is_wide=True),
)


def _to_limit(limit: str, is_wide: bool = False) -> Column:
    return Column(f":\n{limit}", "{:.2f}".format, ("ratio_to_limit",), is_wide=is_wide)


SINGLE_COLUMNS = (_CONTESTANT, _WORKLOAD, _RATE, _SPREAD, _TO_REDIS_PY, _to_limit("floor"))
MANY_COLUMNS = (_CONTESTANT, _WORKLOAD, _RATE, _SPREAD, _TO_REDIS_PY, *_COSTS)
CROWD_COLUMNS = (
    _CONTESTANT,
    _WORKLOAD,
    _RATE,
    _SPREAD,
    _TO_REDIS_PY,
    Column(": fewest\nthreads", "{:.2f}".format, ("ratio_to_fewest",)),
    Column("longest pair\n: median", "{:.1f}".format, ("longest_to_median",)),
    *_COSTS,
)
BATCH_COLUMNS = (_CONTESTANT, _WORKLOAD, _RATE, _SPREAD, _TO_REDIS_PY, _to_limit("server", is_wide=True), *_COSTS)
TERM_COLUMNS = (_CONTESTANT, _WORKLOAD, _RATE, _SPREAD, _to_limit("plain"), *_CPU)
REDLOCK_COLUMNS = (_CONTESTANT, _WORKLOAD, _RATE, _SPREAD, _TO_REDIS_PY, _to_limit("bare"))
LATENCY_COLUMNS = (
    _CONTESTANT,
    _WORKLOAD,
    _RATE,
    _TO_REDIS_PY,
    Column("acquire\np50 ms", "{:.2f}".format, ("acquire_p50_ms",)),
    Column(":\nredis-py", "{:.2f}".format, ("acquire_p50_to_redis_py",), is_wide=True),
    Column("acquire\np99 ms", "{:.2f}".format, ("acquire_p99_ms",)),
    Column(":\nredis-py", "{:.2f}".format, ("acquire_p99_to_redis_py",)),
    Column("taken in\ntime", "{} of {}".format, ("taken_in_time", "tries_in_time"), is_wide=True),
    Column("conn.", str, ("connections",), is_wide=True),
)
MAIN_COLUMNS = (_CONTESTANT, _WORKLOAD, _RATE, _TO_REDIS_PY, _to_limit("limit", is_wide=True), *_COSTS)


def print_rows(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    absent: Mapping[str, str],
    is_wide: bool = True,
) -> None:
    """Print a table, and below it the contestants that are not in it.

    Args:
        title: above the table.
        columns: contestant and workload, then figures.
        rows: as `bench.measuring.rounds.summary` makes them.
        absent: the reason for each contestant that is not in the table.
        is_wide: whether to show all columns, not only those that fit into 80 columns of text.
    """
    columns = [column for column in columns if is_wide or not column.is_wide]
    cells = [[column.of(row) for column in columns] for row in rows]
    report.table(title, [column.heading for column in columns], cells, words=2)
    for name, reason in absent.items():
        print(f"{name}: {reason}")
