"""The list of planted faults is true: each fault applies, and the tests that it names exist."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted import FAULTS
from tests.planted.__main__ import copy_tree, outcome_of
from tests.planted.fault import ROOT, Fault


def _exists(test: str) -> bool:
    file, name = test.split("::")
    path = ROOT / file
    return path.exists() and f"def {name.partition('[')[0]}(" in path.read_text()


def test_each_fault_applies_exactly_once() -> None:
    assert {fault.name: count for fault in FAULTS if (count := fault.occurrences()) != 1} == {}


def test_each_fault_changes_something_and_has_a_name_of_its_own() -> None:
    assert [fault.name for fault in FAULTS if fault.text == fault.replacement] == []
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_each_fault_names_a_test_that_exists() -> None:
    assert [fault.test for fault in FAULTS if not _exists(fault.test)] == []


@pytest.mark.slow
def test_fault_that_a_test_notices_is_told_from_one_that_none_notices(tmp_path: Path) -> None:
    test = "tests/unit/lease/test_handle.py::test_repr_is_without_the_token"
    shown = Fault("token is shown", "_lease/handle.py", "token: bytes = field(repr=False)", "token: bytes", test)
    unnoticed = Fault("nothing is wrong", "_lease/handle.py", "token: bytes = field(repr=False)", shown.text, test)
    gone = Fault("there is no such text", "_lease/handle.py", "no such text", "", test)
    copy_tree(ROOT, tmp_path)
    outcomes = [outcome_of(fault, tmp_path) for fault in (shown, unnoticed, gone)]
    assert [outcome.found_by for outcome in outcomes] == [test, "", ""]
    errors = ["", "", "the text of 'there is no such text' occurs 0 times in _lease/handle.py"]
    assert [outcome.error for outcome in outcomes] == errors
