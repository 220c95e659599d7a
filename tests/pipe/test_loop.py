"""The pipe of a loop, compiled and pure: what is special to it. What all pipes promise stands in `test_pipes.py`.

The peer is the other end of a socket pair in the test's own hands, so that replies come exactly when a test says so.
Rules: every test runs on each pipe of `PIPES` and on each kind of loop; what a call gives is awaited at once, as its
contract says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from redislock_fast._pipe.base import UNSENT_LIMIT_BYTES, ConnectionBroken, Malformed, NoReply, Reply
from redislock_fast._pipe.loop_py import LoopPipe, Pipe, new_pipe
from redislock_fast.server import Server
from tests.support.async_helpers import eventually, in_loop, run_in_loop
from tests.support.async_peer import FOREVER, MakePipe, call, connected, outcomes, pause, start, start_many, within
from tests.support.helpers import PATIENCE_S

MIB = 1 << 20


# Sending and giving up


@in_loop
async def test_a_lone_request_leaves_at_once(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        waiting = pipe.call((b"X", "text", 7), FOREVER)
        assert b"*3\r\n$1\r\nX\r\n$4\r\ntext\r\n$1\r\n7\r\n" == peer.sent_so_far()
        await peer.answer(b"+OK\r\n")
        assert b"OK" == await waiting


@in_loop
async def test_a_part_of_the_buffer_is_no_copy(make_loop_pipe: MakePipe) -> None:
    """asyncio's TLS receives into the rest of the buffer where several records come at once."""
    async with connected(make_loop_pipe) as (pipe, _):
        protocol: Any = pipe
        buffer = protocol.get_buffer(-1)
        rest = buffer[3:]
        rest[0] = 7
        assert buffer[3] == 7


