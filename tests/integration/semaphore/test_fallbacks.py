"""Semaphores where the server knows less, allows less, or is more than one; long queues; users' fakes.

Rules: real servers and users. A waiter that must be told has an interval longer than any test; one that can only ask
has a short one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio
from redis.exceptions import NoPermissionError

from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.clusters import Cluster, Place
from tests.support.helpers import PATIENCE_S, run_script, wait_until
from tests.support.holding import KEPT_S
from tests.support.permits import (
    LIMIT_KEY,
    QUEUE,
    WAITERS,
    ends_of,
    first_done,
    held,
    new_tokens,
    run_acquire,
    run_release,
    run_resize,
    run_wait,
    take,
)
from tests.support.waiting import FAR_S, LATE, until_queued
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")

SOON: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.02}


def never_overshoots(world: World, semaphore: Any, admin: redis.Redis) -> None:
    """Two of five callers hold at once, and each gets its turn."""
    most: list[int] = []

    def work() -> None:
        for _ in range(3):
            with semaphore as permit:
                assert permit.valid
                most.append(held(admin))

    for each in [world.start(work) for _ in range(5)]:
        each.result(2 * PATIENCE_S)
    assert len(most) == 15
    assert max(most) <= 2
    assert admin.exists("name", QUEUE) == 0


# ---- what a user may not do ----


@pytest.mark.parametrize(
    "rules",
    [
        ("-subscribe",), ("-publish",), ("-pubsub",), ("-subscribe", "-publish", "-pubsub"),
        ("-hello",), ("-command",), ("-client",), ("-unlink",), ("-hscan",), ("resetchannels",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_user_with_fewer_rights_never_overshoots(
    world: World, server: Server, client: redis.Redis, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    user = acl_user(server, *rules)
    never_overshoots(world, world.semaphore(world.connect(server.port, **user.options()), **SOON), client)


@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}, {"decode_responses": True}], ids=str)
def test_every_protocol_never_overshoots(
    world: World, server: Server, client: redis.Redis, options: dict[str, Any]
) -> None:
    semaphore = world.semaphore(world.connect(server.port, **options), **SOON)
    never_overshoots(world, semaphore, client)
    semaphore.resize(3)
    report = semaphore.status()
    assert (report.limit, report.held, report.waiting) == (3, 0, 0)
    semaphore.resize(None)
    assert client.exists(LIMIT_KEY) == 0


def test_a_waiter_that_cannot_be_told_takes_what_a_release_leaves(
    world: World, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser
) -> None:
    user = acl_user(valkey, "-pubsub")
    holder = world.semaphore(world.connect(valkey.port, **user.options()), 1, **LATE)
    waiter = world.semaphore(world.connect(valkey.port), 1, **SOON)
    permit = holder.acquire()
    answer = world.start(waiter.acquire)
    wait_until(lambda: valkey_client.zcard(QUEUE) == 1, "it waits")
    permit.release()
    granted = take(answer)
    assert held(valkey_client) == 1
    granted.release()
    assert valkey_client.keys() == []


def test_scripts_that_are_forbidden_raise_an_error_with_the_name(
    world: World, server: Server, client: redis.Redis, acl_user: MakeUser
) -> None:
    user = acl_user(server, "-eval", "-evalsha", "-script")
    semaphore = world.semaphore(world.connect(server.port, **user.options()), **SOON)
    for call in (semaphore.acquire, lambda: semaphore.acquire(blocking=False), lambda: semaphore.resize(3)):
        with pytest.raises(NoPermissionError) as caught:
            call()
        assert getattr(caught.value, "__notes__", ["of the semaphore 'name'"]) == ["of the semaphore 'name'"]
    assert client.keys() == []


def test_a_user_that_may_not_read_the_clients_still_reads_the_status(
    world: World, valkey: Server, acl_user: MakeUser
) -> None:
    user = acl_user(valkey, "-client|list")
    semaphore = world.semaphore(world.connect(valkey.port, **user.options()), **LATE)
    with semaphore:
        report = semaphore.status()
    assert (report.held, [holder.process for holder in report.holders]) == (1, [None])


# ---- clusters ----


def in_cluster(world: World, cluster: Cluster, limit: int, name: str, **settings: Any) -> Any:
    """A semaphore on a client of its own."""
    kind: Any = redis.RedisCluster if world.in_threads else redis.asyncio.RedisCluster
    return world.semaphore(world.keep(kind(host="127.0.0.1", port=cluster.port)), limit, name, **settings)


@pytest.mark.slow
def test_permits_are_handed_over_in_a_cluster_in_the_order_of_arrival(
    world: World, cluster: Cluster, cluster_client: redis.RedisCluster, place: Place
) -> None:
    has_messages = cluster.kind != "redis-6.2"  # else waiters poll
    settings = LATE if has_messages else SOON
    first, second = (in_cluster(world, cluster, 2, place.name, **settings) for _ in range(2))
    permits = [first.acquire(), second.acquire()]
    answers = []
    for semaphore in (first, second, second, first):
        answers.append(world.start(semaphore.acquire))
        if has_messages:
            until_queued(cluster_client, place.name, len(answers))
    order = []
    while answers:
        permits.pop(0).release()
        order.append(first_done(answers))
        permits.append(take(answers.pop(order[-1])))
        assert cluster_client.zcard(place.name) == 2
    assert order == [0] * 4 or not has_messages
    for permit in permits:
        permit.release()
    assert not cluster_client.exists(place.name)


@pytest.mark.slow
def test_a_semaphore_of_a_cluster_has_all_its_keys_in_one_slot(
    world: World, cluster: Cluster, cluster_client: redis.RedisCluster, place: Place
) -> None:
    semaphore = in_cluster(world, cluster, 1, place.name, **SOON)
    permit = semaphore.acquire()
    answer = world.start(semaphore.acquire)
    assert semaphore.acquire(blocking=False) is None
    semaphore.resize(2)
    granted = take(answer)
    assert (cluster_client.zcard(place.name), semaphore.status().held) == (2, 2)
    semaphore.resize(None)
    for each in (permit, granted):
        each.release()
    assert not cluster_client.exists(place.name)


@pytest.mark.slow
def test_permits_move_with_their_slot(
    world: World, cluster: Cluster, cluster_client: redis.RedisCluster, place: Place
) -> None:
    semaphore = in_cluster(world, cluster, 2, place.name, timeout=3 * KEPT_S, sleep=0.02)
    permits = [semaphore.acquire(), semaphore.acquire()]
    place.begin_move()
    try:
        place.move_keys()
        assert permits[0].valid
        permits.pop(0).release()
        assert cluster_client.zcard(place.name) == 1
        assert semaphore.acquire(blocking=False) is None  # not while they move
        waiting = world.start(semaphore.acquire)
        (end,) = ends_of(cluster_client, place.name).values()
        wait_until(lambda: [end] < list(ends_of(cluster_client, place.name).values()), "it is renewed")
    finally:
        place.end_move()
    permits.append(take(waiting))
    assert semaphore.acquire(blocking=False) is None
    assert cluster_client.zcard(place.name) == 2
    for permit in permits:
        permit.release()
    assert not cluster_client.exists(place.name)


@pytest.mark.slow
def test_a_waiter_gets_a_permit_whose_slot_has_moved(
    world: World, cluster: Cluster, cluster_client: redis.RedisCluster, place: Place
) -> None:
    semaphore = in_cluster(world, cluster, 1, place.name, **SOON)
    permit = semaphore.acquire()
    answer = world.start(semaphore.acquire)
    place.move()
    permit.release()
    granted = take(answer)
    assert cluster_client.zcard(place.name) == 1
    granted.release()
    assert not cluster_client.exists(place.name)


# ---- long queues ----

_WAITERS = 100_000
_MOST_CALLS = 400
"""Of one script: at most 50 waiters are passed over, with a few calls for each."""


@pytest.fixture
def crowd(valkey_client: redis.Redis) -> Iterator[redis.Redis]:
    """A server on which so many wait, whose processes are gone, behind a full semaphore."""
    holders = new_tokens(2)
    for token in holders:
        run_acquire(valkey_client, token)
    for begin in range(0, _WAITERS, 10_000):
        tokens = [f"rlf:{number:011x}2{number:020x}" for number in range(begin, begin + 10_000)]
        valkey_client.zadd(QUEUE, {token: number + begin for number, token in enumerate(tokens)})
        valkey_client.hset(WAITERS, mapping={f"t{token}": "60000/2 publish rlf:gone" for token in tokens})
    yield valkey_client
    valkey_client.flushall()


def calls_of(client: redis.Redis, work: Any) -> int:
    """How many commands the scripts have called that the work has run."""
    client.config_resetstat()
    work()
    stats = client.info("commandstats")
    outer = ("eval", "evalsha", "info", "config|resetstat", "zcard")
    return sum(row["calls"] for name, row in stats.items() if name.removeprefix("cmdstat_") not in outer)


@IN_THREADS
@pytest.mark.slow
def test_no_script_does_more_the_more_wait(world: World, crowd: redis.Redis) -> None:
    assert world.in_threads
    (token,) = new_tokens(1)
    holder = next(iter(ends_of(crowd)))
    works = {
        "acquire": lambda: run_acquire(crowd, token),
        "join": lambda: run_wait(crowd, token),
        "health check": lambda: run_wait(crowd, token, look_for=token),
        "release": lambda: run_release(crowd, holder),
        "acquire with room": lambda: run_acquire(crowd, token),
        "join with room": lambda: run_wait(crowd, token),
        "resize": lambda: run_resize(crowd, 50),
        "acquire with much room": lambda: run_acquire(crowd, new_tokens(1)[0], limit=200),
    }
    calls = {name: calls_of(crowd, work) for name, work in works.items()}
    assert {name: count for name, count in calls.items() if count > _MOST_CALLS} == {}
    assert crowd.zcard(QUEUE) > _WAITERS - 51 * len(works)


@IN_THREADS
@pytest.mark.slow
def test_no_more_than_50_ended_permits_are_purged_by_one_script(world: World, valkey_client: redis.Redis) -> None:
    assert world.in_threads
    for token in new_tokens(300):
        run_acquire(valkey_client, token, limit=300, ttl_ms=60_000)
    valkey_client.zadd("name", dict.fromkeys(ends_of(valkey_client), 1.0))
    for ended in (250, 200):  # they take no place: the first one gets its permit, beside which there is none
        run_acquire(valkey_client, new_tokens(1)[0], limit=1)
        assert (valkey_client.zcount("name", 1, 1), held(valkey_client)) == (ended, 1)


# ---- fakes ----


FAKE = """
import asyncio, sys
sys.modules["lupa"] = None  # as where it is not installed
import fakeredis
from redis.exceptions import ResponseError
from redislock_fast import Semaphore, asyncio as tasks


