"""Unit tests: how the results of other projects' tests are compared. No server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.suites import __main__ as command
from tests.compat.suites.catalogue import Suite
from tests.compat.suites.running import Comparison

SUITE = Suite("project", differ={"listed": "the reason"})
SAME = {"kept": "passed", "listed": "passed", "skipped": "skipped"}


@pytest.mark.parametrize(
    ("before", "after", "locks", "status"),
    [
        (SAME, SAME, 1, 0),
        (SAME, SAME | {"listed": "failure"}, 1, 0),
        (SAME, SAME | {"kept": "failure"}, 1, 1),
        (SAME | {"kept": "error"}, SAME, 1, 1),
        (SAME, SAME | {"new": "passed"}, 1, 1),
        (SAME, {}, 1, 1),
        (SAME, SAME, 0, 2),
        ({}, {}, 1, 2),
    ],
    ids=["same", "listed", "fails", "passes", "more", "none on ours", "no lock", "nothing"],
)
def test_status_tells_whether_the_results_differ(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], after: dict[str, str], locks: int, status: int
) -> None:
    monkeypatch.setattr(command, "prepare", lambda *_: (Path(), Path()))
    monkeypatch.setattr(command, "compare", lambda *_: Comparison(before, after, locks, ""))
    assert status == command._check(SUITE, Path(), shows_output=False)
