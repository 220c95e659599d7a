"""The request that sets a lease anew and waits for replicas.

Rules: no server; replies are made up.
"""

from __future__ import annotations

from typing import Any

import hiredis
import pytest

from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import NotExecuted, Refused
from redislock_fast._protocol.replicas import Replicate


def machine() -> Replicate:
    return Replicate(b"name", b"rlf:" + b"0" * 32, 10_000, False, 2, 500)


NATIVE = Capabilities([[b"delifeq"], None, [b"lmpop"]])
MARKED = b"rlf:" + b"0" * 32 + b"+"


def test_waits_no_longer_in_all_however_often_it_asks() -> None:
    operation = machine()
    assert operation.request(NATIVE, 100.0)[1] == (b"WAIT", 2, 500)
    operation.note_unanswered(True)
    assert operation.request(NATIVE, 100.25)[1] == (b"WAIT", 2, 250)
    assert operation.feed([None, 2], NATIVE) is False
    again = operation.request(NATIVE, 109.0)
    assert (again[0][2], again[1]) == (MARKED, (b"WAIT", 2, 1))
    assert operation.feed([b"OK", 2], NATIVE) is True
    assert (operation.result, operation.replicas, operation.sent_at, operation.unsettled) == (True, 2, 100.0, True)


def test_counts_nothing_for_a_lock_that_is_not_held() -> None:
    operation = machine()
    for _ in range(2):
        operation.request(NATIVE, 0.0)
        finished = operation.feed([None, 2], NATIVE)
    assert (finished, operation.held, operation.result, operation.replicas) == (True, False, False, 0)


@pytest.mark.parametrize(
    ("reacquired", "counted", "error"),
    [
        (b"OK", hiredis.ReplyError("NOPERM no"), Refused),
        (hiredis.ReplyError("READONLY You can't write"), hiredis.ReplyError("ERR WAIT cannot be used"), NotExecuted),
        (hiredis.ReplyError("NOREPLICAS not enough"), 0, NotExecuted),
    ],
)
def test_errors(reacquired: Any, counted: Any, error: type[Exception]) -> None:
    operation = machine()
    operation.request(NATIVE, 0.0)
    with pytest.raises(error):
        operation.feed([reacquired, counted], NATIVE)
    assert (operation.result, operation.takes(), operation.to_clean_up(failed=True)) == (False, [], [])
