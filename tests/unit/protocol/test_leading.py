"""The operations on an election's record: what they make of each reply. No server."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import Malformed
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.leading import NoteLeader, ReadLeader, WatchLeader
from redislock_fast._protocol.operation import NotExecuted, Refused
from redislock_fast._protocol.scripts import LEAD
from redislock_fast._util.tokens import token_id_of

TOKEN = b"rlf:" + b"0" * 32
RECORD: Any = [token_id_of(TOKEN).encode(), b"7", b"here", b"1000000"]
SERVER = Capabilities()


def read(held: Any, record: Any, *more: Any) -> Any:
    replies = [record, held, *more]
    reading = ReadLeader(b"beat", with_process=len(replies) > 2)
    assert reading.feed(replies, SERVER)
    assert reading.result == (reading.leader is not None)
    return reading.leader


@pytest.mark.parametrize("value", [TOKEN, TOKEN + b"+"], ids=["plain", "contended"])
def test_leader_is_the_one_whose_token_holds_the_lock(value: bytes) -> None:
    leader = read(value, RECORD, [b"3", b"500000"], b"")
    assert (leader.term, leader.value, leader.process, leader.since_s) == (7, "here", None, 2.5)


@pytest.mark.parametrize("value", [None, b"", b"another's", TOKEN[:-1] + b"1"])
def test_record_of_a_leader_that_has_ended_is_not_shown(value: bytes | None) -> None:
    assert read(value, RECORD) is None
    assert read(value, [None] * 4) is None


def test_leader_is_shown_without_what_the_user_may_not_read() -> None:
    error: Any = hiredis.ReplyError("NOPERM")
    leader = read(TOKEN, [*RECORD[:2], b"", RECORD[3]], error, error)
    assert (leader.term, leader.value, leader.process, leader.since_s) == (7, None, None, None)


@pytest.mark.parametrize("record", [b"OK", [b"id"], [RECORD[0], b"x", b"", b"1"]])
def test_malformed_record_is_refused(record: Any) -> None:
    with pytest.raises(Malformed):
        read(TOKEN, record)


def test_errors_of_the_server_are_told() -> None:
    with pytest.raises(Refused):
        read(hiredis.ReplyError("WRONGTYPE"), RECORD)
    with pytest.raises(NotExecuted):
        read(TOKEN, hiredis.ReplyError("LOADING"))


def test_leader_is_noted_by_the_id_of_its_token() -> None:
    note = NoteLeader(b"beat", TOKEN, 7, b"here")
    keys = (b"beat", b"{beat}:rlf:leader")
    rest = (2, *keys, TOKEN, RECORD[0], 7, b"here")
    assert note.request(SERVER, 0.0) == (b"EVALSHA", LEAD.sha, *rest)
    assert note.feed(hiredis.ReplyError("NOSCRIPT No matching script"), SERVER) is False
    assert note.request(SERVER, 0.0) == (b"EVAL", LEAD.text, *rest)
    assert (note.feed(0, SERVER), note.result) == (True, False)
    assert (note.feed(1, SERVER), note.result) == (True, True)
    with pytest.raises(Malformed):
        note.feed(b"OK", SERVER)
    with pytest.raises(Refused):
        note.feed(hiredis.ReplyError("NOPERM"), SERVER)


def test_record_is_read_before_the_lock_and_watched() -> None:
    watch = WatchLeader(b"beat")
    record, held = (b"HMGET", b"{beat}:rlf:leader", b"id", b"term", b"value", b"since"), (b"GET", b"beat")
    armed = [(b"CLIENT", b"TRACKING", b"ON", b"OPTIN"), (b"CLIENT", b"CACHING", b"YES")]
    assert watch.request(SERVER, 0.0) == [*armed, record, held]
    assert (watch.feed([b"OK", b"OK", RECORD, TOKEN], SERVER), watch.denied) == (True, False)
    assert watch.leader is not None
    assert watch.leader.term == 7
    for reply, error in ((hiredis.ReplyError("LOADING"), NotExecuted), (b"no", Malformed)):
        with pytest.raises(error):
            WatchLeader(b"beat").feed([b"OK", reply, RECORD, TOKEN], SERVER)


def test_watch_is_denied_by_the_server_or_before_it_is_sent() -> None:
    watch = WatchLeader(b"beat")
    assert len(watch.request(Capabilities(queues=False), 0.0)) == 2
    assert watch.denied
    watch.request(SERVER, 0.0)
    error: Any = hiredis.ReplyError("NOPERM")
    assert (watch.feed([error, error, RECORD, TOKEN], SERVER), watch.denied) == (True, True)
