"""`lose`: a held lock or permit is lost at once, for threads and for tasks.

Rules: `FAR_S` never passes during a test, so whatever is lost was lost by the call.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

import redislock_fast
from redislock_fast import LockError, LockLostError, LockNotOwnedError, LossReason
from redislock_fast.server import Server
from redislock_fast.testing import assert_no_locks_left, lose
from tests.support.helpers import in_thread
from tests.support.holding import Losses
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")

WATCHED: dict[str, Any] = {"timeout": FAR_S, "auto_renew": True}
BY_TIME = [LossReason.EXPIRED, LossReason.SERVER_GONE]


def lose_now(world: World, lock: Any, *reason: LossReason | str) -> None:
    """`lose`, in the test's world."""
    if world.in_threads:
        lose(lock, *reason)
    else:
        waited(lose(lock._lock, *reason))


@pytest.mark.parametrize("reason", LossReason, ids=str)
def test_watched_lock_is_lost_when_the_call_returns(
    world: World, valkey: Server, valkey_client: redis.Redis, losses: Losses, reason: LossReason
) -> None:
    lock = world.lock(world.connect(valkey.port), on_lost=world.callback(losses), **WATCHED)
    lock.acquire()
    lose_now(world, lock, reason)
    assert losses.reasons == [reason]
    assert (lock.lost, lock.valid, lock.remaining()) == (True, False, 0.0)
    assert valkey_client.exists("name") == (reason is LossReason.TAKEN)
    with pytest.raises(LockLostError) as caught:
        lock.release()
    assert (caught.value.reason, losses.reasons) == (reason, [reason])


def test_lock_is_lost_on_each_server(world: World, server: Server, client: redis.Redis, losses: Losses) -> None:
    lock = world.lock(world.connect(server.port, decode_responses=True), on_lost=world.callback(losses), **WATCHED)
    for reason in (LossReason.TAKEN, LossReason.EXPIRED):
        with pytest.raises(LockLostError), lock:
            lose_now(world, lock, reason)
        client.delete("name")
    assert losses.reasons == [LossReason.TAKEN, LossReason.EXPIRED]


def test_expired_is_the_usual_reason_and_may_be_text(world: World, valkey: Server, losses: Losses) -> None:
    lock = world.lock(world.connect(valkey.port), on_lost=world.callback(losses), **WATCHED)
    for reason in ([], ["expired"], ["deleted"]):
        with pytest.raises(LockLostError), lock:
            lose_now(world, lock, *reason)
    assert losses.reasons == [LossReason.EXPIRED, LossReason.EXPIRED, LossReason.DELETED]


def test_lock_that_was_lost_can_be_acquired_again(world: World, valkey: Server, losses: Losses) -> None:
    lock = world.lock(world.connect(valkey.port), on_lost=world.callback(losses), **WATCHED)
    lock.acquire()
    lose_now(world, lock)
    assert lock.acquire(blocking=False) is True
    assert (lock.lost, lock.owned()) == (False, True)
    lock.release()


@pytest.mark.parametrize("reason", LossReason, ids=str)
def test_lock_that_nothing_watches_learns_of_its_time_alone(world: World, valkey: Server, reason: LossReason) -> None:
    lock = world.lock(world.connect(valkey.port), timeout=FAR_S)
    lock.acquire()
    lose_now(world, lock, reason)
    assert (lock.lost, lock.valid) == ((True, False) if reason in BY_TIME else (False, True))
    with pytest.raises(LockNotOwnedError):
        lock.release()


@pytest.mark.parametrize("reason", [LossReason.DELETED, LossReason.TAKEN], ids=str)
def test_lock_without_a_ttl_can_be_lost(world: World, valkey: Server, reason: LossReason) -> None:
    lock = world.lock(world.connect(valkey.port))
    with pytest.raises(LockNotOwnedError), lock:
        lose_now(world, lock, reason)


