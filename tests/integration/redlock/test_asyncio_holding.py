"""Holding a Redlock in tasks: the task that is cancelled for a loss, callbacks that are awaited, loops that end.

Rules: as in test_redlock_holding, which has what threads and tasks share; each test runs on both kinds of event loop.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast import LockLostError, LossReason
from redislock_fast.asyncio import Redlock
from redislock_fast.server import Server
from tests.integration.holding.test_asyncio import cancelled_by, forever
from tests.support.async_helpers import AsyncClients, eventually, in_loop, in_task, run_in_loop
from tests.support.helpers import PATIENCE_S, start
from tests.support.holding import BRIEF_S, LONG_S, RENEWED, SLOW_S, Losses, hold_the_gil, passing
from tests.support.redlock import LIMIT_S, SHORT_S, delete, freezing, values
from tests.support.waiting import FAR_S

Fleet = list[Server]
Make = Callable[..., Redlock]
pytestmark = pytest.mark.parametrize("fleet", ["mixed"], indirect=True)


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@pytest.fixture
def make(async_connect: AsyncClients, fleet: Fleet) -> Make:
    """Makes locks on clients of their own."""

    def make(name: str = "name", **settings: Any) -> Redlock:
        return Redlock([async_connect(server.port) for server in fleet], name, **{"limit": LIMIT_S, **settings})

    return make


async def hold(lock: Redlock, held: asyncio.Event | None = None) -> None:
    """Hold it until something happens; the event is set meanwhile."""
    async with lock:
        if held is not None:
            held.set()
        await forever()


async def until_held(fleet: Fleet) -> None:
    await eventually(lambda: all(values(fleet)), "it is held everywhere")


async def until_free(fleet: Fleet) -> None:
    await eventually(lambda: not any(values(fleet)), "it is held nowhere")


# The holding task


@in_loop
async def test_holding_task_is_cancelled_for_a_loss(fleet: Fleet, make: Make) -> None:
    causes: list[Any] = []
    held = asyncio.Event()

    async def work() -> None:
        try:
            await hold(make(cancel_on_lost=True, **RENEWED), held)
        except asyncio.CancelledError as error:
            causes.append(error.__cause__)
            raise

    task = asyncio.create_task(work())
    await asyncio.wait_for(held.wait(), PATIENCE_S)  # what the servers have may be of an attempt that took too long
    delete(fleet[:3])
    await cancelled_by(task)
    assert [(type(cause), cause.reason, cause.lock_name) for cause in causes] == [
        (LockLostError, LossReason.DELETED, "name")
    ]
    await until_free(fleet)


@in_loop
async def test_holding_task_is_cancelled_when_the_lease_ends(make: Make) -> None:
    await cancelled_by(asyncio.create_task(hold(make(timeout=BRIEF_S, cancel_on_lost=True))))


@in_loop
async def test_task_that_awaits_by_a_helper_is_the_one_that_holds(make: Make) -> None:
    lock = make(timeout=BRIEF_S, cancel_on_lost=True)

    async def work() -> None:
        await asyncio.wait_for(lock.acquire(), PATIENCE_S)
        await forever()

    await cancelled_by(asyncio.create_task(work()))


@in_loop
async def test_task_that_released_in_time_is_not_cancelled(make: Make, valkey_client: redis.Redis) -> None:
    async with make(timeout=BRIEF_S, cancel_on_lost=True):
        pass
    await eventually(passing(valkey_client, 2 * BRIEF_S), "the ttl passes")


@pytest.mark.parametrize("verb", ["release", "extend"])
@in_loop
async def test_task_that_finds_the_loss_itself_is_not_cancelled_as_well(fleet: Fleet, make: Make, verb: str) -> None:
    lock = make(timeout=FAR_S, auto_renew=True, cancel_on_lost=True)

    async def work() -> str:
        await lock.acquire()
        await until_held(fleet)
        delete(fleet)
        with pytest.raises(LockLostError):
            await (lock.release() if verb == "release" else lock.extend(1))
        await asyncio.sleep(0)
        return "not cancelled"

    assert await in_task(work) == "not cancelled"


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


# on_lost


@in_loop
async def test_callback_may_be_a_coroutine(make: Make) -> None:
    told: asyncio.Queue[tuple[Any, LossReason]] = asyncio.Queue()

    async def on_lost(lock: Any, reason: LossReason) -> None:
        await asyncio.sleep(0)
        await told.put((lock, reason))

    lock = make(timeout=BRIEF_S, on_lost=on_lost)
    await lock.acquire()
    assert await asyncio.wait_for(told.get(), PATIENCE_S) == (lock, LossReason.EXPIRED)


# Loops


@in_loop
async def test_blocked_loop_loses_the_lock_and_is_told(fleet: Fleet, make: Make, losses: Losses) -> None:
    lock = make(timeout=BRIEF_S, auto_renew=True, on_lost=losses)
    await lock.acquire()
    hold_the_gil(2 * BRIEF_S)
    assert not lock.valid
    await eventually(lambda: losses.reasons, "the loss is told")
    assert losses.reasons == [LossReason.EXPIRED]
    await until_free(fleet)


@pytest.mark.slow
@in_loop
async def test_renewal_survives_a_cancel_of_all_other_tasks(
    fleet: Fleet, make: Make, valkey_client: redis.Redis, losses: Losses
) -> None:
    lock = make(timeout=SLOW_S, auto_renew=True, on_lost=losses, limit=SHORT_S, thread_local=False)
    async with lock:
        await until_held(fleet)
        lease: Any = lock.local.lease
        with freezing(*fleet[:3]):
            await eventually(lambda: lease.renewing, "a renewal is under way")
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        await eventually(passing(valkey_client, 1.25 * SLOW_S), "the ttl passes")
        assert (losses.reasons, lock.valid, await lock.owned()) == ([], True, True)


@pytest.mark.slow
def test_program_that_ends_while_it_holds(fleet: Fleet, loop_kind: str) -> None:
    async def scenario() -> None:
        lock = Redlock(
            [redis.asyncio.Redis(port=server.port) for server in fleet], "name", timeout=0.3, auto_renew=True
        )
        assert await lock.acquire()
        await asyncio.sleep(0.15)

        quorums.add(lock._quorum)

    def end() -> None:
        run_in_loop(loop_kind, scenario())
        gc.collect()

    quorums: weakref.WeakSet[Any] = weakref.WeakSet()
    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release"):
        end()
    assert list(quorums) == []


@pytest.mark.slow
def test_two_loops_hold_side_by_side(fleet: Fleet, valkey_client: redis.Redis, loop_kind: str) -> None:
    async def scenario(name: str) -> tuple[list[LossReason], bool]:
        losses = Losses()
        clients = [redis.asyncio.Redis(port=server.port) for server in fleet]
        async with Redlock(clients, name, on_lost=losses, **RENEWED) as lock:
            await eventually(passing(valkey_client, LONG_S), "the ttl passes")
            return losses.reasons, lock.valid

    running = [start(partial(run_in_loop, loop_kind, scenario(name))) for name in ("name", "other")]
    assert [future.result(PATIENCE_S) for future in running] == [([], True), ([], True)]
    assert (values(fleet), values(fleet, "other")) == ([None] * 5, [None] * 5)
