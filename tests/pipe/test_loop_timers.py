"""The timer of a loop's pipe, which serves all calls, and what runs as it is set.

As in test_loop.py, the peer is scripted, and each test runs on both pipes and on every kind of loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from redislock_fast._pipe.base import ConnectionBroken, NoReply
from tests.pipe.test_loop import PIPES
from tests.support.async_helpers import in_loop
from tests.support.async_peer import MakePipe, connected, outcomes, start, within
from tests.support.helpers import PATIENCE_S


@pytest.fixture(params=PIPES)
def make_pipe(request: pytest.FixtureRequest) -> MakePipe:
    maker: MakePipe = request.param
    return maker


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@in_loop
async def test_limits_that_lie_close_together_all_strike(make_pipe: MakePipe) -> None:
    dice = random.Random(1)
    async with connected(make_pipe) as (pipe, peer):
        replies = []
        for _ in range(300):
            replies += await start(pipe, b"a", timeout_s=dice.random() * 0.01)
        assert [NoReply] * 300 == await outcomes(*replies)
        (reply,) = await start(pipe, b"b", timeout_s=PATIENCE_S)
        await peer.echo(301)
        assert b"b" == await within(reply)


@in_loop
async def test_requests_with_a_limit_share_one_timer(make_pipe: MakePipe, loop_kind: str) -> None:
    if loop_kind != "asyncio":
        pytest.skip("only asyncio's own loop shows its timers")
    loop = asyncio.get_running_loop()
    async with connected(make_pipe) as (pipe, peer):
        before = len(loop._scheduled)  # type: ignore[attr-defined]
        replies = await start(pipe, *[b"a"] * 500, timeout_s=PATIENCE_S)
        assert len(loop._scheduled) <= before + 1  # type: ignore[attr-defined]
        await peer.echo(500)
        assert [b"a"] * 500 == await outcomes(*replies)


@in_loop
async def test_what_posts_as_a_timer_is_set_harms_no_call(make_pipe: MakePipe, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def post_and_set(set_timer: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.undo()
        pipe.post((b"ECHO", b"p" * 900), told.append)  # the buffer has 1,024 bytes
        return set_timer(*args)

    loop = asyncio.get_running_loop()
    async with connected(make_pipe) as (pipe, peer):
        tasks = await start(pipe, b"a")
        for name in ("call_at", "call_later"):
            monkeypatch.setattr(loop, name, partial(post_and_set, getattr(loop, name)))
        tasks += await start(pipe, b"c" * 900, timeout_s=PATIENCE_S)
        await peer.echo(3)
        assert [b"a", b"c" * 900, [b"p" * 900]] == [*await outcomes(*tasks), told]


@in_loop
async def test_what_closes_as_a_timer_is_set_ends_a_call(make_pipe: MakePipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def close_and_set(set_timer: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.undo()
        pipe.close()
        return set_timer(*args)

    loop = asyncio.get_running_loop()
    async with connected(make_pipe) as (pipe, _):
        for name in ("call_at", "call_later"):
            monkeypatch.setattr(loop, name, partial(close_and_set, getattr(loop, name)))
        with pytest.raises(ConnectionBroken, match="closed"):
            await pipe.call((b"ECHO", b"a"), PATIENCE_S)