@in_loop
async def test_the_slot_of_a_cancelled_caller_consumes_its_reply(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        first, second, third = await start(pipe, b"a", b"b", b"c")
        first.cancel()
        second.cancel()
        assert [asyncio.CancelledError] * 2 == await outcomes(first, second)
        await peer.echo(3)
        assert b"c" == await within(third)
        (fourth,) = await start(pipe, b"d")
        await peer.echo()
        assert b"d" == await within(fourth)


@in_loop
async def test_a_caller_cancelled_after_its_reply_came_is_cancelled(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):

        async def call_and_cancel() -> Reply:
            reply = await pipe.call((b"ECHO", b"a"), FOREVER)
            second.cancel()  # its reply came with the same bytes
            return reply

        first = asyncio.create_task(call_and_cancel())
        second, third = await start(pipe, b"b", b"c")
        await peer.read(3)
        await peer.answer(b"+a\r\n+b\r\n+c\r\n")
        assert [b"a", asyncio.CancelledError, b"c"] == await outcomes(first, second, third)
        assert not pipe.broken


@in_loop
async def test_silence_is_counted_while_requests_are_under_way(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        await eventually(lambda: pipe.silence_s > 0.01, "time passes")
        first, second = await start(pipe, b"a", b"b")
        assert pipe.silence_s < 0.01 * PATIENCE_S
        await eventually(lambda: pipe.silence_s > 0.02, "silence")
        await start(pipe, b"c")
        assert pipe.silence_s > 0.02, "a request breaks no silence, a byte does"
        await peer.answer(b"+a\r\n")
        await within(first)
        await peer.answer(b"+b\r\n+c\r\n")
        await within(second)


# Many requests in one piece


@in_loop
async def test_many_requests_get_their_replies_in_order(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        (before,) = await start(pipe, b"before")
        many = await start_many(pipe, b"1", b"2", b"3")
        pipe.post((b"ECHO", b"posted"))
        (after,) = await start(pipe, b"after")
        assert [b"before", b"1", b"2", b"3", b"posted", b"after"] == [words[-1] for words in await peer.read(6)]
        await peer.answer(b"+before\r\n+1\r\n-ERR 2\r\n")
        assert b"before" == await within(before)
        await peer.answer(b"+3\r\n+posted\r\n+after\r\n")
        one, two, three = await many
        assert (b"1", "ERR 2", b"3") == (one, str(two), three)
        assert b"after" == await within(after)


@in_loop
async def test_a_peer_that_does_not_read_delays_and_reorders_nothing(make_loop_pipe: MakePipe) -> None:
    words = [b"%07d" % number + b"x" * 1000 for number in range(10_000)]
    async with connected(make_loop_pipe) as (pipe, peer):
        many = await start_many(pipe, *words)
        behind = await start(pipe, b"a", b"b")
        pipe.post((b"ECHO", b"posted"))
        behind += await start(pipe, b"c")
        assert not any(reply.done() for reply in (many, *behind))
        await peer.echo(10_004)
        assert words == await within(many)
        assert [b"a", b"b", b"c"] == await outcomes(*behind)


# Breaking


@in_loop
async def test_end_of_stream_tells_sent_requests_from_unsent_ones(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        sent = await pause(pipe)
        unsent = await start(pipe, b"a", b"b", timeout_s=PATIENCE_S)
        peer.sock.close()
        assert [True, False, False] == await outcomes(sent, *unsent)
        assert pipe.broken


@pytest.mark.parametrize("paused", [False, True])
@in_loop
async def test_close_tells_of_each_request_whether_it_left(make_loop_pipe: MakePipe, paused: bool) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        if paused:
            await pause(pipe)
        replies = await start(pipe, b"a", b"b")
        replies += [asyncio.create_task(call(pipe, b"c", PATIENCE_S))]
        pipe.close()
        assert pipe.broken
        told = await outcomes(*replies)
        left = {words[-1] for words in await peer.read_all()}
        for word, sent in zip([b"a", b"b", b"c"], told, strict=True):
            assert sent is True or word not in left
        assert paused or {b"a", b"b"} <= left, "what is queued is sent first"


@in_loop
async def test_close_sends_what_was_posted(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        await start(pipe, b"a")
        (queued,) = await start(pipe, b"b")
        pipe.post((b"ECHO", b"posted"))
        pipe.close()
        pipe.close()
        assert [b"a", b"b", b"posted"] == [words[-1] for words in await peer.read_all()]
        assert [True] == await outcomes(queued)


@in_loop
async def test_waiting_for_the_end_is_limited(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, _):
        many = await pause(pipe)
        pipe.close()
        await within(pipe.wait_closed(0.01))  # the peer never takes what is to be sent
        assert [True] == await outcomes(many)
        await within(pipe.wait_closed(PATIENCE_S))


@in_loop
async def test_end_of_stream_while_idle_breaks_the_pipe(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        peer.sock.close()
        await eventually(lambda: pipe.broken, "the pipe breaks")


@in_loop
async def test_a_closed_pipe_keeps_nothing_alive(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, _):
        replies = await start(pipe, b"a", b"b", timeout_s=60.0)
        pipe.close()
        assert [True, True] == await outcomes(*replies)
        await pipe.wait_closed(1.0)
        ref = weakref.ref(pipe)
    del pipe, replies
    await asyncio.sleep(0)
    gc.collect()
    assert ref() is None


# A server that breaks the protocol, or is frozen


@in_loop
async def test_reply_before_its_request_has_left_breaks_the_pipe(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        leaving = await pause(pipe)  # four requests, which the transport has
        queued = await start(pipe, b"a", b"b")
        await peer.answer(b"+1\r\n+2\r\n+3\r\n+4\r\n:1\r\n")
        assert [[b"1", b"2", b"3", b"4"], False, False] == await outcomes(leaving, *queued)
        assert pipe.broken


@pytest.mark.parametrize("reply", [b"+OK\r\n", b":1\r\n", b"*1\r\n+x\r\n"])
@in_loop
async def test_reply_that_came_with_what_made_its_request_be_sent_breaks_the_pipe(
    make_loop_pipe: MakePipe, reply: bytes
) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        replies: list[Reply] = []

        def on_push(push: list[Reply]) -> None:
            pipe.post((b"ECHO", b"posted"))
            pipe.post((b"ECHO", b"posted"), replies.append)

        pipe.on_push = on_push
        await peer.answer(b">1\r\n+x\r\n" + reply + reply)
        await eventually(lambda: pipe.broken, "the pipe breaks")
        assert replies == []


@in_loop
async def test_malformed_reply_that_on_reply_refuses_breaks_the_pipe_and_nothing_else(make_loop_pipe: MakePipe) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with connected(make_loop_pipe) as (pipe, peer):

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


# Pushes


@in_loop
async def test_pushes_that_came_before_the_pipe_was_made_are_no_replies(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe, received=b">2\r\n+invalidate\r\n*1\r\n+key\r\n") as (pipe, peer):
        (reply,) = await start(pipe, b"a")
        await peer.echo()
        assert await within(reply) == b"a"


@in_loop
async def test_what_takes_a_push_may_call_and_post(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):
        calls: list[asyncio.Task[Reply]] = []

        def on_push(push: list[Reply]) -> None:
            pipe.post((b"ECHO", b"posted"))
            calls.append(asyncio.create_task(call(pipe, b"called", FOREVER)))

        pipe.on_push = on_push
        await peer.answer(b">1\r\n+x\r\n")
        await peer.echo(2)
        assert [b"called"] == await outcomes(*calls)


@in_loop
async def test_what_takes_a_push_and_raises_breaks_the_pipe_and_the_loop_is_told(make_loop_pipe: MakePipe) -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
    async with connected(make_loop_pipe) as (pipe, peer):

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


# Calls of a woken caller


@in_loop
async def test_a_woken_caller_may_call_again_and_close(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):

        async def call_thrice() -> list[Reply]:
            replies = [await pipe.call((b"ECHO", b"%d" % number), PATIENCE_S) for number in range(2)]
            pipe.post((b"ECHO", b"posted"))
            replies.append(await pipe.call((b"ECHO", b"2"), PATIENCE_S))
            pipe.close()
            return replies

        callers = [asyncio.create_task(call_thrice()) for _ in range(3)]
        await peer.read(3)
        await peer.answer(b"+0\r\n" * 3)
        await peer.read(3)
        await peer.answer(b"+1\r\n" * 3)
        assert [b"posted", b"2"] * 3 == [words[-1] for words in await peer.read(6)]
        await peer.answer(b"+posted\r\n+2\r\n" * 3)
        # The first to wake closes the pipe; the others' replies came with the same bytes.
        first, *others = await outcomes(*callers)
        assert [b"0", b"1", b"2"] == first
        assert all(told in ([b"0", b"1", b"2"], True) for told in others)


@in_loop
async def test_a_caller_told_of_the_loss_may_close_andcall(make_loop_pipe: MakePipe) -> None:
    async with connected(make_loop_pipe) as (pipe, peer):

        async def call_twice() -> Reply:
            with contextlib.suppress(ConnectionBroken):
                await pipe.call((b"ECHO", b"a"), PATIENCE_S)
            pipe.close()
            return await pipe.call((b"ECHO", b"b"), PATIENCE_S)

        callers = [asyncio.create_task(call_twice()) for _ in range(3)]
        await peer.read(3)
        peer.sock.close()
        assert [False] * 3 == await outcomes(*callers)


def test_a_caller_that_exits_the_program_takes_nobodys_reply_along(make_loop_pipe: MakePipe, loop_kind: str) -> None:
    async def scenario() -> list[object]:
        async with connected(make_loop_pipe) as (pipe, peer):

            async def leave() -> None:
                await pipe.call((b"X",), PATIENCE_S)
                raise SystemExit(3)

            leaver = asyncio.create_task(leave())
            others = await start(pipe, b"a", b"b")
            await peer.read(3)
            await peer.answer(b":1\r\n+OK\r\n$-1\r\n")
            await asyncio.wait([leaver])
            assert isinstance(leaver.exception(), SystemExit)
            others += await start(pipe, b"c")
            with contextlib.suppress(OSError):
                await peer.echo()
            return await outcomes(*others)

    loop = importlib.import_module(loop_kind).new_event_loop()
    try:
        main = loop.create_task(scenario())
        with pytest.raises(SystemExit):
            loop.run_until_complete(main)
        # A caller that still runs, as one cancelled at the end of `asyncio.run`: its own reply, or the loss.
        for own, told in zip([b"OK", None, b"c"], loop.run_until_complete(main), strict=True):
            assert told in (own, True, False)
    finally:
        loop.close()


# Many at once, on a real server


@in_loop
async def test_many_tasks_that_give_up_at_random_each_get_their_own_reply(
    make_loop_pipe: MakePipe, valkey: Server
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", valkey.port)
    pipe = make_loop_pipe(writer.transport, writer)

    async def work(worker: int) -> int:
        rng = random.Random(worker)
        right = 0
        for number in range(100):
            nonce = b"%d:%d" % (worker, number)
            caller = asyncio.create_task(call(pipe, nonce, rng.choice([0.0, 0.001, PATIENCE_S])))
            if rng.random() < 0.2:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                caller.cancel()
            (told,) = await outcomes(caller)
            assert told in (nonce, NoReply, asyncio.CancelledError)
            right += told == nonce
            if rng.random() < 0.05:
                pipe.post((b"ECHO", b"posted"))
        return right

    try:
        assert sum(await asyncio.gather(*map(work, range(32)))) > 0
        assert b"last" == await pipe.call((b"ECHO", b"last"), PATIENCE_S)
    finally:
        pipe.close()
        await pipe.wait_closed(1.0)


# In the middle of a call: finalizers and signal handlers harm no call


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


# The timer, which serves all calls


@in_loop
async def test_limits_that_lie_close_together_all_strike(make_loop_pipe: MakePipe) -> None:
    rng = random.Random(1)
    async with connected(make_loop_pipe) as (pipe, peer):
        replies = []
        for _ in range(300):
            replies += await start(pipe, b"a", timeout_s=rng.random() * 0.01)
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
