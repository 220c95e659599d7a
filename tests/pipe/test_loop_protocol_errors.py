"""A loop's pipe whose server breaks the protocol, or is frozen: it breaks in time, and no caller gets another's reply.

Rules: those of `test_loop.py`; stories of any kind stand in `test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from redislock_fast._pipe.base import UNSENT_LIMIT_BYTES, ConnectionBroken, Malformed, Reply
from redislock_fast._pipe.loop_py import LoopPipe, Pipe, new_pipe
from tests.pipe.test_loop import PIPES
from tests.support.async_helpers import eventually, in_loop, run_in_loop
from tests.support.async_peer import MakePipe, connected, outcomes, pause, start, start_subscribing

MIB = 1 << 20


@pytest.fixture(params=PIPES)
def make_pipe(request: pytest.FixtureRequest) -> MakePipe:
    maker: MakePipe = request.param
    return maker


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@in_loop
async def test_reply_before_its_request_has_left_breaks_the_pipe(make_pipe: MakePipe) -> None:
    async with connected(make_pipe) as (pipe, peer):
        leaving = await pause(pipe)  # four requests, which the transport has
        queued = await start(pipe, b"a", b"b")
        await peer.answer(b"+1\r\n+2\r\n+3\r\n+4\r\n:1\r\n")
        assert [[b"1", b"2", b"3", b"4"], False, False] == await outcomes(leaving, *queued)
        assert pipe.broken


@pytest.mark.parametrize("reply", [b"+OK\r\n", b":1\r\n", b"*1\r\n+x\r\n"])
@in_loop
async def test_reply_that_came_with_what_made_its_request_be_sent_breaks_the_pipe(
    make_pipe: MakePipe, reply: bytes
) -> None:
    async with connected(make_pipe) as (pipe, peer):
        replies: list[Reply] = []

        def on_push(push: list[Reply]) -> None:
            pipe.post((b"ECHO", b"posted"))
            pipe.post((b"ECHO", b"posted"), replies.append)

        pipe.on_push = on_push
        await peer.answer(b">1\r\n+x\r\n" + reply + reply)
        await eventually(lambda: pipe.broken, "the pipe breaks")
        assert replies == []


@in_loop
async def test_subscription_answers_no_other_request(make_pipe: MakePipe) -> None:
    async with connected(make_pipe) as (pipe, peer):
        (before,) = await start(pipe, b"a")
        subscribing = await start_subscribing(pipe, b"SUBSCRIBE", b"c")
        await peer.read(2)
        await peer.answer(b">3\r\n+subscribe\r\n+c\r\n:1\r\n+a\r\n")
        assert [True, True] == await outcomes(before, subscribing)
        assert pipe.broken


@pytest.mark.parametrize("push", [b"subscribe\r\n+d", b"ssubscribe\r\n+c"])
@in_loop
async def test_subscription_to_another_channel_answers_none(make_pipe: MakePipe, push: bytes) -> None:
    async with connected(make_pipe) as (pipe, peer):
        subscribing = await start_subscribing(pipe, b"SUBSCRIBE", b"c")
        await peer.answer(b">3\r\n+%b\r\n:1\r\n" % push)
        assert [True] == await outcomes(subscribing)
        assert pipe.broken


@in_loop
async def test_malformed_reply_that_on_reply_refuses_breaks_the_pipe_and_nothing_else(make_pipe: MakePipe) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with connected(make_pipe) as (pipe, peer):

        def refuse(reply: Reply) -> None:
            raise Malformed(reply)

        pipe.post((b"ECHO", b"a"), refuse)
        (behind,) = await start(pipe, b"b")
        await peer.read(2)
        await peer.answer(b":7\r\n+b\r\n")
        assert [True] == await outcomes(behind)
        assert pipe.broken
    assert told == []


@pytest.mark.slow
def test_queue_of_a_frozen_server_is_bounded() -> None:
    async def play() -> None:
        async with contextlib.AsyncExitStack() as closing:
            # All at once, since it takes as long as a server may be silent.
            makers: list[MakePipe] = list({LoopPipe, new_pipe})
            full = [(await closing.enter_async_context(connected(make)))[0] for make in makers]
            small = [(await closing.enter_async_context(connected(make)))[0] for make in makers]
            leaving = [await pause(pipe) for pipe in full]
            for pipe in full:
                for _ in range(UNSENT_LIMIT_BYTES // MIB + 1):
                    pipe.post((b"ECHO", b"x" * MIB))
                assert not pipe.broken, "a server that has been silent for a moment may yet read it"
            for pipe in small:
                await pause(pipe)
                pipe.post((b"ECHO", b"x" * MIB))
            queued = [(await start(pipe, b"a"))[0] for pipe in full]
            for pipe in full:
                await eventually(lambda pipe=pipe: _refuses(pipe), "it breaks")  # type: ignore[misc]
                assert pipe.broken
            assert [True] * len(full) == await outcomes(*leaving)
            assert [False] * len(full) == await outcomes(*queued)
            assert [False] * len(small) == [_refuses(pipe) for pipe in small]

    run_in_loop("asyncio", play())


def _refuses(pipe: Pipe) -> bool:
    try:
        pipe.post((b"ECHO", b"one more"))
    except ConnectionBroken:
        return True
    return False
