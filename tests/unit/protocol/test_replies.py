"""The replies that all operations have in common: errors, redirections and refusals, fed as hiredis parses them."""

from __future__ import annotations

import re

import hiredis
import pytest

from redislock_fast._pipe.base import Args
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire, Extend, Reacquire, Release
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.permits import ReleasePermit
from redislock_fast._protocol.queue import LeaveQueue
from redislock_fast._protocol.scripts import EXTEND, REACQUIRE, RELEASE
from tests.simulation.model import DELEX_WRONGTYPE, SERVERS, WRONGTYPE
from tests.unit.protocol.test_commands import KEY, NOSCRIPT, TOKEN, capabilities_of, operations

MISCONF = "MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist to disk."

# ---- errors that several operations share ----


@pytest.mark.parametrize("script", ["release", "reacquire", "extend"])
def test_scripts_are_sent_whole_once_the_server_does_not_know_them(script: str) -> None:
    capabilities = capabilities_of("Redis 6.2")
    machines: dict[str, Operation] = {
        "release": Release(KEY, TOKEN, None),
        "reacquire": Reacquire(KEY, TOKEN, 1500),
        "extend": Extend(KEY, TOKEN, 1500, False, 10.0),
    }
    operation = machines[script]
    text = {"release": RELEASE, "reacquire": REACQUIRE, "extend": EXTEND}[script].text
    by_sha = operation.request(capabilities, 1.0)
    assert not operation.feed(NOSCRIPT, capabilities)
    assert (b"EVAL", text, *by_sha[2:]) == operation.request(capabilities, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "BUSY Redis is busy running a script.",
        "CLUSTERDOWN Hash slot not served",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "NOREPLICAS Not enough good replicas to write.",
        "READONLY You can't write against a read only replica.",
        "NOAUTH Authentication required.",
        "ERR Error running script (call to f_0): @user_script:7: @user_script: 7: -READONLY You can't write.",
        "ERR only (P)SUBSCRIBE / (P)UNSUBSCRIBE / PING / QUIT allowed in this context",
    ],
    ids=lambda text: text.split()[0],
)
def test_errors_that_mean_later(text: str) -> None:
    for server in SERVERS:
        for operation in operations():
            before = operation.request(capabilities_of(server), 1.0)
            with pytest.raises(NotExecuted) as caught:
                operation.feed(hiredis.ReplyError(text), capabilities_of(server))
            assert text == str(caught.value)
            assert caught.value.code in text
            assert before == operation.request(capabilities_of(server), 1.0)
            assert not operation.unsettled


@pytest.mark.parametrize("text", [MISCONF, f"ERR Error running script (call to f_0): @user_script: 7: -{MISCONF}"])
def test_disk_that_is_full_fails_an_acquire_at_once_and_all_else_is_tried_again(text: str) -> None:
    for server in SERVERS:
        for operation in [*operations(), LeaveQueue(KEY, TOKEN), ReleasePermit(KEY, TOKEN, None)]:
            operation.request(capabilities_of(server), 1.0)
            with pytest.raises(Refused if isinstance(operation, Acquire) else NotExecuted, match=re.escape(text)):
                operation.feed(hiredis.ReplyError(text), capabilities_of(server))
            assert not operation.unsettled


@pytest.mark.parametrize("text", ["MOVED 5798 127.0.0.1:7001", "ASK 5798 127.0.0.1:7001"])
def test_moved_and_ask_are_redirections(text: str) -> None:
    for server in SERVERS:
        for operation in operations():
            operation.request(capabilities_of(server), 1.0)
            with pytest.raises(Redirected, match=text):
                operation.feed(hiredis.ReplyError(text), capabilities_of(server))
            assert not operation.unsettled


@pytest.mark.parametrize(
    "text",
    [WRONGTYPE, f"ERR Error running script (call to f_0): @user_script:7: {WRONGTYPE}", DELEX_WRONGTYPE],
    ids=["plain", "wrapped", "of DELEX"],
)
def test_what_is_no_string_is_not_our_lock(text: str) -> None:
    for server in SERVERS:
        for operation in (Release(KEY, TOKEN, None), Reacquire(KEY, TOKEN, 1), Extend(KEY, TOKEN, 1, False, 9.0)):
            operation.request(capabilities_of(server), 1.0)
            assert operation.feed(hiredis.ReplyError(text), capabilities_of(server))
            assert not operation.result


def test_acquire_is_refused_what_is_no_string() -> None:
    capabilities = capabilities_of("Valkey 9")
    acquire = Acquire(KEY, TOKEN, 1000)
    acquire.request(capabilities, 1.0)
    with pytest.raises(Refused, match="WRONGTYPE"):
        acquire.feed(hiredis.ReplyError(WRONGTYPE), capabilities)


def _refuse_all(operation: Operation, capabilities: Capabilities, reply: hiredis.ReplyError, sent: list[Args]) -> None:
    """Give this reply to each form of the request, which are added to `sent`."""
    finished = False
    while not finished:
        sent.append(operation.request(capabilities, 1.0))
        finished = operation.feed(reply, capabilities)


@pytest.mark.parametrize("text", ["OOM command not allowed when used memory > 'maxmemory'.", "ERR something else"])
def test_other_errors_are_refusals(text: str) -> None:
    for server in SERVERS:
        for operation in operations():
            sent: list[Args] = []
            with pytest.raises(Refused) as caught:
                _refuse_all(operation, capabilities_of(server), hiredis.ReplyError(text), sent)
            assert text == str(caught.value)
            assert len(set(sent)) == len(sent) <= 2
