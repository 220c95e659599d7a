"""Locks on what a real sentinel calls the primary, through its restart, its move and its demotion.

Rules: a real server and a real sentinel; a fail-over is told to the sentinel by its own commands, because an election
takes longer than a test may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio.sentinel
from redis.exceptions import LockNotOwnedError
from redis.sentinel import MasterNotFoundError, Sentinel

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, few, once, start, wait_until
from tests.support.holding import renewed_in_busy_loop
from tests.support.proxy import Proxy
from tests.support.sentinels import SERVICE, announce, sentinel_of
from tests.support.waiting import FAR_S, Callers, Threads, until_queued

StartServer = Callable[..., Server]


class Watch:
    """A primary, a second server, and a sentinel that watches the primary."""

    def __init__(self, primary: Server, other: Server, sentinel: Server) -> None:
        self.primary = primary
        self.other = other
        self._admin: Any = redis.Redis(port=sentinel.port)
        self.sentinel: Any = Sentinel([("127.0.0.1", sentinel.port)])  # type: ignore[no-untyped-call]

    def announce(self, server: Server) -> None:
        """Let the sentinel call this server the primary from now on."""
        announce(self._admin, server)
        wait_until(lambda: self.sentinel.discover_master(SERVICE) == ("127.0.0.1", server.port), "announced")

    def withdraw(self) -> None:
        """Let the sentinel know of no primary."""
        self._admin.execute_command("SENTINEL", "REMOVE", SERVICE)


@pytest.fixture(params=["valkey", "redis"])
def watch(request: pytest.FixtureRequest, spare_server: StartServer, tmp_path: Path) -> Iterator[Watch]:
    """Servers of each kind, and a sentinel of the same kind."""
    primary, other = spare_server(request.param), spare_server(request.param)
    with sentinel_of(primary, tmp_path) as sentinel:
        yield Watch(primary, other, sentinel)


@pytest.fixture
def client(watch: Watch) -> Iterator[redis.Redis]:
    """A client of whatever the sentinel calls the primary."""
    with watch.sentinel.master_for(SERVICE, retry=few()) as running:
        yield running


def primary_for(callers: Callers, watch: Watch, port: int | None = None, **settings: Any) -> Any:
    """The same for callers who are threads or tasks; of what listens on this port before the sentinel."""
    if port is None:
        port = watch.sentinel.sentinels[0].connection_pool.connection_kwargs["port"]
    kind: Any = Sentinel if isinstance(callers, Threads) else redis.asyncio.sentinel.Sentinel
    sentinel = kind([("127.0.0.1", port)], **settings)
    callers.keep(sentinel.sentinels[0])
    return callers.keep(sentinel.master_for(SERVICE))


def has(server: Server, name: str) -> bool:
    with redis.Redis(port=server.port) as direct:
        return bool(direct.exists(name))


def test_every_operation(watch: Watch, client: redis.Redis) -> None:
    lock = Lock(client, "name", timeout=10)
    for _ in range(2):
        with lock:
            assert has(watch.primary, "name")
            assert (lock.locked(), lock.owned()) == (True, True)
            assert lock.extend(10)
            assert lock.reacquire()
            assert not Lock(client, "name").acquire(blocking=False)
        assert not has(watch.primary, "name")


def test_a_lock_of_the_clients_making(client: redis.Redis) -> None:
    with client.lock("name", timeout=10, lock_class=Lock) as lock:
        assert type(lock) is Lock
        assert lock.owned()


def test_a_primary_that_moved_while_the_lock_was_free_is_found(watch: Watch, client: redis.Redis) -> None:
    lock = Lock(client, "name", timeout=10)
    with lock:
        pass
    watch.primary.kill()
    watch.announce(watch.other)
    with lock:
        assert has(watch.other, "name")


def test_a_primary_that_moved_while_the_lock_was_held_does_not_know_it(watch: Watch, client: redis.Redis) -> None:
    lock = Lock(client, "name", timeout=10)
    lock.acquire()
    watch.primary.kill()
    watch.announce(watch.other)
    assert not lock.owned()
    with pytest.raises(LockNotOwnedError):
        lock.extend(10)
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_a_demoted_primary_is_left_for_the_new_one(watch: Watch, client: redis.Redis) -> None:
    lock = Lock(client, "name", timeout=10)
    with lock:
        pass
    with redis.Redis(port=watch.primary.port) as demoted:
        demoted.replicaof("127.0.0.1", watch.other.port)
    watch.announce(watch.other)
    with lock:
        assert has(watch.other, "name")


def test_a_waiter_finds_the_new_primary(watch: Watch, client: redis.Redis) -> None:
    holder = Lock(client, "name", timeout=10)
    holder.acquire()
    waiter = start(lambda: Lock(client, "name", timeout=10, sleep=0.01).acquire(blocking_timeout=PATIENCE_S))
    watch.announce(watch.other)
    watch.primary.kill()
    assert waiter.result(PATIENCE_S) is True
    assert has(watch.other, "name")


def test_a_primary_that_moved_is_left_for_the_new_one_beside_a_waiter(callers: Callers, watch: Watch) -> None:
    client = primary_for(callers, watch)
    lock = callers.contender(client, "name", timeout=FAR_S)
    assert lock.call("acquire")
    lock.release()
    with redis.Redis(port=watch.primary.port) as former:
        holder = Lock(former, "held", timeout=FAR_S)
        holder.acquire()
        waiter = callers.contender(client, "held", timeout=FAR_S, sleep=0.01)
        answer = waiter.acquire()
        until_queued(former, "held", 1)
        watch.announce(watch.other)
        callers.run(client.connection_pool.disconnect)
        callers.run(client.ping)  # the pool connects, and finds the new primary
        assert lock.call("acquire")
        assert (False, True) == (has(watch.primary, "name"), has(watch.other, "name"))
        assert answer.result(PATIENCE_S) is True
        assert has(watch.other, "held")
        holder.release()
    lock.release()
    waiter.release()


def test_without_a_primary_acquire_raises_what_the_client_does(watch: Watch) -> None:
    with watch.sentinel.master_for(SERVICE, retry=once()) as client:
        watch.withdraw()
        with pytest.raises(MasterNotFoundError):
            Lock(client, "name", timeout=10).acquire()


def test_silent_sentinel_is_waited_for_until_the_callers_time_ends(callers: Callers, watch: Watch) -> None:
    (sentinel,) = watch.sentinel.sentinels
    with Proxy(sentinel.connection_pool.connection_kwargs["port"]) as silent:
        client = primary_for(callers, watch, silent.port, socket_timeout=FAR_S)
        lock = callers.contender(client, "name", timeout=FAR_S)
        silent.hold()
        for _ in range(2):
            with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
                lock.acquire(blocking_timeout=0.05).result(PATIENCE_S)
        assert silent.requests["SENTINEL"] <= 1  # the second attempt has waited for the answer to the first
        silent.resume()
        assert lock.acquire(blocking_timeout=PATIENCE_S).result(PATIENCE_S) is True
        lock.release()
        watch.withdraw()
        callers.run(client.connection_pool.disconnect)
        with pytest.raises(redis.ConnectionError, match="No master found"):
            lock.acquire(blocking_timeout=0.5).result(PATIENCE_S)


def test_a_thread_renews_the_locks_of_tasks(watch: Watch) -> None:
    (port,) = (sentinel.connection_pool.connection_kwargs["port"] for sentinel in watch.sentinel.sentinels)

    async def hold() -> None:
        sentinel: Any = redis.asyncio.sentinel.Sentinel([("127.0.0.1", port)])  # type: ignore[no-untyped-call]
        async with sentinel.master_for(SERVICE) as async_client:
            with redis.Redis(port=watch.primary.port) as admin:
                await renewed_in_busy_loop(async_client, admin)
        await sentinel.sentinels[0].aclose()

    asyncio.run(hold())
