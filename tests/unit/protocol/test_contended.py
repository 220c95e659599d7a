"""The operations on a lock that somebody waits for, driven by hand: its value is the token and a mark.

Rules: as in `test_commands.py`.
"""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._pipe.base import Args
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.commands import Acquire, Extend, Reacquire, Release
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.scripts import PASS_ON, RELEASE
from redislock_fast._util.tokens import CONTENDED_FLAG
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, Model

KEY = b"name"
TOKEN = b"a caller's own"
OURS = b"rlf:" + b"1" * 32
MARKED = OURS + CONTENDED_FLAG

NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")
UNKNOWN_COMMAND = hiredis.ReplyError("ERR unknown command 'X', with args beginning with: ")


def capabilities_of(server: str) -> Capabilities:
    return Capabilities(Model(SERVERS[server]).execute(PROBE))


# ---- acquire ----


def test_acquire_finds_its_own_token_marked_after_a_lost_reply() -> None:
    capabilities = capabilities_of("Valkey 9")
    acquire = Acquire(KEY, OURS, 1000)
    acquire.request(capabilities, 5.0)
    acquire.note_unanswered(True)
    acquire.request(capabilities, 6.0)
    assert acquire.feed(OURS + CONTENDED_FLAG, capabilities)
    assert acquire.result


# ---- release ----


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("contended", [False, True], ids=["unknown", "known"])
def test_release_hands_a_marked_lock_over(server: str, contended: bool) -> None:
    model = Model(SERVERS[server])
    capabilities = capabilities_of(server)
    model.put(KEY, OURS + CONTENDED_FLAG)
    release = Release(KEY, OURS, None, contended=contended)
    forms = []
    finished = False
    while not finished:
        request = release.request(capabilities, 5.0)
        forms.append(request[2])
        finished = release.feed(model.execute(request), capabilities)
    asked_first = {"Valkey 9": [OURS], "Redis 8.4": [b"IFEQ"]}.get(server, [1, 1])  # sent by hash, and then whole
    by_hash_then_whole = [3, 3] if contended or len(asked_first) == 1 else [3]
    assert [*([] if contended else asked_first), *by_hash_then_whole] == forms
    assert release.result
    assert model.entry(KEY) is None


def test_release_is_sent_again_while_too_many_waiters_are_gone() -> None:
    release = Release(KEY, OURS, 9.0, contended=True)
    first = release.request(Capabilities(), 5.0)
    assert not release.feed(3, Capabilities())
    assert release.request(Capabilities(), 5.0) == first
    assert release.feed(2, Capabilities())
    assert (release.result, release.handed_over) == (True, True)


def test_release_whose_lease_ends_before_it_has_passed_over_all_that_are_gone_is_done() -> None:
    release = Release(KEY, OURS, 9.0, contended=True)
    release.request(Capabilities(), 5.0)
    assert not release.feed(3, Capabilities())
    release.request(Capabilities(), 10.0)
    assert release.feed(0, Capabilities())
    assert (release.result, release.handed_over) == (True, False)


def test_release_by_script_that_finds_a_mark_hands_over() -> None:
    capabilities = capabilities_of("Redis 7.0")
    release = Release(KEY, OURS, None)
    release.request(capabilities, 5.0)
    assert not release.feed(2, capabilities)
    assert (b"EVALSHA", PASS_ON.sha, 3, KEY, *queue_keys(KEY), OURS) == release.request(capabilities, 5.0)


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 7.0"])
def test_release_of_a_lock_that_is_not_ours_looks_twice_at_most(server: str) -> None:
    capabilities = capabilities_of(server)
    release = Release(KEY, OURS, None)
    release.request(capabilities, 5.0)
    finished = release.feed(0, capabilities)
    assert finished is (server == "Redis 7.0")  # the script has looked at the mark too
    if not finished:
        release.request(capabilities, 5.0)
        assert release.feed(0, capabilities)
    assert not release.result


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
def test_release_with_a_token_of_the_callers_own_looks_at_no_queue(server: str) -> None:
    capabilities = capabilities_of(server)
    release = Release(KEY, TOKEN, None)
    release.request(capabilities, 5.0)
    assert release.feed(0, capabilities)
    assert not release.result


