"""The operations on a semaphore, driven by hand: what they send, and what they make of each reply.

Rules: no server, no clock, no chance; replies are as hiredis parses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import Malformed
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.keys import permit_keys
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.permits import ReadPermits, ReleasePermit, Resize, acquire_permit
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue, cleanup_requests
from redislock_fast._protocol.scripts import ACQUIRE_PERMIT, FOR_PERMITS, LEAVE, REACQUIRE, RELEASE_PERMIT, RESIZE, WAIT
from redislock_fast._util.tokens import PERMIT, TokenSource
from tests.simulation.model import SERVERS
from tests.unit.protocol.test_commands import capabilities_of
from tests.unit.protocol.test_malformed import ANYTHING

KEY = b"name"
KEYS = (KEY, *permit_keys(KEY))
TOKEN = TokenSource().new_token(PERMIT)
ASKED = Capabilities()

NOSCRIPT = hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")
NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")
WRONGTYPE = hiredis.ReplyError("WRONGTYPE Operation against a key holding the wrong kind of value")
TRYAGAIN = hiredis.ReplyError("TRYAGAIN Multiple keys request during rehashing of slot")
MOVED = hiredis.ReplyError("MOVED 1 127.0.0.1:7000")
LOADING = hiredis.ReplyError("LOADING Redis is loading the dataset in memory")

MAKERS: dict[str, Callable[[], Any]] = {
    "acquire": lambda: acquire_permit(2)(KEY, TOKEN, 1000),
    "release": lambda: ReleasePermit(KEY, TOKEN, 9.0),
    "resize": lambda: Resize(KEY, 3),
}
REQUESTS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "acquire": (ACQUIRE_PERMIT, (TOKEN, 1000, 2)),
    "release": (RELEASE_PERMIT, (TOKEN,)),
    "resize": (RESIZE, (3,)),
}


def test_the_keys_of_a_semaphore_are_in_one_slot() -> None:
    assert permit_keys(b"name") == (b"{name}:rlf:queue", b"{name}:rlf:waiters", b"{name}:rlf:limit")
    assert permit_keys(b"{a}b") == (b"{a}b:rlf:tagged:queue", b"{a}b:rlf:tagged:waiters", b"{a}b:rlf:tagged:limit")


@pytest.mark.parametrize("name", MAKERS)
def test_the_script_is_sent_whole_once_the_server_does_not_know_it(name: str) -> None:
    operation, (script, words) = MAKERS[name](), REQUESTS[name]
    assert operation.request(ASKED, 1.0) == (b"EVALSHA", script.sha, 4, *KEYS, *words)
    assert not operation.feed(NOSCRIPT, ASKED)
    assert operation.request(ASKED, 2.0) == (b"EVAL", script.text, 4, *KEYS, *words)


@pytest.mark.parametrize("server", SERVERS)
def test_the_first_requests_are_those_of_the_operations(server: str) -> None:
    capabilities = capabilities_of(server)
    kind = acquire_permit(2)
    first = (kind(KEY, TOKEN, 1000).request(capabilities, 1.0), 1)
    assert kind.first_request(capabilities, KEY, TOKEN, 1000) == first
    for contended in (False, True):
        request, usual = ReleasePermit.first_request(capabilities, KEY, TOKEN, contended)
        assert request == ReleasePermit(KEY, TOKEN, 9.0).request(capabilities, 1.0)
        assert usual == (2 if contended else 1)


def test_callers_of_one_limit_share_their_kind_of_operation() -> None:
    assert acquire_permit(2) is acquire_permit(2)
    assert (acquire_permit(2).limit, acquire_permit(3).limit) == (2, 3)
    assert acquire_permit(3).terms(1500) == b"1500/3"


@pytest.mark.parametrize(("reply", "result"), [(1, True), (0, False), ([1, 5], True), ([0, 1], False)])
def test_acquire_says_whether_the_permit_is_ours(reply: Any, result: bool) -> None:
    operation = MAKERS["acquire"]()
    operation.request(ASKED, 1.0)
    assert operation.feed(reply, ASKED)
    assert (operation.result, operation.sent_at) == (result, 1.0)


def test_an_acquire_of_unknown_outcome_counts_from_its_first_request() -> None:
    operation = MAKERS["acquire"]()
    first = operation.request(ASKED, 1.0)
    operation.note_unanswered(True)
    assert operation.request(ASKED, 2.0) == first
    assert operation.feed(1, ASKED)
    assert (operation.result, operation.sent_at) == (True, 1.0)


def test_an_acquire_that_has_failed_after_an_unknown_outcome_is_cleaned_up() -> None:
    operation = MAKERS["acquire"]()
    operation.request(ASKED, 1.0)
    operation.note_unanswered(True)
    assert operation.to_clean_up(True) == [(KEY, TOKEN)]


@pytest.mark.parametrize(("reply", "result", "handed_over"), [(1, True, False), (2, True, True), (0, False, False)])
def test_release_says_whether_there_was_a_permit(reply: int, result: bool, handed_over: bool) -> None:
    operation = MAKERS["release"]()
    operation.request(ASKED, 1.0)
    assert operation.feed(reply, ASKED)
    assert (operation.result, operation.handed_over) == (result, handed_over)


@pytest.mark.parametrize(("sent_at", "result"), [(1.0, True), (9.5, False)], ids=["valid", "ended"])
def test_a_release_of_unknown_outcome_was_executed_if_the_permit_was_valid(sent_at: float, result: bool) -> None:
    operation = MAKERS["release"]()
    operation.request(ASKED, sent_at)
    operation.note_unanswered(True)
    operation.request(ASKED, 9.6)
    assert operation.feed(0, ASKED)
    assert (operation.result, operation.may_be_done) == (result, result)


def test_a_release_finds_no_permit_in_a_key_of_another_kind() -> None:
    operation = MAKERS["release"]()
    operation.request(ASKED, 1.0)
    assert operation.feed(WRONGTYPE, ASKED)
    assert operation.result is False


def test_a_resize_goes_on_where_many_are_to_be_asked() -> None:
    operation = MAKERS["resize"]()
    request = operation.request(ASKED, 1.0)
    assert not operation.feed(3, ASKED)
    assert operation.request(ASKED, 2.0) == request
    assert operation.feed(2, ASKED)
    assert operation.result is True
    assert Resize(KEY, None).request(ASKED, 1.0)[-1] == b""


@pytest.mark.parametrize("name", MAKERS)
def test_errors_of_the_server(name: str) -> None:
    for reply, error in ((NOPERM, Refused), (MOVED, Redirected), (LOADING, NotExecuted)):
        operation = MAKERS[name]()
        operation.request(ASKED, 1.0)
        with pytest.raises(error):
            operation.feed(reply, ASKED)
        assert not operation.result


def test_while_the_keys_move_nothing_can_be_had_and_a_permit_is_removed() -> None:
    acquire, release = MAKERS["acquire"](), MAKERS["release"]()
    acquire.request(ASKED, 1.0)
    assert acquire.feed(TRYAGAIN, ASKED)
    assert acquire.result is False
    release.request(ASKED, 1.0)
    assert not release.feed(TRYAGAIN, ASKED)
    assert release.request(ASKED, 2.0) == (b"ZREM", KEY, TOKEN)
    assert release.feed(1, ASKED)
    assert (release.result, release.handed_over) == (True, False)


@pytest.mark.parametrize("name", MAKERS)
def test_reply_that_no_server_gives_is_no_verdict(name: str) -> None:
    right: dict[str, Callable[[Any], bool]] = {
        "acquire": lambda reply: (type(reply) is int and reply in (0, 1)) or reply == [1, 1],
        "release": lambda reply: type(reply) is int and reply in (0, 1, 2),
        "resize": lambda reply: type(reply) is int and reply in (1, 2, 3),
    }
    for reply in ANYTHING:
        operation = MAKERS[name]()
        operation.request(ASKED, 1.0)
        if right[name](reply):
            operation.feed(reply, ASKED)
            continue
        with pytest.raises(Malformed):
            operation.feed(reply, ASKED)
        assert not operation.result


# ---- what waiters, renewals and cleanups send for a permit ----


@pytest.mark.parametrize("server", SERVERS)
def test_the_operations_of_locks_send_the_semaphores_scripts(server: str) -> None:
    capabilities = capabilities_of(server)
    join = JoinQueue(KEY, TOKEN, b"1000/2", b"publish", b"c", 5000, 60_000, b"")
    if capabilities.queues:
        assert join.request(capabilities, 1.0)[:7] == (b"EVALSHA", FOR_PERMITS[WAIT.sha].sha, 4, *KEYS)
    leave = LeaveQueue(KEY, TOKEN, True, b"1000/2")
    words = (TOKEN, b"keep", b"1000/2")
    assert leave.request(capabilities, 1.0) == (b"EVALSHA", FOR_PERMITS[LEAVE.sha].sha, 4, *KEYS, *words)
    renew = Reacquire(KEY, TOKEN, 1000)
    assert renew.request(capabilities, 1.0) == (b"EVALSHA", FOR_PERMITS[REACQUIRE.sha].sha, 1, KEY, TOKEN, 1000)
    others = [TokenSource().new_token(PERMIT) for _ in range(2)]
    requests = cleanup_requests(capabilities, [(KEY, token) for token in others])
    assert [(request[0], request[2:]) for request in requests] == [
        (b"EVAL", (4, *KEYS, others[0], b"pass on")),
        (b"EVALSHA", (4, *KEYS, others[1], b"pass on")),
    ]


@pytest.mark.parametrize("denial", [NOPERM, TRYAGAIN], ids=str)
def test_a_waiter_that_may_not_leave_sends_nothing_that_deletes_the_key(denial: hiredis.ReplyError) -> None:
    leave = LeaveQueue(KEY, TOKEN)
    leave.request(ASKED, 1.0)
    assert leave.feed(denial, ASKED)
    assert leave.result is False
    assert leave.to_clean_up(False) == ([(KEY, TOKEN)] if denial is TRYAGAIN else [])


# ---- read ----

TIME = [b"1", b"500000"]
READ: list[Any] = [[[TOKEN, 2000.0], [b"t", 2500.0]], TIME, b"7", 1, [[b"w", 1_400_000.0]], b"listing"]


@pytest.mark.parametrize("pairs", [True, False], ids=["RESP3", "RESP2"])
def test_read_tells_who_has_permits_and_who_waits(pairs: bool) -> None:
    operation = ReadPermits(KEY)
    replies = list(READ)
    if not pairs:
        replies[0], replies[4] = [TOKEN, b"2000", b"t", b"2500"], [b"w", b"1400000"]
    assert len(operation.request(ASKED, 1.0)) == len(replies)
    assert operation.feed(replies, ASKED)
    assert operation.holders == [(TOKEN, 2000.0), (b"t", 2500.0)]
    assert (operation.limit, operation.waiting, operation.queue) == (7, 1, [(b"w", 1_400_000.0)])
    assert (operation.time_ms, operation.listing, operation.result) == (1500.0, b"listing", True)


def test_read_leaves_out_what_has_ended_and_what_is_forbidden() -> None:
    operation = ReadPermits(KEY)
    replies: list[Any] = [[[TOKEN, 1500.0]], TIME, None, 0, [], NOPERM]
    assert operation.feed(replies, ASKED)
    assert (operation.holders, operation.limit, operation.listing, operation.result) == ([], None, None, False)


@pytest.mark.parametrize("at", range(5))
def test_read_raises_the_errors_and_takes_no_other_replies(at: int) -> None:
    for reply, error in ((WRONGTYPE, Refused), (LOADING, NotExecuted), (1.5j, Malformed)):
        replies: list[Any] = [reply if number == at else each for number, each in enumerate(READ)]
        with pytest.raises(error):
            ReadPermits(KEY).feed(replies, ASKED)
