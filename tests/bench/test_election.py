"""The bench of elections: both ways to be followed are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from redislock_fast.server import find_binary

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_binary("valkey") is None, reason="no valkey server here")]


def test_both_ways_are_measured(figures: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    result = figures("election", "--rounds", 1, "--seconds", 0.05)
    assert min(result["resigned_ms"]) > 0
    assert len(result["killed_ms"]) == 1
    assert "resign() to lead(term)" in capsys.readouterr().out
