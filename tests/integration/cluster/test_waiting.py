"""Waiting on a real cluster: sharded messages, locks in many slots, slots that move while somebody waits.

Rules: those of `support/clusters.py`. Redis 6.2 has no sharded messages: there waiters poll,
everywhere else they wait with an interval that no test lives to see.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.asyncio

from tests.support.clusters import Cluster, Place, connect
from tests.support.helpers import PATIENCE_S
from tests.support.waiting import FAR_S, LATE, Callers, Contender, identifier_of, queued, serve, until_queued


def has_messages(cluster: Cluster) -> bool:
    return cluster.kind != "redis-6.2"


def late(cluster: Cluster) -> dict[str, Any]:
    """Settings of a lock whose waiters must be told, where they can be."""
    return LATE if has_messages(cluster) else {"timeout": FAR_S, "sleep": 0.02}


def queue_up(contender: Contender, cluster: Cluster, admin: redis.RedisCluster) -> Future[Any]:
    """Let it wait."""
    length = queued(admin, contender.lock.name)
    answer = contender.acquire(blocking_timeout=PATIENCE_S)
    if has_messages(cluster):
        until_queued(admin, contender.lock.name, length + 1)
    return answer


def hand_over(holder: Contender, waiter: Contender, cluster: Cluster, admin: redis.RedisCluster) -> None:
    """The waiter waits for the holder's lock, gets it and releases it."""
    assert holder.call("acquire")
    answer = queue_up(waiter, cluster, admin)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


@pytest.mark.slow
def test_a_lock_is_handed_over(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, place: Place
) -> None:
    first, second, third = (callers.contender(connect(callers, cluster), place.name, **late(cluster)) for _ in range(3))
    for _ in range(2):
        assert first.call("acquire")
        answers = [queue_up(waiter, cluster, cluster_client) for waiter in (second, third)]
        first.release()
        order = serve([second, third], answers)
        assert order == [0, 1] or not has_messages(cluster)
    assert not cluster_client.exists(place.name)


@pytest.mark.parametrize("name", [b"{", b"}", b"{}", b"}{", b"a{b}c", b"a{}{b}", b"{a", b"a}", b"\xff\x00"], ids=ascii)
def test_a_lock_of_any_name_is_handed_over(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, name: bytes
) -> None:
    holder, waiter = (callers.contender(connect(callers, cluster), name, **late(cluster)) for _ in range(2))
    hand_over(holder, waiter, cluster, cluster_client)
    assert not cluster_client.exists(name)


def test_waiters_for_locks_in_many_slots_share_a_connection_per_node(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster
) -> None:
    names = [cluster.name() for _ in range(20)]
    client_name = f"waiters-{cluster.name()}"
    of_holders, of_waiters = connect(callers, cluster), connect(callers, cluster, client_name=client_name)
    holders, waiters = (
        [callers.contender(one, name, **late(cluster)) for name in names] for one in (of_holders, of_waiters)
    )
    for holder in holders:
        assert holder.call("acquire")
    answers = [queue_up(waiter, cluster, cluster_client) for waiter in waiters]
    if has_messages(cluster):
        for admin in map(cluster.admins.__getitem__, cluster.primaries()):
            rows = [row for row in admin.client_list() if row["name"] == client_name]
            assert len([row for row in rows if int(row["ssub"])]) == 1
    for holder in holders:
        holder.release()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert answer.result(PATIENCE_S) is True
        waiter.release()


def test_waiters_follow_a_slot_that_moves(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, place: Place
) -> None:
    holder, *waiters = (
        callers.contender(connect(callers, cluster), place.name, timeout=FAR_S, sleep=0.05) for _ in range(4)
    )
    assert holder.call("acquire")
    answers = [queue_up(waiter, cluster, cluster_client) for waiter in waiters]
    place.move()
    holder.release()
    serve(waiters, answers)


def test_a_lock_is_handed_over_after_its_slot_has_moved_and_come_back(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, place: Place
) -> None:
    holder, waiter = (callers.contender(connect(callers, cluster), place.name, **late(cluster)) for _ in range(2))
    hand_over(holder, waiter, cluster, cluster_client)
    for way in [(place.home, place.away), (place.away, place.home)]:
        cluster.settle()
        cluster.move(place.slot, *way)
        hand_over(holder, waiter, cluster, cluster_client)


def test_token_has_the_identifier_of_the_channel_in_its_slot(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, place: Place
) -> None:
    if not has_messages(cluster):
        pytest.skip("it has no sharded messages")
    client = connect(callers, cluster)
    holder, waiter = (callers.contender(client, place.name, **late(cluster)) for _ in range(2))
    assert holder.call("acquire")
    holder.release()
    assert holder.call("acquire")  # by a connection that was there before
    identifier = identifier_of(cluster_client, place.name)
    answer = queue_up(waiter, cluster, cluster_client)
    channels = [
        channel.rpartition(b":rlf:")[2]
        for admin in map(cluster.admins.__getitem__, cluster.primaries())
        for channel in admin.execute_command("PUBSUB SHARDCHANNELS", "*:rlf:*")
    ]
    assert identifier in channels  # of other tests, too
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert identifier == identifier_of(cluster_client, place.name)
