"""One suite on redis-py's asyncio Lock and on ours: every kind of client and connection, and all classes on one key.

Rules: each test passes on both classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.lock
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast
from redislock_fast.server import Server, free_port
from tests.compat.test_clients import Credentials
from tests.conftest import MakeUser, TlsServer
from tests.support.async_helpers import (
    ASYNC_CLASSES,
    AsyncClients,
    AsyncLockClass,
    async_few,
    async_once,
    in_loop,
    in_task,
)
from tests.support.helpers import PATIENCE_S, start, wait_until

StartServer = Callable[..., Server]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


async def exercise(lock_class: AsyncLockClass, client: Any) -> None:
    """Every operation once, through this client."""
    lock = lock_class(client, "name", timeout=10)
    for _ in range(2):
        assert await lock.acquire(blocking=False) is True
        assert (True, True) == (await lock.owned(), await lock.locked())
        other = lock_class(client, "name", timeout=10)
        assert await other.acquire(blocking=False) is False
        assert await other.owned() is False
        assert await lock.extend(10) is True
        assert 10_000 < await client.pttl("name") <= 20_000
        assert await lock.extend(5, replace_ttl=True) is True
        assert 0 < await client.pttl("name") <= 5_000
        assert await lock.reacquire() is True
        assert 5_000 < await client.pttl("name") <= 10_000
        await lock.release()
        assert await lock.locked() is False
    await lock.acquire()
    await client.delete("name")
    uses: list[Callable[[], Awaitable[object]]] = [lambda: lock.extend(1), lock.reacquire, lock.release]
    for fails in uses:
        with pytest.raises(LockNotOwnedError):
            await fails()


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": 2},
        {"protocol": 3},
        {"decode_responses": True},
        {"decode_responses": True, "protocol": 3},
        {"decode_responses": True, "encoding": "latin-1"},
        {"single_connection_client": True},
        {"db": 3},
        {"socket_timeout": None},
        {"socket_timeout": 5, "socket_connect_timeout": 5, "socket_keepalive": True},
        {"health_check_interval": 1},
        {"client_name": "tester"},
        {"max_connections": 2},
        {"host": "127.0.0.1"},
    ],
    ids=str,
)
@in_loop
async def test_client_options(
    async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients, options: dict[str, Any]
) -> None:
    client = async_connect(server.port, **options)
    await client.flushdb()
    await exercise(async_lock_class, client)


@in_loop
async def test_unix_socket(async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients) -> None:
    await exercise(async_lock_class, async_connect.keep(redis.asyncio.Redis(unix_socket_path=str(server.unix_path))))


@pytest.mark.parametrize("query", ["", "?protocol=3", "?decode_responses=true&db=2"])
@in_loop
async def test_url(async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients, query: str) -> None:
    client = async_connect.keep(redis.asyncio.Redis.from_url(f"redis://127.0.0.1:{server.port}{query}"))
    await client.flushdb()
    await exercise(async_lock_class, client)


@in_loop
async def test_url_of_a_unix_socket(
    async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients
) -> None:
    await exercise(async_lock_class, async_connect.keep(redis.asyncio.Redis.from_url(f"unix://{server.unix_path}")))


@pytest.fixture
def blocking_pool(valkey: Server, async_connect: AsyncClients) -> redis.asyncio.BlockingConnectionPool:
    """A pool that makes its callers wait for its one connection."""
    pool: redis.asyncio.BlockingConnectionPool = async_connect.keep(
        redis.asyncio.BlockingConnectionPool(port=valkey.port, max_connections=1, timeout=10)
    )
    return pool


@in_loop
async def test_blocking_connection_pool(
    async_lock_class: AsyncLockClass, blocking_pool: redis.asyncio.BlockingConnectionPool
) -> None:
    client = redis.asyncio.Redis(connection_pool=blocking_pool)
    await exercise(async_lock_class, client)

    async def work() -> None:
        for _ in range(10):
            async with async_lock_class(client, "name", sleep=0.001):
                await client.incr("counter")

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(4))), 20)
    assert b"40" == await client.get("counter")


@in_loop
async def test_two_clients_of_one_pool(
    async_lock_class: AsyncLockClass, blocking_pool: redis.asyncio.BlockingConnectionPool
) -> None:
    first, second = (redis.asyncio.Redis(connection_pool=blocking_pool) for _ in range(2))
    async with async_lock_class(first, "name"):
        assert await async_lock_class(second, "name").acquire(blocking=False) is False
    await exercise(async_lock_class, second)


@in_loop
async def test_single_connection_client_from_tasks(
    async_lock_class: AsyncLockClass, valkey: Server, async_connect: AsyncClients
) -> None:
    client = async_connect(valkey.port, single_connection_client=True)
    async with async_lock_class(client, "name"):
        assert await in_task(lambda: async_lock_class(client, "name").acquire(blocking=False)) is False
    await exercise(async_lock_class, client)


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


@in_loop
async def test_tls(async_lock_class: AsyncLockClass, tls_server: TlsServer, async_connect: AsyncClients) -> None:
    client = async_connect(tls_server.port, host="127.0.0.1", ssl=True, ssl_ca_certs=tls_server.ca_path)
    await client.flushdb()
    await exercise(async_lock_class, client)


@in_loop
async def test_tls_by_url(async_lock_class: AsyncLockClass, tls_server: TlsServer, async_connect: AsyncClients) -> None:
    url = f"rediss://localhost:{tls_server.port}?ssl_ca_certs={tls_server.ca_path}"
    client = async_connect.keep(redis.asyncio.Redis.from_url(url))
    await client.flushdb()
    await exercise(async_lock_class, client)


@in_loop
async def test_tls_with_an_unknown_ca_is_refused(
    async_lock_class: AsyncLockClass, tls_server: TlsServer, async_connect: AsyncClients
) -> None:
    client = async_connect(tls_server.port, host="127.0.0.1", ssl=True, retry=async_once())
    with pytest.raises(redis.ConnectionError, match=r"(?i)certificate"):
        await async_lock_class(client, "name").acquire(blocking=False)


@pytest.mark.parametrize("protocol", [2, 3])
@in_loop
async def test_acl_user_with_password(
    async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients, acl_user: MakeUser, protocol: int
) -> None:
    client = async_connect(server.port, protocol=protocol, **acl_user(server).options())
    await exercise(async_lock_class, client)


@in_loop
async def test_wrong_password_is_refused(
    async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients, acl_user: MakeUser
) -> None:
    options = {**acl_user(server).options(), "password": "canary-wrong"}
    client = async_connect(server.port, retry=async_once(), **options)
    with pytest.raises(redis.AuthenticationError) as caught:
        await async_lock_class(client, "name").acquire(blocking=False)
    assert "canary" not in str(caught.value)


@in_loop
async def test_credential_provider(
    async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients, acl_user: MakeUser
) -> None:
    provider = Credentials(**acl_user(server).options())
    await exercise(async_lock_class, async_connect(server.port, credential_provider=provider))
    assert provider.asked


@in_loop
async def test_requirepass(
    async_lock_class: AsyncLockClass, spare_server: StartServer, async_connect: AsyncClients
) -> None:
    server = spare_server("valkey", {"requirepass": "canary-password"})
    await exercise(async_lock_class, async_connect(server.port, password="canary-password"))
    with pytest.raises(redis.AuthenticationError):
        await async_lock_class(async_connect(server.port, retry=async_once()), "name").acquire(blocking=False)


@pytest.mark.parametrize("arguments", [{"blocking": False}, {"blocking_timeout": 0.1}], ids=str)
@in_loop
async def test_server_that_does_not_listen_raises_connection_error(
    async_lock_class: AsyncLockClass, async_connect: AsyncClients, arguments: dict[str, Any]
) -> None:
    client = async_connect(1, host="127.0.0.1", retry=async_once())
    with pytest.raises(redis.ConnectionError):
        await async_lock_class(client, "name").acquire(**arguments)


# Topologies


@pytest.fixture
def sentinel(
    spare_server: StartServer, tmp_path: Path, async_connect: AsyncClients
) -> Iterator[tuple[Server, redis.asyncio.Redis]]:
    """A server, and an asyncio client that finds it by the sentinel which watches it."""
    primary = spare_server("redis")
    # The binary becomes a sentinel by its name.
    binary = tmp_path / "redis-sentinel"
    binary.symlink_to(primary.binary)
    with Server(str(binary), {"sentinel monitor": f"service 127.0.0.1 {primary.port} 1"}) as watcher:
        watchers: Any = Sentinel([("127.0.0.1", watcher.port)])  # type: ignore[no-untyped-call]
        for client in watchers.sentinels:
            async_connect.keep(client)
        yield primary, async_connect.keep(watchers.master_for("service", retry=async_few()))


@in_loop
async def test_sentinel(async_lock_class: AsyncLockClass, sentinel: tuple[Server, redis.asyncio.Redis]) -> None:
    await exercise(async_lock_class, sentinel[1])


@in_loop
async def test_sentinel_whose_primary_restarts(
    async_lock_class: AsyncLockClass, sentinel: tuple[Server, redis.asyncio.Redis]
) -> None:
    primary, client = sentinel
    lock = async_lock_class(client, "name", timeout=10)
    await lock.acquire()
    primary.kill()
    primary.start()
    assert await lock.locked() is False
    assert await lock.acquire(blocking=False)


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
Pair = tuple[AsyncLockClass, AsyncLockClass]


@pytest.fixture(params=[("redis-py", "ours"), ("ours", "redis-py")], ids="-".join)
def both_classes(request: pytest.FixtureRequest) -> Pair:
    """redis-py's asyncio Lock and ours, in either order."""
    one, other = request.param
    return ASYNC_CLASSES[one], ASYNC_CLASSES[other]


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
async def test_both_classes_exclude_each_other(both_classes: Pair, async_client: redis.asyncio.Redis) -> None:
    one, other = both_classes
    holder, waiter = one(async_client, "name", timeout=10), other(async_client, "name", sleep=0.001)
    await holder.acquire()
    assert await waiter.acquire(blocking=False) is False
    assert (True, False) == (await waiter.locked(), await waiter.owned())
    answer = asyncio.create_task(waiter.acquire(blocking_timeout=10))
    await holder.extend(10)
    await holder.reacquire()
    await holder.release()
    assert await answer is True


@in_loop
async def test_either_class_can_release_and_extend_by_the_others_token(
    both_classes: Pair, async_client: redis.asyncio.Redis
) -> None:
    one, other = both_classes
    holder, heir = one(async_client, "name", timeout=10), other(async_client, "name", timeout=10)
    await holder.acquire()
    heir.local.token = holder.local.token
    assert (True, True) == (await heir.owned(), await heir.extend(10))
    assert 10_000 < await async_client.pttl("name") <= 20_000
    await heir.release()
    assert not await async_client.exists("name")
    with pytest.raises(LockNotOwnedError):
        await holder.release()


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
