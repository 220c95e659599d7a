"""Spinning in the compiled pipes: what comes from afar is soon not spun for.

The spins here are long, so that they would show in the CPU time; the peer answers later than that. How much spinning
gains, and what it costs beside busy programs, is for `bench/`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from redislock_fast._pipe.base import Pipe
from redislock_fast._pipe.impl import compiled
from redislock_fast._pipe.loop_py import LoopPipe, new_pipe
from tests.support.async_helpers import in_loop
from tests.support.async_peer import call, connected, within
from tests.support.pipes import FOREVER, Owner, Peer

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not in use")

SPIN_US = 2000
AFAR_S = 0.005
WAITS = 60
SPINNING_S = 1e-6 * SPIN_US * WAITS


@pytest.fixture
def far() -> Iterator[tuple[Pipe, Peer]]:
    assert compiled is not None
    ours, theirs = socket.socketpair()
    pipe: Pipe = compiled.Pipe(Owner(ours), ours.fileno(), SPIN_US)
    yield pipe, Peer(theirs)
    pipe.close()
    theirs.close()


def calls(pipe: Pipe) -> float:
    """Call and call again. Returns the CPU time of that."""
    began = time.thread_time()
    for _ in range(WAITS):
        pipe.call((b"ECHO", b"a"), FOREVER)
    return time.thread_time() - began


def answer_late(peer: Peer, count: int) -> None:
    for _ in range(count):
        peer.read()
        time.sleep(AFAR_S)
        peer.answer(b"+a\r\n")


def test_replies_from_afar_are_not_spun_for(far: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = far
    cpu = threads.submit(calls, pipe)
    answer_late(peer, WAITS)
    assert cpu.result() < SPINNING_S / 2


def test_replies_from_afar_are_not_spun_for_among_others(far: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = far
    cpu = [threads.submit(calls, pipe) for _ in range(4)]
    answer_late(peer, 4 * WAITS)
    assert sum(one.result() for one in cpu) < 4 * SPINNING_S / 2


def test_rare_messages_are_not_spun_for(far: tuple[Pipe, Peer], threads: ThreadPoolExecutor) -> None:
    pipe, peer = far
    box = pipe.mailbox()
    pipe.on_push = lambda push: box.put(push[-1])
    listening = threading.Semaphore(0)

    def listen() -> float:
        began = time.thread_time()
        for _ in range(WAITS):
            listening.release()
            box.wait(FOREVER)
        return time.thread_time() - began

    cpu = threads.submit(listen)
    for _ in range(WAITS):
        listening.acquire()
        time.sleep(AFAR_S)
        peer.answer(b">3\r\n+message\r\n+ch\r\n+a\r\n")
    assert cpu.result() < SPINNING_S / 2


@pytest.mark.skipif(new_pipe is LoopPipe, reason="the compiled pipe is not in use")
@in_loop
async def test_a_loop_does_not_spin_for_replies_from_afar(monkeypatch: pytest.MonkeyPatch) -> None:
    from redislock_fast._pipe import loop

    monkeypatch.setattr(loop, "SPIN_US", SPIN_US)
    async with connected(new_pipe) as (pipe, peer):
        began = time.thread_time()
        for _ in range(WAITS):
            reply = asyncio.ensure_future(call(pipe, b"a", FOREVER))
            await peer.read()
            await asyncio.sleep(AFAR_S)
            await peer.answer(b"+a\r\n")
            assert b"a" == await within(reply)
        assert time.thread_time() - began < SPINNING_S / 2
