"""What a report says of the server's replies. No server."""

from __future__ import annotations

from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.report import LockReport, Participant, ProcessDetails, ReadReport
from redislock_fast._util.tokens import token_id_of

NOPERM = hiredis.ReplyError("NOPERM no")
ASK = hiredis.ReplyError("ASK 7 127.0.0.1:6379")
NOW_US = 1_700_000_000_000_000

HOLDER = b"rlf:11111111abc0" + b"a" * 20
FIRST = b"rlf:22222222abc0" + b"b" * 20
SECOND = b"rlf:33333333abc0" + b"c" * 20
ROW = "id=%d addr=10.0.0.%d:4711 name=%s age=%d user=default lib-name=%s lib-ver=5"
LISTING = "\n".join(
    (
        ROW % (1, 1, "", 5, "redislock_fast(11111111abc;web-1;11;a.py)"),
        ROW % (2, 2, "theirs", 9, "redis-py(x)"),
        ROW % (3, 3, "redislock_fast(22222222abc;web-2;22;b.py)", 7, ""),
    )
).encode()

OF_HOLDER = ProcessDetails("web-1", 11, "a.py", "10.0.0.1:4711", 5)
OF_FIRST = ProcessDetails("web-2", 22, "b.py", "10.0.0.3:4711", 7)
OURS = Participant("redislock_fast", "11111111abc", OF_HOLDER, True, token_id=token_id_of(HOLDER))


def replies(**others: Reply) -> list[Reply]:
    """The replies about a lock that is held fenced, while two others wait."""
    usual: dict[str, Any] = {
        "get": HOLDER + b"+",
        "pttl": 1500,
        "fence": [HOLDER, b"7"],
        "count": 2,
        "queue": [[FIRST, NOW_US - 3e6], [SECOND, NOW_US - 1e6]],
        "time": [b"1700000000", b"0"],
        "listing": LISTING,
    }
    return list((usual | others).values())


def report(**others: Reply) -> LockReport:
    """The report of the usual replies with these in the place of others."""
    reading = ReadReport(b"name")
    assert len(reading.request(Capabilities(), 0.0)) == 7
    assert reading.feed(replies(**others), Capabilities())
    assert reading.report.held is reading.result
    return reading.report


def test_report_tells_the_holder_and_the_queue() -> None:
    waiters = (
        Participant("redislock_fast", "22222222abc", OF_FIRST, True, 3.0, token_id_of(FIRST)),
        Participant("redislock_fast", "33333333abc", None, False, 1.0, token_id_of(SECOND)),
    )
    expected = LockReport(OURS, 1.5, True, 7, 2, waiters)
    assert expected == report()
    in_resp2: list[Reply] = [FIRST, b"%d" % (NOW_US - 3_000_000), SECOND, b"%d" % (NOW_US - 1_000_000)]
    assert expected == report(queue=in_resp2)


def test_report_of_a_free_lock() -> None:
    assert LockReport(None, None, False, None, 0, ()) == report(get=None, pttl=-2, count=0, queue=[])


def test_lock_that_ends_between_two_reads_is_free() -> None:
    assert not report(pttl=-2, queue=[]).held


def test_lock_without_end_has_no_ttl() -> None:
    assert report(pttl=-1).ttl_s is None


@pytest.mark.parametrize(
    "value", [b"", b"own", b"rlf:" + b"S3CR3T" * 5 + b"SE", b"9f8e" * 8, hiredis.ReplyError("WRONGTYPE no")], ids=repr
)
def test_tokens_made_elsewhere_tell_nothing(value: Any) -> None:
    held = report(get=value)
    token_id = token_id_of(value) if isinstance(value, bytes) and value else None
    assert Participant("unknown", token_id=token_id) == held.holder
    assert "S3CR3T" not in repr(held)


def test_fence_is_that_of_the_holder_alone() -> None:
    assert report(fence=[FIRST, b"8"]).fence is None
    assert report(fence=[None, None]).fence is None
    assert 8 == report(get=b"own", fence=[b"own", b"8"]).fence


def test_connection_after_that_of_the_token_shows_that_the_process_is_there() -> None:
    holder = report(listing=LISTING.replace(b"11111111abc", b"11111111abd")).holder
    assert OURS == holder


@pytest.mark.parametrize(
    ("listing", "token"),
    [
        (NOPERM, HOLDER),
        (LISTING.replace(b"lib-name", b"else").replace(b"11111111", b"44444444"), HOLDER),
        (LISTING, b"rlf:01111111abc0" + b"a" * 20),
    ],
    ids=["forbidden", "before Redis 7.2", "an identifier of no connection"],
)
def test_process_that_cannot_be_seen_is_not_called_dead(listing: Any, token: bytes) -> None:
    holder = report(listing=listing, get=token).holder
    assert holder is not None
    assert (None, None) == (holder.process, holder.alive)


@pytest.mark.parametrize("error", [NOPERM, ASK], ids=str)
@pytest.mark.parametrize("missing", ["pttl", "fence", "count", "queue", "time", "listing"])
def test_what_the_server_does_not_tell_is_missing_alone(missing: str, error: Any) -> None:
    told = report(**{missing: error})
    holder = told.holder
    assert holder is not None
    assert "11111111abc" == holder.identifier
    assert {
        "pttl": told.ttl_s,
        "fence": told.fence,
        "count": told.waiting,
        "queue": told.waiters or None,
        "time": told.waiters and told.waiters[0].waited_s,
        "listing": holder.alive,
    }[missing] is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (hiredis.ReplyError("MOVED 7 127.0.0.1:6379"), Redirected),
        (hiredis.ReplyError("LOADING soon"), NotExecuted),
        (NOPERM, Refused),
    ],
    ids=str,
)
def test_value_that_cannot_be_read_is_an_error(error: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        report(get=error)


def test_server_that_closes_connections_for_unknown_requests_is_asked_for_the_lock_alone() -> None:
    reading, plain = ReadReport(b"name"), Capabilities(queues=False)
    assert [(b"GET", b"name"), (b"PTTL", b"name")] == reading.request(plain, 0.0)
    assert reading.feed([HOLDER, 1500], plain)
    holder = Participant("redislock_fast", "11111111abc", token_id=token_id_of(HOLDER))
    assert LockReport(holder, 1.5, False, None, None, ()) == reading.report


@pytest.mark.parametrize(
    "odd",
    [
        {"get": 1}, {"pttl": b"1"}, {"fence": b"x"}, {"fence": [HOLDER]}, {"fence": [HOLDER, b"x"]}, {"count": b"1"},
        {"queue": [HOLDER]}, {"queue": [[HOLDER]]}, {"queue": [[FIRST, HOLDER]]}, {"queue": [[1, 1.0]]},
        {"time": [b"1"]}, {"time": [b"x", b"y"]}, {"listing": []},
    ],
    ids=repr,
)  # fmt: skip
def test_other_replies_are_protocol_errors_that_quote_nothing(odd: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as caught:
        report(**odd)
    error: BaseException | None = caught.value
    assert HOLDER.decode() not in f"{error} {error!r}"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
