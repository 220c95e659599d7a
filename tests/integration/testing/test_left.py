"""`assert_no_locks_left`: names the locks that are held, or waited for, at the end of a test."""

from __future__ import annotations

import os
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio

from redislock_fast import Lock, LossReason
from redislock_fast.server import Server
from redislock_fast.testing import assert_no_locks_left, lose
from tests.conftest import Connect
from tests.support.clusters import Place
from tests.support.holding import Losses
from tests.support.waiting import FAR_S, Peer, until_queued

FOREIGN: dict[str, Any] = {"text": "rlf:", "number": 17, "own": "rlf:a-users-own-token"}


@pytest.fixture(params=[False, True], ids=["bytes", "decoded"])
def reader(request: pytest.FixtureRequest, server: Server, connect: Connect) -> redis.Redis:
    """A client that reads bytes or texts."""
    return connect(server.port, decode_responses=request.param)


def test_server_without_locks_is_well(reader: redis.Redis) -> None:
    reader.mset(FOREIGN)
    reader.zadd("jobs:queue", {"job": 1})
    reader.hset("hash", "rlf:", "rlf:")
    assert_no_locks_left(reader)


def test_values_that_are_no_text_are_no_locks(reader: redis.Redis, client: redis.Redis) -> None:
    client.set("pickle", b"\xff\x00")
    client.zadd("set", {b"\xff\x00": 1})
    assert_no_locks_left(reader)
    with Lock(client, "name", timeout=FAR_S), pytest.raises(AssertionError, match="'name' is held"):
        assert_no_locks_left(reader)


def test_released_lock_is_not_left(reader: redis.Redis, client: redis.Redis) -> None:
    with Lock(client, "name", timeout=FAR_S, fencing=True):
        pass
    assert_no_locks_left(reader)


def test_locks_that_are_held_are_named_with_their_holders(reader: redis.Redis, client: redis.Redis) -> None:
    names = ("first", "{second}:tagged")
    locks = [Lock(client, name, timeout=FAR_S) for name in names]
    for lock in locks:
        lock.acquire()
    with pytest.raises(AssertionError) as caught:
        assert_no_locks_left(reader)
    text = str(caught.value)
    assert [f"{name!r} is held by" in text for name in names] == [True, True]
    assert f"pid {os.getpid()} on" in text
    for lock in locks:
        token = client.get(lock.name)
        assert isinstance(token, bytes)
        assert token.decode() not in text
        lock.release()


def test_lock_of_another_process_and_its_waiters_are_named(reader: redis.Redis, client: redis.Redis) -> None:
    with Lock(client, "name", timeout=FAR_S), Peer("threads", client.connection_pool.connection_kwargs["port"]) as peer:
        peer.ask("acquire")
        until_queued(client, "name", 1)
        with pytest.raises(AssertionError, match=r"'name' has waiters, 'name' is held by"):
            assert_no_locks_left(reader)


def test_name_may_be_any_bytes(reader: redis.Redis, client: redis.Redis) -> None:
    client.set(b"\xff", "x")
    client.zadd(b"\xff\xff", {"x": 1})
    assert_no_locks_left(reader)
    with Lock(client, b"\xff\x00", timeout=FAR_S), pytest.raises(AssertionError, match=r"'\\\\xff\\x00' is held"):
        assert_no_locks_left(reader)


def test_locks_of_a_cluster_are_found(cluster_client: redis.RedisCluster, place: Place) -> None:
    with Lock(cluster_client, place.name, timeout=FAR_S), pytest.raises(AssertionError, match=place.name):
        assert_no_locks_left(cluster_client)
    assert_no_locks_left(cluster_client)


@pytest.mark.parametrize("client_class", [redis.asyncio.Redis, dict])
def test_other_clients_are_refused(client_class: Any) -> None:
    with pytest.raises(TypeError):
        assert_no_locks_left(client_class())


def test_both_helpers_work_on_fakeredis(losses: Losses) -> None:
    with fakeredis.FakeRedis() as client:
        lock = Lock(client, "name", timeout=FAR_S, auto_renew=True, on_lost=losses)
        lock.acquire()
        with pytest.raises(AssertionError, match="'name' is held"):
            assert_no_locks_left(client)
        lose(lock)
        assert losses.reasons == [LossReason.EXPIRED]
        assert_no_locks_left(client)
