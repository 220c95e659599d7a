"""The pipe, compiled and pure, under many threads: what wakes one caller must neither miss nor delay another.

As in `test_threads.py`, the peer is in the test's own hands unless a test is about numbers.
"""

from __future__ import annotations

import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from redislock_fast._pipe.base import ConnectionBroken, NoReply, Pipe, Reply
from redislock_fast._pipe.impl import compiled
from redislock_fast.server import Server
from tests.support.pipes import FOREVER, Peer, compiled_pipe

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


def test_a_crowd_that_is_answered_in_one_piece_wakes_up_completely(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    with ThreadPoolExecutor(100) as pool:
        for _ in range(5):
            crowd = [pool.submit(pipe.call, (b"one",), 20.0) for _ in range(100)]
            peer.answer(b"".join(REPLIES[request[0]][0] for request in peer.read(100)))
            assert [1] * 100 == [future.result(timeout=10) for future in crowd]


def test_a_crowd_wakes_up_completely_when_the_connection_breaks(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    with ThreadPoolExecutor(100) as pool:
        crowd = [pool.submit(pipe.call, (b"lost",), FOREVER) for _ in range(100)]
        peer.read(100)
        peer.sock.close()
        assert [ConnectionBroken] * 100 == [type(future.exception(timeout=20)) for future in crowd]


class Interruption(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def crowd() -> Iterator[tuple[Pipe, Peer, ThreadPoolExecutor]]:
    """A compiled pipe and many threads, in an interpreter whose GIL stays with a thread until that blocks."""
    interval_s = sys.getswitchinterval()
    ours, theirs = socket.socketpair()
    pool = ThreadPoolExecutor(128)
    pipe = compiled_pipe(ours)
    sys.setswitchinterval(30)
    try:
        yield pipe, Peer(theirs), pool
    finally:
        sys.setswitchinterval(interval_s)
        pipe.close()
        theirs.close()
        pool.shutdown(wait=False)  # callers of a failed test end with their pipe


WITH_GIL = pytest.mark.skipif(
    sysconfig.get_config_var("Py_GIL_DISABLED") == 1, reason="no caller waits for a GIL there"
)


def keep_the_gil(seconds: float) -> None:
    """Let only what needs no GIL go on."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@pytest.mark.skipif(compiled is None, reason="the reader in Python needs the GIL")
@WITH_GIL
def test_a_reply_that_came_in_time_counts_though_its_caller_was_not_woken_in_time(
    crowd: tuple[Pipe, Peer, ThreadPoolExecutor],
) -> None:
    pipe, peer, pool = crowd
    limit_s = 2.0  # on a busy machine, the thread that reads may get no core for long
    calls = [pool.submit(pipe.call, (b"one",), limit_s) for _ in range(32)]
    assert len(peer.read(32)) == 32
    peer.answer(32 * b":1\r\n")
    keep_the_gil(limit_s)
    assert [1] * 32 == [call.result(timeout=20) for call in calls]


@pytest.mark.skipif(compiled is None, reason="the reader in Python needs the GIL")
@WITH_GIL
@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs pthread_kill")
def test_a_caller_that_is_interrupted_before_it_is_woken_keeps_nobody_asleep(
    crowd: tuple[Pipe, Peer, ThreadPoolExecutor],
) -> None:
    pipe, peer, pool = crowd
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(*_: object) -> None:
        raise Interruption

    def answer_and_interrupt() -> list[Future[Reply]]:
        peer.read(1)
        after = [pool.submit(pipe.call, (b"one",), FOREVER) for _ in range(7)]
        peer.read(len(after))
        peer.answer(108 * b":1\r\n")
        keep_the_gil(0.05)
        signal.pthread_kill(main, signal.SIGUSR1)
        keep_the_gil(0.05)
        return after

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        before = [pool.submit(pipe.call, (b"one",), FOREVER) for _ in range(100)]  # many more than are woken at once
        peer.read(len(before))
        with ThreadPoolExecutor(1) as other:
            peer_side = other.submit(answer_and_interrupt)

            def call_until_interrupted() -> None:
                pipe.call((b"one",), FOREVER)
                peer_side.result(timeout=20)  # on a busy machine, the reply may be faster than the signal

            with pytest.raises(Interruption):
                call_until_interrupted()
            after = peer_side.result(timeout=20)
        assert [1] * 107 == [call.result(timeout=20) for call in (*before, *after)]
    finally:
        signal.signal(signal.SIGUSR1, previous)
