"""The commands of the bench, as the command line runs them.

Rules for all tests here: on real servers, for a moment: the figures mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command of the bench, and returns its exit status."""
    pytest.importorskip("bench", reason="the bench is no part of the package")
    pytest.importorskip("rich", reason="what the bench prints its tables with")
    from bench.commands import main
    from bench.measuring import report

    monkeypatch.setattr(report, "warn_if_busy", lambda: None)  # the tests keep the machine busy
    return lambda *words: main([str(word) for word in words])


@pytest.fixture
def figures(bench: Callable[..., int], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a command of the bench, and returns what it has saved."""

    def figures(*words: object) -> dict[str, Any]:
        saved = tmp_path / "figures.json"
        assert bench(*words, "--json", saved) == 0
        found: dict[str, Any] = json.loads(saved.read_text())
        return found

    return figures
