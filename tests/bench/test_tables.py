"""The tables of `make bench` on a terminal of 80 columns, and the notice of a busy machine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.measuring import columns as all_columns
from bench.measuring.report import Column, busy_share, print_rows

LARGEST: dict[str, Any] = {
    "title": "redis-benchmark -P 64",
    "workload": "100 tasks, asyncio",
    "median": 999_999.4,
    "ratio_to_redis_py": 199.99,
    "ratio_to_limit": 0.99,
    "latency_p50_ms": 123.45,
    "latency_p99_ms": 123.45,
    "acquire_p50_ms": 123.45,
    "acquire_p99_ms": 123.45,
    "acquire_p99_to_redis_py": 19.99,
    "acquisitions_per_s": 99_999.4,
    "acquisitions_per_s_to_redis_py": 19.99,
    "gap_p50_ms": 1_512.0,
    "wait_p99_ms": 12_512.0,
    "jain": 1.0,
}
IN_80_COLUMNS = {
    "throughput": (all_columns.MAIN, LARGEST),
    "latency": (all_columns.LATENCY, {**LARGEST, "title": "redislock_fast", "workload": "64 threads"}),
    "contention": (all_columns.SPEED, {**LARGEST, "title": "redislock_fast", "workload": "8 processes, 1/1"}),
}


def printed(columns: tuple[Column, ...], row: dict[str, Any], is_wide: bool, capsys: pytest.CaptureFixture[str]) -> str:
    print_rows("title", columns, [row], is_wide=is_wide)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", IN_80_COLUMNS)
def test_table_of_make_bench_is_whole_in_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns, row = IN_80_COLUMNS[command]
    out = printed(columns, row, False, capsys)
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert "…" not in out
    shown = [column.of(row) for column in columns if not column.is_wide]
    assert [cell for cell in shown if cell not in out] == []


@pytest.mark.parametrize("command", IN_80_COLUMNS)
def test_wide_table_has_all_figures_and_is_not_cut(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns, row = IN_80_COLUMNS[command]
    every = {figure: 1234.5 for column in columns for figure in column.figures}
    out = printed(columns, {**every, **row}, True, capsys)
    assert "…" not in out
    assert [cell for column in columns if (cell := column.of({**every, **row})) not in out] == []


def test_share_of_the_busy_processors_is_what_was_not_idle() -> None:
    user, nice, system, idle, iowait, irq, softirq, steal = 30, 5, 10, 40, 10, 1, 2, 2
    before = [1000] * 8
    after = [1000 + spent for spent in (user, nice, system, idle, iowait, irq, softirq, steal)]
    assert busy_share(before, after) == pytest.approx(0.5)
