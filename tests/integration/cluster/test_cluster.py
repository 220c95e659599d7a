"""Locks on a real cluster, whose slots move while locks are free, held or waited for.

Rules: those of `support/clusters.py`.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.lock
from redis.exceptions import LockNotOwnedError

from redislock_fast import Lock, once
from redislock_fast.asyncio import Lock as AsyncLock
from redislock_fast.fencing import AsyncGuard, Guard, StaleFenceError
from tests.integration.waiting.test_giving_up import DropAt
from tests.support.async_helpers import async_few, eventually
from tests.support.clusters import Cluster, Place, connect, remap_ports
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, RELEASES_LAST, run_script
from tests.support.holding import RENEWED, renewed, renewed_in_busy_loop
from tests.support.waiting import FAR_S, Callers, connections


@pytest.fixture
def client(cluster_client: redis.RedisCluster) -> redis.RedisCluster:
    """A client of each kind of cluster in turn."""
    return cluster_client


def lock_of(client: redis.RedisCluster, name: str, **options: Any) -> Lock:
    lock = client.lock(name, lock_class=Lock, **options)
    assert isinstance(lock, Lock)
    return lock


def test_every_operation(client: redis.RedisCluster, place: Place) -> None:
    lock = lock_of(client, place.name, timeout=10)
    home = place.cluster.admins[place.home]
    for _ in range(2):
        assert (lock.locked(), lock.owned()) == (False, False)
        assert lock.acquire(blocking=False)
        assert home.get(place.name) == lock.local.token
        assert (lock.locked(), lock.owned()) == (True, True)
        assert not lock_of(client, place.name).acquire(blocking=False)
        assert lock.extend(10)
        assert 10_000 < home.pttl(place.name) <= 20_000
        assert lock.reacquire()
        assert 0 < home.pttl(place.name) <= 10_000
        lock.release()
        assert not home.exists(place.name)
    with lock:
        home.delete(place.name)
        with pytest.raises(LockNotOwnedError):
            lock.release()
        lock.acquire()


def test_job_that_is_done_is_noted_in_the_slot_of_its_lock(client: redis.RedisCluster, place: Place) -> None:
    run = once(client, place.name, timeout=FAR_S, others="wait", done_for=FAR_S, on_skip=lambda _: "done")(
        lambda: "ran"
    )
    assert [run(), run()] == ["ran", "done"]
    assert (place.keys_at(place.home), client.exists(place.name)) == (1, 0)


def test_the_original_excludes_ours_and_ours_the_original(client: redis.RedisCluster, place: Place) -> None:
    ours, original = lock_of(client, place.name, timeout=10), redis.lock.Lock(client, place.name, timeout=10)
    with original:
        assert not ours.acquire(blocking=False)
        assert ours.locked()
    with ours:
        assert not original.acquire(blocking=False)


def test_locks_of_one_client_share_a_connection_per_node(cluster: Cluster) -> None:
    with redis.RedisCluster(host="127.0.0.1", port=cluster.port, client_name="shared") as client:
        for _ in range(20):
            with lock_of(client, cluster.name(), timeout=10):
                pass
        for admin in map(cluster.admins.__getitem__, cluster.primaries()):
            commands = [row["cmd"] for row in admin.client_list() if row["name"] == "shared"]
            assert len([command for command in commands if command.upper() in RELEASE_COMMANDS]) == 1


def test_a_free_locks_slot_that_moved_is_followed(client: redis.RedisCluster, place: Place) -> None:
    lock = lock_of(client, place.name, timeout=10)
    with lock:
        pass
    place.move()
    for _ in range(2):
        with lock:
            assert lock.owned()
            assert not lock_of(client, place.name).acquire(blocking=False)


def test_the_callers_own_token_is_found_on_the_other_node(client: redis.RedisCluster, place: Place) -> None:
    lock_of(client, place.name, timeout=10).acquire(token="same")
    place.move()
    assert lock_of(client, place.name, timeout=10).acquire(blocking=False, token="same")


def test_numbers_move_with_the_slot(client: redis.RedisCluster, place: Place) -> None:
    fences = []
    for _ in range(2):
        for _ in range(2):
            lock = Lock(client, place.name, timeout=10, fencing=True)
            assert lock.acquire()
            fences.append(lock.fence)
            client.delete(place.name)
        if len(fences) == 2:
            place.move()
    assert fences == [1, 2, 3, 4]


def test_guards_follow_the_slot(client: redis.RedisCluster, place: Place) -> None:
    def stale(fence: int) -> bool:
        try:
            Guard(client).set(place.name, fence, fence)
        except StaleFenceError:
            return True
        return False

    async def stale_for_asyncio(fence: int) -> bool:
        async with redis.asyncio.RedisCluster(host="127.0.0.1", port=place.cluster.port) as async_client:
            try:
                await AsyncGuard(async_client).set(place.name, fence, fence)
            except StaleFenceError:
                return True
            return False

    assert (stale(2), stale(1), asyncio.run(stale_for_asyncio(1))) == (False, True, True)
    place.move()
    assert (stale(1), asyncio.run(stale_for_asyncio(1)), asyncio.run(stale_for_asyncio(3))) == (True, True, False)
    assert client.get(place.name) == b"3"


def test_a_pipeline_is_refused(client: redis.RedisCluster) -> None:
    with pytest.raises(TypeError, match="pipeline"):
        Lock(client.pipeline(), "name")  # type: ignore[no-untyped-call]


def test_a_client_ends_with_its_last_user(cluster: Cluster) -> None:
    def use() -> weakref.ref[redis.RedisCluster]:
        client = redis.RedisCluster(host="127.0.0.1", port=cluster.port)
        with lock_of(client, cluster.name(), timeout=10):
            return weakref.ref(client)

    async def use_in_loop() -> weakref.ref[redis.asyncio.RedisCluster]:
        client = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.port)
        async with client, AsyncLock(client, cluster.name(), timeout=10):
            return weakref.ref(client)

    of_threads, of_loop = use(), asyncio.run(use_in_loop())
    gc.collect()
    assert (of_threads(), of_loop()) == (None, None)


@pytest.mark.parametrize("topology", ["known", "to be read again"])
def test_a_client_that_was_closed_stays_closed(place: Place, topology: str) -> None:
    cluster = place.cluster

    def open_connections() -> int:
        return sum(connections(admin, place.name) for admin in cluster.admins)

    async def use() -> None:
        client = redis.asyncio.RedisCluster(
            host="127.0.0.1", port=cluster.port, client_name=place.name, retry=async_few()
        )
        lock = AsyncLock(client, place.name, timeout=10)
        await lock.acquire()
        await eventually(lambda: open_connections() > 1, "the client has connections")
        await client.aclose()
        if topology == "known":
            assert await lock.owned()
        else:
            with cluster.unserved(place.slot, place.home), pytest.raises(redis.exceptions.ClusterDownError):
                await lock.owned()
        await eventually(lambda: open_connections() == 1, "the lock's connection alone is open")
        await lock.release()

    asyncio.run(use())


def test_what_a_dropped_task_has_begun_is_undone(place: Place) -> None:
    home = place.cluster.admins[place.home]

    async def drop() -> None:
        async with redis.asyncio.RedisCluster(host="127.0.0.1", port=place.cluster.port) as client:
            lock = AsyncLock(client, place.name, timeout=60)
            assert not await lock.locked()  # connects
            await DropAt(lock.acquire(), 0)
            await lock.locked()  # behind it
            await eventually(lambda: not home.exists(place.name), "it is undone")

    asyncio.run(drop())


def test_a_child_leaves_the_connections_of_its_parents_loop_alone(in_fork: InFork, place: Place) -> None:
    home = place.cluster.admins[place.home]

    async def use(lock: AsyncLock) -> None:
        assert await lock.acquire()
        await lock.release()

    async def program() -> None:
        client = redis.asyncio.RedisCluster(host="127.0.0.1", port=place.cluster.port, client_name=place.name)
        other = AsyncLock(client, f"{{{place.name}}}:other", timeout=10)

        def child() -> str:
            asyncio.run(use(other))
            return "fine"

        async with client:
            lock = AsyncLock(client, place.name, timeout=60)
            await lock.acquire()
            before = connections(home, place.name)
            assert in_fork(child) == "fine"
            assert await lock.owned()
            await eventually(lambda: connections(home, place.name) == before, "the child's have ended")
            await lock.release()

    asyncio.run(program())


@pytest.mark.parametrize("kind", ["first use", "topology to be read again"])
def test_a_silent_cluster_is_waited_for_until_the_callers_time_ends(callers: Callers, place: Place, kind: str) -> None:
    cluster = place.cluster
    with cluster.proxied() as proxies:
        home = proxies[cluster.nodes[place.home].port]
        elsewhere = remap_ports({port: proxy.port for port, proxy in proxies.items()})
        client = connect(callers, cluster, address_remap=elsewhere, socket_timeout=None)
        lock = callers.contender(client, place.name, timeout=FAR_S)
        if kind == "topology to be read again":
            assert not lock.call("locked")
            home.refuse()
            home.cut()
        for proxy in proxies.values():
            proxy.hold()
        with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            lock.acquire(blocking_timeout=0.1).result(PATIENCE_S)
        if kind == "topology to be read again":
            home.accept()
        for proxy in proxies.values():
            proxy.resume()
        assert lock.acquire(blocking_timeout=PATIENCE_S).result(PATIENCE_S)
        lock.release()


def test_a_release_when_the_interpreter_ends_waits_for_no_thread_to_read_the_topology(place: Place) -> None:
    connected = """