@pytest.mark.parametrize("reason", BY_TIME, ids=str)
def test_lock_without_a_ttl_does_not_expire(world: World, valkey: Server, reason: LossReason) -> None:
    with world.lock(world.connect(valkey.port)) as lock:
        with pytest.raises(ValueError, match=r"'name' does not expire"):
            lose_now(world, lock, reason)
        assert lock.owned()


def test_job_of_once_can_lose_its_lock(world: World, valkey: Server, losses: Losses) -> None:
    lock = world.lock(world.connect(valkey.port), on_lost=world.callback(losses), **WATCHED)
    run = world.ours.once(lock.redis if world.in_threads else lock._lock.redis, "nightly", timeout=FAR_S)
    waited((run.__enter__ if world.in_threads else run.__aenter__)())
    waited(lose(run))
    assert run.lost


def test_lock_that_is_not_held_is_refused(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    lock = world.lock(world.connect(valkey.port), **WATCHED)
    with pytest.raises(LockError, match="'name'"):
        lose_now(world, lock)
    lock.acquire()
    valkey_client.set("name", "another's")
    with pytest.raises(LockError, match="'name'"):
        lose_now(world, lock)
    assert valkey_client.get("name") == b"another's"
    with pytest.raises(LockLostError):
        lock.release()


def test_unknown_reason_is_refused(world: World, valkey: Server) -> None:
    with world.lock(world.connect(valkey.port), **WATCHED) as lock:
        with pytest.raises(ValueError, match="stolen"):
            lose_now(world, lock, "stolen")
        assert lock.owned()


@IN_THREADS
def test_other_locks_are_refused(world: World) -> None:
    other: Any = redis.Redis().lock("name", timeout=FAR_S)
    with pytest.raises(TypeError, match="Lock"):
        lose(other)


@IN_THREADS
def test_lock_that_threads_share_is_lost_by_any(world: World, valkey_client: redis.Redis, losses: Losses) -> None:
    lock = redislock_fast.Lock(valkey_client, "name", on_lost=losses, thread_local=False, **WATCHED)
    lock.acquire()
    in_thread(lambda: lose(lock))
    assert (losses.reasons, lock.lost) == ([LossReason.EXPIRED], True)


@IN_THREADS
def test_loss_without_a_callback_is_logged(
    world: World, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lock = redislock_fast.Lock(valkey_client, "name", **WATCHED)
    lock.acquire()
    lose(lock, "taken by another")
    assert "The lock 'name' was lost: taken by another." in caplog.text


# The permits of semaphores


def lose_permit_now(world: World, permit: Any, *reason: LossReason) -> None:
    """`lose`, in the test's world."""
    waited(lose(permit if world.in_threads else permit._lock, *reason))


@pytest.mark.parametrize("reason", [LossReason.EXPIRED, LossReason.DELETED, LossReason.SERVER_GONE], ids=str)
def test_permit_is_lost_when_the_call_returns(
    world: World, valkey: Server, valkey_client: redis.Redis, losses: Losses, reason: LossReason
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 2, on_lost=world.callback(losses), **LATE)
    kept, permit = semaphore.acquire(), semaphore.acquire()
    lose_permit_now(world, permit, reason)
    assert (losses.reasons, permit.lost, permit.valid, kept.valid) == ([reason], True, False, True)
    assert valkey_client.zcard("name") == 1
    with pytest.raises(LockLostError) as caught:
        permit.release()
    assert (caught.value.reason, losses.reasons) == (reason, [reason])
    with pytest.raises(LockError):
        lose_permit_now(world, permit)
    with pytest.raises(ValueError, match="semaphore 'name' cannot be lost as 'taken by another'"):
        lose_permit_now(world, kept, LossReason.TAKEN)
    kept.release()


def test_permits_that_are_held_are_left(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    valkey_client.zadd("scores", {"anna": 1})
    semaphore = world.semaphore(world.connect(valkey.port), 2, **LATE)
    assert_no_locks_left(valkey_client)
    with semaphore, semaphore, pytest.raises(AssertionError, match="'name' has 2 permits held"):
        assert_no_locks_left(valkey_client)
    assert_no_locks_left(valkey_client)
