"""The operations that number a lock's holders, driven by hand: the requests, and the result for each reply.

No server, no clock, no chance; the scripts themselves run in `integration/fencing/test_fenced.py`.
"""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.fenced import AcquireFenced, AcquireOwnFenced, Fence
from redislock_fast._protocol.keys import fence_key
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.scripts import ACQUIRE_FENCED
from redislock_fast._util.tokens import CONTENDED_FLAG
from tests.simulation.model import WRONGTYPE

KEY = b"name"
FENCE = fence_key(KEY)
OURS = b"rlf:" + b"1" * 32

NOSCRIPT = hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")


def operations() -> list[Operation]:
    return [AcquireFenced(KEY, OURS, 1000), AcquireOwnFenced(KEY, OURS, 1000), Fence(KEY, OURS)]


@pytest.mark.parametrize(("ttl_ms", "value"), [(1500, 1500), (None, 0)])
def test_acquire_request(ttl_ms: int | None, value: int) -> None:
    request = AcquireFenced(KEY, OURS, ttl_ms).request(Capabilities(), 1.0)
    assert (b"EVALSHA", ACQUIRE_FENCED.sha, 2, KEY, FENCE, OURS, value) == request


def test_fence_request_takes_nothing() -> None:
    request = Fence(KEY, OURS).request(Capabilities(), 1.0)
    assert (b"EVALSHA", ACQUIRE_FENCED.sha, 2, KEY, FENCE, OURS, b"") == request


def test_acquire_remembers_when_the_first_request_left() -> None:
    operation = AcquireFenced(KEY, OURS, 1000)
    operation.request(Capabilities(), 5.0)
    operation.note_unanswered(True)
    operation.request(Capabilities(), 6.0)
    assert operation.feed([1, None, 7], Capabilities())
    assert (operation.result, operation.fence, operation.sent_at) == (True, 7, 5.0)


@pytest.mark.parametrize("value", [OURS, OURS + CONTENDED_FLAG], ids=["unmarked", "marked"])
@pytest.mark.parametrize("sent", [True, False], ids=["lost", "never sent"])
def test_acquire_finds_its_own_token_after_a_lost_reply_only(value: bytes, sent: bool) -> None:
    operation = AcquireFenced(KEY, OURS, 1000)
    operation.request(Capabilities(), 5.0)
    operation.note_unanswered(sent)
    operation.request(Capabilities(), 6.0)
    assert operation.feed([2, value, 7], Capabilities())
    assert (operation.result, operation.fence, operation.holder) == (sent, 7, value)


@pytest.mark.parametrize("sent", [True, False])
def test_acquire_of_unknown_outcome_is_undone(sent: bool) -> None:
    operation = AcquireFenced(KEY, OURS, 1000)
    operation.request(Capabilities(), 1.0)
    operation.note_unanswered(sent)
    assert operation.to_clean_up(True) == ([(KEY, OURS)] if sent else [])
    assert operation.takes() == [(KEY, OURS)]


def test_script_is_sent_whole_once_the_server_does_not_know_it() -> None:
    for operation in operations():
        by_sha = operation.request(Capabilities(), 1.0)
        assert not operation.feed(NOSCRIPT, Capabilities())
        assert (b"EVAL", ACQUIRE_FENCED.text, *by_sha[2:]) == operation.request(Capabilities(), 1.0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("READONLY You can't write against a read only replica.", NotExecuted),
        ("ERR Error running script (call to f_0): @user_script:7: @user_script: 7: -READONLY You can't.", NotExecuted),
        ("MOVED 5798 127.0.0.1:7001", Redirected),
        ("NOPERM User u has no permissions to run the 'evalsha' command", Refused),
        ("OOM command not allowed when used memory > 'maxmemory'.", Refused),
        (WRONGTYPE, Refused),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_errors(text: str, error: type[Exception]) -> None:
    for operation in operations():
        before = operation.request(Capabilities(), 1.0)
        with pytest.raises(error):
            operation.feed(hiredis.ReplyError(text), Capabilities())
        assert before == operation.request(Capabilities(), 1.0)
        assert (operation.result, operation.unsettled) == (False, False)
