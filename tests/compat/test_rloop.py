"""Asyncio locks in rloop's event loop, whose transports keep their first protocol: by the client's methods, polling."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
import valkey.asyncio
from redis.exceptions import LockError, LockNotOwnedError, RedisError

from redislock_fast.asyncio import Lock, Locker, Redlock
from redislock_fast.server import Server
from tests.support.clusters import Cluster
from tests.support.redlock import LIMIT_S

rloop: Any = pytest.importorskip("rloop")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # rloop leaves its sockets

FAR_S = 60.0
SOON: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.01, "thread_local": False}


def in_rloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an `async def` a test that runs in an rloop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        loop = rloop.new_event_loop()
        try:
            loop.run_until_complete(test(**fixtures))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    return run


@asynccontextmanager
async def client_of(client_class: Any, port: int, **options: Any) -> AsyncIterator[Any]:
    """A client, closed at the end of the block."""
    client = client_class(host="127.0.0.1", port=port, **options)
    try:
        yield client
    finally:
        await client.aclose()


async def exercise(client: Any) -> None:
    """Each operation of a lock, and a contended one, by two tasks."""
    holder, waiter = Lock(client, "name", **SOON), Lock(client, "name", **SOON)
    for _ in range(2):
        assert await holder.acquire()
        assert await waiter.acquire(blocking=False) is False
        assert await waiter.acquire(blocking_timeout=0.05) is False
        assert await holder.extend(FAR_S) is True
        assert await holder.reacquire() is True
        waiting = asyncio.ensure_future(waiter.acquire())
        await holder.release()
        assert await waiting is True
        assert (await waiter.owned(), await holder.owned()) == (True, False)
        await waiter.release()
    with pytest.raises(LockError):
        await waiter.release()
    assert await holder.acquire()
    await client.delete("name")
    with pytest.raises(LockNotOwnedError):
        await holder.release()
    assert await client.keys() == []


@pytest.mark.parametrize("options", [{}, {"decode_responses": True}, {"protocol": 2}, {"max_connections": 2}], ids=str)
@pytest.mark.parametrize("client_class", [redis.asyncio.Redis, valkey.asyncio.Valkey])
@in_rloop
async def test_lock_goes_by_the_clients_methods_and_says_so_once(
    valkey: Server, valkey_client: redis.Redis, caplog: Any, client_class: Any, options: dict[str, Any]
) -> None:
    assert valkey_client.keys() == []
    with caplog.at_level(logging.INFO, "redislock_fast"):
        async with client_of(client_class, valkey.port, **options) as client:
            await exercise(client)
    assert len([record for record in caplog.records if "rloop" in record.getMessage()]) <= 1


class LoadsElsewhere(redis.asyncio.RedisCluster):
    """Loads scripts on other nodes than the key's, as redis-py 7.1 may."""

    async def script_load(self, script: Any) -> str:
        return hashlib.sha1(script.encode()).hexdigest()


@pytest.mark.parametrize("client_class", [redis.asyncio.RedisCluster, LoadsElsewhere])
@in_rloop
async def test_lock_of_a_cluster(cluster: Cluster, cluster_client: redis.RedisCluster, client_class: Any) -> None:
    cluster_client.script_flush()
    async with client_of(client_class, cluster.port) as client:
        lock = Lock(client, "name", **SOON)
        assert await lock.acquire()
        assert await Lock(client, "name").acquire(blocking=False) is False
        assert lock.local.token == cluster_client.get("name")
        await lock.release()
        assert cluster_client.get("name") is None


@pytest.mark.parametrize("options", [{"auto_renew": True}, {"fencing": True}, {"linger": 0.5}, {"reentrant": True}])
@in_rloop
async def test_options(valkey: Server, valkey_client: redis.Redis, options: dict[str, Any]) -> None:
    async with client_of(redis.asyncio.Redis, valkey.port) as client:
        for _ in range(2):
            async with Lock(client, "name", timeout=FAR_S, **options) as lock:
                assert lock.local.token == valkey_client.get("name")
        assert not valkey_client.exists("name")


@in_rloop
async def test_replicas_are_not_waited_for(valkey: Server, valkey_client: redis.Redis) -> None:
    async with client_of(redis.asyncio.Redis, valkey.port) as client:
        with pytest.raises(RedisError, match="replicas"):
            await Lock(client, "name", timeout=FAR_S, wait_replicas=1, wait_timeout=0.1).acquire()
        while valkey_client.exists("name"):  # it is released in the background
            await asyncio.sleep(0.01)


@in_rloop
async def test_many_locks_at_once(valkey: Server, valkey_client: redis.Redis) -> None:
    async with client_of(redis.asyncio.Redis, valkey.port) as client:
        batch = await Locker(client).acquire_many(["a", "b"], FAR_S)
        assert {b"a", b"b"} == set(valkey_client.keys())
        assert await batch.release() == {"a": True, "b": True}
        assert valkey_client.keys() == []


@in_rloop
async def test_redlock(fleet: list[Server]) -> None:
    clients = [redis.asyncio.Redis(port=server.port) for server in fleet]
    lock = Redlock(clients, "name", timeout=FAR_S, limit=LIMIT_S)
    assert await lock.acquire()
    assert await Redlock(clients, "name", timeout=FAR_S, limit=LIMIT_S).acquire(blocking=False) is False
    await lock.release()
    for client in clients:
        while await client.exists("name"):  # the minority is not waited for
            await asyncio.sleep(0.01)
        await client.aclose()


@in_rloop
async def test_acquire_that_is_cancelled_leaves_no_key(valkey: Server, valkey_client: redis.Redis) -> None:
    async with client_of(redis.asyncio.Redis, valkey.port) as client:
        lock = Lock(client, "name", **SOON)
        for steps in range(12):
            acquiring = asyncio.ensure_future(lock.acquire())
            for _ in range(steps):
                await asyncio.sleep(0)
            acquiring.cancel()
            (outcome,) = await asyncio.gather(acquiring, return_exceptions=True)
            if outcome is True:
                await lock.release()
        while valkey_client.exists("name"):
            await asyncio.sleep(0.01)


def test_same_lock_serves_both_kinds_of_loop(valkey: Server, valkey_client: redis.Redis) -> None:
    pool = redis.asyncio.ConnectionPool(port=valkey.port)
    lock = Lock(redis.asyncio.Redis(connection_pool=pool), "name", timeout=FAR_S)

    async def use() -> None:
        async with lock:
            assert valkey_client.get("name") == lock.local.token
        await pool.disconnect()

    for make_loop in (rloop.new_event_loop, asyncio.new_event_loop) * 2:
        loop = make_loop()
        loop.run_until_complete(use())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    assert not valkey_client.exists("name")
