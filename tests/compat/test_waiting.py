"""One suite on redis-py's Locks and on ours, for threads and for asyncio: blocking, polling, and the limits of waiting.

Ours polls here: what it does by default is in `test_waiting*.py`.

Rules: sleeping is faked where it is counted, to the exact sleep (redis-py's own tests do the same), and real where
another holder lets go.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError

from tests.support.helpers import FakeTime, LockClass, wait_until
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("polling", "world")


@pytest.fixture
def taken(valkey_client: redis.Redis) -> redis.Redis:
    """A client of a server on which the lock "name" is taken."""
    valkey_client.set("name", "taken")
    return valkey_client


def test_blocking_timeout_sleeps_until_the_next_sleep_would_pass_it(
    lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime
) -> None:
    lock = lock_class(taken, "name", sleep=0.05, blocking_timeout=0.4)
    assert lock.acquire() is False
    assert pytest.approx([0.05] * 8) == fake_time.sleeps_s


def test_sleep_longer_than_blocking_timeout_is_not_slept(
    lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime
) -> None:
    lock = lock_class(taken, "name", sleep=60, blocking_timeout=1)
    assert lock.acquire() is False
    assert [] == fake_time.sleeps_s


@pytest.mark.parametrize(
    ("settings", "arguments", "sleeps_s"),
    [
        ({}, {"blocking_timeout": 0.35}, [0.1] * 3),
        ({}, {"blocking_timeout": 0}, []),
        ({}, {"blocking_timeout": -1}, []),
        ({}, {"sleep": 0.25, "blocking_timeout": 0.6}, [0.25] * 2),
        ({"sleep": 0.25, "blocking_timeout": 0.6}, {}, [0.25] * 2),
        ({"sleep": 0.25, "blocking_timeout": 0.6}, {"sleep": 0.5}, [0.5]),
        ({"blocking_timeout": 0.6}, {"blocking_timeout": 0.15}, [0.1]),
        ({"blocking_timeout": 10}, {"blocking": False}, []),
        ({"blocking": False}, {}, []),
        ({"blocking": False, "blocking_timeout": 10}, {}, []),
        ({"blocking": False}, {"blocking": True, "blocking_timeout": 0.15}, [0.1]),
    ],
    ids=str,
)
def test_arguments_of_acquire_go_before_those_of_the_constructor(
    world: World,
    lock_class: LockClass,
    taken: redis.Redis,
    fake_time: FakeTime,
    settings: dict[str, Any],
    arguments: dict[str, Any],
    sleeps_s: list[float],
) -> None:
    if not world.in_threads and "sleep" in arguments:
        pytest.skip("asyncio's acquire takes no sleep")
    lock = lock_class(taken, "name", **settings)
    assert lock.acquire(**arguments) is False
    assert pytest.approx(sleeps_s) == fake_time.sleeps_s


@IN_THREADS
def test_acquire_takes_its_arguments_in_redis_pys_order(
    lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime
) -> None:
    lock = lock_class(taken, "name")
    assert lock.acquire(0.25, True, 0.3, "token") is False
    assert [0.25] == fake_time.sleeps_s
    taken.delete("name")
    assert lock.acquire(0.25, False, None, "token") is True
    assert b"token" == taken.get("name")


def test_blocking_without_a_limit_waits_on(lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime) -> None:
    fake_time.at_most = 50
    with pytest.raises(AssertionError, match="waits forever"):
        lock_class(taken, "name").acquire()
    assert [0.1] * 50 == fake_time.sleeps_s


def test_free_lock_is_acquired_without_a_sleep(
    lock_class: LockClass, valkey_client: redis.Redis, fake_time: FakeTime
) -> None:
    assert lock_class(valkey_client, "name", blocking_timeout=0).acquire()
    assert [] == fake_time.sleeps_s


def test_waits_with_one_token_from_try_to_try(lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime) -> None:
    tokens: list[object] = []

    class Recording(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            tokens.append(token)
            return bool(waited(super().do_acquire(token)))

    assert not Recording(taken, "name").acquire(blocking_timeout=0.35)
    assert 4 == len(tokens)
    assert 1 == len(set(tokens))


def test_acquire_again_on_the_same_instance_waits_when_it_has_a_limit(
    lock_class: LockClass, valkey_client: redis.Redis, fake_time: FakeTime
) -> None:
    lock = lock_class(valkey_client, "name", sleep=0.05)
    lock.acquire()
    token = lock.local.token
    assert lock.acquire(blocking_timeout=0.4) is False
    assert pytest.approx([0.05] * 8) == fake_time.sleeps_s
    assert token == lock.local.token
    assert lock.owned()


def test_acquire_again_on_the_same_instance_waits_for_its_expiry(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=0.05, sleep=0.005)
    lock.acquire()
    token = lock.local.token
    assert lock.acquire() is True
    assert token != lock.local.token


def test_waiter_acquires_when_the_holder_releases(world: World, lock_class: LockClass, client: redis.Redis) -> None:
    holder = lock_class(client, "name")
    holder.acquire()
    tries = 0

    class Counting(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            nonlocal tries
            tries += 1
            return bool(waited(super().do_acquire(token)))

    waiter = Counting(client, "name", sleep=0.002, thread_local=False)
    answer = world.start(waiter.acquire)
    wait_until(lambda: tries > 2, "the waiter polls")
    assert not answer.done()
    holder.release()
    assert answer.result(10) is True
    assert waiter.owned()


def test_waiter_acquires_when_the_lock_expires(lock_class: LockClass, client: redis.Redis) -> None:
    holder = lock_class(client, "name", timeout=0.05)
    holder.acquire()
    assert lock_class(client, "name", sleep=0.005).acquire(blocking_timeout=10)
    with pytest.raises(LockNotOwnedError):
        holder.release()


def test_many_callers_exclude_each_other(world: World, lock_class: LockClass, client: redis.Redis) -> None:
    beside = world.client(client)
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(10):
            with lock_class(client, "name", sleep=0.001):
                inside += 1
                most = max(most, inside)
                waited(beside.ping())  # lets the others run
                inside -= 1

    for worker in [world.start(work) for _ in range(6)]:
        worker.result(20)
    assert 1 == most
    assert not client.exists("name")