import sys
import redis

retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
client = redis.RedisCluster(host="127.0.0.1", port=int(sys.argv[1]), socket_timeout=None, retry=retry)
"""
    script = f"{connected}{RELEASES_LAST}client.nodes_manager.slots_cache.clear()\n"
    ended = run_script(script, place.cluster.port, place.name)
    assert (ended.returncode, ended.stdout) == (0, "ends\n")


def test_a_thread_renews_the_locks_of_tasks(cluster: Cluster, client: redis.RedisCluster) -> None:
    async def hold() -> None:
        async with redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.port) as async_client:
            for place in (cluster.place(), cluster.place()):
                await renewed_in_busy_loop(async_client, client, place.name)

    asyncio.run(hold())


def test_loop_renews_its_lock_while_a_thread_waits_for_silent_nodes(cluster: Cluster, place: Place) -> None:
    admin = cluster.admins[place.home]

    async def hold() -> None:
        with cluster.proxied() as proxies:
            elsewhere = remap_ports({port: proxy.port for port, proxy in proxies.items()})
            settings: dict[str, Any] = {"address_remap": elsewhere, "socket_timeout": FAR_S}
            async with redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.port, **settings) as client:
                lock = AsyncLock(client, place.name, **RENEWED)
                assert await lock.acquire()
                home = proxies.pop(cluster.nodes[place.home].port)
                home.answer(b"-ERR not now\r\n", "CLUSTER")  # so the thread asks the next node, and waits
                for proxy in proxies.values():
                    proxy.hold()
                for _ in range(3):
                    await eventually(renewed(lambda: int(admin.pttl(place.name))), "it is renewed")
                await lock.release()

    asyncio.run(hold())
