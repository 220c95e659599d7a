"""One suite on redis-py's Locks and on ours, for threads and for asyncio: pools that are not as redis-py made them.

A lock is where the client's own commands go: on the same server, in the same database.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast.server import Server
from tests.support.helpers import LockClass, wait_until
from tests.support.worlds import World, waited

pytestmark = pytest.mark.usefixtures("world")

DB = 3
EACH_OPTIONS = pytest.mark.parametrize(
    "options",
    [
        *({}, {"blocking_timeout": 1}, {"auto_renew": True}, {"fencing": True}, {"linger": 60}, {"reentrant": True}),
        *({"wait": "poll"}, {"linger": 60, "auto_renew": True}),
    ],
    ids=str,
)


def package(world: World) -> Any:
    """redis-py for this world."""
    return redis if world.in_threads else redis.asyncio


def own_pool(world: World, method: str) -> type[Any]:
    """A class of pools whose connections are to the other database, by this method alone."""
    plain: Any = package(world).ConnectionPool

    def make_connection(pool: Any) -> Any:
        return pool.connection_class(**{**pool.connection_kwargs, "db": DB})

    def get_connection(pool: Any, *_args: Any, **_options: Any) -> Any:
        connection = make_connection(pool)
        pool._in_use_connections.add(connection)
        if world.in_threads:
            connection.connect()
            return connection
        return _connected(connection)

    methods: dict[str, Callable[..., Any]] = {"make_connection": make_connection, "get_connection": get_connection}
    return type("OwnPool", (plain,), {method: methods[method]})


async def _connected(connection: Any) -> Any:
    await connection.connect()
    return connection


@pytest.fixture
def here(valkey: Server, connect: Any) -> Any:
    """A client of the database that the settings of the pools name, and of nothing else."""
    client = connect(valkey.port)
    client.flushall()
    return client


@pytest.fixture
def there(valkey: Server, connect: Any, here: Any) -> Any:  # which empties it
    """A client of the other database."""
    return connect(valkey.port, db=DB)


def exercise(world: World, lock_class: Any, client: Any, there: Any, here: Any) -> None:
    """Every operation once: the lock is there."""
    lock, rival = lock_class(client, "name", timeout=60), world.lock_class("redis-py")(client, "name", timeout=60)
    assert lock.acquire(blocking=False) is True
    assert (1, 0) == (there.exists("name"), here.exists("name"))
    assert rival.acquire(blocking=False) is False
    assert lock.extend(60) is True
    assert 60_000 < there.pttl("name") <= 120_000
    assert lock.reacquire() is True
    assert (lock.owned(), lock.locked()) == (True, True)
    lock.release()
    assert rival.acquire(blocking=False) is True
    assert lock.acquire(blocking=False) is False
    rival.release()
    assert there.keys() == here.keys() == []


@pytest.mark.parametrize("method", ["make_connection", "get_connection"])
def test_pool_class_with_a_method_of_its_own(
    world: World, lock_class: LockClass, valkey: Server, here: Any, there: Any, method: str
) -> None:
    pool = world.keep(own_pool(world, method)(host="127.0.0.1", port=valkey.port))
    exercise(world, lock_class, package(world).Redis(connection_pool=pool), there, here)


@pytest.mark.parametrize("method", ["make_connection", "get_connection"])
def test_pool_object_with_a_method_of_its_own(
    world: World, lock_class: LockClass, valkey: Server, here: Any, there: Any, method: str
) -> None:
    pool = world.keep(package(world).ConnectionPool(host="127.0.0.1", port=valkey.port))
    setattr(pool, method, getattr(own_pool(world, method), method).__get__(pool))
    exercise(world, lock_class, package(world).Redis(connection_pool=pool), there, here)


def test_pools_of_redis_py_have_a_connection_for_locks(
    world: World, our_lock: Any, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (package(world).ConnectionPool, package(world).BlockingConnectionPool):
        client = package(world).Redis(connection_pool=world.keep(kind(host="127.0.0.1", port=valkey.port)))
        with caplog.at_level(logging.INFO), our_lock(client, "name", timeout=10):
            pass
    sentinel = package(world).sentinel.Sentinel([("127.0.0.1", 1)])
    with caplog.at_level(logging.INFO):
        our_lock(sentinel.master_for("service"), "name")
    assert [record for record in caplog.records if "own" in record.getMessage()] == []


# ---- a pool that is replaced ----


def replace(world: World, client: Any, pool: Any) -> None:
    """Give the client another pool, and forget the old one."""
    waited(client.connection_pool.disconnect())
    client.connection_pool = pool
    gc.collect()


def pool_of(world: World, server: Server, **settings: Any) -> Any:
    """A pool of redis-py."""
    return world.keep(package(world).ConnectionPool(host="127.0.0.1", port=server.port, **settings))


def test_lock_goes_with_a_client_whose_pool_is_replaced(
    world: World, lock_class: LockClass, valkey: Server, here: Any, there: Any
) -> None:
    client = world.connect(valkey.port)
    lock = lock_class(client, "name", timeout=60)
    exercise(world, lambda *_args, **_settings: lock, client, here, there)
    replace(world, client, pool_of(world, valkey, db=DB))
    exercise(world, lambda *_args, **_settings: lock, client, there, here)
    replace(world, client, pool_of(world, valkey))
    exercise(world, lambda *_args, **_settings: lock, client, here, there)


def test_lock_that_is_held_is_not_there_for_the_new_pool(
    world: World, lock_class: LockClass, valkey: Server, here: Any, there: Any
) -> None:
    client = world.connect(valkey.port)
    lock = lock_class(client, "name", timeout=60)
    assert lock.acquire()
    replace(world, client, pool_of(world, valkey, db=DB))
    assert (lock.owned(), lock.locked()) == (False, False)
    for fails in (lambda: lock.extend(1), lock.reacquire, lock.release):
        with pytest.raises(LockNotOwnedError):
            fails()
    assert (0, 1) == (there.exists("name"), here.exists("name"))


def test_lock_that_is_held_is_released_by_another_pool_of_its_server(
    world: World, lock_class: LockClass, valkey: Server, here: Any
) -> None:
    client = world.connect(valkey.port)
    lock = lock_class(client, "name", timeout=60)
    for _ in range(2):
        assert lock.acquire()
        replace(world, client, pool_of(world, valkey))
        assert lock.owned()
        lock.release()
        assert here.keys() == []


def test_pool_with_a_method_of_its_own_may_replace_one_of_redis_py(
    world: World, lock_class: LockClass, valkey: Server, here: Any, there: Any
) -> None:
    client = world.connect(valkey.port)
    lock = lock_class(client, "name", timeout=60)
    with lock:
        pass
    own = world.keep(own_pool(world, "make_connection")(host="127.0.0.1", port=valkey.port))
    replace(world, client, own)
    exercise(world, lambda *_args, **_settings: lock, client, there, here)


# ---- what redis-py's locks do not have ----


@EACH_OPTIONS
def test_lock_with_options_goes_with_the_pool(
    world: World, our_lock: Any, valkey: Server, here: Any, there: Any, options: dict[str, Any]
) -> None:
    client = world.connect(valkey.port)
    lock = our_lock(client, "name", timeout=60, **options)
    pools = [pool_of(world, valkey, **settings) for settings in ({}, {"db": DB}, {})]
    for place, client.connection_pool in zip((here, there, here), pools, strict=True):
        assert lock.acquire()
        assert lock.local.token == place.get("name").removesuffix(b"+")
        assert lock.owned()
        lock.release()


def test_locker_goes_with_the_pool(world: World, valkey: Server, here: Any, there: Any) -> None:
    client = world.connect(valkey.port)
    locker = world.locker(client)
    for place, settings in ((here, {}), (there, {"db": DB})):
        replace(world, client, pool_of(world, valkey, **settings))
        batch = locker.acquire_many(["a", "b"], 60)
        assert {b"a", b"b"} == set(place.keys())
        assert batch.release() == {"a": True, "b": True}


def test_redlock_goes_with_the_pools(world: World, fleet: list[Server], connect: Any) -> None:
    clients = [world.connect(server.port) for server in fleet]
    lock = world.redlock(clients, timeout=60)
    for settings in ({}, {"db": DB}, {}):
        for client, server in zip(clients, fleet, strict=True):
            replace(world, client, pool_of(world, server, **settings))
        assert lock.acquire()
        assert [1] * len(fleet) == [connect(server.port, **settings).exists("name") for server in fleet]
        lock.release()
        assert not lock.locked()


@pytest.mark.slow
def test_lock_that_is_renewed_is_not_lost_with_its_pool(world: World, our_lock: Any, valkey: Server, here: Any) -> None:
    client = world.connect(valkey.port)
    lock = our_lock(client, "name", timeout=3, auto_renew=True)
    assert lock.acquire()
    replace(world, client, pool_of(world, valkey))
    assert lock.owned()
    gc.collect()
    until = time.monotonic() + 4
    wait_until(lambda: time.monotonic() > until or not here.exists("name"), "its first lease is over")
    assert lock.owned()
    lock.release()
    with pytest.raises(LockError):
        lock.release()
