"""The calls of a lock's holder while others wait for it, and the value at the key meanwhile.

Rules: those of `test_waiting.py`.
"""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.integration.waiting.test_waiting import holder
from tests.support.helpers import PATIENCE_S, capabilities_of
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, LATE, Threads, hand_round, until_queued
from tests.support.worlds import World, waited

__all__ = ["holder"]


def test_a_lock_is_marked_from_when_somebody_waits(scene: Scene, holder: Lock) -> None:
    waiter = scene.contender()
    holder.acquire()
    assert scene.client.get("name") == holder.local.token
    answers = scene.queue_up([waiter])
    assert scene.client.get("name") == holder.local.token + b"+"
    holder.release()
    hand_round([waiter], answers)
    holder.acquire()
    assert scene.client.get("name") == holder.local.token


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_every_operation_on_a_marked_lock(scene: Scene, acl_user: MakeUser, scripts: bool) -> None:
    if not scripts and capabilities_of(scene.server).release is None:
        pytest.skip("without scripts, only native commands extend and release")
    user = acl_user(scene.server, *([] if scripts else ["-eval", "-evalsha", "-script"]))
    holder = scene.holder(scene.connect(**user.options()), timeout=10)
    waiter = scene.contender(timeout=FAR_S, sleep=FAR_S if scripts else 0.02)
    answers = scene.queue_up([waiter])
    for _ in range(2):
        assert (holder.call("locked"), holder.call("owned"), waiter.call("owned")) == (True, True, False)
        assert holder.call("extend", 10) is True
        assert 10_000 < scene.client.pttl("name") <= 20_000
        assert holder.call("extend", 5, replace_ttl=True) is True
        assert 0 < scene.client.pttl("name") <= 5_000
        assert holder.call("reacquire") is True
        assert 5_000 < scene.client.pttl("name") <= 10_000
        assert scene.client.get("name") == holder.lock.local.token
    holder.release()
    hand_round([waiter], answers)
    for verb in ("release", "extend", "reacquire"):
        with pytest.raises(LockError):
            holder.call(verb, *([1] if verb == "extend" else []))


@pytest.mark.parametrize("ask", ["owned", "reacquire"])
def test_local_token_is_the_value_once_a_reply_has_told_of_waiters(valkey_scene: Scene, ask: str) -> None:
    holder, waiter = valkey_scene.holder_and(1)
    answers = valkey_scene.queue_up([waiter])
    value = valkey_scene.client.get("name")
    assert value == holder.lock.local.token + b"+"
    holder.call(ask)
    assert value == holder.lock.local.token
    holder.release()
    assert answers[0].result(PATIENCE_S)
    assert valkey_scene.client.get("name") == waiter.lock.local.token
    waiter.release()


