"""What a release is made of: its notes, and the platforms that get a compiled wheel. No server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

CHANGELOG = """# Changelog

## Unreleased

- Not yet.

## 1.2.0 - 2026-12-01

### Added

- A lock.

## 1.1.0

"""


def _notes(folder: Path, version: str, tag: str) -> subprocess.CompletedProcess[str]:
    """Have the program read a changelog, in a tree of this version."""
    program = folder / ".ci" / "release_notes.py"
    module = folder / "src" / "redislock_fast" / "_version.py"
    for file in (program, module):
        file.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / program.name, program)
    module.write_text(f'"""The version."""\n\n__version__ = "{version}"\n')
    folder.joinpath("CHANGELOG.md").write_text(CHANGELOG)
    return subprocess.run([sys.executable, program, tag], capture_output=True, text=True, check=False)


def test_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    printed = _notes(tmp_path, "1.2.0", "v1.2.0")
    assert (0, "### Added\n\n- A lock.\n", "") == (printed.returncode, printed.stdout, printed.stderr)


@pytest.mark.parametrize(
    ("version", "tag", "words"),
    [
        ("1.2.0", "v1.2.1", ("v1.2.1", "1.2.0")),
        ("1.2.0", "1.2.0", ("v1.2.0",)),
        ("1.1.0", "v1.1.0", ("CHANGELOG.md", "1.1.0")),
        ("1.3.0", "v1.3.0", ("CHANGELOG.md", "1.3.0")),
    ],
    ids=["other tag", "no v", "empty section", "no section"],
)
def test_release_that_is_not_prepared_is_an_error(
    version: str, tag: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    printed = _notes(tmp_path, version, tag)
    assert (1, "") == (printed.returncode, printed.stdout)
    assert [] == [word for word in words if word not in printed.stderr]


def test_one_extra_has_all_others() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for inner in extras.pop("all") for extra in re.findall(r"[\[,](\w+)", inner)]
    assert sorted(named) == sorted(extras)


@pytest.mark.parametrize(
    ("platform", "archs", "places"),
    [
        (
            "linux",
            "x86_64,aarch64",
            {"manylinux_x86_64", "manylinux_aarch64", "musllinux_x86_64", "musllinux_aarch64"},
        ),
        ("macos", "x86_64,arm64", {"macosx_x86_64", "macosx_arm64"}),
    ],
)
def test_compiled_wheels_are_for_each_python_on_each_platform(platform: str, archs: str, places: set[str]) -> None:
    pytest.importorskip("cibuildwheel")
    command = ["cibuildwheel", "--platform", platform, "--archs", archs, "--print-build-identifiers"]
    printed = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    pythons = ("cp310", "cp311", "cp312", "cp313", "cp314", "cp314t")
    assert {f"{python}-{place}" for python in pythons for place in places} == set(printed.stdout.split())
