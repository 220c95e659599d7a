"""A Redlock of tasks: calls that are cancelled or dropped, several event loops, loops that end.

What threads and tasks share is in test_redlock, test_faults and test_holding; what the locks for tasks share, in
holding/test_asyncio. Rules: as in test_redlock, on both kinds of loop.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast.asyncio import Redlock
from redislock_fast.server import Server
from tests.integration.lock.test_asyncio_cancel import CANCELS, Cancelled
from tests.integration.waiting.test_giving_up import DropAt
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.holding import BRIEF_S, LONG_S, RENEWED, SLOW_S, Losses, passing
from tests.support.redlock import LIMIT_S, SHORT_S, freezing, values

Fleet = list[Server]
Make = Callable[..., Redlock]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@pytest.fixture
def make(async_connect: AsyncClients, fleet: Fleet) -> Make:
    """Makes locks on clients of their own."""

    def make(name: str = "name", **settings: Any) -> Redlock:
        clients = [async_connect(server.port) for server in fleet]
        return Redlock(clients, name, **{"timeout": 30, "limit": LIMIT_S, **settings})

    return make


async def until_free(fleet: Fleet) -> None:
    await eventually(lambda: not any(values(fleet)), "the key is gone everywhere")


async def until_held(fleet: Fleet) -> None:
    await eventually(lambda: all(values(fleet)), "the key is there everywhere")


@in_loop
async def test_acquire_of_a_dropped_task_is_undone(fleet: Fleet, make: Make) -> None:
    lock = make()
    await lock.locked()  # connects
    await DropAt(lock.acquire(), 0)
    assert not lock.valid
    await lock.locked()  # behind it
    await until_free(fleet)


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_cancelled_acquire_leaves_nothing(
    fleet: Fleet, make: Make, cancelled: Cancelled, counts: list[int]
) -> None:
    first = make()
    for count in counts:
        lock = Redlock(first.servers, "name", timeout=30, limit=LIMIT_S)
        if not await cancelled(lock.acquire, count):
            break
        assert lock.remaining() == 0.0
        await until_free(fleet)


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_cancelled_release_goes_on(fleet: Fleet, make: Make, cancelled: Cancelled, counts: list[int]) -> None:
    lock = make(thread_local=False)
    for count in counts:
        await lock.acquire()
        await until_held(fleet)
        if not await cancelled(lock.release, count):
            break
        await until_free(fleet)
        await lock.release()


@in_loop
async def test_acquire_cancelled_while_a_majority_is_frozen_leaves_nothing(fleet: Fleet, make: Make) -> None:
    lock = make()
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
async def test_two_loops_in_turn(make: Make) -> None:
    lock = make(thread_local=False)
    other = make("other")

    async def use() -> tuple[bool, bool]:
        async with other:
            return await other.owned(), await other.extend(10)

    await lock.acquire()
    assert await asyncio.to_thread(lambda: asyncio.run(use())) == (True, True)
    assert await lock.owned()
    await lock.release()


# Renewal


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["extend", "reacquire"])
@in_loop
async def test_cancelled_prolonging_keeps_the_lock(
    fleet: Fleet, make: Make, valkey_client: redis.Redis, losses: Losses, verb: str
) -> None:
    lock = make(timeout=SLOW_S, auto_renew=True, on_lost=losses, thread_local=False)
    async with lock:
        await until_held(fleet)
        with freezing(*fleet[:3]):
            task = asyncio.ensure_future(lock.extend(BRIEF_S, True) if verb == "extend" else lock.reacquire())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()
        await eventually(passing(valkey_client, 1.25 * SLOW_S), "the ttl passes")
        assert (losses.reasons, lock.valid, await lock.owned()) == ([], True, True)


@pytest.mark.slow
@in_loop
async def test_cancelled_release_ends_the_renewal(
    fleet: Fleet, make: Make, valkey_client: redis.Redis, losses: Losses
) -> None:
    lock = make(on_lost=losses, thread_local=False, **RENEWED)
    await lock.acquire()
    await until_held(fleet)
    with freezing(*fleet[:3]):
        task = asyncio.ensure_future(lock.release())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert not lock.valid
    await until_free(fleet)
    await lock.release()
    await eventually(passing(valkey_client, LONG_S), "the ttl passes")
    assert (values(fleet), losses.reasons) == ([None] * 5, [])


@pytest.mark.slow
@in_loop
async def test_renewal_survives_a_cancel_of_all_other_tasks(
    fleet: Fleet, make: Make, valkey_client: redis.Redis, losses: Losses
) -> None:
    lock = make(timeout=SLOW_S, auto_renew=True, on_lost=losses, limit=SHORT_S, thread_local=False)
    async with lock:
        await until_held(fleet)
        lease: Any = lock._held().lease
        with freezing(*fleet[:3]):
            await eventually(lambda: lease.renewing, "a renewal is under way")
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        await eventually(passing(valkey_client, 1.25 * SLOW_S), "the ttl passes")
        assert (losses.reasons, lock.valid, await lock.owned()) == ([], True, True)


@pytest.mark.slow
def test_program_that_ends_while_it_holds(fleet: Fleet, loop_kind: str) -> None:
    async def scenario() -> None:
        clients = [redis.asyncio.Redis(port=server.port) for server in fleet]
        lock = Redlock(clients, "name", timeout=BRIEF_S, auto_renew=True)
        assert await lock.acquire()
        await asyncio.sleep(BRIEF_S / 2)
        quorums.add(lock._quorum)

    def end() -> None:
        run_in_loop(loop_kind, scenario())
        gc.collect()

    quorums: weakref.WeakSet[Any] = weakref.WeakSet()
    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release"):
        end()
    assert list(quorums) == []
