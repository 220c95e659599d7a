"""The timer of a loop's pipe, which serves all calls.

As in test_loop.py, the peer is scripted, and each test runs on both pipes and on every kind of loop.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from redislock_fast._pipe.base import NoReply
from tests.support.async_helpers import in_loop
from tests.support.async_peer import MakePipe, connected, outcomes, start, within
from tests.support.helpers import PATIENCE_S


@in_loop
async def test_limits_that_lie_close_together_all_strike(make_loop_pipe: MakePipe) -> None:
    dice = random.Random(1)
    async with connected(make_loop_pipe) as (pipe, peer):
        replies = []
        for _ in range(300):
            replies += await start(pipe, b"a", timeout_s=dice.random() * 0.01)
        assert [NoReply] * 300 == await outcomes(*replies)
        (reply,) = await start(pipe, b"b", timeout_s=PATIENCE_S)
        await peer.echo(301)
        assert b"b" == await within(reply)


@in_loop
async def test_requests_with_a_limit_share_one_timer(make_loop_pipe: MakePipe, loop_kind: str) -> None:
    if loop_kind != "asyncio":
        pytest.skip("only asyncio's own loop shows its timers")
    loop = asyncio.get_running_loop()
    async with connected(make_loop_pipe) as (pipe, peer):
        before = len(loop._scheduled)  # type: ignore[attr-defined]
        replies = await start(pipe, *[b"a"] * 500, timeout_s=PATIENCE_S)
        assert len(loop._scheduled) <= before + 1  # type: ignore[attr-defined]
        await peer.echo(500)
        assert [b"a"] * 500 == await outcomes(*replies)
