"""Many requests in one piece, on every pipe: all replies in order, also when callers give up or the pipe breaks.

The peer is the other end of a socket pair in the test's own hands. Rules: what a pipe promises for one request it
promises for many, so each test sends them both as a list and as a `Bulk`.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import hiredis
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from redislock_fast._pipe import resp_py
from redislock_fast._pipe.base import Args, Bulk, ConnectionBroken, NoReply, Pipe, Reply
from redislock_fast._pipe.loop_py import Pipe as LoopPipe
from redislock_fast.server import Server
from tests.support.any_pipe import AnyPair, outcomes
from tests.support.async_peer import MakePipe, connected, within
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.pipes import FOREVER, MAKERS, Peer

Requests = list[Args] | Bulk


def _listed(words: list[bytes]) -> Requests:
    return [(b"ECHO", word) for word in words]


def _in_bulk(words: list[bytes]) -> Requests:
    return Bulk((b"ECHO",), words, ())


EACH_SHAPE = pytest.mark.parametrize("echoing", [_listed, _in_bulk], ids=["listed", "in bulk"])

Echoing = Callable[[list[bytes]], Requests]


# Encoding

_words = st.one_of(
    st.binary(), st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(1 << 63), (1 << 63) - 1)
)
_shared = st.lists(_words, max_size=12).map(tuple)
_bulks = st.builds(Bulk, _shared, st.lists(st.binary(max_size=300), min_size=1, max_size=20), _shared)


def _one_by_one(bulk: Bulk) -> bytes:
    return b"".join(resp_py.encode((*bulk.before, word, *bulk.after)) for word in bulk.words)


def _receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes, and whatever has come beyond them."""
    data = b""
    while len(data) < size:
        data += sock.recv(1 << 20)
    return data


@pytest.mark.parametrize("make", MAKERS)
@given(bulk=_bulks)
def test_a_bulk_leaves_as_its_requests_one_by_one(make: Callable[[socket.socket], Pipe], bulk: Bulk) -> None:
    near, far = socket.socketpair()
    far.settimeout(PATIENCE_S)
    pipe = make(near)
    with far:
        for requests in (bulk, bulk.requests()):
            with pytest.raises(NoReply):
                pipe.call_many(requests, 0.0)
            assert _one_by_one(bulk) == _receive(far, len(_one_by_one(bulk)))
        pipe.close()


@settings(max_examples=30)
@given(bulk=_bulks)
def test_a_bulk_leaves_a_loop_as_its_requests_one_by_one(make_loop_pipe: MakePipe, bulk: Bulk) -> None:
    async def scenario() -> None:
        async with connected(make_loop_pipe) as (pipe, peer):
            waiting = asyncio.ensure_future(_loop_call_many(pipe, bulk))
            await asyncio.sleep(0)
            assert [_shown(request) for request in bulk.requests()] == await peer.read(len(bulk.words))
            waiting.cancel()

    asyncio.run(scenario())


async def _loop_call_many(pipe: LoopPipe, requests: Requests) -> object:
    return await pipe.call_many(requests, FOREVER)


def _shown(request: Args) -> list[bytes]:
    """The part of a request that a peer reads."""
    return [word if isinstance(word, bytes) else str(word).encode() for word in request]


def test_words_of_every_type_go_out_in_a_list_and_around_a_bulk(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    requests: list[Requests] = [[(b"a", "é", -7), ("b",)], Bulk((b"a", "é", 0), [b"1", b"", b"\r\n"], (-7, "z", b""))]
    for each in requests:
        with pytest.raises(NoReply):
            pipe.call_many(each, 0.0)
    assert [[b"a", "é".encode(), b"-7"], [b"b"]] == peer.read(2)
    around = [[b"a", "é".encode(), b"0", word, b"-7", b"z", b""] for word in (b"1", b"", b"\r\n")]
    assert around == peer.read(3)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ([(b"X",), (b"X", 1.5)], TypeError),
        ([(b"X",), (b"X", 1 << 63)], OverflowError),
        ([(b"X",), ("\ud800",)], UnicodeEncodeError),
        (Bulk((b"X", None), [b"a"], ()), TypeError),  # type: ignore[arg-type]
        (Bulk((b"X",), [b"a"], (1.5,)), TypeError),  # type: ignore[arg-type]
        (Bulk((b"X",), [b"a", None], ()), TypeError),  # type: ignore[list-item]
        (Bulk((b"X",), [b"a"], (1 << 63,)), OverflowError),
    ],
    ids=repr,
)
def test_a_bad_word_is_refused_before_anything_is_queued(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, bad: Requests, error: type[Exception]
) -> None:
    pipe, peer = pair
    with pytest.raises(error):
        pipe.call_many(bad, FOREVER)
    with pytest.raises(error):
        pipe.post_many(bad, pipe.mailbox().put)
    replies = threads.submit(pipe.call_many, [(b"ECHO", b"fine")], FOREVER)
    assert [[b"ECHO", b"fine"]] == peer.read()
    peer.answer(b"+fine\r\n")
    assert [b"fine"] == replies.result(PATIENCE_S)


