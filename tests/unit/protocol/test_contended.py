"""The operations on a lock that somebody waits for, driven with a pen: its value is the token and a mark.

Rules: as in `test_commands.py`.
"""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._pipe.base import Args
from redislock_fast._protocol.capabilities import PROBE, Dialect
from redislock_fast._protocol.commands import Acquire, Extend, Reacquire, Release
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.scripts import PASS_ON, RELEASE
from redislock_fast._util.tokens import MARK
from tests.simulation.model import SERVERS, Entry, Model

KEY = b"name"
TOKEN = b"a caller's own"
OURS = b"rlf:" + b"1" * 32
MARKED = OURS + MARK

NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the command")
UNKNOWN_COMMAND = hiredis.ReplyError("ERR unknown command 'X', with args beginning with: ")


def dialect_of(server: str) -> Dialect:
    return Dialect(Model(SERVERS[server]).execute(PROBE))


# ---- acquire ----


def test_acquire_finds_its_own_token_marked_after_a_lost_reply() -> None:
    dialect = dialect_of("Valkey 9")
    acquire = Acquire(KEY, OURS, 1000)
    acquire.request(dialect, 5.0)
    acquire.lost(True)
    acquire.request(dialect, 6.0)
    assert acquire.feed(OURS + MARK, dialect)
    assert acquire.result


# ---- release ----


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("queued", [False, True], ids=["unknown", "known"])
def test_release_hands_a_marked_lock_over(server: str, queued: bool) -> None:
    model = Model(SERVERS[server])
    dialect = dialect_of(server)
    model.put(KEY, OURS + MARK)
    release = Release(KEY, OURS, None, queued=queued)
    forms = []
    finished = False
    while not finished:
        request = release.request(dialect, 5.0)
        forms.append(request[2])
        finished = release.feed(model.execute(request), dialect)
    asked_first = {"Valkey 9": [OURS], "Redis 8.4": [b"IFEQ"]}.get(server, [1, 1])  # sent by hash, and then whole
    by_hash_then_whole = [3, 3] if queued or len(asked_first) == 1 else [3]
    assert [*([] if queued else asked_first), *by_hash_then_whole] == forms
    assert release.result
    assert model.entry(KEY) is None


def test_release_by_script_that_finds_a_mark_hands_over() -> None:
    dialect = dialect_of("Redis 7.0")
    release = Release(KEY, OURS, None)
    release.request(dialect, 5.0)
    assert not release.feed(2, dialect)
    assert (b"EVALSHA", PASS_ON.sha, 3, KEY, *queue_keys(KEY), OURS) == release.request(dialect, 5.0)


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 7.0"])
def test_release_of_a_lock_that_is_not_ours_looks_twice_at_most(server: str) -> None:
    dialect = dialect_of(server)
    release = Release(KEY, OURS, None)
    release.request(dialect, 5.0)
    finished = release.feed(0, dialect)
    assert finished is (server == "Redis 7.0")  # the script has looked at the mark too
    if not finished:
        release.request(dialect, 5.0)
        assert release.feed(0, dialect)
    assert not release.result


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
def test_release_with_a_token_of_the_callers_own_looks_at_no_queue(server: str) -> None:
    dialect = dialect_of(server)
    release = Release(KEY, TOKEN, None)
    release.request(dialect, 5.0)
    assert release.feed(0, dialect)
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
    dialect = dialect_of(server)
    release = Release(KEY, OURS, None, queued=True)
    release.request(dialect, 5.0)
    assert not release.feed(refusal, dialect)
    assert request_ == release.request(dialect, 5.0)
    assert release.feed(1, dialect)
    assert release.result


def test_release_whose_hand_over_was_lost_was_executed_if_nothing_is_left() -> None:
    dialect = dialect_of("Valkey 9")
    release = Release(KEY, OURS, 10.0, queued=True)
    release.request(dialect, 5.0)
    release.lost(True)
    release.request(dialect, 6.0)
    assert release.feed(0, dialect)
    assert release.result


# ---- reacquire and extend ----


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
def test_reacquire_of_a_marked_lock_keeps_the_mark(server: str) -> None:
    model = Model(SERVERS[server])
    dialect = dialect_of(server)
    model.put(KEY, OURS + MARK, 1000)
    reacquire = Reacquire(KEY, OURS, 1500)
    assert not reacquire.feed(model.execute(reacquire.request(dialect, 5.0)), dialect)
    assert reacquire.feed(model.execute(reacquire.request(dialect, 5.5)), dialect)
    assert (True, 5.0) == (reacquire.result, reacquire.sent_at)
    assert model.entry(KEY) == Entry(OURS + MARK, 1500)


@pytest.mark.parametrize("server", ["Valkey 9", "Redis 8.4"])
def test_reacquire_of_a_lock_known_to_be_marked_asks_once(server: str) -> None:
    dialect = dialect_of(server)
    reacquire = Reacquire(KEY, OURS, 1500, queued=True)
    marked = OURS + MARK
    assert (b"SET", KEY, marked, b"IFEQ", marked, b"PX", 1500) == reacquire.request(dialect, 5.0)
    assert reacquire.feed(None, dialect)
    assert not reacquire.result


def test_reacquire_by_script_looks_at_both_values_itself() -> None:
    model = Model(SERVERS["Redis 7.0"])
    dialect = dialect_of("Redis 7.0")
    model.put(KEY, OURS + MARK, 1000)
    reacquire = Reacquire(KEY, OURS, 1500)
    reacquire.with_text = True
    assert reacquire.feed(model.execute(reacquire.request(dialect, 5.0)), dialect)
    assert reacquire.result
    assert model.entry(KEY) == Entry(OURS + MARK, 1500)


def test_extend_that_computes_the_ttl_itself_keeps_the_mark() -> None:
    model = Model(SERVERS["Valkey 9"], frozenset({"EVAL", "EVALSHA"}))
    model.put(KEY, OURS + MARK, 2000)
    dialect = Dialect(model.execute(PROBE))
    extend = Extend(KEY, OURS, 1500, False, 2.0)
    while not extend.feed(model.execute(extend.request(dialect, 0.0)), dialect):
        pass
    assert extend.result
    assert model.entry(KEY) == Entry(OURS + MARK, 3500)


def test_extend_that_computes_the_ttl_itself_asks_again_when_the_lock_is_marked_meanwhile() -> None:
    model = Model(SERVERS["Valkey 9"], frozenset({"EVAL", "EVALSHA"}))
    model.put(KEY, OURS, 2000)
    dialect = Dialect(model.execute(PROBE))
    extend = Extend(KEY, OURS, 1500, False, 2.0)
    finished = False
    while not finished:
        request = extend.request(dialect, 0.0)
        if request[0] == b"SET":
            model.put(KEY, MARKED, 2000)
        finished = extend.feed(model.execute(request), dialect)
    assert extend.result
    assert model.entry(KEY) == Entry(MARKED, 3500)