@pytest.mark.parametrize(
    ("server", "request_"),
    [
        ("Valkey 9", (b"DELIFEQ", KEY, b"rlf:" + b"1" * 32 + b"+")),
        ("Redis 8.4", (b"DELEX", KEY, b"IFEQ", b"rlf:" + b"1" * 32 + b"+")),
        ("Redis 7.0", (b"EVALSHA", RELEASE.sha, 1, KEY, b"rlf:" + b"1" * 32)),
    ],
)
@pytest.mark.parametrize("refusal", [NOPERM, UNKNOWN_COMMAND], ids=str)
def test_release_deletes_a_marked_lock_where_the_queue_is_forbidden(
    server: str, request_: Args, refusal: hiredis.ReplyError
) -> None:
    capabilities = capabilities_of(server)
    release = Release(KEY, OURS, None, contended=True)
    release.request(capabilities, 5.0)
    assert not release.feed(refusal, capabilities)
    assert request_ == release.request(capabilities, 5.0)
    assert release.feed(1, capabilities)
    assert release.result


def test_release_whose_hand_over_was_lost_was_executed_if_nothing_is_left() -> None:
    capabilities = capabilities_of("Valkey 9")
    release = Release(KEY, OURS, 10.0, contended=True)
    release.request(capabilities, 5.0)
    release.note_unanswered(True)
    release.request(capabilities, 6.0)
    assert release.feed(0, capabilities)
    assert release.result


# ---- reacquire and extend ----


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
def test_reacquire_of_a_marked_lock_keeps_the_mark(server: str) -> None:
    model = Model(SERVERS[server])
    capabilities = capabilities_of(server)
    model.put(KEY, OURS + CONTENDED_FLAG, 1000)
    reacquire = Reacquire(KEY, OURS, 1500)
    assert not reacquire.feed(model.execute(reacquire.request(capabilities, 5.0)), capabilities)
    assert reacquire.feed(model.execute(reacquire.request(capabilities, 5.5)), capabilities)
    assert (True, 5.0) == (reacquire.result, reacquire.sent_at)
    assert model.entry(KEY) == Entry(OURS + CONTENDED_FLAG, 1500)


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
def test_reacquire_of_a_lock_known_to_be_marked_asks_once(server: str) -> None:
    capabilities = capabilities_of(server)
    reacquire = Reacquire(KEY, OURS, 1500, contended=True)
    marked = OURS + CONTENDED_FLAG
    assert (b"SET", KEY, marked, b"IFEQ", marked, b"PX", 1500) == reacquire.request(capabilities, 5.0)
    assert reacquire.feed(None, capabilities)
    assert not reacquire.result


def test_reacquire_by_script_looks_at_both_values_itself() -> None:
    model = Model(SERVERS["Redis 7.0"])
    capabilities = capabilities_of("Redis 7.0")
    model.put(KEY, OURS + CONTENDED_FLAG, 1000)
    reacquire = Reacquire(KEY, OURS, 1500)
    reacquire.with_text = True
    assert reacquire.feed(model.execute(reacquire.request(capabilities, 5.0)), capabilities)
    assert reacquire.result
    assert model.entry(KEY) == Entry(OURS + CONTENDED_FLAG, 1500)


def test_extend_that_computes_the_ttl_itself_keeps_the_mark() -> None:
    model = Model(SERVERS["Valkey 9"], frozenset({"EVAL", "EVALSHA"}))
    model.put(KEY, OURS + CONTENDED_FLAG, 2000)
    capabilities = Capabilities(model.execute(PROBE))
    extend = Extend(KEY, OURS, 1500, False, 2.0)
    while not extend.feed(model.execute(extend.request(capabilities, 0.0)), capabilities):
        pass
    assert extend.result
    assert model.entry(KEY) == Entry(OURS + CONTENDED_FLAG, 3500)


def test_extend_that_computes_the_ttl_itself_asks_again_when_the_lock_is_marked_meanwhile() -> None:
    model = Model(SERVERS["Valkey 9"], frozenset({"EVAL", "EVALSHA"}))
    model.put(KEY, OURS, 2000)
    capabilities = Capabilities(model.execute(PROBE))
    extend = Extend(KEY, OURS, 1500, False, 2.0)
    finished = False
    while not finished:
        request = extend.request(capabilities, 0.0)
        if request[0] == b"SET":
            model.put(KEY, MARKED, 2000)
        finished = extend.feed(model.execute(request), capabilities)
    assert extend.result
    assert model.entry(KEY) == Entry(MARKED, 3500)
