"""Waiting for a contended asyncio lock: what is special to tasks and event loops.

What holds for threads and tasks alike is in `test_waiting*.py`. Rules: as there; everything runs in each kind of loop.
"""

from __future__ import annotations

import asyncio
import copy
import random
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import AbstractBackoff, DecorrelatedJitterBackoff, ExponentialBackoff, FullJitterBackoff
from redis.exceptions import LockError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast._util import times
from redislock_fast._util.times import clock
from redislock_fast.asyncio import Lock, Locker
from redislock_fast.server import Server
from tests.support.async_helpers import AsyncClients, FakeAsyncio, Owner, eventually, in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S, FakeTime, start
from tests.support.waiting import LATE, connections, queued, until_queued


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


async def until_queue_is(client: redis.Redis, length: int) -> None:
    """Return once so many wait for the lock."""
    await eventually(lambda: queued(client, "name") == length, f"{length} wait")


# Tasks


@in_loop
async def test_tasks_get_the_lock_in_order(client: redis.Redis, async_client: redis.asyncio.Redis) -> None:
    order = []

    async def take_turn(number: int) -> None:
        async with Lock(async_client, "name", **LATE):
            order.append(number)
            await asyncio.sleep(0)

    tasks = []
    async with Lock(async_client, "name", **LATE):
        for number in range(20):
            tasks.append(asyncio.create_task(take_turn(number)))
            await until_queue_is(client, number + 1)
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert order == list(range(20))
    assert client.keys() == []


@in_loop
async def test_tasks_that_come_at_once_get_the_lock_in_order(
    client: redis.Redis, async_client: redis.asyncio.Redis
) -> None:
    order = []

    async def take_turn(number: int) -> None:
        async with Lock(async_client, "name", **LATE):
            order.append(number)
            await asyncio.sleep(0)

    for _ in range(3):
        order.clear()
        async with Lock(async_client, "name", **LATE):
            tasks = [asyncio.create_task(take_turn(number)) for number in range(200)]
            await until_queue_is(client, 200)
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        assert order == list(range(200))


@in_loop
async def test_one_lock_object_of_many_tasks(client: redis.Redis, async_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_client, "name", **LATE)
    inside = 0

    async def work() -> None:
        nonlocal inside
        for _ in range(3):
            async with lock:
                before = inside
                inside = before + 1
                assert await lock.owned()
                assert inside == before + 1

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(50))), PATIENCE_S)
    assert inside == 150
    assert client.keys() == []


@in_loop
async def test_who_called_acquire_owns_what_was_handed_over(
    client: redis.Redis, async_client: redis.asyncio.Redis
) -> None:
    holder, waiter = Lock(async_client, "name", **LATE), Lock(async_client, "name", **LATE)
    async with Owner(holder) as holding:
        acquiring = asyncio.create_task(asyncio.wait_for(waiter.acquire(), PATIENCE_S))
        await until_queue_is(client, 1)
        await holding.ask(holder.release)
        assert await acquiring is True
    assert await waiter.owned()
    assert client.get("name") in (waiter.local.token, waiter.local.token + b"+")
    with pytest.raises(LockError):
        await asyncio.create_task(_call(holder.release))
    await waiter.release()
    assert client.keys() == []


async def _call(method: Any) -> Any:
    return await method()


@in_loop
async def test_tasks_share_one_connection_and_leave_the_loop_alone(
    client: redis.Redis, server: Server, async_connect: AsyncClients
) -> None:
    waiting_client = async_connect(server.port, client_name="waiting")
    holder = Lock(async_connect(server.port), "name", **LATE)
    locks = [Lock(waiting_client, "name", **LATE) for _ in range(500)]

    async def take_turn(lock: Lock) -> None:
        async with lock:
            pass

    async with holder:
        tasks = [asyncio.create_task(take_turn(lock)) for lock in locks]
        await until_queue_is(client, 500)
        assert connections(client, "waiting") == 1
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert connections(client, "waiting") == 1


# Loops


def test_loops_in_many_threads_stand_in_one_queue(client: redis.Redis, server: Server, loop_kind: str) -> None:
    holder = redislock_fast.Lock(client, "name", **LATE)
    holder.acquire()
    order = []

    async def take_turn(number: int) -> None:
        async with redis.asyncio.Redis(port=server.port) as own, Lock(own, "name", **LATE):
            order.append(number)

    def in_a_loop(number: int) -> None:
        run_in_loop(loop_kind, take_turn(number))

    workers: list[Future[Any]] = []
    for number in range(6):
        workers.append(start(partial(in_a_loop, number)))
        until_queued(client, "name", number + 1)
    holder.release()
    for worker in workers:
        worker.result(PATIENCE_S)
    assert order == list(range(6))


