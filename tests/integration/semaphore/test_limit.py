"""At most so many hold permits at once, and waiters get them in the order of arrival.

Rules: with `LATE` no permit ends and no health check is made while a test runs: whoever is granted was told.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.permits import (
    LIMIT_KEY,
    QUEUE,
    ends_of,
    first_done,
    held,
    limits_logged_anew,
    new_tokens,
    now_ms,
    queue_up,
    run_acquire,
    take,
)
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")


# ---- at most so many ----


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_than_the_limit_hold(world: World, server: Server, client: redis.Redis, limit: int) -> None:
    semaphore = world.semaphore(world.connect(server.port), limit, **LATE)
    permits = [semaphore.acquire(blocking=False) for _ in range(limit)]
    assert [permit.valid for permit in permits] == [True] * limit
    assert semaphore.acquire(blocking=False) is None
    assert len(ends_of(client)) == limit
    permits.pop().release()
    permits.append(semaphore.acquire(blocking=False))
    assert semaphore.acquire(blocking=False) is None
    for permit in permits:
        permit.release()
    assert client.keys() == []


def test_many_callers_of_several_connections_are_never_more_than_the_limit(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    semaphores = [world.semaphore(world.connect(valkey.port), 3, **LATE) for _ in range(4)]
    inside: list[int] = []
    most: list[int] = []

    def work(semaphore: Any) -> None:
        for _ in range(10):
            with semaphore:
                inside.append(1)
                most.append(max(len(inside), len(ends_of(valkey_client))))
                inside.pop()

    working = [world.start(partial(work, semaphore)) for semaphore in semaphores for _ in range(4)]
    for each in working:
        each.result(PATIENCE_S)
    assert len(most) == 160
    assert max(most) <= 3
    assert valkey_client.keys() == []


# ---- in the order of arrival ----


def test_waiters_of_several_connections_get_permits_in_the_order_of_arrival(
    world: World, server: Server, client: redis.Redis
) -> None:
    first, second = (world.semaphore(world.connect(server.port), 2, **LATE) for _ in range(2))
    permits = [first.acquire(), second.acquire()]
    answers = queue_up(world, [first, second, second, first, second], client)
    order = []
    while answers:
        permits.pop(0).release()
        number = first_done(answers)
        order.append(number)
        permits.append(take(answers.pop(number)))
        assert held(client) == 2
    assert order == [0, 0, 0, 0, 0]
    for permit in permits:
        permit.release()
    assert client.keys() == []


def test_a_caller_that_does_not_wait_overtakes_nobody(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    other = world.semaphore(world.connect(server.port), 2, **LATE)
    dead, alive = new_tokens(2)
    for token in (dead, alive):
        run_acquire(client, token)
    (answer,) = queue_up(world, [semaphore], client)
    client.zrem("name", dead)  # one place is free, and nobody has told the waiter
    assert other.acquire(blocking=False) is None
    permit = take(answer)  # by the attempt of the other
    assert held(client) == 2
    permit.release()
    assert alive in ends_of(client)


def test_a_caller_that_does_not_wait_leaves_the_rest_to_itself(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    other = world.semaphore(world.connect(server.port), 2, **LATE)
    for token in new_tokens(2):
        run_acquire(client, token)
    (answer,) = queue_up(world, [semaphore], client)
    client.delete("name")  # both places are free
    permit = other.acquire(blocking=False)
    granted = take(answer)
    assert held(client) == 2
    assert (permit.valid, granted.valid) == (True, True)
    permit.release()
    granted.release()
    assert client.keys() == []


def test_a_waiter_that_gives_up_leaves_nothing(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, **LATE)
    permit = semaphore.acquire()
    assert semaphore.acquire(blocking_timeout=0.05) is None
    assert client.zcard(QUEUE) == 0
    permit.release()
    assert client.keys() == []


# ---- what grants a permit to a waiter ----


def test_a_waiter_is_granted_the_permit_of_one_that_has_died_at_its_end(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    dead, later = new_tokens(2)
    client.config_resetstat()
    run_acquire(client, later, ttl_ms=60_000)
    assert run_acquire(client, dead, ttl_ms=400) == 1
    end = ends_of(client)[dead]
    permit = take(world.start(semaphore.acquire))
    (granted_end,) = (end for token, end in ends_of(client).items() if token != later)
    granted_at = granted_end - 1000 * FAR_S
    assert 0 <= granted_at - end
    scripts = client.info("commandstats")
    # An attempt, a request to join, the health check at the end: none is made before, and none fails.
    calls = sum(scripts.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))
    assert calls <= 2 + 4 + 2  # of the two above, and each of four scripts was unknown at first
    permit.release()


def test_permits_of_the_dead_are_free_for_a_new_caller(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 3, **LATE)
    tokens = new_tokens(3)
    for token in tokens[:2]:
        run_acquire(client, token, limit=3, ttl_ms=50)
    run_acquire(client, tokens[2], limit=3)
    end = max(ends_of(client)[token] for token in tokens[:2])
    wait_until(lambda: now_ms(client) >= end + 1, "two have ended")
    permits = [semaphore.acquire(blocking=False), semaphore.acquire(blocking=False)]
    assert semaphore.acquire(blocking=False) is None
    assert len(ends_of(client)) == 3
    for permit in permits:
        permit.release()


def test_many_permits_of_the_dead_beyond_a_lower_limit_take_no_place(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    *dead, alive = new_tokens(200)
    run_acquire(client, alive, limit=200)
    for token in dead:
        run_acquire(client, token, limit=200, ttl_ms=1)
    end = ends_of(client)[dead[-1]]
    wait_until(lambda: now_ms(client) >= end + 1, "they have ended")
    permit = semaphore.acquire(blocking=False)
    assert permit is not None
    assert semaphore.acquire(blocking=False) is None
    permit.release()
    assert alive in ends_of(client)


def test_a_permit_that_was_deleted_is_granted_by_a_health_check(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=FAR_S, sleep=0.05)
    run_acquire(client, new_tokens(1)[0])
    (answer,) = queue_up(world, [semaphore], client)
    client.delete("name")
    take(answer).release()
    assert client.keys() == []


# ---- resize ----


def test_a_higher_limit_admits_waiters_at_once(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, **LATE)
    permits = [semaphore.acquire()]
    answers = queue_up(world, [semaphore] * 3, client)
    semaphore.resize(3)
    permits += [take(answers.pop(0)), take(answers.pop(0))]
    assert (held(client), client.zcard(QUEUE), client.get(LIMIT_KEY)) == (3, 1, b"3")
    semaphore.resize(4)
    permits.append(take(answers.pop(0)))
    assert semaphore.acquire(blocking=False) is None
    for permit in permits:
        permit.release()
    assert client.keys() == [LIMIT_KEY.encode()]
    semaphore.resize(None)
    assert client.keys() == []


def test_a_lower_limit_lets_holders_finish_and_admits_nobody_meanwhile(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 3, **LATE)
    permits = [semaphore.acquire() for _ in range(3)]
    (answer,) = queue_up(world, [semaphore], client)
    semaphore.resize(1)
    for _ in range(2):
        permits.pop().release()
        assert semaphore.acquire(blocking=False) is None
    assert (answer.done(), held(client), permits[0].valid) == (False, 1, True)
    permits.pop().release()
    take(answer).release()
    semaphore.resize(None)
    assert client.keys() == []


def test_without_the_operators_limit_the_callers_counts_again(
    world: World, server: Server, client: redis.Redis
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    semaphore.resize(1)
    permits = [semaphore.acquire()]
    (answer,) = queue_up(world, [semaphore], client)
    semaphore.resize(None)
    permits.append(take(answer))
    assert semaphore.acquire(blocking=False) is None
    for permit in permits:
        permit.release()
    assert client.keys() == []


def test_an_operators_limit_is_logged_once(
    world: World, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    limits_logged_anew()
    semaphore = world.semaphore(world.connect(valkey.port), 2, **LATE)
    other = world.semaphore(world.connect(valkey.port), 3, **LATE)
    semaphore.resize(3)
    with caplog.at_level(logging.WARNING, "redislock_fast"):
        for _ in range(3):
            semaphore.acquire().release()
            other.acquire().release()
    assert [record.getMessage() for record in caplog.records] == [
        "The semaphore 'name': the limit that an operator has set is in force, 3, not the caller's, 2."
    ]


@pytest.mark.parametrize("text", ["text", "", "5.5", "nan"])
def test_a_limit_that_is_no_number_is_told_and_admits_nobody(
    world: World, server: Server, client: redis.Redis, text: str
) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, **LATE)
    permit = semaphore.acquire()
    (answer,) = queue_up(world, [semaphore], client)
    client.set(LIMIT_KEY, text)
    with pytest.raises(ResponseError, match=r"limit of the semaphore is no number.* \{name\}:rlf:limit"):
        semaphore.acquire(blocking=False)
    with pytest.raises(ResponseError, match="limit of the semaphore 'name' is no number"):
        semaphore.status()
    permit.release()
    assert (held(client), client.zcard(QUEUE)) == (0, 1)
    semaphore.resize(None)
    take(answer).release()
    assert client.keys() == []


def test_status_tells_the_limit_the_holders_and_the_waiters(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    report = semaphore.status()
    assert (report.limit, report.held, report.waiting, report.holders, report.next_end_s) == (2, 0, 0, (), None)
    permits = [semaphore.acquire(), semaphore.acquire()]
    answers = queue_up(world, [semaphore] * 2, client)
    report = semaphore.status()
    assert (report.limit, report.held, report.waiting) == (2, 2, 2)
    assert [holder.kind for holder in (*report.holders, *report.waiters)] == ["redislock_fast"] * 4
    assert report.next_end_s is not None
    assert 0 < report.next_end_s <= FAR_S
    semaphore.resize(4)
    permits += map(take, answers)
    report = semaphore.status()
    assert (report.limit, report.held, report.waiting) == (4, 4, 0)
    semaphore.resize(3)
    assert (semaphore.status().limit, semaphore.status().held, semaphore.limit) == (3, 4, 2)
    for permit in permits:
        permit.release()
    semaphore.resize(None)
