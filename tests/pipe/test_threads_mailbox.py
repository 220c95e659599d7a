"""Mailboxes, in the pipe compiled and pure: a thread that waits for a push drives the socket, and delays no caller.

As in `test_threads.py`, the peer is in the test's own hands unless a test is about pub/sub or numbers. Whether a
listener reads already when a caller comes cannot be seen from outside, so what depends on it is done many times over: a
request that only left with the reader's next look would make such a test last for minutes.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import redis

from redislock_fast._pipe.base import ConnectionBroken, Mailbox, NoReply, Pipe, Reply
from redislock_fast.server import Server
from tests.conftest import TlsServer
from tests.pipe.test_threads import Interrupted, interrupt
from tests.support.any_pipe import outcomes
from tests.support.helpers import PATIENCE_S, start
from tests.support.pipes import FOREVER, Owner, Peer

__all__ = ["interrupt"]

ROUNDS = 2000


@pytest.fixture
def box(pair: tuple[Pipe, Peer]) -> Mailbox:
    """A mailbox that is told the last word of every push."""
    pipe, _ = pair
    box = pipe.mailbox()
    pipe.on_push = lambda push: box.put(push[-1])
    return box


def message(word: bytes) -> bytes:
    return b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$%d\r\n%b\r\n" % (len(word), word)


# Messages


def test_messages_that_are_there_come_at_once_and_in_order(pair: tuple[Pipe, Peer]) -> None:
    box = pair[0].mailbox()
    for number in range(3):
        box.put(number)
    assert [0, 1, 2] == [box.wait(0.0) for _ in range(3)]
    with pytest.raises(NoReply):
        box.wait(0.0)


def test_messages_that_are_there_come_at_once_while_another_thread_reads(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    box = pipe.mailbox()
    reply = threads.submit(pipe.call, (b"X",), FOREVER)
    peer.read()
    for number in range(3):
        box.put(number)
    assert [0, 1, 2] == [box.wait(FOREVER) for _ in range(3)]
    peer.answer(b"+OK\r\n")
    assert reply.result(timeout=20) == b"OK"


def test_what_is_about_to_come_is_awaited_in_either_way(pair: tuple[Pipe, Peer], box: Mailbox) -> None:
    pipe, peer = pair
    for number in range(ROUNDS):  # so often that it is spun for, and blocked for
        pipe.post((b"X",), box.put)
        peer.read()
        peer.answer(b":%d\r\n" % number)
        assert number == box.wait(FOREVER, soon=True)


def test_what_is_about_to_come_and_does_not_is_awaited_for_as_long(pair: tuple[Pipe, Peer], box: Mailbox) -> None:
    pipe, peer = pair
    for number in range(50):
        with pytest.raises(NoReply):
            box.wait(0.0001 * (number % 3), soon=True)
    pipe.post((b"X",), box.put)
    peer.answer(b"+late\r\n")
    assert b"late" == box.wait(FOREVER, soon=True)


def test_a_listener_reads_what_is_pushed(pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor) -> None:
    _, peer = pair
    for number in range(10):
        waiting = threads.submit(box.wait, FOREVER)
        peer.answer(message(b"%d" % number))
        assert waiting.result(timeout=20) == b"%d" % number


def test_a_message_that_came_while_a_caller_read_is_there_at_once(
    pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    reply = threads.submit(pipe.call, (b"X",), FOREVER)
    peer.read()
    peer.answer(message(b"a") + b"+OK\r\n")
    assert reply.result(timeout=20) == b"OK"
    assert box.wait(0.0) == b"a"


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, 0.15])
def test_time_ends_a_wait_and_nothing_else(
    pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor, timeout_s: float
) -> None:
    pipe, peer = pair
    waits = [threads.submit(pipe.mailbox().wait, timeout_s) for _ in range(3)]
    assert [NoReply] * 3 == [type(waiting.exception(timeout=20)) for waiting in waits]
    waiting = threads.submit(box.wait, FOREVER)
    peer.answer(message(b"a"))
    assert waiting.result(timeout=20) == b"a"
    assert not pipe.broken


def test_thread_that_does_not_read_may_tell_a_mailbox(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, _ = pair
    for _ in range(5):
        boxes = [pipe.mailbox() for _ in range(8)]
        waits = [threads.submit(box.wait, FOREVER) for box in boxes]
        for number, box in enumerate(boxes):
            box.put(number)
        assert list(range(8)) == [waiting.result(timeout=20) for waiting in waits]


def test_a_message_told_just_as_somebody_begins_to_wait_is_never_missed(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, _ = pair
    reader = threads.submit(
        pipe.mailbox().wait, FOREVER
    )  # else the waiting thread would read, and look only now and then
    there, back = pipe.mailbox(), pipe.mailbox()

    def echo() -> None:
        for _ in range(ROUNDS):
            back.put(there.wait(FOREVER))

    echoing = threads.submit(echo)
    for number in range(ROUNDS):
        there.put(number)
        assert back.wait(FOREVER) == number
    echoing.result(timeout=20)
    pipe.close()
    assert isinstance(reader.exception(timeout=20), ConnectionBroken)


def test_a_second_thread_may_not_wait(pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor) -> None:
    _, peer = pair
    done, waiting = wait([threads.submit(box.wait, FOREVER) for _ in range(2)], 20, return_when=FIRST_COMPLETED)
    assert [RuntimeError] == [type(refused.exception()) for refused in done]
    peer.answer(message(b"a"))
    assert [b"a"] == [told.result(timeout=20) for told in waiting]


# Signals


def _wait_until_interrupted(box: Mailbox, interrupt: Callable[[], None]) -> None:
    """Wait for a message that does not come. The interrupt is sent soon."""
    begins = threading.Lock()
    begins.acquire()

    def interrupt_soon() -> None:
        begins.acquire()
        time.sleep(0.05)
        interrupt()

    def begin() -> None:
        begins.release()  # on a busy machine, the interrupt may come before the wait
        box.wait(FOREVER)

    interrupting = start(interrupt_soon)
    with pytest.raises(Interrupted):
        begin()
    interrupting.result(PATIENCE_S)


def test_an_interrupt_loses_no_message(pair: tuple[Pipe, Peer], box: Mailbox, interrupt: Callable[[], None]) -> None:
    pipe, peer = pair
    _wait_until_interrupted(box, interrupt)
    peer.answer(message(b"a") + message(b"b"))
    assert [b"a", b"b"] == [box.wait(FOREVER) for _ in range(2)]
    assert not pipe.broken


def test_an_interrupt_of_a_listener_that_follows_harms_nobody(
    pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor, interrupt: Callable[[], None]
) -> None:
    pipe, peer = pair
    reply = threads.submit(pipe.call, (b"X",), FOREVER)
    peer.read()
    _wait_until_interrupted(box, interrupt)
    peer.answer(message(b"a") + b"+OK\r\n")
    assert reply.result(timeout=20) == b"OK"
    assert box.wait(FOREVER) == b"a"


# Callers beside a listener


@pytest.fixture
def listener(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> Future[object]:
    """The wait of a listener that nobody tells anything."""
    return threads.submit(pair[0].mailbox().wait, FOREVER)


@pytest.mark.usefixtures("listener")
def test_a_request_leaves_at_once_though_a_listener_reads(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    echoing = threads.submit(_echo_each, peer, ROUNDS)
    for number in range(ROUNDS):
        assert pipe.call((b"ECHO", b"%d" % number), FOREVER) == b"%d" % number
    echoing.result(timeout=20)


@pytest.mark.usefixtures("listener")
def test_requests_of_many_threads_leave_at_once_though_a_listener_reads(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair

    def work(worker: int) -> None:
        for number in range(ROUNDS // 4):
            word = b"%d:%d" % (worker, number)
            assert pipe.call((b"ECHO", word), FOREVER) == word
            if number % 10 == 0:
                pipe.post((b"ECHO", b"posted"))
                assert pipe.call_many([(b"ECHO", word), (b"ECHO", b"second")], FOREVER) == [word, b"second"]

    echoing = threads.submit(_echo_each, peer, 4 * (ROUNDS // 4 + 3 * (ROUNDS // 40)))
    for worker in [threads.submit(work, worker) for worker in range(4)]:
        worker.result(timeout=60)
    echoing.result(timeout=20)


@pytest.mark.usefixtures("listener")
def test_a_post_leaves_at_once_though_a_listener_reads(pair: tuple[Pipe, Peer]) -> None:
    pipe, peer = pair
    for number in range(ROUNDS):
        pipe.post((b"ECHO", b"%d" % number))
        assert peer.read() == [[b"ECHO", b"%d" % number]]
        peer.answer(b"+OK\r\n")


@pytest.mark.usefixtures("listener")
def test_a_request_leaves_at_once_though_a_post_is_unanswered(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    for number in range(ROUNDS // 4):
        pipe.post((b"POST",))
        reply = threads.submit(pipe.call, (b"CALL", b"%d" % number), FOREVER)
        assert [[b"POST"], [b"CALL", b"%d" % number]] == peer.read(2)
        peer.answer(b"+posted\r\n+%d\r\n" % number)
        assert reply.result(timeout=20) == b"%d" % number


def test_what_is_queued_leaves_before_what_has_come_is_delivered(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    box = pipe.mailbox()
    received: list[list[list[bytes]]] = []

    def hear(push: list[Reply]) -> None:  # in the reader, which sends nothing as long as it is here
        received.append(peer.read())
        box.put(push[-1])

    pipe.on_push = hear
    listening = threads.submit(box.wait, FOREVER)
    asked = threads.submit(pipe.call, (b"X",), FOREVER)
    peer.read()
    pipe.post((b"Y",))  # behind a request under way: for the reader to send
    peer.answer(message(b"m"))
    assert b"m" == listening.result(timeout=20)
    assert received == [[[b"Y"]]]
    peer.answer(b":1\r\n:2\r\n")
    assert asked.result(timeout=20) == 1


@pytest.mark.usefixtures("listener")
def test_a_request_for_which_there_is_no_room_leaves_all_the_same(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    large = b"x" * 2_000_000
    calls = [threads.submit(pipe.call, (b"ECHO", large), FOREVER) for _ in range(2)]
    small = threads.submit(pipe.call, (b"ECHO", b"small"), FOREVER)
    peer.echo(3)
    assert [large, large] == [call.result(timeout=20) for call in calls]
    assert small.result(timeout=20) == b"small"


@pytest.mark.usefixtures("listener")
def test_silence_begins_with_a_request_though_a_listener_reads(
    pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    while pipe.silence_s <= 0.3:
        pass
    reply = threads.submit(pipe.call, (b"ECHO", b"a"), FOREVER)
    request = peer.read()[0]
    assert pipe.silence_s < 0.3
    peer.answer(b"+%b\r\n" % request[-1])
    assert reply.result(timeout=20) == b"a"


def test_reading_goes_from_callers_to_listeners_and_back(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    boxes = {b"%d" % number: pipe.mailbox() for number in range(6)}
    pipe.on_push = lambda push: boxes[word_of(push)].put(push[-1])
    for _ in range(20):
        first = threads.submit(pipe.call, (b"ECHO", b"first"), FOREVER)
        peer.read()
        waits = {word: threads.submit(box.wait, FOREVER) for word, box in boxes.items()}
        peer.answer(b"+first\r\n")
        assert first.result(timeout=20) == b"first"
        for number, (word, waiting) in enumerate(waits.items()):
            if number % 2:
                peer.answer(message(word))
                assert waiting.result(timeout=20) == word
                continue
            second = threads.submit(pipe.call, (b"ECHO", b"second"), FOREVER)
            peer.read()
            peer.answer(message(word))
            assert waiting.result(timeout=20) == word
            peer.answer(b"+second\r\n")
            assert second.result(timeout=20) == b"second"


def test_listeners_that_come_and_go_disturb_nobody(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    over = threading.Event()

    def come_and_go(worker: int) -> None:
        rng = random.Random(worker)
        box = pipe.mailbox()
        while not over.is_set():
            with contextlib.suppress(NoReply):
                box.wait(rng.random() * 0.0002)

    def work(worker: int) -> None:
        for number in range(ROUNDS // 4):
            word = b"%d:%d" % (worker, number)
            pipe.post((b"ECHO", b"posted"))
            assert pipe.call((b"ECHO", word), FOREVER) == word

    listeners = [threads.submit(come_and_go, worker) for worker in range(4)]
    workers = [threads.submit(work, worker) for worker in range(4)]
    _echo_each(peer, 8 * (ROUNDS // 4))
    for working in workers:
        working.result(timeout=60)
    over.set()
    for listener in listeners:
        listener.result(timeout=20)
    assert not pipe.broken


# Breaking


def test_a_broken_pipe_ends_waits_as_nothing_sent(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    waits = [threads.submit(pipe.mailbox().wait, FOREVER) for _ in range(5)]
    peer.sock.close()
    assert outcomes(*waits) == [False] * 5
    assert pipe.broken
    with pytest.raises(ConnectionBroken) as caught:
        pipe.mailbox().wait(FOREVER)
    assert not caught.value.sent


def test_messages_outlive_the_pipe(pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    peer.answer(message(b"a") + message(b"b"))
    peer.sock.close()
    listener = threads.submit(pipe.mailbox().wait, FOREVER)
    assert outcomes(listener) == [False]
    box.put(b"c")
    assert [b"a", b"b", b"c"] == [box.wait(FOREVER) for _ in range(3)]
    with pytest.raises(ConnectionBroken):
        box.wait(FOREVER)


def test_close_ends_listeners_and_callers(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    reply = threads.submit(pipe.call, (b"X",), FOREVER)
    peer.read()
    waits: list[Future[Any]] = [threads.submit(pipe.mailbox().wait, FOREVER) for _ in range(5)]
    pipe.close()
    assert outcomes(reply, *waits) == [True] + [False] * 5


class Reopener(Owner):
    """Opens other sockets as soon as its own is closed: one of them gets the same descriptor."""

    reopened: tuple[socket.socket, socket.socket]

    def disconnect(self) -> None:
        super().disconnect()
        self.reopened = socket.socketpair()


def test_nothing_is_sent_on_a_descriptor_that_was_closed(
    make_pair: Callable[[], tuple[Pipe, Peer]], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[Reopener] = []

    def make_owner(sock: socket.socket) -> Owner:
        owners.append(Reopener(sock))
        return owners[-1]

    def call_for_ever(pipe: Pipe) -> None:
        while True:
            pipe.call((b"ECHO", b"a"), FOREVER)

    monkeypatch.setattr("tests.support.pipes.Owner", make_owner)
    for _ in range(30):
        pipe, peer = make_pair()
        running = [threads.submit(pipe.mailbox().wait, FOREVER)]
        running += [threads.submit(call_for_ever, pipe) for _ in range(3)]
        _echo_each(peer, 20)
        peer.sock.close()
        assert [ConnectionBroken] * 4 == [type(future.exception(timeout=20)) for future in running]
        reopened = owners[-1].reopened
        assert [] == select.select(reopened, [], [], 0)[0]
        for sock in reopened:
            sock.close()


# Many at once, on a real server


def test_two_hundred_listeners_are_each_told_once_beside_callers(
    make_pipe: Callable[[socket.socket], Pipe], valkey: Server
) -> None:
    pipe = make_pipe(socket.create_connection(("127.0.0.1", valkey.port)))
    boxes = {b"%d" % number: pipe.mailbox() for number in range(200)}
    pipe.on_push = lambda push: boxes[word_of(push)].put(push[-1])
    pipe.call((b"HELLO", 3), FOREVER)
    assert pipe.call((b"SUBSCRIBE", b"c"), FOREVER) == [b"subscribe", b"c", 1]
    told = threading.Event()

    def work(worker: int) -> int:
        key = b"key-%d" % worker
        number = 0
        while not told.is_set():
            assert pipe.call((b"SET", key, number), FOREVER) == b"OK"
            assert pipe.call((b"GET", key), FOREVER) == b"%d" % number
            number += 1
        return number

    with ThreadPoolExecutor(208) as pool, redis.Redis(port=valkey.port) as publisher:
        workers = [pool.submit(work, worker) for worker in range(8)]
        waits = {word: pool.submit(box.wait, FOREVER) for word, box in boxes.items()}
        for word in boxes:
            publisher.publish("c", word)
        assert {word: word for word in boxes} == {word: waiting.result(timeout=30) for word, waiting in waits.items()}
        told.set()
        assert all(worker.result(timeout=20) for worker in workers)
    for box in boxes.values():
        with pytest.raises(NoReply):
            box.wait(0.0)
    pipe.close()


def test_over_tls_callers_may_send_while_a_listener_reads(
    make_pipe: Callable[[socket.socket], Pipe], tls_server: TlsServer, threads: ThreadPoolExecutor
) -> None:
    context = ssl.create_default_context(cafile=tls_server.ca_path)
    sock = socket.create_connection(("127.0.0.1", tls_server.port))
    pipe = make_pipe(context.wrap_socket(sock, server_hostname="localhost"))
    box = pipe.mailbox()
    pipe.on_push = lambda push: box.put(push[-1])
    pipe.call((b"HELLO", 3), FOREVER)
    pipe.call((b"SUBSCRIBE", b"c"), FOREVER)
    waiting = threads.submit(box.wait, FOREVER)

    def work(worker: int) -> None:
        for number in range(200):
            word = b"%d:%d" % (worker, number) * (5000 if number % 50 == 0 else 1)
            assert pipe.call((b"ECHO", word), FOREVER) == word

    for working in [threads.submit(work, worker) for worker in range(4)]:
        working.result(timeout=30)
    pipe.call((b"PUBLISH", b"c", b"told"), FOREVER)
    assert waiting.result(timeout=20) == b"told"
    pipe.close()


def _echo_each(peer: Peer, count: int) -> None:
    for _ in range(count):
        peer.echo()


def word_of(push: list[Reply]) -> bytes:
    word = push[-1]
    assert isinstance(word, bytes)
    return word
