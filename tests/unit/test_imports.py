"""Tests import what they may. No server.

Those of behaviour import no private module, so that the package may change behind its public names.
"""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.support.helpers import ROOT

IMPORTS_PRIVATE = re.compile(r"^\s*(from|import) redislock_fast([\w.]*\._|(\.asyncio)? import .*\b_)", re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "is_private"),
    [
        ("import redislock_fast.asyncio", False),
        ("from redislock_fast.lock import Lock", False),
        ("import redislock_fast._pipe.impl", True),
        ("    from redislock_fast._util import times", True),
        ("from redislock_fast import Lock, _util", True),
    ],
)
def test_an_import_of_a_private_module_is_recognised(line: str, is_private: bool) -> None:
    assert bool(IMPORTS_PRIVATE.search(f"import os\n{line}\n")) is is_private


@pytest.mark.parametrize("folder", ["bench", "compat", "integration", "slow"])
def test_tests_of_behaviour_import_public_modules_only(folder: str) -> None:
    files = (ROOT / "tests" / folder).rglob("*.py")
    assert [str(file) for file in files if IMPORTS_PRIVATE.search(file.read_text())] == []


def test_what_the_tests_import_is_in_their_group() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    named = {re.split(r"[^\w-]", one)[0].replace("-", "_") for one in needed}
    statements = [node for file in (ROOT / "tests").rglob("*.py") for node in ast.parse(file.read_text()).body]
    modules = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
    packages = {module.partition(".")[0] for module in modules} - {"bench", "redislock_fast", "tests"}
    distributions = {one: {name.replace("-", "_") for name in names} for one, names in packages_distributions().items()}
    foreign = packages - sys.stdlib_module_names
    installed = foreign & distributions.keys()  # another group may do without some, and their tests are skipped
    assert len(installed) > 5
    assert {package for package in installed if named.isdisjoint(distributions[package])} == set()
