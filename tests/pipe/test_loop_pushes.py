"""Pushes in the pipe of a loop, compiled and pure: those that answer a request, and those that are told to `on_push`.

Rules: those of `test_loop.py`.
"""

from __future__ import annotations

import asyncio

import hiredis
import pytest

from redislock_fast._pipe.base import Reply
from tests.pipe.test_loop import PIPES
from tests.support.async_helpers import eventually, in_loop
from tests.support.async_peer import (
    FOREVER,
    MakePipe,
    call,
    connected,
    outcomes,
    start,
    start_many,
    start_subscribing,
    within,
)
from tests.support.pipes import MESSAGES


@pytest.fixture(params=PIPES)
def make_pipe(request: pytest.FixtureRequest) -> MakePipe:
    maker: MakePipe = request.param
    return maker


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@in_loop
async def test_pushes_are_told_in_order_wherever_the_stream_is_cut(make_pipe: MakePipe) -> None:
    push = b">3\r\n$7\r\nmessage\r\n+c\r\n+%d\r\n"
    data = push % 1 + b"+a\r\n" + push % 2 + push % 3 + b"*1\r\n+b\r\n" + push % 4
    async with connected(make_pipe) as (pipe, peer):
        told: list[list[Reply]] = []
        pipe.on_push = told.append
        for cut in range(len(data) + 1):
            many = await start_many(pipe, b"a", b"b")
            await peer.read(2)
            await peer.answer(data[:cut])
            await asyncio.sleep(0)
            await peer.answer(data[cut:])
            assert [b"a", [b"b"]] == await within(many)
            await eventually(lambda: len(told) == 4, "all pushes are told")
            assert [[b"message", b"c", b"%d" % number] for number in (1, 2, 3, 4)] == told
            told.clear()


@pytest.mark.parametrize("cut", [0, 20, 30, 35])
@in_loop
async def test_every_push_is_told_as_it_was_written(make_pipe: MakePipe, cut: int) -> None:
    data = b"".join(MESSAGES)
    async with connected(make_pipe) as (pipe, peer):
        told: list[list[Reply]] = []
        pipe.on_push = told.append
        for piece in (data[:cut], data[cut:]):
            await peer.answer(piece)
            await asyncio.sleep(0)
        await eventually(lambda: len(told) == len(MESSAGES), "all pushes are told")
        assert told == list(MESSAGES.values())


@pytest.mark.parametrize("kind", [b"subscribe", b"ssubscribe"])
@in_loop
async def test_a_subscription_is_answered_by_a_push(make_pipe: MakePipe, kind: bytes) -> None:
    async with connected(make_pipe) as (pipe, peer):
        told: list[list[Reply]] = []
        pipe.on_push = told.append
        subscribing = await start_subscribing(pipe, kind.upper(), b"c")
        (behind,) = await start(pipe, b"behind")
        await peer.read(2)
        await peer.answer(b">2\r\n+invalidate\r\n_\r\n>3\r\n+%b\r\n+c\r\n:1\r\n+behind\r\n" % kind)
        assert [[kind, b"c", 1], b"behind"] == await outcomes(subscribing, behind)
        assert [[b"invalidate", None]] == told


@in_loop
async def test_a_refused_subscription_is_answered_by_an_error(make_pipe: MakePipe) -> None:
    async with connected(make_pipe) as (pipe, peer):
        subscribing = await start_subscribing(pipe, b"SUBSCRIBE", b"c")
        await peer.answer(b"-NOPERM no\r\n")
        assert isinstance(await within(subscribing), hiredis.ReplyError)
        assert not pipe.broken


@in_loop
async def test_what_takes_a_push_may_call_and_post(make_pipe: MakePipe) -> None:
    async with connected(make_pipe) as (pipe, peer):
        calls: list[asyncio.Task[Reply]] = []

        def on_push(push: list[Reply]) -> None:
            pipe.post((b"ECHO", b"posted"))
            calls.append(asyncio.create_task(call(pipe, b"called", FOREVER)))

        pipe.on_push = on_push
        await peer.answer(b">1\r\n+x\r\n")
        await peer.echo(2)
        assert [b"called"] == await outcomes(*calls)


@in_loop
async def test_what_takes_a_push_and_raises_breaks_the_pipe_and_the_loop_is_told(make_pipe: MakePipe) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
    async with connected(make_pipe) as (pipe, peer):

        def on_push(push: list[Reply]) -> None:
            raise ValueError(push[-1])

        pipe.on_push = on_push
        replies = await start(pipe, b"a", b"b")
        await peer.read(2)
        await peer.answer(b"+a\r\n>1\r\n+x\r\n+b\r\n")
        assert [b"a", True] == await outcomes(*replies)
        assert pipe.broken
        await eventually(lambda: told != [], "the loop is told")
        assert [(ValueError, (b"x",))] == [(type(error), getattr(error, "args", None)) for error in told]
