"""Locks on a real cluster of two nodes, whose slots move while locks are free, held or waited for.

Rules: one cluster of each kind of server serves the session; every test uses a name of its own, whose slot has never
moved, because a slot that comes back soon may be disputed between the nodes. Must not know: how the client finds them.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.lock
from redis.exceptions import LockNotOwnedError

from redislock_fast import Lock
from redislock_fast._fence import AcquireFenced
from redislock_fast._tokens import new_token
from redislock_fast._transport import transport_of
from redislock_fast.fencing import AsyncGuard, Guard, StaleFenceError
from redislock_fast.server import KINDS, Server
from tests.conftest import Servers
from tests.helpers import PATIENCE_S, start, wait_until

_BUS_PORT_OFFSET = 10_000
_SLOTS = 16_384
_FIRST_HALF = _SLOTS // 2


def _node_port() -> int:
    """A free port whose bus port is a port too, and free."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1] % 20_000 + 20_000
        with socket.socket() as node, socket.socket() as bus:
            try:
                node.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + _BUS_PORT_OFFSET))
            except OSError:
                continue
        return port


class Cluster:
    """Two nodes, each with half of the slots."""

    def __init__(self, nodes: list[Server]) -> None:
        self.nodes = nodes
        self.admins: list[Any] = [redis.Redis(port=node.port) for node in nodes]
        self.names = itertools.count()
        self._ids = [admin.execute_command("CLUSTER", "MYID").decode() for admin in self.admins]

    def form(self) -> None:
        """Make the nodes one cluster."""
        for admin, first, last in zip(self.admins, (0, _FIRST_HALF), (_FIRST_HALF - 1, _SLOTS - 1), strict=True):
            # Redis 6.2 has no ADDSLOTSRANGE.
            admin.execute_command("CLUSTER", "ADDSLOTS", *range(first, last + 1))
        for number, admin in enumerate(self.admins, start=1):
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number)
        self.admins[0].execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[1].port)
        wait_until(lambda: all(self._is_up(admin) for admin in self.admins), "the cluster is up")

    @staticmethod
    def _is_up(admin: Any) -> bool:
        info: bytes = admin.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in info and b"cluster_known_nodes:2" in info

    def move(self, slot: int, to: int) -> None:
        """Give a slot to a node, with the keys in it, as `redis-cli --cluster reshard` does, but all at once."""
        source, target = self.admins[1 - to], self.admins[to]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[1 - to])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[to])
        for key in source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.execute_command("MIGRATE", "127.0.0.1", self.nodes[to].port, key, 0, 5000)
        for admin in (target, source):
            admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", self._ids[to])


@pytest.fixture(scope="session")
def clusters(servers: Servers) -> Iterator[dict[str, Cluster]]:
    """The session's clusters by kind, each started when it is first asked for."""
    running: dict[str, Cluster] = {}
    yield running
    for cluster in running.values():
        for node in cluster.nodes:
            node.close()


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, servers: Servers, clusters: dict[str, Cluster]) -> Cluster:
    """A cluster of each kind of server in turn."""
    kind: str = request.param
    if kind not in clusters:
        servers.get(kind)  # skips or fails where it is not installed
        with ExitStack() as on_failure:
            nodes = [
                on_failure.enter_context(
                    Server(kind, {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}, _node_port())
                )
                for _ in range(2)
            ]
            clusters[kind] = Cluster(nodes)
            clusters[kind].form()
            on_failure.pop_all()
    return clusters[kind]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[redis.RedisCluster]:
    """A client of the cluster."""
    with redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port) as running:
        yield running


@dataclass(frozen=True)
class Place:
    """A lock's name and where its slot is.

    Attributes:
        home: the node that has its slot.
        away: the other one.
    """

    name: str
    cluster: Cluster
    slot: int
    home: int

    @property
    def away(self) -> int:
        return 1 - self.home

    def move(self) -> None:
        """Give the slot to the other node."""
        self.cluster.move(self.slot, self.away)


@pytest.fixture(params=[0, 1], ids=["first node", "second node"])
def place(request: pytest.FixtureRequest, client: redis.RedisCluster, cluster: Cluster) -> Place:
    """A name that no other test uses, whose slot is at each node in turn."""
    while True:
        name = f"name-{next(cluster.names)}"
        slot = slot_of(client, name)
        if (slot >= _FIRST_HALF) == request.param:
            return Place(name, cluster, slot, request.param)


