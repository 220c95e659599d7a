"""`lose` and `assert_no_locks_left` for the permits of semaphores, for threads and for tasks."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from redislock_fast import LockError, LockLostError, LossReason
from redislock_fast.server import Server
from redislock_fast.testing import assert_no_locks_left, lose
from tests.support.holding import Losses
from tests.support.waiting import LATE
from tests.support.worlds import World, waited

pytestmark = pytest.mark.usefixtures("world")


def lose_now(world: World, permit: Any, *reason: LossReason) -> None:
    """`lose`, in the test's world."""
    waited(lose(permit if world.in_threads else permit._lock, *reason))


@pytest.mark.parametrize("reason", [LossReason.EXPIRED, LossReason.DELETED, LossReason.SERVER_GONE], ids=str)
def test_permit_is_lost_when_the_call_returns(
    world: World, valkey: Server, valkey_client: redis.Redis, losses: Losses, reason: LossReason
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 2, on_lost=world.callback(losses), **LATE)
    kept, permit = semaphore.acquire(), semaphore.acquire()
    lose_now(world, permit, reason)
    assert (losses.reasons, permit.lost, permit.valid, kept.valid) == ([reason], True, False, True)
    assert valkey_client.zcard("name") == 1
    with pytest.raises(LockLostError) as caught:
        permit.release()
    assert (caught.value.reason, losses.reasons) == (reason, [reason])
    with pytest.raises(LockError):
        lose_now(world, permit)
    with pytest.raises(ValueError, match="semaphore 'name' cannot be lost as 'taken by another'"):
        lose_now(world, kept, LossReason.TAKEN)
    kept.release()


def test_permits_that_are_held_are_left(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    valkey_client.zadd("scores", {"anna": 1})
    semaphore = world.semaphore(world.connect(valkey.port), 2, **LATE)
    assert_no_locks_left(valkey_client)
    with semaphore, semaphore, pytest.raises(AssertionError, match="'name' has 2 permits held"):
        assert_no_locks_left(valkey_client)
    assert_no_locks_left(valkey_client)
