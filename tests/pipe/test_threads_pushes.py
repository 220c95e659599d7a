"""Pushes in the pipe of threads, compiled and pure: those that answer a request, and those that are told to `on_push`.

As in `test_threads.py`, the peer is in the test's own hands.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from redislock_fast._pipe.base import ConnectionBroken, Mailbox, Pipe, Reply
from tests.pipe.test_threads_mailbox import box, message
from tests.support.pipes import FOREVER, Peer

__all__ = ["box"]


def test_pushes_and_replies_cut_anywhere_each_find_their_way(
    pair: tuple[Pipe, Peer], box: Mailbox, threads: ThreadPoolExecutor
) -> None:
    pipe, peer = pair
    data = (
        message(b"a") + b"+OK\r\n" + message(b"b") + message(b"c") + b"*2\r\n:1\r\n+x\r\n" + message(b"d") + b":1\r\n"
    )
    for cut in range(len(data) + 1):
        waiting = threads.submit(lambda: [box.wait(FOREVER) for _ in range(4)])
        replies = threads.submit(pipe.call_many, [(b"X",)] * 3, FOREVER)
        peer.read(3)
        peer.answer(data[:cut])
        peer.answer(data[cut:])
        assert replies.result(timeout=20) == [b"OK", [1, b"x"], 1]
        assert waiting.result(timeout=20) == [b"a", b"b", b"c", b"d"]


def test_what_takes_a_push_may_post(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair
    box = pipe.mailbox()

    def on_push(push: list[Reply]) -> None:
        pipe.post((b"ECHO", b"posted"))
        box.put(push[-1])

    pipe.on_push = on_push
    for _ in range(20):
        waiting = threads.submit(box.wait, FOREVER)
        peer.answer(message(b"a"))
        assert waiting.result(timeout=20) == b"a"
        assert peer.read() == [[b"ECHO", b"posted"]]
        peer.answer(b"+posted\r\n")


def test_what_takes_a_push_and_raises_breaks_the_pipe(pair: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = pair

    def on_push(push: list[Reply]) -> None:
        raise ValueError(push[-1])

    pipe.on_push = on_push
    waits: list[Future[Any]] = [threads.submit(pipe.mailbox().wait, FOREVER) for _ in range(3)]
    reply = threads.submit(pipe.call, (b"X",), FOREVER)
    peer.read()
    peer.answer(message(b"a"))
    told = [type(future.exception(timeout=20)) for future in [reply, *waits]]
    assert {ValueError: 1, ConnectionBroken: 3} == {kind: told.count(kind) for kind in set(told)}
    assert pipe.broken
    assert not pipe.closed_by_peer
