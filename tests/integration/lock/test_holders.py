"""`holders`: which process holds a lock, and which processes wait for it, for threads and for tasks.

A server before Redis 7.2 does not know of libraries: there, a connection tells of itself by its name, unless its client
gives it another one, as a `Peer` does.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
from redis.exceptions import DataError, LockError, NoPermissionError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.clusters import Cluster
from tests.support.helpers import CLASSES, in_thread, wait_until
from tests.support.waiting import FAR_S, Peer, connections, until_queued
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")

UNKNOWN = ("unknown", None, None, None)


def holders(world: World, client: Any, name: Any = "name") -> redislock_fast.LockReport:
    """The report, in the test's world."""
    report = waited(world.ours.holders(client, name))
    assert isinstance(report, redislock_fast.LockReport)
    return report


def described(participant: Any) -> tuple[Any, ...]:
    """What is known of it, without times."""
    return (participant.kind, participant.identifier, participant.process, participant.alive)


def knows_libraries(client: redis.Redis) -> bool:
    return "lib-name" in client.client_list()[0]


@pytest.mark.parametrize("decodes", [False, True])
def test_free_lock_has_no_holder(world: World, server: Server, decodes: bool) -> None:
    report = holders(world, world.connect(server.port, decode_responses=decodes))
    assert (False, None, None, False, None, 0, ()) == (
        report.held, report.holder, report.ttl_s, report.contended, report.fence, report.waiting, report.waiters,
    )  # fmt: skip


def test_new_connection_tells_whose_it_is_once(world: World, server: Server, client: redis.Redis) -> None:
    told: list[str] = []
    expected = 1 if knows_libraries(client) else 0  # its connection is an old one now
    with redis.Redis(port=server.port) as watching, watching.monitor() as monitor:
        with world.lock(world.connect(server.port), timeout=FAR_S):
            client.get("marker")
        while "GET marker" not in told:
            told.append(monitor.next_command()["command"])
    names = [command for command in told if "LIB-" in command]
    assert len(names) == expected
    assert all("redislock_fast(" in name for name in names)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decodes", [False, True])
def test_holder_is_known_by_its_process(
    world: World, server: Server, client: redis.Redis, decodes: bool, protocol: int
) -> None:
    ours = world.connect(server.port, decode_responses=decodes, protocol=protocol)
    lock = world.lock(ours, timeout=FAR_S)
    with lock:  # the first request on its connection
        report = holders(world, ours)
        holder = report.holder
        assert holder is not None
        value = client.get("name")
        assert isinstance(value, bytes)
        assert ("redislock_fast", value[4:15].decode(), True, None) == (
            holder.kind, holder.identifier, holder.alive, holder.waited_s,
        )  # fmt: skip
        process = holder.process
        assert process is not None
        assert (os.getpid(), socket.gethostname().partition(".")[0][:30]) == (process.pid, process.host)
        assert process.program
        assert process.address.startswith("127.0.0.1:")
        assert 0 <= process.connected_s <= 600
        assert report.ttl_s is not None
        assert 0 < report.ttl_s <= FAR_S
        assert (True, False, 0, ()) == (report.held, report.contended, report.waiting, report.waiters)
    assert not holders(world, ours).held


def test_lock_without_a_ttl_has_no_end(world: World, server: Server) -> None:
    client = world.connect(server.port)
    with world.lock(client):
        report = holders(world, client)
    assert report.held
    assert report.ttl_s is None


def test_fence_is_the_holders(world: World, server: Server) -> None:
    client = world.connect(server.port)
    with world.lock(client, timeout=FAR_S, fencing=True) as lock:
        assert lock.fence == holders(world, client).fence
    with world.lock(client, timeout=FAR_S):
        assert holders(world, client).fence is None


def test_waiters_are_listed_in_their_order(world: World, server: Server, client: redis.Redis) -> None:
    ours = world.connect(server.port)
    expected = True if knows_libraries(client) else None
    with Peer("threads", server.port, timeout=FAR_S) as first, Peer("tasks", server.port, timeout=FAR_S) as second:
        with world.lock(ours, timeout=FAR_S):
            for number, peer in enumerate((first, second)):
                peer.ask("acquire")
                until_queued(client, "name", number + 1)
            report = holders(world, ours)
        assert first.answer()
        heir = holders(world, ours).holder
        first.call("release")
        assert second.answer()
        second.call("release")
    assert (True, 2, 2) == (report.contended, report.waiting, len(report.waiters))
    assert [("redislock_fast", expected)] * 2 == [(one.kind, one.alive) for one in report.waiters]
    ages_s = [one.waited_s or 0.0 for one in report.waiters]
    assert 0 < ages_s[1] < ages_s[0]
    assert heir is not None
    assert report.waiters[0].identifier == heir.identifier
    pids = {one.process.pid for one in report.waiters if one.process is not None} - {os.getpid()}
    assert (2 if expected else 0) == len(pids)


def test_process_that_is_gone_is_not_alive(world: World, server: Server, client: redis.Redis) -> None:
    ours = world.connect(server.port)
    told = knows_libraries(client)
    with Peer("threads", server.port, timeout=FAR_S) as peer:
        assert peer.call("acquire")
        before = holders(world, ours).holder
        peer.kill()
    wait_until(lambda: not connections(client, peer.client_name), "the server has noticed")
    after = holders(world, ours).holder
    assert before is not None
    assert after is not None
    assert before.identifier == after.identifier
    assert (True if told else None, False if told else None) == (before.alive, after.alive)
    assert (told, False) == (before.process is not None, after.process is not None)


