"""The other ways to wait, for threads and for tasks: by polling, with the pauses of redis-py or of one of its backoffs.

Rules: sleeping is faked where it is counted.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import redis
from redis.backoff import (
    AbstractBackoff,
    ConstantBackoff,
    DecorrelatedJitterBackoff,
    EqualJitterBackoff,
    ExponentialBackoff,
    FullJitterBackoff,
    NoBackoff,
)

from redislock_fast import Lock
from tests.support.helpers import PATIENCE_S, REDIS_PY, FakeTime, wait_until
from tests.support.scenes import Scene
from tests.support.worlds import World


@pytest.fixture
def slept(world: World, monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The clock by which our locks sleep."""
    fake = FakeTime(at_most=5)
    world.sleep_by(fake, monkeypatch)
    return fake


@pytest.fixture
def taken(client: redis.Redis) -> redis.Redis:
    """A client of a server on which the lock is taken."""
    client.set("name", "taken")
    return client


@pytest.mark.parametrize("sleep", [0.1, 2.5, 0])
def test_polling_sleeps_as_redis_py_does(our_lock: Any, taken: redis.Redis, slept: FakeTime, sleep: float) -> None:
    with pytest.raises(AssertionError, match="forever"):
        our_lock(taken, "name", sleep=sleep, wait="poll").acquire()
    assert slept.sleeps_s == [sleep] * 5
    assert taken.keys() == [b"name"]


BACKOFFS: list[AbstractBackoff] = [
    ConstantBackoff(0.3),
    NoBackoff(),
    ExponentialBackoff(cap=1, base=0.1),
    FullJitterBackoff(cap=1, base=0.1),
    EqualJitterBackoff(cap=1, base=0.1),
    DecorrelatedJitterBackoff(cap=1, base=0.1),
]
if REDIS_PY >= (5, 3):
    from redis.backoff import ExponentialWithJitterBackoff

    BACKOFFS.append(ExponentialWithJitterBackoff(cap=1, base=0.1))


@pytest.mark.parametrize("backoff", BACKOFFS, ids=lambda backoff: type(backoff).__name__)
def test_pauses_are_the_backoffs_own(
    our_lock: Any, taken: redis.Redis, slept: FakeTime, backoff: AbstractBackoff
) -> None:
    backoff, own = copy.deepcopy(backoff), copy.deepcopy(backoff)  # the parameter is shared with other worlds
    own.reset()  # type: ignore[no-untyped-call]
    random.seed(7)
    pauses_s = [own.compute(failures) for failures in range(1, 6)]
    before = copy.deepcopy(vars(backoff))
    for _ in range(2):  # a second acquire begins again
        slept.sleeps_s.clear()
        random.seed(7)
        with pytest.raises(AssertionError, match="forever"):
            our_lock(taken, "name", wait=backoff).acquire()
        assert slept.sleeps_s == pauses_s
    assert vars(backoff) == before


def test_a_pause_that_would_end_too_late_is_not_slept(our_lock: Any, taken: redis.Redis, slept: FakeTime) -> None:
    lock = our_lock(taken, "name", wait=ExponentialBackoff(cap=10, base=0.1))
    assert lock.acquire(blocking_timeout=1) is False
    assert slept.sleeps_s == [0.2, 0.4]


def test_backoff_goes_on_for_as_long_as_a_caller_waits(our_lock: Any, taken: redis.Redis, slept: FakeTime) -> None:
    slept.at_most = 1100
    lock = our_lock(taken, "name", wait=ExponentialBackoff(cap=10, base=0.1))
    with pytest.raises(AssertionError, match="forever"):
        lock.acquire()
    assert slept.sleeps_s[-1] == 10


@pytest.mark.parametrize("wait", ["poll", ConstantBackoff(0.005)], ids=["poll", "backoff"])
def test_a_poller_gets_the_lock_and_never_queues(scene: Scene, wait: Any) -> None:
    holder, waiter = scene.holder_and(1, timeout=60, sleep=0.005, wait=wait)
    before = scene.client.info("commandstats")["cmdstat_set"]["calls"]
    answer = waiter.acquire()
    wait_until(lambda: scene.client.info("commandstats")["cmdstat_set"]["calls"] > before + 3, "tries again and again")
    assert scene.client.keys() == [b"name"]
    assert scene.client.get("name") == holder.lock.local.token
    holder.release()
    assert answer.result(PATIENCE_S) is True


@pytest.mark.parametrize("wait", ["nonsense", "", "PUSH", None, 0.1, True, AbstractBackoff], ids=str)
def test_an_unknown_way_to_wait_is_refused(world: World, client: redis.Redis, wait: Any) -> None:
    with pytest.raises(ValueError, match="wait"):
        world.ours.Lock(world.client(client), "name", wait=wait)
    with pytest.raises(ValueError, match="wait"):
        world.ours.Locker(world.client(client)).lock("name", wait=wait)
    lock = world.ours.Lock(world.client(client), "name")
    with pytest.raises(ValueError, match="wait"):
        lock.wait = wait
    assert lock.wait == "push"


@pytest.mark.usefixtures("unhurried")
def test_the_way_to_wait_may_be_changed(
    world: World, our_lock: Any, taken: redis.Redis, slept: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept.restore_clock(monkeypatch)  # waiting by push reads the real one
    lock = our_lock(taken, "name", timeout=1, sleep=0.01)
    assert lock.wait == "push"
    assert lock.acquire(blocking_timeout=0.005) is False
    assert slept.sleeps_s == []
    world.sleep_by(slept, monkeypatch)
    lock.wait = "poll"
    assert lock.acquire(blocking_timeout=0.025) is False
    assert slept.sleeps_s == [0.01, 0.01]


@pytest.mark.parametrize("wait", ["push", "poll", ExponentialBackoff(cap=3, base=0.5)], ids=["push", "poll", "backoff"])
def test_copies_keep_the_way_to_wait(world: World, client: redis.Redis, wait: Any) -> None:
    lock = world.ours.Locker(world.client(client)).lock("name", wait=wait)
    assert copy.copy(lock).wait is wait


def test_redis_pys_own_constructor_arguments_wait_by_push(client: redis.Redis) -> None:
    lock = client.lock("name", 10, 0.1, True, None, Lock, True)
    assert isinstance(lock, Lock)
    assert lock.wait == "push"
