"""What a semaphore leaves on the server: each permit has its own end, and nothing stays after all have ended."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.exceptions import LockError, LockNotOwnedError, ResponseError
from redis.retry import Retry

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lock.test_faults_at_each_message import FAULTS
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.permits import (
    LIMIT_KEY,
    QUEUE,
    WAITERS,
    ends_of,
    held,
    new_tokens,
    now_ms,
    queue_up,
    run_acquire,
    run_release,
    run_resize,
    run_wait,
    take,
)
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")


def few() -> Retry:
    """A retry policy that soon gives up."""
    return Retry(ConstantBackoff(0.01), 3)


@pytest.fixture(autouse=True)
def _nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No error is left to the handler of an event loop."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


# ---- ends and ttls ----


def test_the_queue_is_kept_for_the_longest_interval_after_a_waiter_was_put_back(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=FAR_S, sleep=20_000)
    permit = semaphore.acquire()
    (answer,) = queue_up(world, [semaphore], client)
    semaphore.resize(1)  # the script looks at the first waiter, which it cannot admit
    assert client.pttl(QUEUE) > 3_600_000
    permit.release()
    take(answer).release()
    semaphore.resize(None)
    assert client.keys() == []


def test_each_permit_has_an_end_of_its_own_by_the_servers_clock(
    world: World, server: Server, client: redis.Redis
) -> None:
    connected = world.connect(server.port)
    before_ms = now_ms(client)
    brief = world.semaphore(connected, timeout=10, sleep=FAR_S).acquire()
    long = world.semaphore(connected, timeout=30, sleep=FAR_S).acquire()
    after_ms = now_ms(client)
    ends = sorted(ends_of(client).values())
    for end, ttl_ms in zip(ends, (10_000, 30_000), strict=True):
        assert int(before_ms) + ttl_ms <= end <= after_ms + ttl_ms
    brief.release()
    assert list(ends_of(client).values()) == ends[1:]
    long.release()


def test_the_ttl_of_the_key_is_the_latest_end_and_never_shortened(
    world: World, server: Server, client: redis.Redis
) -> None:
    connected = world.connect(server.port)
    long = world.semaphore(connected, 3, timeout=FAR_S, sleep=FAR_S).acquire()
    (end,) = ends_of(client).values()
    brief = world.semaphore(connected, 3, timeout=5, sleep=FAR_S)
    for _ in range(2):
        brief.acquire().release()
        assert end - now_ms(client) - 1000 <= client.pttl("name") <= end - now_ms(client) + 1000
    longer = world.semaphore(connected, 3, timeout=2 * FAR_S, sleep=FAR_S).acquire()
    assert 1000 * FAR_S < client.pttl("name")
    assert client.pttl("name") <= max(ends_of(client).values()) - now_ms(client) + 1000
    long.release()
    longer.release()
    assert client.keys() == []


def test_a_short_permit_does_not_end_a_long_one(client: redis.Redis) -> None:
    long, brief, third = new_tokens(3)
    run_acquire(client, long, ttl_ms=60_000)
    run_acquire(client, brief, ttl_ms=1)
    wait_until(lambda: now_ms(client) >= ends_of(client)[brief] + 1, "it has ended")
    assert run_acquire(client, third, ttl_ms=1) == 1  # whose own ttl purges nobody else
    assert set(ends_of(client)) == {long, third}
    assert client.pttl("name") > 50_000


def _have_changed(client: Any, before: dict[bytes, float]) -> bool:
    return ends_of(client) != before


def test_a_permit_is_renewed_and_released_while_the_server_has_no_memory_left(
    world: World, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    admin = connect(server.port)
    permit = world.semaphore(world.connect(server.port), timeout=0.9).acquire()
    admin.config_set("maxmemory", "1")
    for _ in range(3):
        before = ends_of(admin)
        wait_until(partial(_have_changed, admin, before), "it is renewed or has ended")
    assert (permit.valid, list(ends_of(admin))) == (True, list(before))
    permit.release()
    assert admin.keys() == []


def test_permits_that_all_have_ended_leave_nothing(client: redis.Redis) -> None:
    for token in new_tokens(3):
        run_acquire(client, token, limit=3, ttl_ms=20)
    wait_until(lambda: client.keys() == [], "all have ended")


def test_a_waiter_that_was_killed_leaves_nothing_after_the_others(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, **LATE)
    permit = semaphore.acquire()
    run_wait(client, new_tokens(1)[0], limit=1)
    assert client.exists(QUEUE, WAITERS) == 2
    permit.release()
    assert client.keys() == []


# ---- idempotence ----


def test_an_acquire_that_is_repeated_takes_one_place(client: redis.Redis) -> None:
    token, other = new_tokens(2)
    assert [run_acquire(client, token) for _ in range(3)] == [1, 1, 1]
    assert run_acquire(client, other) == 1
    assert run_acquire(client, token) == 1  # though it is full
    assert len(ends_of(client)) == 2


def test_a_release_that_is_repeated_or_a_strangers_changes_nothing(client: redis.Redis) -> None:
    token, other, stranger = new_tokens(3)
    for each in (token, other):
        run_acquire(client, each)
    assert run_release(client, stranger) == 0
    assert (run_release(client, token), run_release(client, token)) == (1, 0)
    assert list(ends_of(client)) == [other]


def test_a_request_to_join_that_is_repeated_keeps_its_place(client: redis.Redis) -> None:
    holder, first, second = new_tokens(3)
    run_acquire(client, holder, limit=1)
    arrivals = [run_wait(client, token, limit=1)[3] for token in (first, second, first)]
    assert arrivals[2] == 0 < arrivals[0] < arrivals[1]
    assert client.zrange(QUEUE, 0, -1) == [first, second]


def test_a_grant_that_is_asked_for_again_is_the_same(client: redis.Redis) -> None:
    (token,) = new_tokens(1)
    assert [run_wait(client, token) for _ in range(2)] == [[1, token + b"+"]] * 2
    assert len(ends_of(client)) == 1


def test_a_resize_that_is_repeated_changes_nothing(client: redis.Redis) -> None:
    assert [run_resize(client, 3) for _ in range(2)] == [1, 1]
    assert client.get(LIMIT_KEY) == b"3"
    assert [run_resize(client, None) for _ in range(2)] == [1, 1]
    assert client.keys() == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_holder_notices_no_fault_at_any_message(
    world: World, server: Server, client: redis.Redis, connect: Connect, fault: str
) -> None:
    for nth in itertools.count(1):
        with Proxy(server.port) as proxy:
            FAULTS[fault](proxy, nth)
            semaphore = world.semaphore(world.client(connect(proxy.port, retry=few())), timeout=FAR_S)
            permit = semaphore.acquire(blocking=False)
            assert (permit.valid, len(ends_of(client))) == (True, 1)
            permit.release()
            wait_until(lambda: client.keys() == [], "it is released")
            if not proxy.dropped.is_set():
                break
    assert nth > 2 or "message" in fault  # a holder gets none


@pytest.mark.parametrize("fault", FAULTS)
def test_a_waiter_gets_a_permit_whatever_message_is_lost(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect, fault: str
) -> None:
    for nth in itertools.count(1):
        with Proxy(valkey.port) as proxy:
            FAULTS[fault](proxy, nth)
            holder = world.semaphore(world.connect(valkey.port), 1, timeout=FAR_S)
            waiter = world.semaphore(world.client(connect(proxy.port, retry=few())), 1, timeout=FAR_S, sleep=0.02)
            permit = holder.acquire()
            answer = world.start(waiter.acquire)
            wait_until(lambda: proxy.dropped.is_set() or valkey_client.zcard(QUEUE) == 1, "it waits")
            permit.release()
            granted = take(answer)
            assert held(valkey_client) == 1
            granted.release()
            wait_until(lambda: valkey_client.keys() == [], "nothing is left")
            if not proxy.dropped.is_set():
                break
    assert nth > 1


# ---- keys of another kind ----


@pytest.mark.parametrize("value", ["text", "rlf:" + 32 * "0", "list"])
def test_a_key_of_another_kind_is_refused_at_once_and_kept(
    world: World, server: Server, client: redis.Redis, value: str
) -> None:
    semaphore = world.semaphore(world.connect(server.port), **LATE)
    if value == "list":
        client.rpush("name", value)
    else:
        client.set("name", value)
    kept = client.dump("name")
    for call in (
        semaphore.acquire,
        lambda: semaphore.acquire(blocking=False),
        lambda: semaphore.resize(3),
        semaphore.status,
        semaphore.__enter__,
    ):
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            call()
    assert (client.dump("name"), client.keys()) == (kept, [b"name"])


def test_a_semaphore_whose_key_becomes_a_string_loses_its_permits_and_deletes_nothing(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=FAR_S, sleep=0.05)
    permit = semaphore.acquire()
    waiting = world.start(lambda: semaphore.acquire(blocking_timeout=PATIENCE_S))
    wait_until(lambda: client.zcard(QUEUE) == 1, "it waits")
    client.set("name", "another's")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        waiting.result(PATIENCE_S)
    with pytest.raises(LockNotOwnedError, match="permit"):
        permit.release()
    wait_until(lambda: client.keys() == [b"name"], "the queue is left")
    assert client.get("name") == b"another's"


def test_a_waiter_leaves_the_queue_of_a_key_that_has_become_a_string(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, **LATE)
    permit = semaphore.acquire()
    waiting = world.start(lambda: semaphore.acquire(blocking_timeout=0.3))
    wait_until(lambda: client.zcard(QUEUE) == 1, "it waits")
    client.set("name", "another's")
    assert waiting.result(PATIENCE_S) is None
    wait_until(lambda: client.keys() == [b"name"], "the queue is left")
    with pytest.raises(LockNotOwnedError):
        permit.release()


def test_a_lock_on_the_key_of_a_semaphore_is_refused_and_changes_nothing(
    world: World, our_lock: Any, server: Server, client: redis.Redis
) -> None:
    permit = world.semaphore(world.connect(server.port), **LATE).acquire()
    kept = client.dump("name")
    lock = our_lock(client, "name", timeout=FAR_S)
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        lock.acquire()
    lock.local.token = new_tokens(1)[0].replace(b"2", b"0", 1)  # of a lock: that of the permit may release it
    with pytest.raises((LockError, ResponseError)):
        lock.release()
    assert client.dump("name") == kept
    permit.release()
    assert client.keys() == []
