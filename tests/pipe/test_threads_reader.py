"""The thread that reads for all callers of a pipe: what it must not keep from them, nor they from it.

Each test drives both pipes, compiled and pure, against a peer in its own hands.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from redislock_fast._pipe.base import UNSENT_SILENCE_S, ConnectionBroken, Forked, NoReply, Pipe, Reply
from redislock_fast._pipe.impl import compiled
from redislock_fast.server import Server
from tests.support.forks import FORKS
from tests.support.helpers import start
from tests.support.pipes import FOREVER, PUSH, Owner, Peer

BUSY_S = 3.0
SPIN_US = 5000
SLICE_S = 0.05  # after which a reader looks in any case whether there is something to send


class Interrupted(Exception):
    """The exception of the test's signal handler."""


def busy_work() -> None:
    sum(range(500))


@pytest.fixture
def tired(pair: tuple[Pipe, Peer]) -> Iterator[threading.Event]:
    """Set when a peer that sends pushes without a pause has done so for `BUSY_S`, and stops.

    The peer is a process of its own, and faster than this one, so that there is always something to read.
    """
    pipe, peer = pair
    pipe.on_push = lambda _: busy_work()
    tired = threading.Event()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads; the child uses none
        pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            while True:
                peer.sock.sendall(PUSH * 2000)
        os._exit(0)

    def stop() -> None:
        tired.set()
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(BUSY_S, stop)
    timer.start()
    yield tired
    timer.cancel()
    if not tired.is_set():
        stop()
    os.waitpid(pid, 0)


# ---- while the reader blocks ----


def test_a_request_leaves_though_the_reader_waits_for_a_far_servers_reply(
    make_pair: Callable[[], tuple[Pipe, Peer]], threads: ThreadPoolExecutor
) -> None:
    fastest_s = SLICE_S
    for _ in range(20):
        pipe, peer = make_pair()  # no reply has come yet: the server may be far away
        reader = threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
        assert [[b"ECHO", b"reader"]] == peer.read()
        began = time.monotonic()
        others = [threads.submit(pipe.call, (b"ECHO", b"%d" % number), FOREVER) for number in range(3)]
        pipe.post((b"ECHO", b"posted"))
        requests = peer.read(4)  # before any reply
        fastest_s = min(fastest_s, time.monotonic() - began)
        assert {b"0", b"1", b"2", b"posted"} == {request[-1] for request in requests}
        peer.answer(b"+reader\r\n" + b"".join(b"+%b\r\n" % request[-1] for request in requests))
        assert b"reader" == reader.result(timeout=20)
        assert [b"0", b"1", b"2"] == [other.result(timeout=20) for other in others]
        pipe.close()
        peer.sock.close()
    assert fastest_s < SLICE_S / 2


