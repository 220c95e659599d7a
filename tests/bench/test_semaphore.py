"""The bench of semaphores: each row is measured, and no more hold one than may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench import semaphore
from bench.contestants import OURS
from bench.contestants.semaphores import BLPOP_LIST, LOCKS_IN_TURN, SEMAPHORE
from redislock_fast.server import find_binary

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_binary("valkey") is None, reason="no valkey server here")]


def test_every_row_is_measured(figures: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    result = figures("semaphore", "--rounds", 1, "--seconds", 0.05, "--processes", 6)
    out = capsys.readouterr().out
    rows = [row.figure for part in semaphore.PARTS.values() for row in part if row.figure not in result["not_measured"]]
    assert [row for row in rows if not {SEMAPHORE, OURS} <= result["figures"][row].keys()] == []
    assert {BLPOP_LIST, LOCKS_IN_TURN} <= result["figures"]["used capacity"].keys()
    assert [row for row in rows if row not in out] == []
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert result["violations"] == 0