# Replies


@EACH_SHAPE
@pytest.mark.parametrize("count", [1, 3000])
def test_replies_come_in_order(any_pair: AnyPair, echoing: Echoing, count: int) -> None:
    pipe, peer = any_pair
    words = [b"%d" % number for number in range(count)]
    replies = pipe.call_many(echoing(words))
    peer.echo(count)
    assert words == replies.result(PATIENCE_S)


@EACH_SHAPE
def test_replies_of_every_kind_come_in_their_places(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    replies = pipe.call_many(echoing([b"%d" % number for number in range(7)]))
    peer.read(7)
    for piece in (b"_\r\n-ERR no\r\n:", b"1\r\n>2\r\n+push\r\n+x\r\n$-1\r", b"\n$1\r\na\r\n+OK\r\n*1\r\n", b":2\r\n"):
        peer.answer(piece)
    nil, error, *others = replies.result(PATIENCE_S)
    assert (None, hiredis.ReplyError, "ERR no") == (nil, type(error), str(error))
    assert [1, None, b"a", b"OK", [2]] == others


_ON_THE_WIRE: dict[bytes, list[Reply]] = {
    b"_\r\n": [None],
    b"$-1\r\n": [None],
    b":0\r\n": [0],
    b":1\r\n": [1],
    b":12\r\n": [12],
    b"+OK\r\n": [b"OK"],
    b"+Ok\r\n": [b"Ok"],
    b">1\r\n+push\r\n": [],
}
_runs = st.lists(st.tuples(st.sampled_from(list(_ON_THE_WIRE)), st.integers(1, 20)), max_size=10)
_MORE_THAN_ONE_READ_TAKES = [(b"+OK\r\n", 14_000), (b":1\r\n", 3_000)]


def _stream(runs: list[tuple[bytes, int]]) -> tuple[bytes, list[Reply]]:
    """Runs of replies as bytes, and as they are parsed; at least two."""
    runs = [*runs, (b":1\r\n", 2)]
    data = b"".join(data * count for data, count in runs)
    return data, [reply for data, count in runs for reply in _ON_THE_WIRE[data] * count]


@pytest.mark.parametrize("make", MAKERS)
@example(runs=_MORE_THAN_ONE_READ_TAKES, share=0.5)
@given(runs=_runs, share=st.floats(0, 1))
def test_runs_of_equal_replies_are_shared_out_by_count(
    make: Callable[[socket.socket], Pipe], runs: list[tuple[bytes, int]], share: float
) -> None:
    data, replies = _stream(runs)
    first = 1 + int(share * (len(replies) - 2))
    posted: list[Any] = []
    near, far = socket.socketpair()
    with far:
        pipe = make(near)
        pipe.post_many(_in_bulk([b"1"] * first), posted.append)
        far.sendall(data)
        called = pipe.call_many(_in_bulk([b"2"] * (len(replies) - first)), FOREVER)
        assert [replies[:first]] == posted
        assert replies[first:] == called
        pipe.close()


@settings(max_examples=30)
@example(runs=_MORE_THAN_ONE_READ_TAKES, share=0.5)
@given(runs=_runs, share=st.floats(0, 1))
def test_runs_of_equal_replies_are_shared_out_by_count_in_a_loop(
    make_loop_pipe: MakePipe, runs: list[tuple[bytes, int]], share: float
) -> None:
    data, replies = _stream(runs)
    first = 1 + int(share * (len(replies) - 2))

    async def scenario() -> None:
        async with connected(make_loop_pipe) as (pipe, peer):
            calls = [_loop_call_many(pipe, _in_bulk([b"1"] * count)) for count in (first, len(replies) - first)]
            waiting = asyncio.gather(*calls)
            await asyncio.sleep(0)
            await peer.answer(data)
            assert [replies[:first], replies[first:]] == await within(waiting)

    asyncio.run(scenario())


@EACH_SHAPE
def test_a_peer_that_reads_nothing_while_it_answers_deadlocks_nobody(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    words = [bytes([number % 256]) * 10_000 for number in range(1000)]
    replies = pipe.call_many(echoing(words))
    for _ in words:  # each answer goes out whole before the next request is read
        ((_, word),) = peer.read()
        peer.answer(b"$%d\r\n%b\r\n" % (len(word), word))
    assert words == replies.result(PATIENCE_S)


@EACH_SHAPE
def test_ten_megabytes_reach_a_peer_that_reads_slowly(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    words = [bytes([number]) * 1_000_000 for number in range(10)]
    replies = pipe.call_many(echoing(words))
    expected = b"".join(resp_py.encode((b"ECHO", word)) for word in words)
    got = bytearray()
    while len(got) < len(expected):
        got += peer.sock.recv(4096)
    assert expected == got
    peer.answer(b"+OK\r\n" * 10)
    assert [b"OK"] * 10 == replies.result(PATIENCE_S)


# Giving up


@EACH_SHAPE
def test_a_reader_whose_time_is_up_halfway_leaves_its_replies_to_nobody(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    late = pipe.call_many(echoing([b"1", b"2", b"3"]), 0.2)
    peer.read(3)
    peer.answer(b"+1\r\n+2\r\n+")
    assert isinstance(late.exception(PATIENCE_S), NoReply)
    after = pipe.call_many(echoing([b"4", b"5"]))
    peer.read(2)
    peer.answer(b"3\r\n+4\r\n+5\r\n")
    assert [b"4", b"5"] == after.result(PATIENCE_S)
    assert not pipe.broken


@EACH_SHAPE
def test_a_follower_whose_time_is_up_leaves_its_replies_to_nobody(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    reader = pipe.echo(b"reader")
    peer.read()
    late = pipe.call_many(echoing([b"1", b"2"]), 0.01)
    assert isinstance(late.exception(PATIENCE_S), NoReply)
    peer.answer(b"+reader\r\n")
    assert b"reader" == reader.result(PATIENCE_S)
    after = pipe.echo(b"after")
    peer.echo(3)
    assert b"after" == after.result(PATIENCE_S)


@EACH_SHAPE
def test_a_follower_becomes_the_reader(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    reader = pipe.echo(b"reader")
    peer.read()
    follower = pipe.call_many(echoing([b"1", b"2"]))
    peer.answer(b"+reader\r\n")
    peer.echo(2)
    assert (b"reader", [b"1", b"2"]) == (reader.result(PATIENCE_S), follower.result(PATIENCE_S))


# Breaking


@EACH_SHAPE
def test_a_stream_that_ends_among_the_replies_loses_them_all(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    replies = pipe.call_many(echoing([b"1", b"2"]))
    peer.read(2)
    peer.answer(b"+1\r\n")
    peer.sock.close()
    assert (outcomes(replies), pipe.broken) == ([True], True)


@EACH_SHAPE
def test_what_was_half_sent_is_lost_as_sent_but_what_is_queued_behind_is_not(
    any_pair: AnyPair, echoing: Echoing
) -> None:
    pipe, peer = any_pair
    half = pipe.call_many(echoing([b"x" * 5_000_000] * 2))
    peer.sock.recv(1)
    behind = pipe.call_many(echoing([b"1", b"2"]))
    assert not wait([behind], 0.02).done  # it sleeps in the pipe now, or finds the pipe broken: unsent either way
    peer.sock.close()
    assert outcomes(half, behind) == [True, False]


@EACH_SHAPE
def test_a_broken_protocol_among_the_replies_breaks_the_pipe(any_pair: AnyPair, echoing: Echoing) -> None:
    pipe, peer = any_pair
    replies = pipe.call_many(echoing([b"1", b"2"]))
    peer.read(2)
    peer.answer(b"+1\r\n?what\r\n")
    assert (outcomes(replies), pipe.broken) == ([True], True)


# Posting


@EACH_SHAPE
def test_posted_requests_leave_though_nobody_reads_and_their_replies_come_together(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, echoing: Echoing
) -> None:
    pipe, peer = pair
    first, second = pipe.mailbox(), pipe.mailbox()
    pipe.post_many(echoing([b"1", b"2"]), first.put)
    pipe.post_many(echoing([b"3"]), second.put)
    peer.echo(2)
    replies = threads.submit(second.wait, FOREVER)
    peer.echo()
    assert [b"3"] == replies.result(PATIENCE_S)
    assert [b"1", b"2"] == first.wait(0.0)


@EACH_SHAPE
def test_any_reader_completes_posted_requests(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, echoing: Echoing
) -> None:
    pipe, peer = pair
    box = pipe.mailbox()
    before = threads.submit(pipe.call, (b"ECHO", b"before"), FOREVER)
    peer.read()
    pipe.post_many(echoing([b"1", b"2"]), box.put)
    after = threads.submit(pipe.call, (b"ECHO", b"after"), FOREVER)
    peer.answer(b"+before\r\n")
    peer.echo(3)
    assert (b"before", b"after") == (before.result(PATIENCE_S), after.result(PATIENCE_S))
    assert [b"1", b"2"] == box.wait(0.0)


@EACH_SHAPE
def test_posted_requests_for_which_there_is_no_room_leave_when_their_replies_are_waited_for(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, echoing: Echoing
) -> None:
    pipe, peer = pair
    box = pipe.mailbox()
    words = [bytes([65 + number]) * 1_000_000 for number in range(10)]
    pipe.post_many(echoing(words), box.put)
    replies = threads.submit(box.wait, FOREVER)
    peer.echo(10)
    assert words == replies.result(PATIENCE_S)


@EACH_SHAPE
def test_end_of_the_stream_is_raised_in_a_wait_for_posted_requests(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, echoing: Echoing
) -> None:
    pipe, peer = pair
    box = pipe.mailbox()
    pipe.post_many(echoing([b"1", b"2"]), box.put)
    replies = threads.submit(box.wait, FOREVER)
    peer.echo()
    peer.sock.close()
    assert isinstance(replies.exception(PATIENCE_S), ConnectionBroken)
    with pytest.raises(ConnectionBroken) as caught:
        pipe.post_many(echoing([b"3"]), box.put)
    assert not caught.value.sent


# Together


@EACH_SHAPE
def test_a_loops_replies_come_in_order_and_cancelled_ones_to_nobody(make_loop_pipe: MakePipe, echoing: Echoing) -> None:
    async def scenario() -> None:
        words = [b"%d" % number for number in range(500)]
        async with connected(make_loop_pipe) as (pipe, peer):
            tasks = [asyncio.create_task(_loop_call_many(pipe, echoing(words))) for _ in range(3)]
            await asyncio.sleep(0)
            await peer.echo(200)
            tasks[0].cancel()
            await peer.echo(1300)
            assert [words, words] == [await within(task) for task in tasks[1:]]
            assert tasks[0].cancelled()

    asyncio.run(scenario())


def test_many_and_single_calls_of_many_threads_each_get_their_own(
    make_pipe: Callable[[socket.socket], Pipe], valkey: Server, threads: ThreadPoolExecutor
) -> None:
    pipe = make_pipe(socket.create_connection(("127.0.0.1", valkey.port)))

    def work(worker: int) -> int:
        rng = random.Random(worker)
        finished = 0
        for number in range(100):
            words = [b"%d:%d:%d" % (worker, number, place) for place in range(rng.choice((1, 2, 50)))]
            limit_s = 0.0 if rng.random() < 0.2 else PATIENCE_S
            try:
                if rng.random() < 0.3:
                    assert words[0] == pipe.call((b"ECHO", words[0]), limit_s)
                elif rng.random() < 0.5:
                    assert words == pipe.call_many(rng.choice((_listed, _in_bulk))(words), limit_s)
                else:
                    box = pipe.mailbox()
                    pipe.post_many(rng.choice((_listed, _in_bulk))(words), box.put)
                    assert words == box.wait(limit_s)
            except NoReply:
                assert limit_s == 0.0  # the others must never wait in vain
            finished += 1
            if rng.random() < 0.05:
                pipe.post((b"ECHO", b"posted"))
        return finished

    assert [100] * 16 == [future.result(60) for future in [threads.submit(work, worker) for worker in range(16)]]
    assert not pipe.broken
    pipe.close()


@EACH_SHAPE
def test_a_connection_cut_under_load_hangs_nobody(
    make_pair: Callable[[], tuple[Pipe, Peer]], threads: ThreadPoolExecutor, echoing: Echoing
) -> None:
    pipe, peer = make_pair()
    running = threading.Event()

    def work() -> str:
        while True:
            try:
                assert [b"1", b"2"] == pipe.call_many(echoing([b"1", b"2"]), PATIENCE_S)
            except ConnectionBroken:
                return "lost"

    def serve() -> None:
        for _ in range(500):
            peer.echo()
            running.set()
        peer.sock.close()

    workers = [threads.submit(work) for _ in range(8)]
    threads.submit(serve)
    assert running.wait(PATIENCE_S)
    assert ["lost"] * 8 == [worker.result(PATIENCE_S) for worker in workers]
    wait_until(lambda: pipe.broken, "the pipe is broken")
