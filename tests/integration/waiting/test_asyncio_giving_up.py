"""Tasks that stop waiting for a contended lock: cancelled at every point, dropped, ended with their loop.

Rules: on ours alone, in each kind of loop. A cancel strikes at a counted point of the work, or beside a grant that a
lock in the same thread makes, so that the message has come and no task has read it.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections.abc import Awaitable, Generator
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
from redislock_fast.asyncio import Lock, Locker
from redislock_fast.server import Server
from tests.integration.lock.test_asyncio_cancel import cancelled_at, warm_up
from tests.integration.lock.test_asyncio_loops import new_loop
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S, in_thread, wait_until
from tests.support.holding import passing
from tests.support.transports import clean_up, noted_messages
from tests.support.waiting import FAR_S, connections, queued

TOLD: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S, "thread_local": False}
"""Settings of a waiter that must be notified."""

MOMENTS = 12
"""How many iterations of the loop a grant takes at most, from the socket to its task."""


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


async def waits(lock: Lock, client: redis.Redis, **arguments: Any) -> asyncio.Task[bool]:
    """A task that acquires, once it stands in the queue."""
    before = queued(client, "name")
    task = asyncio.create_task(lock.acquire(**arguments))
    await eventually(lambda: queued(client, "name") == before + 1, "it stands in the queue")
    return task


# Cancels


@in_loop
async def test_what_a_cancelled_waiter_raises_keeps_nothing_alive(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    gc.disable()
    try:
        task = await waits(Lock(locks, "name", **TOLD), client)
        task.cancel()
        error = None
        try:
            await task
        except asyncio.CancelledError as cancelled:
            error = weakref.ref(cancelled)
        del task
        assert error is not None
        await eventually(lambda: error() is None, "the error is gone, without the collector")
    finally:
        gc.enable()


@pytest.mark.parametrize("connected", [True, False])
@in_loop
async def test_cancelled_at_any_point_of_waiting(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients, connected: bool
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    for count in range(15):
        waiter = Lock(locks if connected else async_connect(server.port), "name", timeout=FAR_S, sleep=0.01)
        assert await cancelled_at(waiter.acquire, count)
        assert waiter.local.token is None
        await eventually(lambda: queued(client, "name") == 0, "it leaves the queue")
        assert holder.owned()
    holder.release()
    assert client.keys() == []


@pytest.mark.parametrize("others", [0, 1])
@in_loop
async def test_cancelled_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients, others: int
) -> None:
    locks, next_locks = async_connect(server.port), async_connect(server.port)
    outcomes = set()
    for moment in range(MOMENTS):
        waiter, next_waiter = Lock(locks, "name", **TOLD), Lock(next_locks, "name", **TOLD)
        task = await waits(waiter, client)
        next_tasks = [await waits(next_waiter, client) for _ in range(others)]
        holder.release()
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done(), "hangs"
        assert task.cancelled() == (waiter.local.token is None)
        outcomes.add(task.cancelled())
        if not task.cancelled():
            assert await waiter.owned()
            await waiter.release()
        for next_task in next_tasks:
            assert await asyncio.wait_for(next_task, PATIENCE_S) is True
            await next_waiter.release()
        await eventually(lambda: not client.keys(), "the lock is free")
        assert holder.acquire()
    assert outcomes == {True, False}


@in_loop
async def test_wait_for_that_ends_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    for number in range(20):
        waiter = Lock(locks, "name", **TOLD)
        loop = asyncio.get_running_loop()
        # Both are due at once; whichever timer comes first, the lock is held or free afterwards.
        waiting = asyncio.create_task(asyncio.wait_for(waiter.acquire(), 0.02))
        loop.call_later(0.0195 + number * 0.00005, holder.release)
        try:
            acquired = await waiting
        except asyncio.TimeoutError:
            acquired = False
        assert acquired == (waiter.local.token is not None)
        if acquired:
            await waiter.release()
        await eventually(lambda: not client.keys(), "the lock is free")
        assert holder.acquire()


@in_loop
async def test_cancel_of_some_waiters_disturbs_no_other(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    waiters = [Lock(locks, "name", **TOLD) for _ in range(10)]
    tasks = [await waits(waiter, client) for waiter in waiters]
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks[::2], timeout=PATIENCE_S)
    await eventually(lambda: queued(client, "name") == 5, "they leave the queue")
    holder.release()
    for waiter, task in zip(waiters[1::2], tasks[1::2], strict=True):
        assert await asyncio.wait_for(task, PATIENCE_S) is True
        await waiter.release()
    assert client.keys() == []


# Dropped, and ended with the loop


class DropAt:
    """Awaits the work, and closes it unfinished when it is suspended for the n-th time, from 0."""

    def __init__(self, work: Awaitable[Any], count: int) -> None:
        self._work = work
        self._count = count

    def __await__(self) -> Generator[Any, Any, None]:
        inner = self._work.__await__()
        for _ in range(self._count):
            yield inner.send(None)
        inner.send(None)
        in_thread(inner.close)  # as garbage is collected: by whichever thread


@in_loop
async def test_dropped_at_any_point_of_waiting(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    for count in range(15):
        waiter = Lock(locks, "name", timeout=FAR_S, sleep=0.01)
        await asyncio.wait_for(DropAt(waiter.acquire(), count), PATIENCE_S)
        assert waiter.local.token is None
        await waiter.locked()
        await eventually(lambda: queued(client, "name") == 0, "it leaves the queue")
        assert holder.owned()
    holder.release()
    assert client.keys() == []


@in_loop
async def test_another_looks_for_one_that_is_dropped(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    waiting = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.05), client)
    poller = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.05), client)
    await eventually(passing(client, 0.2), "the other waiter has left the health check to this one")
    work: Any = poller.get_coro()
    in_thread(work.close)  # as it is collected
    await eventually(lambda: queued(client, "name") == 1, "it leaves the queue")
    client.delete("name")  # of which nobody is told
    assert await asyncio.wait_for(waiting, PATIENCE_S) is True
    poller.cancel()
    await asyncio.wait([poller])
    assert isinstance(poller.exception(), RuntimeError)  # there is nothing left to cancel


@pytest.mark.slow
@in_loop
async def test_waiter_that_is_not_the_poller_sleeps_until_it_gives_up(
    server: Server,
    client: redis.Redis,
    holder: redislock_fast.Lock,
    async_connect: AsyncClients,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks = async_connect(server.port)
    told = noted_messages(monkeypatch)
    gives_up = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.5, blocking_timeout=1), client)
    (messages,) = told.values()
    poller = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.5), client)
    messages.clear()
    assert await gives_up is False
    assert messages == [None]
    holder.release()
    assert await poller is True


class SlowLock(Lock):
    """Does more once it has the lock."""

    async def do_acquire(self, token: Any) -> bool:
        acquired = await super().do_acquire(token)
        await asyncio.sleep(0.001)
        return acquired


@in_loop
async def test_dropped_while_a_hook_that_has_the_lock_does_more(
    server: Server, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    for count in range(2):
        lock = SlowLock(locks, "name", timeout=FAR_S)
        await asyncio.wait_for(DropAt(lock.acquire(), count), PATIENCE_S)
        assert lock.local.token is None
        await eventually(lambda: not client.keys(), "the lock is free")


@in_loop
async def test_dropped_at_any_point_of_a_batch_that_waits(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    before = client.keys()
    for count in range(10):
        batch = Locker(locks).acquire_many(["a", "name"], FAR_S, None, sleep=0.01, all_or_nothing=True)
        await asyncio.wait_for(DropAt(batch, count), PATIENCE_S)
        await eventually(lambda: client.keys() == before, "the locks are free")
    holder.release()


@in_loop
async def test_dropped_while_its_own_token_is_undone(
    server: Server, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    asyncio.get_running_loop().set_debug(True)  # then it refuses what no other thread may do
    client.set("name", "mine")
    clean_up(locks, [(b"name", b"mine")])
    await asyncio.wait_for(DropAt(Lock(locks, "name", timeout=FAR_S).acquire(token="mine"), 0), PATIENCE_S)
    await eventually(lambda: not client.keys(), "it is undone")


async def _wait_and_end(
    server: Server, admin: redis.Redis, holder: redislock_fast.Lock | None, cancels: bool
) -> asyncio.Task[bool]:
    """The task that waits when the program ends."""
    client = redis.asyncio.Redis(port=server.port, client_name="ending")
    task = await waits(Lock(client, "name", **TOLD), admin)
    if holder is not None:
        holder.release()
    if cancels:
        task.cancel()  # else the end of the loop does it
    return task


@pytest.mark.parametrize("cancels", [False, True])
def test_program_that_ends_while_a_task_waits(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, loop_kind: str, cancels: bool
) -> None:
    run_in_loop(loop_kind, _wait_and_end(server, client, None, cancels))
    wait_until(lambda: not connections(client, "ending"), "the connection is closed")
    holder.release()
    assert client.keys() == []


@pytest.mark.parametrize("cancels", [False, True])
def test_program_that_ends_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, loop_kind: str, cancels: bool
) -> None:
    task = run_in_loop(loop_kind, _wait_and_end(server, client, holder, cancels))
    wait_until(lambda: not connections(client, "ending"), "the connection is closed")
    # Where the task was faster than the end of the loop, it holds the lock, and has not released it.
    assert bool(client.exists("name")) == (not task.cancelled())
    assert task.cancelled() or not cancels


def test_loop_closed_while_a_task_waits(
    valkey: Server, valkey_client: redis.Redis, loop_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        client = redis.asyncio.Redis(port=valkey.port, client_name="ending")
        tasks.append(await waits(Lock(client, "name", **TOLD), valkey_client))

    async def is_gone() -> None:
        await eventually(lambda: not connections(valkey_client, "ending"), "the connection is closed", patience_s=1)

    holder = redislock_fast.Lock(valkey_client, "name", **TOLD)
    assert holder.acquire()
    tasks: list[asyncio.Task[bool]] = []
    loop = new_loop(loop_kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loop complains of what it was closed with
        loop.run_until_complete(program())
        loop.close()
        del loop
        tasks.clear()
        caplog.clear()
        gc.collect()
    run_in_loop(loop_kind, is_gone())
    holder.release()
    assert valkey_client.keys() == []
