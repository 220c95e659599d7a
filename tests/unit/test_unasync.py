"""The modules that are generated: what the script finds in a tree that is not up to date. No server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

GENERATED = ("election", "inspection", "locker", "redlock", "semaphore", "single")


def _run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/unasync.py", *words]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package in a copy of the tree, as far as the script reads it."""
    pytest.importorskip("ruff")
    for name in (".ci/unasync.py", "pyproject.toml"):
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    package = tmp_path / "src" / "redislock_fast"
    shutil.copytree(ROOT / "src" / "redislock_fast" / "asyncio", package / "asyncio")
    for name in ("__init__", *GENERATED):
        shutil.copy(ROOT / "src" / "redislock_fast" / f"{name}.py", package)
    return package


def test_stale_module_is_found_and_written_anew(package: Path) -> None:
    tree = package.parents[1]
    assert (_run(tree, "--check").returncode, _run(tree, "--check").stdout) == (0, "")
    locker = package / "locker.py"
    expected = locker.read_text()
    locker.write_text(expected.replace("in one round", "one by one"))
    assert _run(tree, "--check").stdout.startswith("src/redislock_fast/locker.py is not what")
    assert _run(tree, "--check").returncode == 1
    assert _run(tree).returncode == 0
    assert locker.read_text() == expected


def test_rule_that_matches_nothing_is_an_error(package: Path) -> None:
    source = package / "asyncio" / "redlock.py"
    source.write_text(source.read_text().replace("current_task()", "None"))
    answer = _run(package.parents[1], "--check")
    assert (answer.returncode, "current_task" in answer.stderr) == (1, True)


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/decisions/0018-generated-modules.md"]
)
def test_page_names_each_generated_module(page: str) -> None:
    named = re.findall(r"\b(\w+)\.py\b", (ROOT / page).read_text(encoding="utf-8"))
    assert set(GENERATED) - set(named) == set()


def test_generated_module_awaits_nothing() -> None:
    for name in GENERATED:
        text = (ROOT / "src" / "redislock_fast" / f"{name}.py").read_text()
        assert re.findall(r"\basync\b|\bawait|\bCoroutine|Loop[A-Z]", text) == []
