"""What runs in the middle of a call of a loop's pipe, as a finalizer or a signal handler does, harms no call.

As in test_loop.py, the peer is scripted, and each test runs on both pipes and on every kind of loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from redislock_fast._pipe.base import ConnectionBroken
from tests.support.async_helpers import in_loop
from tests.support.async_peer import MakePipe, connected, outcomes, start
from tests.support.helpers import PATIENCE_S


class Interrupted:
    """A transport in which something else runs once, before or after it takes the bytes of a write."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.before: Callable[[], object] | None = None
        self.after: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        before, self.before = self.before, None
        after, self.after = self.after, None
        if before is not None:
            before()
        self._transport.write(data)
        if after is not None:
            after()


@pytest.mark.parametrize("moment", ["before", "after"])
@in_loop
async def test_what_posts_while_the_transport_is_called_follows(make_loop_pipe: MakePipe, moment: str) -> None:
    told: list[object] = []
    async with connected(lambda transport, *rest: make_loop_pipe(Interrupted(transport), *rest)) as (pipe, peer):

        def post() -> None:
            pipe.post((b"ECHO", b"p"), told.append)
            pipe.post((b"ECHO", b"q"))

        setattr(pipe.transport, moment, post)  # type: ignore[attr-defined]
        tasks = await start(pipe, b"a")
        setattr(pipe.transport, moment, post)  # type: ignore[attr-defined]
        tasks += await start(pipe, b"b", b"c")
        await peer.echo(7)
        assert [b"a", b"b", b"c", [b"p", b"p"]] == [*await outcomes(*tasks), told]


@pytest.mark.parametrize("moment", ["before", "after"])
@in_loop
async def test_what_closes_while_the_transport_is_called_ends_a_call(make_loop_pipe: MakePipe, moment: str) -> None:
    async with connected(lambda transport, *rest: make_loop_pipe(Interrupted(transport), *rest)) as (pipe, _):
        setattr(pipe.transport, moment, pipe.close)  # type: ignore[attr-defined]
        tasks = await start(pipe, b"a")
        assert [True] == await outcomes(*tasks)


@in_loop
async def test_what_posts_as_a_timer_is_set_harms_no_call(
    make_loop_pipe: MakePipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def post_and_set(set_timer: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.undo()
        pipe.post((b"ECHO", b"p" * 900), told.append)  # the buffer has 1,024 bytes
        return set_timer(*args)

    loop = asyncio.get_running_loop()
    async with connected(make_loop_pipe) as (pipe, peer):
        tasks = await start(pipe, b"a")
        for name in ("call_at", "call_later"):
            monkeypatch.setattr(loop, name, partial(post_and_set, getattr(loop, name)))
        tasks += await start(pipe, b"c" * 900, timeout_s=PATIENCE_S)
        await peer.echo(3)
        assert [b"a", b"c" * 900, [b"p" * 900]] == [*await outcomes(*tasks), told]


@in_loop
async def test_what_closes_as_a_timer_is_set_ends_a_call(
    make_loop_pipe: MakePipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close_and_set(set_timer: Callable[..., Any], *args: Any) -> Any:
        monkeypatch.undo()
        pipe.close()
        return set_timer(*args)

    loop = asyncio.get_running_loop()
    async with connected(make_loop_pipe) as (pipe, _):
        for name in ("call_at", "call_later"):
            monkeypatch.setattr(loop, name, partial(close_and_set, getattr(loop, name)))
        with pytest.raises(ConnectionBroken, match="closed"):
            await pipe.call((b"ECHO", b"a"), PATIENCE_S)
