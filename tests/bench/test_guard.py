"""The bench of two source trees: each figure has a ratio, and a tree without a workload is named.

Rules: on real servers, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.guard import command
from redislock_fast.server import find_binary

pytestmark = pytest.mark.skipif(find_binary("valkey") is None, reason="no valkey server here")

TREE = Path(__file__).resolve().parents[2]


def run(before: Path, *arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["--before", str(before), *map(str, arguments)]))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An empty package in a tree of its own."""
    package = tmp_path / "src" / "redislock_fast"
    package.mkdir(parents=True)
    return package


@pytest.mark.slow
def test_command_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "figures.json"
    names = ["reused", "batch", "contention-8", "redlock"]
    assert run(TREE, "--rounds", 1, "--only", ",".join(names), "--json", saved) == 0
    result = json.loads(saved.read_text())
    assert result["not_measured"] == {}
    assert [row["figure"] for row in result["results"]] == names
    assert all(row["ratios"] == [row["ratio"]] and row["ratio"] > 0 for row in result["results"])
    assert "batch of 1,000" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind here")
def test_instructions_of_equal_trees_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "figures.json"
    assert run(TREE, "--instructions", "--only", "linger", "--json", saved) == 0
    assert "1 thread, linger" in capsys.readouterr().out
    (row,) = json.loads(saved.read_text())["instructions"]
    assert row["before"] > 1_000
    assert row["ratio"] == pytest.approx(1, abs=0.02)


def test_what_a_tree_lacks_is_named(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "__init__.py").write_text("implementation = 'python'\n")
    assert run(package.parents[1], "--rounds", 1, "--only", "reused") == 0
    assert "reused: before: cannot import name 'Lock'" in capsys.readouterr().out


def test_package_that_cannot_be_imported_is_said_so(package: Path) -> None:
    (package / "__init__.py").write_text("raise SystemExit")
    assert run(package.parents[1], "--only", "reused") == 2


def test_tree_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path)
