"""The bench of the scripts: each row is measured, on a short queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench import scripts


def test_command_saves_each_row(figures: Callable[..., dict[str, Any]]) -> None:
    rows = figures("scripts", "--waiters", 200, "--count", 3)["results"]
    stories = [(script, queue) for script, queue, *_ in scripts.stories(200)]
    assert [(row["script"], row["queue"]) for row in rows] == stories
    assert all(0 < row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in rows)
