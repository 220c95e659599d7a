"""What a Redlock does for tasks alone: acquires and releases that are cancelled or dropped, several event loops.

What threads and tasks share is in test_redlock and test_faults. Rules: as there, on both kinds of loop.
"""

from __future__ import annotations

import asyncio

import pytest

from redislock_fast.asyncio import Redlock
from redislock_fast.server import Server
from tests.integration.lock.test_asyncio_cancel import CANCELS, Cancelled
from tests.integration.waiting.test_asyncio_giving_up import DropAt
from tests.support.async_helpers import AsyncClients, eventually, in_loop
from tests.support.redlock import LIMIT_S, freezing, values

Fleet = list[Server]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


def make(connect: AsyncClients, fleet: Fleet, name: str = "name", thread_local: bool = True) -> Redlock:
    """A lock on clients of its own."""
    clients = [connect(server.port) for server in fleet]
    return Redlock(clients, name, timeout=30, limit=LIMIT_S, thread_local=thread_local)


async def until_free(fleet: Fleet) -> None:
    await eventually(lambda: not any(values(fleet)), "the key is gone everywhere")


async def until_held(fleet: Fleet) -> None:
    await eventually(lambda: all(values(fleet)), "the key is there everywhere")


@in_loop
async def test_acquire_of_a_dropped_task_is_undone(fleet: Fleet, async_connect: AsyncClients) -> None:
    lock = make(async_connect, fleet)
    await lock.locked()  # connects
    await DropAt(lock.acquire(), 0)
    assert not lock.valid
    await lock.locked()  # behind it
    await until_free(fleet)


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_cancelled_acquire_leaves_nothing(
    fleet: Fleet, async_connect: AsyncClients, cancelled: Cancelled, counts: list[int]
) -> None:
    first = make(async_connect, fleet)
    for count in counts:
        lock = Redlock(first.servers, "name", timeout=30, limit=LIMIT_S)
        if not await cancelled(lock.acquire, count):
            break
        assert lock.remaining() == 0.0
        await until_free(fleet)


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_cancelled_release_goes_on(
    fleet: Fleet, async_connect: AsyncClients, cancelled: Cancelled, counts: list[int]
) -> None:
    lock = make(async_connect, fleet, thread_local=False)
    for count in counts:
        await lock.acquire()
        await until_held(fleet)
        if not await cancelled(lock.release, count):
            break
        await until_free(fleet)
        await lock.release()


@in_loop
async def test_acquire_cancelled_while_a_majority_is_frozen_leaves_nothing(
    fleet: Fleet, async_connect: AsyncClients
) -> None:
    lock = make(async_connect, fleet)
    async with lock:
        await until_held(fleet)
    await until_free(fleet)
    with freezing(*fleet[:3]):
        waiting = asyncio.ensure_future(lock.acquire())
        await eventually(lambda: all(values(fleet[3:])), "the requests have left")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await until_free(fleet)


@in_loop
async def test_two_loops_in_turn(fleet: Fleet, async_connect: AsyncClients) -> None:
    lock = make(async_connect, fleet, thread_local=False)
    other = make(async_connect, fleet, "other")

    async def use() -> tuple[bool, bool]:
        async with other:
            return await other.owned(), await other.extend(10)

    await lock.acquire()
    assert await asyncio.to_thread(lambda: asyncio.run(use())) == (True, True)
    assert await lock.owned()
    await lock.release()
