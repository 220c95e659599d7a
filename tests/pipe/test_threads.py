"""The pipe of threads, compiled and pure: what is special to it. What all pipes promise stands in `test_pipes.py`.

The peer is the other end of a socket pair in the test's own hands, so that replies come exactly when a test says so.
"""

from __future__ import annotations

import importlib.util
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import redis

from redislock_fast._pipe import threads_py
from redislock_fast._pipe.base import NOT_ASKED, ConnectionBroken, NoReply, Pipe, Reply
from redislock_fast._pipe.resp_py import encode
from redislock_fast._pipe.threads_py import Bell
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, on_signal, run_script, signal_main
from tests.support.pipes import FOREVER, PUSH, Peer


def test_asking_thread_is_inside_until_it_has_its_reply(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    inside: set[int] = set()
    reply = threads.submit(pipe.ask, (b"ECHO", b"a"), FOREVER, inside)
    (request,) = peer.read()
    assert len(inside) == 1
    assert threading.get_ident() not in inside
    peer.answer(b"+%b\r\n" % request[-1])
    assert reply.result() == b"a"
    assert inside == set()


def test_thread_that_is_inside_asks_nothing(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    inside = {threading.get_ident()}
    assert pipe.ask((b"ECHO", b"a"), FOREVER, inside) is NOT_ASKED
    assert inside == {threading.get_ident()}
    reply = threads.submit(pipe.call, (b"ECHO", b"b"), FOREVER)
    peer.echo()
    assert reply.result() == b"b"  # the first that was sent


def test_thread_that_gets_no_reply_is_not_inside(pair: tuple[Pipe, Peer]) -> None:
    pipe, _ = pair
    inside: set[int] = set()
    with pytest.raises(NoReply):
        pipe.ask((b"X",), 0.0, inside)
    pipe.close()
    with pytest.raises(ConnectionBroken):
        pipe.ask((b"X",), FOREVER, inside)
    assert inside == set()


def test_callers_that_come_together_travel_together(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    if isinstance(peer.sock, ssl.SSLSocket):
        pytest.skip("there, one receives a single record at a time")
    first = threads.submit(pipe.call, (b"ECHO", b"first"), FOREVER)
    request = peer.read()[0]
    others = _queue_behind(pipe, threads, [b"%d" % number for number in range(20)])
    peer.answer(b"+%b\r\n" % request[-1])
    data = peer.sock.recv(65536)
    assert data.count(b"ECHO") > 1, "what was queued leaves in the write that follows the first reply"
    peer.received(data)
    for request in peer.read(20):
        peer.answer(b"+%b\r\n" % request[-1])
    assert first.result() == b"first"
    assert {name: name for name in others} == {name: future.result() for name, future in others.items()}


def test_what_is_posted_while_the_reader_delivers_leaves_together(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    words = [b"%d" % number for number in range(20)]

    def post_all(_: object) -> None:
        for word in words:
            pipe.post((b"ECHO", word))

    pipe.on_push = post_all
    reader = threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
    peer.read()
    peer.answer(PUSH)
    assert peer.sock.recv(65536) == b"".join(encode((b"ECHO", word)) for word in words)  # over TLS: in one record
    peer.answer(b"+reader\r\n" + b"+OK\r\n" * 20)
    assert reader.result(timeout=20) == b"reader"


def _queue_behind(pipe: Pipe, threads: ThreadPoolExecutor, names: list[bytes]) -> dict[bytes, Future[Reply]]:
    """Calls that are queued in this order behind a call that is under way."""
    futures: dict[bytes, Future[Reply]] = {}
    for name in names:
        started = threading.Event()

        def run(word: bytes = name, begun: threading.Event = started) -> Reply:
            begun.set()
            return pipe.call((b"ECHO", word), FOREVER)

        futures[name] = threads.submit(run)
        started.wait()
        wait(
            [futures[name]], timeout=0.02
        )  # it sleeps in the pipe now, or will soon: the order is for the pipe to keep
    return futures


def test_a_reader_whose_time_is_up_hands_reading_on(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    reader = threads.submit(pipe.call, (b"ECHO", b"reader"), 0.2)
    peer.read()
    follower = threads.submit(pipe.call, (b"ECHO", b"follower"), FOREVER)
    assert isinstance(reader.exception(timeout=20), NoReply)
    assert peer.read() == [[b"ECHO", b"follower"]]
    peer.answer(b"+reader\r\n+follower\r\n")
    assert follower.result(timeout=20) == b"follower"


def test_a_follower_whose_time_is_up_harms_nobody(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    reader = threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
    peer.read()
    follower = threads.submit(pipe.call, (b"ECHO", b"follower"), 0.01)
    assert isinstance(follower.exception(timeout=20), NoReply)
    peer.answer(b"+reader\r\n")
    assert reader.result(timeout=20) == b"reader"
    last = threads.submit(pipe.call, (b"ECHO", b"last"), FOREVER)
    peer.echo(2)
    assert last.result(timeout=20) == b"last"


def test_post_leaves_at_once_and_its_reply_is_dropped(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    pipe.post((b"ECHO", b"posted"))
    assert peer.read() == [[b"ECHO", b"posted"]]
    reply = threads.submit(pipe.call, (b"ECHO", b"called"), FOREVER)
    peer.answer(b"+posted\r\n")
    peer.echo()
    assert reply.result() == b"called"


def test_post_goes_behind_a_call_that_is_under_way(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    reply = threads.submit(pipe.call, (b"ECHO", b"called"), FOREVER)
    peer.read()
    pipe.post((b"ECHO", b"posted"))
    peer.answer(b"+called\r\n")
    assert reply.result(timeout=20) == b"called"
    assert peer.read() == [[b"ECHO", b"posted"]], "with nobody left to read, the last reader still sends it"


def test_end_of_stream_tells_sent_requests_from_unsent_ones(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    reader = threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
    peer.read()
    followers = _queue_behind(pipe, threads, [b"follower"])
    peer.sock.shutdown(socket.SHUT_WR)
    sent = {}
    for name, future in {b"reader": reader, **followers}.items():
        error = future.exception(timeout=20)
        assert isinstance(error, ConnectionBroken)
        sent[name] = error.sent
    # The follower's request leaves when the reader next looks for signals, which on a busy machine may come first.
    assert sent == {b"reader": True, b"follower": peer.sock.recv(1) != b""}


def test_close_wakes_reader_and_followers(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    reader = threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
    peer.read()
    followers = _queue_behind(pipe, threads, [b"a", b"b"])
    pipe.close()
    for future in (reader, *followers.values()):
        assert isinstance(future.exception(timeout=20), ConnectionBroken)


def test_a_connection_closed_while_idle_is_found_before_sending(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    peer.sock.close()
    while pipe.silence_s <= 0.001:  # idle is what has been silent for longer
        pass
    with pytest.raises(ConnectionBroken) as caught:
        pipe.call((b"X",), FOREVER)
    assert not caught.value.sent


def test_silence_begins_with_a_request_for_whose_reply_nobody_waits(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    while pipe.silence_s <= 0.3:
        pass
    pipe.post((b"ECHO", b"a"))
    assert pipe.silence_s < 0.3
    while pipe.silence_s <= 0.3:
        pass
    pipe.post((b"ECHO", b"b"))
    assert pipe.silence_s > 0.3, "a request breaks no silence, a byte does"
    peer.echo(2)


class Interrupted(Exception):
    """The exception of the test's signal handler."""


@pytest.fixture(params=["sent to it", "taken by another thread"])
def interrupt(
    request: pytest.FixtureRequest, pair: tuple[Pipe, Peer], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Makes SIGUSR1 raise Interrupted in the main thread; call it, in another, to send one.

    The twin promises less: an interrupt of its reader at work breaks the connection. So that one sleeps by then, and
    the main thread sleeps on until it is interrupted.
    """
    sleeps, is_coming = threading.Event(), [True]
    sleep = Bell.wait

    def sleep_on(bell: Bell, *args: Any) -> None:
        sleeps.set()
        sleep(bell, *args)
        while is_coming and threading.current_thread() is threading.main_thread():
            sleep(bell, *args)

    def handler(number: int, frame: object) -> None:
        is_coming.clear()
        raise Interrupted

    def send() -> None:
        assert not isinstance(pair[0], threads_py.Pipe) or sleeps.wait(PATIENCE_S)
        if request.param == "sent to it":
            signal_main()
        else:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(Bell, "wait", sleep_on)
    with on_signal(handler):
        yield send


def _interrupt_once_sent(peer: Peer, interrupt: Callable[[], None]) -> threading.Thread:
    """Send the interrupt soon, and not before the main thread's request has left: it waits for the reply then."""

    def read_and_interrupt() -> None:
        peer.read()
        time.sleep(0.1)  # the core's thread is in the TLS object as it sends, where an interrupt breaks the connection
        interrupt()

    thread = threading.Thread(target=read_and_interrupt)
    thread.start()
    return thread


def test_a_signal_handler_that_raises_ends_the_wait_of_the_reader(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, interrupt: Callable[[], None]
) -> None:
    pipe, peer = pair
    timer = _interrupt_once_sent(peer, interrupt)
    with pytest.raises(Interrupted):
        pipe.call((b"ECHO", b"interrupted"), FOREVER)
    timer.join()
    reply = threads.submit(pipe.call, (b"ECHO", b"next"), FOREVER)
    peer.answer(b"+interrupted\r\n")
    peer.echo()
    assert reply.result(timeout=20) == b"next"
    assert not pipe.broken


def test_a_signal_handler_that_raises_ends_the_wait_of_a_follower(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, interrupt: Callable[[], None]
) -> None:
    pipe, peer = pair
    reader = threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
    peer.read()
    timer = _interrupt_once_sent(peer, interrupt)
    with pytest.raises(Interrupted):
        pipe.call((b"ECHO", b"interrupted"), FOREVER)
    timer.join()
    peer.answer(b"+reader\r\n")
    assert reader.result(timeout=20) == b"reader"
    reply = threads.submit(pipe.call, (b"ECHO", b"next"), FOREVER)
    peer.answer(b"+interrupted\r\n")
    peer.echo()
    assert reply.result(timeout=20) == b"next"
    assert not pipe.broken


def test_a_signal_whose_handler_returns_does_not_end_the_wait(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    handled = threading.Event()

    def signal_then_answer() -> None:
        peer.read()
        signal_main()
        handled.wait(20)
        peer.answer(b"+OK\r\n")

    with on_signal(lambda *_: handled.set()):
        threads.submit(signal_then_answer)
        assert pipe.call((b"X",), FOREVER) == b"OK"


def test_many_threads_on_a_real_server_each_get_their_own_reply(
    make_pipe: Callable[[socket.socket], Pipe], valkey: Server, threads: ThreadPoolExecutor
) -> None:
    sock = socket.create_connection(("127.0.0.1", valkey.port))
    pipe = make_pipe(sock)

    def work(worker: int) -> tuple[int, int]:
        rng = random.Random(worker)
        right = given_up = 0
        for number in range(300):
            nonce = b"%d:%d" % (worker, number)
            try:
                reply = pipe.call((b"ECHO", nonce), 0.0 if rng.random() < 0.1 else 20.0)
            except NoReply:
                given_up += 1
            else:
                assert reply == nonce
                right += 1
            if rng.random() < 0.05:
                pipe.post((b"ECHO", b"posted"))
        return right, given_up

    results = [future.result(timeout=60) for future in [threads.submit(work, worker) for worker in range(32)]]
    assert sum(right + given_up for right, given_up in results) == 32 * 300
    assert not pipe.broken
    pipe.close()


def test_connection_cut_under_load_fails_everybody_and_hangs_nobody(
    make_pipe: Callable[[socket.socket], Pipe], valkey: Server, threads: ThreadPoolExecutor
) -> None:
    sock = socket.create_connection(("127.0.0.1", valkey.port))
    pipe = make_pipe(sock)
    own_id = pipe.call((b"CLIENT", b"ID"), 20.0)
    assert isinstance(own_id, int)
    running = threading.Barrier(17)

    def work(worker: int) -> bool:
        running.wait(20)
        while True:
            try:
                assert pipe.call((b"ECHO", worker), 20.0) == b"%d" % worker
            except ConnectionBroken:
                return True

    futures = [threads.submit(work, worker) for worker in range(16)]
    running.wait(20)
    with redis.Redis(port=valkey.port) as operator:
        operator.client_kill_filter(_id=str(own_id))
    assert [True] * 16 == [future.result(timeout=20) for future in futures]
    assert pipe.broken


def test_pipe_is_closed_as_idle_while_nobody_uses_it(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    replies: list[Reply] = []
    pipe.post((b"ECHO", b"post"), replies.append)
    peer.read()
    assert pipe.close_idle() is False  # a reply is to come
    caller = threads.submit(pipe.call, (b"ECHO", b"call"), FOREVER)
    peer.read()
    assert pipe.close_idle() is False  # a thread reads
    peer.answer(b"+post\r\n+call\r\n")
    assert caller.result() == b"call"
    assert (replies, pipe.broken) == ([b"post"], False)
    mailbox = pipe.mailbox()
    pipe.on_push = lambda _: mailbox.put(pipe.close_idle())
    listener = threads.submit(mailbox.wait, FOREVER)
    peer.answer(b">1\r\n+push\r\n")
    assert listener.result() is False  # a thread listened
    assert [pipe.close_idle() for _ in range(2)] == [True, False]
    assert (pipe.broken, pipe.closed_by_peer, peer.sock.recv(1)) == (True, False, b"")
    with pytest.raises(ConnectionBroken) as broken:
        pipe.call((b"ECHO", b"late"), FOREVER)
    assert broken.value.sent is False


WAKE_AT_ONCE = """
import eventlet
eventlet.monkey_patch()
import socket
from redislock_fast._pipe.threads_py import Bell

ours, peers = socket.socketpair()
peers.send(b"reply")
bell, event = Bell(), eventlet.event.Event()
bell.ring()
bell.wait(ours, True, 10)  # the socket has a reply and room, and the bell has rung
eventlet.spawn_after(0.2, event.send, "sent")
print(event.wait())
"""


@pytest.mark.skipif(importlib.util.find_spec("eventlet") is None, reason="eventlet is not installed")
def test_greenlet_that_several_sockets_wake_is_woken_once() -> None:
    finished = run_script(WAKE_AT_ONCE)
    assert (finished.stdout, finished.returncode) == ("sent\n", 0)