def test_value_releases_the_lock_by_hook_as_its_token_does(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    answers = scene.queue_up([waiter])
    holder.call("do_release", scene.client.get("name"))
    hand_round([waiter], answers)


def test_every_operation_on_a_lock_that_was_handed_over(scene: Scene, holder: Lock) -> None:
    first, second = scene.contenders(2, timeout=10, sleep=FAR_S)
    holder.acquire()
    answers = scene.queue_up([first, second])
    holder.release()
    assert answers[0].result(PATIENCE_S)
    assert (first.call("locked"), first.call("owned"), second.call("owned")) == (True, True, False)
    assert scene.client.get("name") == first.lock.local.token
    assert first.call("extend", 10) is True
    assert 10_000 < scene.client.pttl("name") <= 20_000
    assert first.call("reacquire") is True
    assert 0 < scene.client.pttl("name") <= 10_000
    hand_round([first, second], answers)
    assert not scene.client.exists("name")


@pytest.mark.parametrize("holders_ttl_s", [FAR_S, None])
@pytest.mark.parametrize("ttl_s", [None, 3, 7.5])
def test_a_lock_handed_over_has_the_waiters_ttl(scene: Scene, holders_ttl_s: float | None, ttl_s: float | None) -> None:
    holder = scene.holder(timeout=holders_ttl_s)
    waiter = scene.contender(timeout=ttl_s, sleep=FAR_S)
    answer = scene.wait(waiter)
    holder.release()
    assert answer.result(PATIENCE_S)
    left_ms = scene.client.pttl("name")
    if ttl_s is None:
        assert left_ms == -1
    else:
        assert 0.7 * ttl_s * 1000 < left_ms <= ttl_s * 1000
    waiter.release()


def test_a_marked_lock_that_was_lost_is_not_owned(scene: Scene) -> None:
    """The value of another lock's holder, marked, is never taken for one's own."""
    holder = scene.holder(timeout=10)
    stolen = holder.lock.local.token[:-1] + b"x+"
    scene.client.set("name", stolen)
    for verb, arguments in (("extend", [1]), ("reacquire", []), ("release", [])):
        with pytest.raises(LockNotOwnedError):
            holder.call(verb, *arguments)
    assert scene.client.get("name") == stolen


@pytest.mark.parametrize("by_value", [False, True], ids=["token", "value"])
def test_another_lock_object_with_the_token_hands_over(scene: Scene, holder: Lock, by_value: bool) -> None:
    deputy, waiter = scene.contenders(2)
    holder.acquire()
    answers = scene.queue_up([waiter])
    deputy.lock.local.token = scene.client.get("name") if by_value else holder.local.token
    assert deputy.call("owned")
    assert deputy.call("extend", 1)
    assert deputy.call("reacquire")
    deputy.release()
    hand_round([waiter], answers)
    with pytest.raises(LockNotOwnedError):
        holder.release()


def test_a_holder_whose_ttl_has_ended_takes_nothing_from_the_next(scene: Scene) -> None:
    holder = scene.holder(timeout=0.1)
    waiter = scene.contender()
    assert waiter.acquire().result(PATIENCE_S) is True
    for verb, arguments in (("extend", [1]), ("reacquire", []), ("release", [])):
        with pytest.raises(LockNotOwnedError):
            holder.call(verb, *arguments)
    assert waiter.call("owned")
    waiter.release()
    assert scene.client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_holder_that_acquires_again_waits_for_the_end_of_its_lease(scene: Scene) -> None:
    contender = scene.holder(timeout=1.5, sleep=FAR_S)
    first = contender.lock.local.token
    assert contender.call("acquire", blocking_timeout=0.01) is False
    assert contender.lock.local.token == first
    assert contender.call("owned")
    assert contender.call("acquire") is True
    assert contender.lock.local.token != first
    contender.release()
    assert scene.client.keys() == []


def test_a_lock_is_handed_over_when_the_server_has_no_memory_left(scene: Scene) -> None:
    holder, *waiters = scene.holder_and(3)
    answers = scene.queue_up(waiters)
    scene.client.config_set("maxmemory", 1)
    try:
        holder.release()
        hand_round(waiters, answers)
    finally:
        scene.client.config_set("maxmemory", 0)
    assert scene.client.keys() == []


# Batches


def test_a_batch_hands_over_what_others_wait_for(world: World, server: Server, client: redis.Redis) -> None:
    names = [f"name-{number}" for number in range(20)]
    locker = world.ours.Locker(world.client(client))
    batch = waited(locker.acquire_many(names, timeout=10))
    with Threads() as threads:
        waiting_client = threads.client(server.port)
        waiters = {name: threads.contender(waiting_client, name, **LATE) for name in names[::2]}
        answers = {name: waiter.acquire() for name, waiter in waiters.items()}
        for name in waiters:
            until_queued(client, name, 1)
        assert waited(batch.extend(10)) == dict.fromkeys(names, True)
        assert all(10_000 < client.pttl(name) <= 20_000 for name in names)
        assert waited(batch.reacquire()) == dict.fromkeys(names, True)
        assert all(0 < client.pttl(name) <= 10_000 for name in names)
        assert waited(locker.acquire_many(names, timeout=10)).acquired == []
        assert waited(batch.release()) == dict.fromkeys(names, True)
        for name, waiter in waiters.items():
            assert answers[name].result(PATIENCE_S) is True
            assert waiter.call("owned")
            waiter.release()
    assert client.keys() == []
