"""The contract of every pipe, for threads and loops, compiled and pure: each call gets its own reply, beside pushes.

The other files test what is special to one kind. The peer is the other end of a socket pair in the test's own hands, so
that replies come exactly when a test says so.
"""

from __future__ import annotations

import os

import hiredis
import pytest

from redislock_fast._pipe.base import Args, ConnectionBroken, NoReply, Reply
from tests.support.any_pipe import AnyPair, outcomes
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.pipes import MESSAGES

PUSH = b">2\r\n+invalidate\r\n*1\r\n+key\r\n"


def subscribed(kind: bytes, channel: bytes) -> bytes:
    """The push that answers a subscription."""
    return b">3\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n:1\r\n" % (len(kind), kind, len(channel), channel)


# Replies


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"+a\r\n", b"a"),
        (b"_\r\n", None),
        (b"$-1\r\n", None),
        (b":7\r\n", 7),
        (b"*2\r\n:1\r\n*-1\r\n", [1, None]),
        (b"$2\r\nab\r\n", b"ab"),
        (b"$0\r\n\r\n", b""),
        (b"%1\r\n+a\r\n:1\r\n", {b"a": 1}),
    ],
)
def test_replies_come_as_hiredis_parses_them(any_pair: AnyPair, data: bytes, expected: Reply) -> None:
    pipe, peer = any_pair
    reply = pipe.echo(b"a")
    assert peer.read() == [[b"ECHO", b"a"]]
    peer.answer(data)
    assert reply.result(PATIENCE_S) == expected


