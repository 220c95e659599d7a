"""Waiting for a contended asyncio lock: what is special to tasks and event loops.

What holds for threads and tasks alike is in the other files. Rules: as in `test_waiting.py`; each test runs in each
kind of loop.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.support.async_helpers import Owner, eventually, in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S, start
from tests.support.waiting import LATE, queued, until_queued


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


async def until_queue_is(client: redis.Redis, length: int) -> None:
    """Return once so many wait for the lock."""
    await eventually(lambda: queued(client, "name") == length, f"{length} wait")


# Tasks


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
            tasks = [asyncio.create_task(take_turn(0))]
            await until_queue_is(client, 1)  # so the others know that the lock is contended, and make no attempt
            tasks += [asyncio.create_task(take_turn(number)) for number in range(1, 200)]
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
async def test_the_task_that_called_acquire_owns_what_was_handed_over(
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
