"""Tests of behaviour import no private module, so that the package may change behind its public names. No server."""

from __future__ import annotations

import re

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