def told(error):
    return str(error), getattr(error, "__notes__", ["of the semaphore 'name'"])


async def acquire():
    async with tasks.Semaphore(fakeredis.FakeAsyncRedis(), "name", 2):
        pass


try:
    Semaphore(fakeredis.FakeRedis(), "name", 2).acquire()
except ResponseError as error:
    print(told(error))
try:
    asyncio.run(acquire())
except ResponseError as error:
    print(told(error))
"""


@IN_THREADS
@pytest.mark.slow
def test_a_fake_without_scripts_raises_an_error_with_the_name(world: World) -> None:
    assert world.in_threads
    done = run_script(FAKE)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == second
    assert "unknown command" in first
    assert "of the semaphore 'name'" in first


@pytest.mark.parametrize("world", ["threads", "asyncio"], indirect=True)
@pytest.mark.parametrize("decode_responses", [False, True])
def test_a_fake_with_scripts_does_all(world: World, decode_responses: bool) -> None:
    pytest.importorskip("lupa")
    kind = fakeredis.FakeRedis if world.in_threads else fakeredis.FakeAsyncRedis
    fake = kind(server=fakeredis.FakeServer(), decode_responses=decode_responses)
    semaphore = world.semaphore(world.keep(fake), 2, **SOON)
    permits = [semaphore.acquire(), semaphore.acquire()]
    assert semaphore.acquire(blocking=False) is None
    waiting = world.start(semaphore.acquire)
    assert semaphore.acquire(blocking_timeout=0.05) is None
    permits.pop().release()
    permits.append(take(waiting))
    semaphore.resize(3)
    permits.append(semaphore.acquire(blocking=False))
    assert (semaphore.status().limit, semaphore.status().held) == (3, 3)
    semaphore.resize(None)
    for permit in permits:
        permit.release()
    assert waited(fake.keys()) == []
