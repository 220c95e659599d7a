"""The tally, compiled and pure: one request on each of several pipes, and whoever answers first.

The peers are in the test's own hands, but for the last test, where threads share the connections to real servers.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from redislock_fast._pipe import tally_py
from redislock_fast._pipe.base import MISSING, Args, Lost, Pipe
from redislock_fast._pipe.impl import compiled
from redislock_fast.server import Server
from tests.pipe.test_threads import Interrupted, interrupt
from tests.support.pipes import Peer

__all__ = ["interrupt"]

LONG_S = 20.0
REQUESTS: list[Args] = [(b"X", b"0"), (b"X", b"1"), (b"X", b"2")]
ORDER = [0, 1, 2]

MAKERS = [pytest.param(tally_py.PythonTally, id="python")]
if compiled is not None:
    MAKERS.append(pytest.param(tally_py.new_tally, id="compiled"))


class Three(NamedTuple):
    """Three pipes, their peers, and a tally of them."""

    pipes: list[Pipe]
    peers: list[Peer]
    tally: tally_py.PythonTally


@pytest.fixture(params=MAKERS)
def make_tally(request: pytest.FixtureRequest) -> type[tally_py.PythonTally]:
    tally: type[tally_py.PythonTally] = request.param
    return tally


@pytest.fixture
def three(make_pipe: Callable[[socket.socket], Pipe], make_tally: type[tally_py.PythonTally]) -> Iterator[Three]:
    with contextlib.ExitStack() as closing:
        pairs = [socket.socketpair() for _ in ORDER]
        for ours, theirs in pairs:
            closing.enter_context(ours)
            closing.enter_context(theirs)
        pipes = [make_pipe(ours) for ours, _ in pairs]
        yield Three(pipes, [Peer(theirs) for _, theirs in pairs], make_tally(pipes))


def _answer_late(three: Three, index: int) -> None:
    """Answer what the tally has asked, and have somebody else read that."""
    three.peers[index].echo()
    three.peers[index].answer(b"+OK\r\n")
    assert three.pipes[index].call((b"Y",), LONG_S) == b"OK"


def test_all_are_asked_before_anybody_is_waited_for(three: Three) -> None:
    three.tally.ask(REQUESTS)
    assert [peer.read() for peer in three.peers] == [[[b"X", b"0"]], [[b"X", b"1"]], [[b"X", b"2"]]]
    assert three.tally.replies() == [MISSING, MISSING, MISSING]


def test_waits_until_enough_have_answered_and_no_longer(three: Three) -> None:
    three.tally.ask(REQUESTS)
    three.peers[0].echo()
    three.peers[1].echo()
    three.tally.wait(2, LONG_S, LONG_S)
    assert three.tally.replies() == [b"0", b"1", MISSING]
    assert [waited is None for waited in three.tally.waited_s] == [False, False, True]


def test_a_slow_one_is_waited_for_as_long_as_its_slice(three: Three) -> None:
    three.tally.ask(REQUESTS)
    three.peers[1].echo()
    three.peers[2].echo()
    three.tally.wait(2, 0.01, LONG_S)
    assert three.tally.replies() == [MISSING, b"1", b"2"]


def test_without_time_what_has_come_is_taken(three: Three) -> None:
    three.tally.ask(REQUESTS)
    for peer in three.peers:
        peer.echo()
    three.tally.wait(3, LONG_S, 0.0)
    assert three.tally.replies() == [b"0", b"1", b"2"]


def test_a_reply_that_comes_late_is_handed_on(three: Three) -> None:
    late: list[Any] = []
    three.tally.ask(REQUESTS)
    three.tally.hand_on(0, late.append)
    _answer_late(three, 0)
    assert late == [b"0"]


def test_a_reply_that_has_come_is_handed_on_at_once(three: Three) -> None:
    late: list[Any] = []
    three.tally.ask(REQUESTS)
    three.peers[0].echo()
    three.tally.wait(1, LONG_S, LONG_S)
    three.tally.hand_on(0, late.append)
    assert late == [b"0"]
    assert three.tally.replies() == [MISSING, MISSING, MISSING]


def test_a_pipe_that_was_broken_before_is_noted_and_the_others_are_asked(three: Three) -> None:
    three.pipes[1].close()
    three.tally.ask(REQUESTS)
    lost = three.tally.lost
    assert [type(error) for error in lost] == [type(None), Lost, type(None)]
    assert lost[1] is not None
    assert lost[1].sent is False
    three.peers[0].echo()
    three.peers[2].echo()
    three.tally.wait(3, 0.01, LONG_S)
    assert three.tally.replies() == [b"0", MISSING, b"2"]


def test_a_pipe_that_breaks_is_not_waited_for(three: Three) -> None:
    three.tally.ask(REQUESTS)
    three.peers[0].sock.close()
    three.peers[1].echo()
    three.tally.wait(1, LONG_S, LONG_S)
    assert three.tally.replies() == [MISSING, b"1", MISSING]
    assert three.pipes[0].broken is True


def test_an_interrupt_ends_the_wait_and_loses_no_reply(three: Three, interrupt: Callable[[], None]) -> None:
    late: list[Any] = []
    three.tally.ask(REQUESTS)
    timer = threading.Timer(0.05, interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        three.tally.wait(1, LONG_S, LONG_S)
    timer.join()
    three.tally.hand_on(0, late.append)
    _answer_late(three, 0)
    assert late == [b"0"]


def test_a_reply_that_never_comes_keeps_no_pipe_alive(
    make_pipe: Callable[[socket.socket], Pipe], make_tally: type[tally_py.PythonTally]
) -> None:
    def listen(push: object) -> None:
        raise AssertionError

    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = make_pipe(ours)
        pipe.on_push = listen
        tally = make_tally([pipe])
        tally.ask(REQUESTS[:1])
        tally.wait(1, 0.0, 0.0)
        tally.hand_on(0, list[Any]().append)
        seen = weakref.ref(listen)
        del pipe, tally, listen
        gc.collect()
        assert seen() is None


def test_threads_that_share_pipes_are_each_given_their_replies_once(
    make_pipe: Callable[[socket.socket], Pipe], make_tally: type[tally_py.PythonTally], valkey: Server
) -> None:
    pipes = [make_pipe(socket.create_connection(("127.0.0.1", valkey.port))) for _ in ORDER]
    guard = threading.Lock()
    late: Counter[bytes] = Counter()

    def note(reply: Any) -> None:
        with guard:
            late[reply] += 1

    def work(worker: int) -> list[Any]:
        taken: list[Any] = []
        for number in range(200):
            words = [b"%d %d %d" % (worker, number, index) for index in ORDER]
            tally = make_tally(pipes)
            tally.ask([(b"ECHO", word) for word in words])
            tally.wait(1 + number % 3, LONG_S, LONG_S)
            for index, reply in enumerate(tally.replies()):
                if reply is MISSING:
                    tally.hand_on(index, note)
                else:
                    assert reply == words[index]
                    taken.append(reply)
        return taken

    with ThreadPoolExecutor(8) as pool:
        taken = [word for words in pool.map(work, range(8)) for word in words]
    for pipe in pipes:
        assert pipe.call((b"PING",), LONG_S) == b"PONG"  # behind which all replies have come
    assert set((Counter(taken) + late).values()) == {1}
    assert len(taken) + len(late) == 8 * 200 * 3
    for pipe in pipes:
        pipe.close()
