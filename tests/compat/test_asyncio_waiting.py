"""One suite on redis-py's asyncio Lock and on ours: polling, where it is another than that of threads.

Ours polls here: what it does by default is in `integration/waiting`. Rules: as in test_waiting, where the rest stands.
"""

from __future__ import annotations

import asyncio

import pytest
import redis
import redis.asyncio

from redislock_fast.server import Server
from tests.support.async_helpers import AsyncClients, AsyncLockClass, in_loop, run_in_loop
from tests.support.helpers import FakeTime, start

pytestmark = pytest.mark.usefixtures("polling")


@pytest.fixture
def taken(valkey_client: redis.Redis, async_connect: AsyncClients, valkey: Server) -> redis.asyncio.Redis:
    """An asyncio client of a server on which the lock "name" is taken."""
    valkey_client.set("name", "taken")
    return async_connect(valkey.port)


@in_loop
async def test_acquire_takes_its_arguments_in_redis_pys_order(
    async_lock_class: AsyncLockClass, taken: redis.asyncio.Redis, fake_async_time: FakeTime
) -> None:
    lock = async_lock_class(taken, "name", sleep=0.25)
    assert await lock.acquire(True, 0.3, "token") is False
    assert [0.25] == fake_async_time.sleeps_s
    await taken.delete("name")
    assert await lock.acquire(False, None, "token") is True
    assert b"token" == await taken.get("name")


@in_loop
async def test_sleep_of_the_asyncio_module_is_what_a_waiter_sleeps_by(
    async_lock_class: AsyncLockClass, taken: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_sleep = asyncio.sleep

    async def sleep_and_delete(seconds: float) -> None:
        if seconds == 12.5:
            await taken.delete("name")
        else:
            await real_sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep_and_delete)
    assert await async_lock_class(taken, "name", sleep=12.5).acquire() is True


def test_loops_in_many_threads_exclude_each_other(async_lock_class: AsyncLockClass, server: Server) -> None:
    inside = 0
    most = 0

    async def work() -> None:
        nonlocal inside, most
        async with redis.asyncio.Redis(port=server.port) as client:
            for _ in range(10):
                async with async_lock_class(client, "name", sleep=0.001):
                    inside += 1
                    most = max(most, inside)
                    await client.ping()
                    inside -= 1

    for worker in [start(lambda: run_in_loop("asyncio", work())) for _ in range(4)]:
        worker.result(20)
    assert 1 == most
