"""The log of calls: a record for each acquire, wait, renewal and release, where the logger is enabled for DEBUG."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError

import redislock_fast
from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.waiting import FAR_S, until_queued
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The records, while locks are logged."""
    with caplog.at_level(logging.DEBUG, "redislock_fast.calls"):
        yield caplog


def texts(log: pytest.LogCaptureFixture) -> list[str]:
    """The records of calls, with their times left out."""
    records = [record for record in log.records if record.name == "redislock_fast.calls"]
    assert {record.levelno for record in records} <= {logging.DEBUG}
    return [re.sub(r" \d+\.\d{3} ms", " T ms", record.getMessage()) for record in records]


def pair_with(token_id: str) -> list[str]:
    """The records of an acquire and a release."""
    return [f"acquired 'name' after T ms, token id {token_id}", f"released 'name', held for T ms, token id {token_id}"]


def token_id_of_holder(client: redis.Redis) -> str:
    """The token id of the present holder."""
    holder = redislock_fast.holders(client, "name").holder
    assert holder is not None
    assert holder.token_id is not None
    return holder.token_id


@pytest.mark.parametrize(
    "options", [{}, {"linger": 0.05}, {"fencing": True}, {"auto_renew": True}, {"thread_local": False}], ids=str
)
def test_pair_is_logged(
    our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    with our_lock(valkey_client, b"name", timeout=FAR_S, **options):
        token_id = token_id_of_holder(valkey_client)
    assert pair_with(token_id) == texts(log)


def test_wait_is_logged(world: World, our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture) -> None:
    holder, waiter = (our_lock(valkey_client, "name", timeout=FAR_S) for _ in range(2))
    token_ids: list[str] = []

    def wait() -> None:
        with waiter:
            token_ids.append(token_id_of_holder(valkey_client))

    with holder:
        waiting = world.start(wait)
        until_queued(valkey_client, "name", 1)
    waiting.result()
    [token_id] = token_ids
    waited = f"waited for 'name' for T ms, token id {token_id}, by queue, handed over"
    assert {waited, *pair_with(token_id)} < set(texts(log))


def test_refusal_is_logged(our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture) -> None:
    valkey_client.set("name", "taken")
    assert not our_lock(valkey_client, "name").acquire(blocking=False)
    assert ["did not acquire 'name' for T ms"] == texts(log)


def test_error_is_logged_by_its_class(our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture) -> None:
    valkey_client.rpush("name", "a list")
    with pytest.raises(redis.ResponseError):
        our_lock(valkey_client, "name").acquire()
    assert ["did not acquire 'name' for T ms, ResponseError"] == texts(log)


def test_renewal_is_logged(our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture) -> None:
    with our_lock(valkey_client, "name", timeout=1.5, auto_renew=True):
        renewed = f"renewed 'name' in T ms, token id {token_id_of_holder(valkey_client)}"
        wait_until(lambda: renewed in texts(log), "it is renewed")


def test_release_of_a_lost_lock_is_logged(
    our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture
) -> None:
    lock = our_lock(valkey_client, "name", timeout=FAR_S)
    lock.acquire()
    token_id = token_id_of_holder(valkey_client)
    valkey_client.delete("name")
    with pytest.raises(LockNotOwnedError):
        lock.release()
    assert f"released 'name', which was lost before, held for T ms, token id {token_id}" == texts(log)[-1]


def test_redlock_is_logged(world: World, fleet: list[Server], log: pytest.LogCaptureFixture) -> None:
    clients = [world.connect(server.port) for server in fleet]
    with world.redlock(clients, timeout=FAR_S), redis.Redis(port=fleet[0].port) as client:
        token_id = token_id_of_holder(client)
    assert pair_with(token_id) == texts(log)


def test_batch_is_logged(world: World, valkey_client: redis.Redis, log: pytest.LogCaptureFixture) -> None:
    valkey_client.set("taken", "other")
    batch = world.locker(world.client(valkey_client)).acquire_many(["taken", "name", b"b", "c"], timeout=FAR_S)
    token_id = token_id_of_holder(valkey_client)
    valkey_client.delete("c")
    batch.release()
    assert {} == batch.release()
    assert [
        f"acquired 'name' and 2 more after T ms, token id {token_id}, 1 missed",
        f"released 'name' and 2 more, held for T ms, token id {token_id}, 1 lost before",
    ] == texts(log)


@pytest.mark.parametrize(("all_or_nothing", "how"), [(False, "by polling"), (True, "by queue, handed over")])
def test_wait_of_a_batch_is_logged(
    world: World, valkey_client: redis.Redis, log: pytest.LogCaptureFixture, all_or_nothing: bool, how: str
) -> None:
    client = world.client(valkey_client)
    with log.at_level(logging.INFO, "redislock_fast.calls"):
        holder = world.lock(client, "name", timeout=FAR_S)
    holder.acquire()

    def wait() -> str:
        settings = {"sleep": 0.01, "all_or_nothing": all_or_nothing}
        with world.locker(client).acquire_many(["a", "name"], FAR_S, FAR_S, **settings):
            return token_id_of_holder(valkey_client)

    waiting = world.start(wait)
    wait_until(lambda: valkey_client.exists("a"), "it has the other lock")
    if all_or_nothing:
        until_queued(valkey_client, "name", 1)
    holder.release()
    token_id = waiting.result()
    assert [
        f"waited for 'name' for T ms, token id {token_id}, {how}",
        f"acquired 'a' and 1 more after T ms, token id {token_id}",
        f"released 'a' and 1 more, held for T ms, token id {token_id}",
    ] == texts(log)


def test_batch_that_gets_nothing_is_logged(
    world: World, valkey_client: redis.Redis, log: pytest.LogCaptureFixture
) -> None:
    locker = world.locker(world.client(valkey_client))
    valkey_client.set("name", "taken")
    locker.acquire_many(["a", "name"], timeout=FAR_S, all_or_nothing=True).release()
    valkey_client.delete("name")
    valkey_client.rpush("name", "a list")
    with pytest.raises(redis.ResponseError):
        locker.acquire_many(["name"], timeout=FAR_S)
    assert ["did not acquire 'a' and 1 more for T ms", "did not acquire 'name' for T ms, ResponseError"] == texts(log)


def test_no_token_is_logged(our_lock: Any, valkey_client: redis.Redis, log: pytest.LogCaptureFixture) -> None:
    with our_lock(valkey_client, "name", timeout=FAR_S) as lock:
        token = lock.local.token.decode()
    assert 2 == len(texts(log))
    assert [] == [text for text in texts(log) if token in text or token[-20:] in text]


def test_lock_that_was_made_before_is_not_logged(
    our_lock: Any, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    before = our_lock(valkey_client, "name", timeout=FAR_S)
    with caplog.at_level(logging.DEBUG, "redislock_fast"):
        after = our_lock(valkey_client, "name", timeout=FAR_S)
        with before:
            assert [] == texts(caplog)
        assert [] == texts(caplog)
        with after:
            assert 1 == len(texts(caplog))
        assert 2 == len(texts(caplog))