def test_an_error_reply_is_returned_not_raised(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    reply = pipe.call((b"X",))
    peer.read()
    peer.answer(b"-ERR no\r\n")
    error = reply.result(PATIENCE_S)
    assert (type(error), str(error)) == (hiredis.ReplyError, "ERR no")


def test_each_caller_gets_its_own_reply_though_they_come_byte_by_byte(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    replies = {b"word-%d" % number: pipe.echo(b"word-%d" % number) for number in range(20)}
    words = [request[-1] for request in peer.read(20)]
    for byte in b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words):
        peer.answer(bytes([byte]))
    assert {word: reply.result(PATIENCE_S) for word, reply in replies.items()} == {word: word for word in words}


def test_requests_and_replies_larger_than_every_buffer(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    large = os.urandom(5_000_000)
    reply = pipe.echo(large)
    assert peer.read() == [[b"ECHO", large]]
    peer.answer(b"$%d\r\n%b\r\n" % (len(large), large))
    assert reply.result(PATIENCE_S) == large


@pytest.mark.parametrize("bad", [None, 1.5])
def test_a_bad_word_leaves_the_pipe_as_it_was(any_pair: AnyPair, bad: object) -> None:
    pipe, peer = any_pair
    request: Args = (b"X", bad)  # type: ignore[assignment]
    assert outcomes(pipe.call(request), pipe.call_many([(b"X",), request])) == [TypeError] * 2
    with pytest.raises(TypeError):
        pipe.post(request)
    reply = pipe.echo(b"fine")
    peer.echo()
    assert reply.result(PATIENCE_S) == b"fine"


def test_a_caller_whose_time_is_up_harms_no_other(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    patient = pipe.echo(b"patient")
    peer.read()
    late = [pipe.echo(b"late", 0.01), pipe.echo(b"later", 0.0), pipe.call_many([(b"X",)] * 2, 0.02)]
    assert outcomes(*late) == [NoReply] * 3
    assert not patient.done()
    peer.answer(b"+patient\r\n")
    assert patient.result(PATIENCE_S) == b"patient"
    following = pipe.echo(b"following")
    peer.echo(5)
    assert following.result(PATIENCE_S) == b"following"
    assert not pipe.broken


# Breaking


@pytest.mark.parametrize("count", [1, 2])
def test_end_of_stream_fails_sent_requests_as_sent(any_pair: AnyPair, count: int) -> None:
    pipe, peer = any_pair
    replies = pipe.call_many([(b"ECHO", b"a")] * count)
    peer.read(count)
    peer.answer(b"+a\r\n" * (count - 1))
    peer.sock.close()
    assert outcomes(replies) == [True]
    assert pipe.broken
    wait_until(lambda: pipe.closed_by_peer, "the end is seen")


def test_a_closed_pipe_refuses_before_anything_is_sent(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    pipe.close()
    pipe.close()
    assert pipe.broken
    assert not pipe.closed_by_peer
    assert outcomes(pipe.echo(b"a"), pipe.call_many([(b"X",)] * 2)) == [False, False]
    with pytest.raises(ConnectionBroken):
        pipe.post((b"X",))
    with pytest.raises(EOFError):
        peer.read()


@pytest.mark.parametrize(
    ("data", "expected"), [(b"?what\r\n", True), (b":what\r\n", True), (b"+OK\r\n+nobody asked\r\n", b"OK")]
)
def test_a_broken_protocol_breaks_the_pipe(any_pair: AnyPair, data: bytes, expected: object) -> None:
    pipe, peer = any_pair
    reply = pipe.call((b"X",))
    peer.read()
    peer.answer(data)
    assert outcomes(reply) == [expected]
    wait_until(lambda: pipe.broken, "the pipe breaks")
    assert not pipe.closed_by_peer


# Pushes


def test_pushes_are_not_replies(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    for word in (b"a", b"b"):
        reply = pipe.echo(word)
        peer.read()
        peer.answer(PUSH + b">0\r\n" + b"+%b\r\n" % word + PUSH)
        assert reply.result(PATIENCE_S) == word
    assert not pipe.broken


def test_pushes_and_replies_are_told_in_order_wherever_the_stream_is_cut(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    told: list[list[Reply]] = []
    pipe.on_push(told.append)
    push = b">3\r\n$7\r\nmessage\r\n+c\r\n+%d\r\n"
    data = push % 1 + b"+a\r\n" + push % 2 + push % 3 + b"*1\r\n+b\r\n" + push % 4 + b":1\r\n"
    for cut in range(len(data) + 1):
        replies = pipe.call_many([(b"X",)] * 3)
        peer.read(3)
        peer.answer(data[:cut])
        peer.answer(data[cut:])
        assert replies.result(PATIENCE_S) == [b"a", [b"b"], 1]
        assert told == [[b"message", b"c", b"%d" % number] for number in (1, 2, 3, 4)]
        told.clear()


@pytest.mark.parametrize("cut", [0, 20, 30, 35])
def test_every_push_is_told_as_it_was_written(any_pair: AnyPair, cut: int) -> None:
    pipe, peer = any_pair
    told: list[list[Reply]] = []
    pipe.on_push(told.append)
    data = b"".join(MESSAGES)
    reply = pipe.call((b"X",))
    peer.read()
    peer.answer(data[:cut])
    peer.answer(data[cut:] + b"+OK\r\n")
    assert reply.result(PATIENCE_S) == b"OK"
    assert told == list(MESSAGES.values())


@pytest.mark.parametrize("kind", [b"subscribe", b"ssubscribe"])
def test_a_subscription_is_answered_by_a_push(any_pair: AnyPair, kind: bytes) -> None:
    pipe, peer = any_pair
    told: list[list[Reply]] = []
    pipe.on_push(told.append)
    subscribing = pipe.call((kind.upper(), b"c"))
    peer.read()
    behind = pipe.echo(b"behind")
    peer.read()
    peer.answer(PUSH + subscribed(kind, b"c") + b"+behind\r\n")
    assert outcomes(subscribing, behind) == [[kind, b"c", 1], b"behind"]
    assert told == [[b"invalidate", [b"key"]]]


def test_a_refused_subscription_is_answered_by_an_error(any_pair: AnyPair) -> None:
    pipe, peer = any_pair
    subscribing = pipe.call((b"SUBSCRIBE", b"c"))
    peer.read()
    peer.answer(b"-NOPERM no\r\n")
    assert isinstance(subscribing.result(PATIENCE_S), hiredis.ReplyError)
    assert not pipe.broken


@pytest.mark.parametrize(
    ("kind", "channel"), [(b"subscribe", b"others"), (b"ssubscribe", b"mine")], ids=["channel", "kind"]
)
def test_another_subscription_does_not_answer_one(any_pair: AnyPair, kind: bytes, channel: bytes) -> None:
    pipe, peer = any_pair
    subscribing = pipe.call((b"SUBSCRIBE", b"mine"))
    peer.read()
    peer.answer(subscribed(kind, channel))
    assert outcomes(subscribing) == [True]
    assert pipe.broken


@pytest.mark.parametrize("kind", [b"subscribe", b"ssubscribe"])
def test_a_subscription_answers_no_other_request(any_pair: AnyPair, kind: bytes) -> None:
    pipe, peer = any_pair
    before = pipe.call((b"DEL", b"a"))
    peer.read()
    subscribing = pipe.call((kind.upper(), b"c"))
    peer.read()
    peer.answer(subscribed(kind, b"c") + b":1\r\n")
    assert outcomes(before, subscribing) == [True, True]
    assert pipe.broken
