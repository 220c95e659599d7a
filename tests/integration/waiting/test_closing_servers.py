"""Waiting at proxies that close the connection for a command that they do not know, instead of answering an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio.retry
import redis.retry
from redis.backoff import NoBackoff

from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, HEARD_S, queue_of
from tests.support.worlds import World

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*lib_name:DeprecationWarning"),  # the way that redis-py 5 knows, too
]

SOON: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.02, "thread_local": False}
"""Settings of a lock that polls often."""

UNKNOWN = [
    ("COMMAND",),
    ("SUBSCRIBE",),
    ("EVALSHA 3", "EVAL 3"),
    ("COMMAND", "HELLO", "CLIENT", "SUBSCRIBE", "EVALSHA 3", "EVAL 3"),
]
"""The commands that some proxy does not know; a script of the queue has three keys."""

MakeClient = Callable[[], Any]


@pytest.fixture
def make(world: World, proxy: Proxy) -> MakeClient:
    """Makes clients of the proxy that neither retry nor send what it does not know."""
    retry = redis.retry.Retry if world.in_threads else redis.asyncio.retry.Retry
    options: dict[str, Any] = {"protocol": 2, "lib_name": None, "lib_version": None}
    return lambda: world.connect(proxy.port, retry=retry(NoBackoff(), 0), **options)


@pytest.mark.parametrize("unknown", UNKNOWN, ids=" ".join)
def test_waiter_gets_the_lock_by_polling(
    world: World, proxy: Proxy, client: redis.Redis, make: MakeClient, unknown: tuple[str, ...]
) -> None:
    proxy.close_on(*unknown)
    holder, waiter = (world.lock(make(), **SOON) for _ in range(2))
    assert holder.acquire()
    assert holder.extend(1)
    answer = world.start(waiter.acquire)
    sent = proxy.requests["SET"]
    wait_until(lambda: answer.done() or proxy.requests["SET"] >= sent + 4, "it polls")
    assert not answer.done()
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert waiter.owned()
    waiter.release()
    wait_until(lambda: client.keys() == [], "nothing is left")


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("unknown", UNKNOWN, ids=" ".join)
def test_commands_are_not_sent_again_after_two_losses_in_a_row(
    world: World, proxy: Proxy, client: redis.Redis, make: MakeClient, unknown: tuple[str, ...]
) -> None:
    proxy.close_on(*unknown)
    ours = make()
    client.set("name", "another's")
    first = world.start(world.lock(ours, **SOON).acquire)
    wait_until(lambda: proxy.requests["SET"] >= 6, "it polls, after two losses")
    client.delete("name")
    assert first.result(PATIENCE_S) is True
    client.set("name", "another's")
    counts = [proxy.requests[command] for command in ("COMMAND", "SUBSCRIBE", "EVALSHA", "EVAL")]
    for _ in range(3):
        assert not world.lock(ours, **SOON).acquire(blocking_timeout=0.1)
    assert [proxy.requests[command] for command in ("COMMAND", "SUBSCRIBE", "EVALSHA", "EVAL")] == counts
    assert max(counts[:2]) <= 3


def test_holder_releases_a_lock_for_which_others_queue(
    world: World, proxy: Proxy, client: redis.Redis, make: MakeClient
) -> None:
    proxy.close_on("COMMAND", "EVALSHA 3", "EVAL 3")
    holder = world.lock(make(), **SOON)
    waiter = world.lock(world.connect(client.connection_pool.connection_kwargs["port"]), **SOON)
    assert holder.acquire()
    answer = world.start(waiter.acquire)
    wait_until(lambda: answer.done() or client.get("name") == holder.local.token + b"+", "it queues")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert client.keys() == []


@pytest.mark.parametrize("unknown", ["COMMAND", "SUBSCRIBE"])
def test_log_says_that_locks_poll(
    world: World, proxy: Proxy, client: redis.Redis, make: MakeClient, caplog: pytest.LogCaptureFixture, unknown: str
) -> None:
    proxy.close_on(unknown)
    client.set("name", "another's")
    with caplog.at_level(logging.INFO, "redislock_fast._transport.base"):
        assert not world.lock(make(), **SOON).acquire(blocking_timeout=HEARD_S)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "polling" in caplog.text


@pytest.mark.parametrize("lost", ["COMMAND", "SUBSCRIBE", "EVALSHA"])
def test_waiter_queues_after_one_loss(
    world: World, proxy: Proxy, client: redis.Redis, make: MakeClient, lost: str
) -> None:
    holder = world.lock(world.connect(client.connection_pool.connection_kwargs["port"]), timeout=FAR_S)
    waiter = world.lock(make(), timeout=FAR_S, sleep=FAR_S, thread_local=False)
    proxy.drop_request(lost)
    assert holder.acquire()
    answer = world.start(waiter.acquire)
    wait_until(lambda: answer.done() or client.zcard(queue_of("name")) == 1, "it queues")
    assert proxy.dropped.is_set()
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


def test_waiter_queues_though_connections_break_again_and_again(
    world: World, proxy: Proxy, client: redis.Redis, make: MakeClient
) -> None:
    holder = world.lock(world.connect(client.connection_pool.connection_kwargs["port"]), timeout=FAR_S)
    waiter = world.lock(make(), timeout=FAR_S, sleep=FAR_S, thread_local=False)
    assert holder.acquire()
    answer = world.start(waiter.acquire)
    for joined in range(1, 5):
        wait_until(lambda: answer.done() or proxy.replies["SUBSCRIBE"] >= joined, "it listens")  # noqa: B023
        wait_until(lambda: answer.done() or client.zcard(queue_of("name")) == 1, "it queues")
        proxy.wait_for_quiet()
        if joined < 4:
            client.delete(queue_of("name"))
            proxy.cut()
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
