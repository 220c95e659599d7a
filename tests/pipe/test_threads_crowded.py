"""The pipe, compiled and pure, under many threads: what wakes one caller must neither miss nor delay another.

As in `test_threads.py`, the peer is in the test's own hands unless a test is about numbers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from redislock_fast._pipe.base import NoReply, Pipe, Reply
from redislock_fast.server import Server
from tests.support.pipes import FOREVER, Peer

REPLIES: dict[bytes, tuple[bytes, Reply]] = {
    b"one": (b":1\r\n", 1),
    b"bulk": (b"$2\r\nab\r\n", b"ab"),
    b"null": (b"_\r\n", None),
    b"zero": (b":0\r\n", 0),
    b"array": (b"*2\r\n:1\r\n+OK\r\n", [1, b"OK"]),
    b"ok": (b"+OK\r\n", b"OK"),
    b"nil": (b"$-1\r\n", None),
    b"seven": (b":7\r\n", 7),
}
"""The reply for each word, which its caller must get: with and without the parser."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(16)
    yield pool
    pool.shutdown(wait=False)


def test_replies_of_all_kinds_in_one_piece_each_find_their_caller(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    total = sum(len(data) for data, _ in REPLIES.values())
    for cut in range(1, total):
        first = threads.submit(pipe.call, (b"first",), FOREVER)
        peer.read()
        got = {word: threads.submit(pipe.call, (word,), FOREVER) for word in REPLIES}
        with pytest.raises(NoReply):
            pipe.call((b"ok",), 0.0)
        peer.answer(b"+first\r\n")
        data = b"".join(REPLIES[request[0]][0] for request in peer.read(len(REPLIES) + 1))
        peer.answer(data[:cut])
        peer.answer(data[cut:])
        assert first.result(timeout=20) == b"first"
        expected = {word: reply for word, (_, reply) in REPLIES.items()}
        assert expected == {word: future.result(timeout=20) for word, future in got.items()}


def test_a_batch_goes_behind_a_plain_reply_and_before_the_next(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    pipe.post((b"posted",))
    peer.read()
    batch = threads.submit(pipe.call_many, [(b"a",), (b"b",), (b"c",)], FOREVER)
    peer.read(3)
    peer.answer(b"+OK\r\n:1\r\n_\r\n:0\r\n")
    assert [1, None, 0] == batch.result(timeout=20)


def test_a_woken_caller_that_stays_away_delays_nobody(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    back = threading.Event()
    away = threading.Barrier(5)

    def call_and_stay_away() -> Reply:
        reply = pipe.call((b"away",), FOREVER)
        away.wait(20)
        assert back.wait(20)
        return reply

    reader = threads.submit(pipe.call, (b"reader",), FOREVER)
    peer.read()
    absent = [threads.submit(call_and_stay_away) for _ in range(4)]
    present = [threads.submit(pipe.call, (b"present",), FOREVER) for _ in range(4)]
    peer.answer(b":1\r\n")
    assert reader.result(timeout=20) == 1
    peer.read(8)
    peer.answer(8 * b":1\r\n")
    assert [1] * 4 == [future.result(timeout=20) for future in present]
    away.wait(20)
    later = [threads.submit(pipe.call, (b"later",), FOREVER) for _ in range(4)]
    peer.read(4)
    peer.answer(4 * b":0\r\n")
    assert [0] * 4 == [future.result(timeout=20) for future in later]
    back.set()
    assert [1] * 4 == [future.result(timeout=20) for future in absent]


def test_a_thousand_threads_each_get_their_own_replies(
    make_pipe: Callable[[socket.socket], Pipe], valkey: Server
) -> None:
    pipe = make_pipe(socket.create_connection(("127.0.0.1", valkey.port)))
    start = threading.Barrier(1000)

    def work(worker: int) -> None:
        start.wait(60)
        for number in range(3):
            word = b"%d:%d" % (worker, number)
            assert pipe.call((b"ECHO", word), FOREVER) == word
            assert pipe.call((b"SETBIT", b"bits", worker * 8 + number, 1), FOREVER) == 0
            assert pipe.call((b"GETBIT", b"bits", worker * 8 + number), FOREVER) == 1

    with ThreadPoolExecutor(1000) as pool:
        futures: list[Future[None]] = [pool.submit(work, worker) for worker in range(1000)]
        for future in futures:
            future.result(timeout=60)
    assert not pipe.broken
    pipe.close()
