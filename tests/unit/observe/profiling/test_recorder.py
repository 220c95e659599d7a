"""What a recorder keeps of callers that never release."""

from __future__ import annotations

import gc

import pytest

from redislock_fast._observe.profiling import recorder
from redislock_fast._observe.profiling.recorder import Recorder
from tests.support.helpers import in_thread


def test_what_one_caller_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_HELD", 3)
    told = Recorder()
    for number in range(10):
        told.record_acquisition(str(number), 0.0, 1)
    assert [list(caller.held) for caller in told._callers.values()] == [["7", "8", "9"]]


def test_what_a_thread_holds_is_forgotten_with_it() -> None:
    told = Recorder()
    in_thread(lambda: told.record_acquisition("name", 0.0, 1))
    gc.collect()
    assert list(told._callers.values()) == []


def test_a_name_of_any_type_is_text() -> None:
    told = Recorder()
    for name in ("name", b"name", b"\xff", 7):
        told.record_acquisition(name, 0.0, 1)
    assert sorted(lock["name"] for lock in told.as_dict()["locks"]) == ["7", "\\xff", "name"]


def test_a_report_may_come_in_the_midst_of_another() -> None:
    """As where a signal handler uses a lock, or the garbage collector drops one."""
    told = Recorder()

    class Interrupting(float):
        def __rsub__(self, now: float) -> float:
            told.record_acquisition("other", 0.0, 1)
            told.record_release("other", 0.0, True)
            return now - float(self)

    told.record_acquisition("name", Interrupting(1.0), 1)
    assert {lock["name"]: lock["acquisitions"] for lock in told.as_dict()["locks"]} == {"name": 1, "other": 1}