def slot_of(client: redis.RedisCluster, name: str) -> int:
    slot: int = client.keyslot(name)  # type: ignore[no-untyped-call]
    return slot


def lock_of(client: redis.RedisCluster, name: str, **options: Any) -> Lock:
    lock = client.lock(name, lock_class=Lock, **options)
    assert isinstance(lock, Lock)
    return lock


def test_every_operation_on_either_node(client: redis.RedisCluster, place: Place) -> None:
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


def test_the_original_excludes_ours_and_ours_the_original(client: redis.RedisCluster, place: Place) -> None:
    ours, original = lock_of(client, place.name, timeout=10), redis.lock.Lock(client, place.name, timeout=10)
    with original:
        assert not ours.acquire(blocking=False)
        assert ours.locked()
    with ours:
        assert not original.acquire(blocking=False)


def test_locks_of_one_client_share_a_connection_per_node(cluster: Cluster) -> None:
    with redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, client_name="shared") as client:
        for number in range(20):
            with lock_of(client, f"name-{number}", timeout=10):
                pass
        for admin in cluster.admins:
            commands = [row["cmd"] for row in admin.client_list() if row["name"] == "shared"]
            assert len([command for command in commands if command in ("delifeq", "evalsha", "eval")]) == 1


def test_a_free_locks_slot_that_moved_is_followed(client: redis.RedisCluster, place: Place) -> None:
    lock = lock_of(client, place.name, timeout=10)
    with lock:
        pass
    place.move()
    for _ in range(2):
        with lock:
            assert lock.owned()
            assert not lock_of(client, place.name).acquire(blocking=False)


@pytest.mark.parametrize("operation", ["release", "extend", "reacquire", "owned", "locked"])
def test_a_held_locks_slot_that_moved_is_followed(client: redis.RedisCluster, place: Place, operation: str) -> None:
    lock = lock_of(client, place.name, timeout=10)
    lock.acquire()
    place.move()
    result = lock.extend(10) if operation == "extend" else getattr(lock, operation)()
    assert result is (None if operation == "release" else True)
    if operation != "release":
        lock.release()
    assert not lock.locked()


def test_a_waiter_follows_the_slot(client: redis.RedisCluster, place: Place) -> None:
    holder = lock_of(client, place.name, timeout=10)
    holder.acquire()
    waiter = start(lambda: lock_of(client, place.name, timeout=10, sleep=0.01).acquire(blocking_timeout=PATIENCE_S))
    place.move()
    holder.release()
    assert waiter.result(PATIENCE_S) is True


@pytest.mark.parametrize("operation", ["release", "extend", "reacquire"])
def test_a_lost_lock_whose_slot_moved_is_not_owned(client: redis.RedisCluster, place: Place, operation: str) -> None:
    lock = lock_of(client, place.name, timeout=10)
    lock.acquire()
    client.delete(place.name)
    place.move()
    with pytest.raises(LockNotOwnedError):
        lock.extend(10) if operation == "extend" else getattr(lock, operation)()


def test_the_callers_own_token_is_found_on_the_other_node(client: redis.RedisCluster, place: Place) -> None:
    lock_of(client, place.name, timeout=10).acquire(token="same")
    place.move()
    assert lock_of(client, place.name, timeout=10).acquire(blocking=False, token="same")


def test_a_slot_that_is_just_leaving_is_waited_for(client: redis.RedisCluster, place: Place) -> None:
    """While a slot migrates, a missing key answers ASK: the lock is neither free nor held until the move is over."""
    slot, admins = place.slot, place.cluster.admins
    source, target = admins[place.home], admins[place.away]
    lock = lock_of(client, place.name, timeout=10)
    ids = [admin.execute_command("CLUSTER", "MYID").decode() for admin in (source, target)]
    target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    try:
        with pytest.raises(redis.RedisError):
            lock.acquire(blocking_timeout=0.05)
    finally:
        for admin in (target, source):
            admin.execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
    with lock:
        assert lock.owned()


def test_numbers_move_with_the_slot(client: redis.RedisCluster, place: Place) -> None:
    fences = []
    for _ in range(2):
        for _ in range(2):
            operation = AcquireFenced(place.name.encode(), new_token(), 10_000)
            transport_of(client).execute(operation)
            fences.append(operation.fence)
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
        async with redis.asyncio.RedisCluster(host="127.0.0.1", port=place.cluster.nodes[0].port) as async_client:
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
