"""The bench of two source trees: each figure has a ratio, and a tree without a workload is named.

Rules: on real servers, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from redislock_fast.server import find_binary

pytestmark = pytest.mark.skipif(find_binary("valkey") is None, reason="no valkey server here")

TREE = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An empty package in a tree of its own."""
    package = tmp_path / "src" / "redislock_fast"
    package.mkdir(parents=True)
    return package


@pytest.mark.slow
def test_command_prints_and_saves(figures: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    names = ["reused", "tasks", "batch", "contention-8", "redlock"]
    result = figures("guard", "--before", TREE, "--rounds", 1, "--only", ",".join(names))
    assert result["not_measured"] == {}
    assert [row["figure"] for row in result["results"]] == names
    assert all(row["ratios"] == [row["ratio"]] and row["ratio"] > 0 for row in result["results"])
    assert "batch of 1,000" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(400)  # valgrind runs four interpreters, on a busy machine
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind here")
def test_instructions_of_equal_trees_are_equal(
    figures: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = figures("guard", "--before", TREE, "--instructions", "--only", "reused")["results"]
    assert "1 thread" in capsys.readouterr().out
    assert row["before"] > 1_000
    assert row["ratio"] == pytest.approx(1, abs=0.02)


def test_what_a_tree_lacks_is_named(
    package: Path, bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "__init__.py").write_text("implementation = 'python'\n")
    assert bench("guard", "--before", package.parents[1], "--rounds", 1, "--only", "reused") == 0
    assert "reused: before: " in capsys.readouterr().out


def test_package_that_cannot_be_imported_is_said_so(package: Path, bench: Callable[..., int]) -> None:
    (package / "__init__.py").write_text("raise SystemExit")
    assert bench("guard", "--before", package.parents[1], "--only", "reused") == 2


def test_tree_without_a_package_is_refused(tmp_path: Path, bench: Callable[..., int]) -> None:
    with pytest.raises(SystemExit):
        bench("guard", "--before", tmp_path)