@pytest.mark.slow
def test_many_callers_of_a_far_server_each_get_their_own_replies(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    callers, calls, late_s = 16, 50, 0.0005

    def answer_late() -> None:
        for _ in range(callers * calls):
            (request,) = peer.read()
            threading.Event().wait(late_s)
            peer.answer(b"+%b\r\n" % request[-1])

    def work(caller: int) -> list[Reply]:
        return [pipe.call((b"ECHO", b"%d:%d" % (caller, number)), FOREVER) for number in range(calls)]

    answering = threads.submit(answer_late)
    working = [threads.submit(work, caller) for caller in range(callers)]
    for caller, worker in enumerate(working):
        assert [b"%d:%d" % (caller, number) for number in range(calls)] == worker.result(timeout=60)
    answering.result(timeout=20)


@pytest.mark.skipif(compiled is None, reason="nothing spins in Python")
def test_a_request_to_a_near_server_leaves_though_a_listener_spins(valkey: Server) -> None:
    sock = socket.create_connection(("127.0.0.1", valkey.port))
    assert compiled is not None
    pipe: Pipe = compiled.Pipe(Owner(sock), sock.fileno(), SPIN_US)
    for _ in range(100):  # the server is near
        assert pipe.call((b"DEL", b"none"), FOREVER) == 0
    listening = start(lambda: pipe.mailbox().wait(FOREVER, soon=True))
    took_s = []
    for _ in range(60):
        began = time.monotonic()
        assert pipe.call((b"DEL", b"none"), FOREVER) == 0
        took_s.append(time.monotonic() - began)
    pipe.close()
    assert isinstance(listening.exception(20), ConnectionBroken)
    assert sorted(took_s)[len(took_s) // 2] < SLICE_S / 2


# ---- while bytes keep coming ----


def test_a_reader_whose_time_is_up_stops_though_bytes_keep_coming(
    pair: tuple[Pipe, Peer], tired: threading.Event
) -> None:
    pipe, _ = pair
    for _ in range(3):
        with pytest.raises(NoReply):
            pipe.call((b"ECHO", b"late"), 0.05)
    assert not tired.is_set()
    assert not pipe.broken


@pytest.mark.parametrize("ended_by", ["its time", "a signal handler"])
def test_a_listener_that_reads_stops_though_replies_to_others_keep_coming(
    make_pipe: Callable[[socket.socket], Pipe], valkey: Server, ended_by: str
) -> None:
    pipe = make_pipe(socket.create_connection(("127.0.0.1", valkey.port)))
    stop, reading = threading.Event(), threading.Event()
    give_up = threading.Timer(BUSY_S, stop.set)
    give_up.start()

    def work() -> None:
        reading.wait(20)
        with contextlib.suppress(ConnectionBroken):  # an interrupt outside of its waits breaks the pipe in Python
            while not stop.is_set():
                assert pipe.call((b"DEL", b"none"), FOREVER) == 0

    def handler(number: int, frame: object) -> None:
        raise Interrupted

    workers = [start(work) for _ in range(4)]
    before = signal.signal(signal.SIGUSR1, handler)
    interrupt = threading.Timer(0.1, signal.raise_signal, [signal.SIGUSR1])  # taken by another thread
    threading.Timer(0.02, reading.set).start()
    try:
        if ended_by == "its time":
            with pytest.raises(NoReply):
                pipe.mailbox().wait(0.1)
        else:
            interrupt.start()
            with pytest.raises(Interrupted):
                pipe.mailbox().wait(FOREVER)
            interrupt.join()
        assert not stop.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
        give_up.cancel()
        stop.set()
        for worker in workers:
            worker.result(20)
        pipe.close()


# ---- what belongs to no request ----


def test_a_reply_before_its_request_breaks_the_pipe_and_is_nobodys(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    peer.answer(b":1\r\n")
    threading.Event().wait(0.01)  # a caller that comes later looks first at what has come
    with pytest.raises(ConnectionBroken) as caught:
        pipe.call((b"DEL", b"k"), FOREVER)
    assert not caught.value.sent
    assert pipe.broken


@pytest.mark.slow
def test_a_silent_server_on_which_too_much_waits_is_left(pair: tuple[Pipe, Peer]) -> None:
    pipe, _ = pair
    large = b"x" * 1_000_000
    with pytest.raises(NoReply):
        pipe.call((b"ECHO", large), 0.0)
    for _ in range(15):
        pipe.post((b"ECHO", large))
    assert not pipe.broken
    while pipe.silence_s <= UNSENT_SILENCE_S:
        threading.Event().wait(0.1)
    with pytest.raises(ConnectionBroken) as caught:
        pipe.post((b"ECHO", b"small"))
    assert not caught.value.sent
    assert pipe.broken


# ---- a fork in the middle of a call ----


@FORKS
@pytest.mark.parametrize("reads", [True, False])
def test_a_call_in_which_a_signal_handler_forks_goes_on_in_the_parent_alone(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor, fork: Callable[[], int], reads: bool
) -> None:
    pipe, peer = pair
    told, tell = os.pipe()
    child = -1

    def handle(number: int, frame: object) -> None:
        nonlocal child
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is under test
            child = fork()

    def answer_behind_the_child() -> bytes:
        outcome = os.read(told, 1000)
        for request in peer.read(1 if reads else 2):
            peer.answer(b"+%b\r\n" % request[-1])
        return outcome

    if not reads:
        threads.submit(pipe.call, (b"ECHO", b"reader"), FOREVER)
        select.select([peer.sock], [], [], 20)
    answering = start(answer_behind_the_child)
    timer = threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1])
    before = signal.signal(signal.SIGUSR1, handle)
    reply: object = None
    try:
        timer.start()
        reply = pipe.call((b"ECHO", b"called"), FOREVER)
    except BaseException as error:
        reply = error
    finally:
        if child == 0:
            os.write(tell, type(reply).__name__.encode())
            os._exit(0)
        signal.signal(signal.SIGUSR1, before)
    timer.join()
    os.waitpid(child, 0)
    assert b"called" == reply
    assert Forked.__name__.encode() == answering.result(timeout=20)
    os.close(told)
    os.close(tell)


@FORKS
def test_a_call_in_which_a_push_is_taken_by_what_forks_goes_on_in_the_parent_alone(
    pair: tuple[Pipe, Peer], fork: Callable[[], int]
) -> None:
    pipe, peer = pair
    told, tell = os.pipe()
    child = -1

    def take(push: list[Reply]) -> None:
        nonlocal child
        if child == -1:
            child = fork()

    pipe.on_push = take
    peer.answer(PUSH)
    threading.Event().wait(0.01)  # a caller that comes later looks first at what has come
    try:
        pipe.call((b"ECHO", b"called"), 0.1)
    except BaseException as error:
        outcome = type(error).__name__.encode()
    finally:
        if child == 0:
            os.write(tell, outcome)
            os._exit(0)
    os.waitpid(child, 0)
    assert (b"NoReply", b"Forked") == (outcome, os.read(told, 100))
    pipe.close()
    assert [[b"ECHO", b"called"]] == peer.read()
    with pytest.raises(EOFError):
        peer.read()
    os.close(told)
    os.close(tell)
