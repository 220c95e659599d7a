"""One suite on redis-py's asyncio Lock and on ours: closed clients, clusters, patched clients.

Rules: each test passes on both classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast
from redislock_fast.server import Server, free_port
from tests.support.async_helpers import ASYNC_CLASSES, AsyncClients, AsyncLockClass, in_loop
from tests.support.helpers import PATIENCE_S, start, wait_until

StartServer = Callable[..., Server]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


@in_loop
async def test_closed_client_connects_again(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await async_client.aclose()
    assert await lock.acquire(blocking=False)
    await async_client.aclose()
    assert await lock.owned()
    await async_client.aclose()
    await lock.release()
    assert not client.exists("name")


@pytest.fixture
def cluster(spare_server: StartServer, async_connect: AsyncClients) -> Any:
    """An asyncio client, never used before, of a cluster of one node."""
    server = spare_server("valkey", {"cluster-enabled": "yes", "cluster-port": str(free_port())})
    with redis.Redis(port=server.port) as node:
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), "the cluster is up")
    return async_connect.keep(redis.asyncio.RedisCluster(host="127.0.0.1", port=server.port))


@pytest.mark.slow
@in_loop
async def test_cluster(async_lock_class: AsyncLockClass, cluster: Any) -> None:
    lock = cluster.lock("name", 10, 0.2, False, 3, async_lock_class, False, False)
    assert type(lock) is async_lock_class
    for _ in range(2):
        assert await lock.acquire() is True
        assert lock.local.token == await cluster.get("name")
        assert (True, True) == (await lock.owned(), await lock.locked())
        assert await async_lock_class(cluster, "name").acquire(blocking=False) is False
        assert await lock.extend(10) is True
        assert await lock.reacquire() is True
        await lock.release()
        assert not await lock.locked()
    with pytest.raises(LockError):
        await lock.release()
    await lock.acquire(token="token")
    await cluster.delete("name")
    with pytest.raises(LockNotOwnedError):
        await lock.release()


# Classes beside each other

ORIGINAL = ASYNC_CLASSES["redis-py"]


@in_loop
async def test_patched_clients_make_our_lock(async_valkey_client: redis.asyncio.Redis) -> None:
    redislock_fast.patch()
    try:
        lock = async_valkey_client.lock("name", timeout=10)
        assert type(lock) is ASYNC_CLASSES["ours"]
        assert type(async_valkey_client.lock("name", lock_class=ORIGINAL)) is ORIGINAL
        assert redis.asyncio.lock.Lock is ASYNC_CLASSES["ours"]
        client: Any = async_valkey_client
        assert type(client.lock("name", 10, auto_renew=True)) is ASYNC_CLASSES["ours"]
        with pytest.warns(RuntimeWarning, match="pipeline"):
            assert type(async_valkey_client.pipeline().lock("name")) is ORIGINAL
        async with lock:
            assert await async_valkey_client.exists("name")
    finally:
        redislock_fast.unpatch()
    assert type(async_valkey_client.lock("name")) is redis.asyncio.lock.Lock is ORIGINAL


@in_loop
async def test_sync_and_asyncio_locks_exclude_each_other(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", sleep=0.001)
    with redislock_fast.Lock(client, "name", timeout=10):
        assert await lock.acquire(blocking=False) is False
    async with lock:
        waiter = redislock_fast.Lock(client, "name", sleep=0.001, thread_local=False)
        assert waiter.acquire(blocking=False) is False
        answer = start(waiter.acquire)
    assert await asyncio.wait_for(asyncio.wrap_future(answer), PATIENCE_S) is True
    assert await lock.acquire(blocking=False) is False
    waiter.release()