def test_one_client_waits_in_one_loop_after_another(client: redis.Redis, server: Server, loop_kind: str) -> None:
    shared = redis.asyncio.Redis(port=server.port)
    lock = Lock(shared, "name", thread_local=False, **LATE)
    holder = redislock_fast.Lock(client, "name", thread_local=False, **LATE)

    async def wait_once() -> None:
        assert await lock.acquire()
        await lock.release()
        await shared.aclose()

    for _ in range(3):
        assert holder.acquire()
        worker = start(lambda: run_in_loop(loop_kind, wait_once()))
        until_queued(client, "name", 1)
        holder.release()
        worker.result(PATIENCE_S)
    assert client.keys() == []


# Batches


@in_loop
async def test_a_batch_hands_over_what_others_wait_for(client: redis.Redis, async_client: redis.asyncio.Redis) -> None:
    names = [f"name-{number}" for number in range(20)]
    batch = await Locker(async_client).acquire_many(names, timeout=10)

    async def take_turn(name: str) -> Any:
        async with Lock(async_client, name, **LATE):
            return client.get(name)

    tasks = [asyncio.create_task(take_turn(name)) for name in names[::2]]
    for name in names[::2]:
        await eventually(partial(queued, client, name), "somebody waits")
    assert await batch.extend(10) == dict.fromkeys(names, True)
    assert await batch.reacquire() == dict.fromkeys(names, True)
    assert all(0 < client.pttl(name) <= 10_000 for name in names)
    assert (await Locker(async_client).acquire_many(names, timeout=10)).acquired == []
    assert await batch.release() == dict.fromkeys(names, True)
    values = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
    assert len(set(values)) == 10
    assert client.keys() == []


# How a lock is told to wait


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """What our locks sleep by."""
    fake = FakeTime(at_most=5)
    FakeAsyncio(fake).replace_ours(monkeypatch)
    return fake


@pytest.mark.parametrize("sleep", [0.1, 2.5, 0])
@in_loop
async def test_polling_sleeps_as_redis_py_does(
    client: redis.Redis, async_client: redis.asyncio.Redis, slept: FakeTime, sleep: float
) -> None:
    client.set("name", "taken")
    with pytest.raises(AssertionError, match="for ever"):
        await Lock(async_client, "name", sleep=sleep, wait="poll").acquire()
    assert slept.sleeps_s == [sleep] * 5
    assert client.keys() == [b"name"]


@pytest.mark.parametrize(
    "backoff",
    [ExponentialBackoff(cap=1, base=0.1), FullJitterBackoff(cap=1, base=0.1), DecorrelatedJitterBackoff(1, 0.1)],
    ids=lambda backoff: type(backoff).__name__,
)
@in_loop
async def test_pauses_are_the_backoffs_own(
    client: redis.Redis, async_client: redis.asyncio.Redis, slept: FakeTime, backoff: AbstractBackoff
) -> None:
    client.set("name", "taken")
    own = copy.deepcopy(backoff)
    own.reset()  # type: ignore[no-untyped-call]
    random.seed(7)
    pauses_s = [own.compute(failures) for failures in range(1, 6)]
    before = copy.deepcopy(vars(backoff))
    for _ in range(2):  # a second acquire begins again
        slept.sleeps_s.clear()
        random.seed(7)
        with pytest.raises(AssertionError, match="for ever"):
            await Lock(async_client, "name", wait=backoff).acquire()
        assert slept.sleeps_s == pauses_s
    assert vars(backoff) == before


@pytest.mark.parametrize("wait", ["nonsense", None, 0.1], ids=str)
@in_loop
async def test_an_unknown_way_to_wait_is_refused(async_client: redis.asyncio.Redis, wait: Any) -> None:
    with pytest.raises(ValueError, match="wait"):
        Lock(async_client, "name", wait=wait)
    with pytest.raises(ValueError, match="wait"):
        Locker(async_client).lock("name", wait=wait)
    lock = Lock(async_client, "name")
    with pytest.raises(ValueError, match="wait"):
        lock.wait = wait
    assert lock.wait == "push"


@pytest.mark.usefixtures("unhurried")
@in_loop
async def test_the_way_to_wait_may_be_changed(
    client: redis.Redis, async_client: redis.asyncio.Redis, slept: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "clock", clock)  # what waits by push reads the real one
    client.set("name", "taken")
    lock = Lock(async_client, "name", timeout=1, sleep=0.01)
    assert await lock.acquire(blocking_timeout=0.005) is False
    assert slept.sleeps_s == []
    FakeAsyncio(slept).replace_ours(monkeypatch)
    lock.wait = "poll"
    assert await lock.acquire(blocking_timeout=0.025) is False
    assert slept.sleeps_s == [0.01, 0.01]


@pytest.mark.parametrize("wait", ["push", "poll", ExponentialBackoff(cap=3, base=0.5)], ids=["push", "poll", "backoff"])
@in_loop
async def test_copies_keep_the_way_to_wait(async_client: redis.asyncio.Redis, wait: Any) -> None:
    lock = Locker(async_client).lock("name", wait=wait)
    assert copy.copy(lock).wait is wait