def test_holder_whose_connection_was_replaced_is_alive(world: World, server: Server, client: redis.Redis) -> None:
    ours = world.connect(server.port)
    lock = world.lock(ours, timeout=FAR_S)
    lock.acquire()
    client.client_kill_filter(_type="normal", skipme=True)
    client.client_kill_filter(_type="pubsub", skipme=True)
    assert lock.extend(1)
    holder = holders(world, ours).holder
    assert holder is not None
    assert holder.alive is True
    assert holder.process is not None
    assert os.getpid() == holder.process.pid
    lock.release()


def test_lock_of_redis_py_has_an_unknown_holder(world: World, server: Server, client: redis.Redis) -> None:
    lock = CLASSES["redis-py"](client, "name", timeout=FAR_S)
    assert in_thread(lock.acquire)
    report = holders(world, world.connect(server.port))
    assert report.held
    assert UNKNOWN == described(report.holder)
    assert report.ttl_s is not None


@pytest.mark.parametrize("token", ["canary", "rlf:" + "canary" * 5 + "ca", "c0ffee" * 6], ids=str)
def test_no_token_is_shown(world: World, server: Server, client: redis.Redis, token: str) -> None:
    ours = world.connect(server.port)
    lock = world.lock(ours, timeout=FAR_S, fencing=True)
    assert lock.acquire(token=token)
    report = holders(world, ours)
    assert UNKNOWN == described(report.holder)
    assert token not in repr(report)
    lock.release()
    lock.acquire()
    value = client.get("name")
    assert isinstance(value, bytes)
    shown = repr(holders(world, ours))
    assert value[4:15].decode() in shown
    assert value[15:].decode() not in shown
    lock.release()


def test_key_that_is_no_string_has_an_unknown_holder(world: World, server: Server, client: redis.Redis) -> None:
    client.lpush("name", "x")
    report = holders(world, world.connect(server.port))
    assert UNKNOWN == described(report.holder)


@pytest.mark.parametrize("rules", [("-client",), ("-zrange", "-zcard", "-hmget", "-time", "-pttl")], ids=str)
def test_what_the_user_may_not_read_is_not_known(
    world: World, server: Server, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    with world.lock(world.connect(server.port), timeout=FAR_S):
        report = holders(world, world.connect(server.port, **acl_user(server, *rules).options()))
    assert report.holder is not None
    assert "redislock_fast" == report.holder.kind
    if rules == ("-client",):
        assert (None, None) == (report.holder.process, report.holder.alive)
        assert 0 == report.waiting
    else:
        assert (None, None, ()) == (report.ttl_s, report.waiting, report.waiters)
        assert report.holder.alive


def test_holder_that_may_not_tell_of_itself_is_not_called_dead(
    world: World, server: Server, acl_user: MakeUser
) -> None:
    silent = world.connect(server.port, **acl_user(server, "-client").options())
    lock = world.lock(silent, timeout=FAR_S)
    lock.acquire()
    lock.release()
    with lock:  # a later request than that which connects
        holder = holders(world, world.connect(server.port)).holder
    assert holder is not None
    assert (None, None) == (holder.process, holder.alive)


def test_lock_that_the_user_may_not_read_is_an_error(world: World, server: Server, acl_user: MakeUser) -> None:
    client = world.connect(server.port, **acl_user(server, "-get").options())
    with pytest.raises(NoPermissionError):
        holders(world, client)


def test_batch_holder_is_known(world: World, server: Server) -> None:
    client = world.connect(server.port)
    batch = world.locker(client).acquire_many(["a", "b"], timeout=FAR_S)
    for name in ("a", "b"):
        holder = holders(world, client, name).holder
        assert holder is not None
        assert holder.alive
    batch.release()


@pytest.mark.parametrize("name", [None, [], True])
def test_bad_names_are_refused(world: World, server: Server, name: Any) -> None:
    with pytest.raises(DataError):
        holders(world, world.connect(server.port), name)


def test_clients_of_the_other_kind_and_pipelines_are_refused(world: World, server: Server, connect: Connect) -> None:
    other = redis.asyncio.Redis(port=server.port) if world.in_threads else connect(server.port)
    for client in (other, world.connect(server.port).pipeline(), object()):
        with pytest.raises(TypeError):
            holders(world, client)


def test_client_with_methods_of_its_own_tells_of_the_lock_alone(world: World) -> None:
    pytest.importorskip("lupa")  # for the scripts of fakeredis
    kind = fakeredis.FakeRedis if world.in_threads else fakeredis.FakeAsyncRedis
    client = world.keep(kind())
    with world.lock(client, timeout=FAR_S):
        report = holders(world, client)
    assert report.holder is not None
    assert ("redislock_fast", None, None) == (report.holder.kind, report.holder.alive, report.waiting)


@IN_THREADS
def test_holder_in_a_cluster(cluster: Cluster, cluster_client: redis.RedisCluster) -> None:
    name = cluster.name()
    lock = redislock_fast.Lock(cluster_client, name, timeout=FAR_S)
    with lock:
        report = redislock_fast.holders(cluster_client, name)
    assert report.holder is not None
    assert report.holder.process is not None
    assert (os.getpid(), True, 0) == (report.holder.process.pid, report.holder.alive, report.waiting)
    assert not redislock_fast.holders(cluster_client, name).held


@IN_THREADS
def test_lost_lock_is_another_holders(client: redis.Redis) -> None:
    lock = redislock_fast.Lock(client, "name", timeout=FAR_S)
    lock.acquire()
    client.set("name", "stolen")
    assert UNKNOWN == described(redislock_fast.holders(client, "name").holder)
    with pytest.raises(LockError):
        lock.release()
