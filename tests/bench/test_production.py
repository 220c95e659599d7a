"""The bench of what production turns on: each setting has its ratios, or its reason.

Rules: on real servers, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench import production
from redislock_fast.server import find_binary

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_binary("valkey") is None, reason="no valkey server here")]


@pytest.mark.parametrize("callers", ["1 thread", "1 task"])
def test_every_setting_is_measured(
    callers: str, figures: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = figures("production", "--rounds", 1, "--seconds", 0.02, "--callers", callers)
    out = capsys.readouterr().out
    with_tls = find_binary("redis") is not None
    names = {setting.name for setting in production.SETTINGS if with_tls or not setting.place.startswith("tls")}
    assert names <= set(result["pairs_per_s"][callers])
    assert [name for name in names if name not in out] == []
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_crowds_contention_over_tls_and_interpreters_are_measured(figures: Callable[..., dict[str, Any]]) -> None:
    result = figures("production", "--rounds", 1, "--seconds", 0.02, "--callers", "rest", "--with-gil", sys.executable)
    assert "1000 threads" in [row["workload"] for row in result["rest"]]
    with_gil = [row["workload"] for row in result["rest"] if row["contestant"] == "with the GIL"]
    assert len(with_gil) == 5
    gaps = [row for row in result["rest"] if row.get("gap_p50_ms")]
    assert len(gaps) == 1 + (find_binary("redis") is not None)
