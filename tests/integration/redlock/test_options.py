"""The options of a Redlock that it shares with a lock on one server: metrics, breaker, reentrance, adaptive ttl."""

from __future__ import annotations

import pybreaker
import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import AdaptiveTTL, LossReason
from redislock_fast.server import Server
from tests.integration.holding.test_watching import FailureWatcher
from tests.support.redlock import Make, delete, values
from tests.support.waiting import FAR_S
from tests.support.worlds import World

Fleet = list[Server]
pytestmark = pytest.mark.usefixtures("world")
ON_VALKEY = pytest.mark.parametrize("fleet", ["valkey"], indirect=True)


@ON_VALKEY
def test_metrics_are_told_of_acquisitions_failures_losses_and_releases(make: Make, fleet: Fleet) -> None:
    watcher = FailureWatcher()
    lock, other = make(metrics=watcher), make(metrics=watcher)
    assert lock.acquire()
    assert other.acquire(blocking=False) is False
    lock.release()
    assert [(name, attempts) for name, _, attempts in watcher.acquired] == [("name", 1)]
    assert [(name, success) for name, _, success in watcher.released] == [("name", True)]
    assert watcher.failed == [("name", 1, None)]
    assert lock.acquire()
    delete(fleet)
    with pytest.raises(LockError):
        lock.release()
    assert watcher.lost == [("name", LossReason.DELETED)]
    assert [success for _, _, success in watcher.released] == [True, False]


def test_breaker_hears_of_servers_that_are_gone(world: World) -> None:
    breaker = pybreaker.CircuitBreaker(fail_max=1, reset_timeout=FAR_S)
    lock = world.redlock([world.connect(port) for port in (1, 2, 3)], timeout=10, breaker=breaker, limit=0.05)
    for _ in range(2):
        with pytest.raises((redis.ConnectionError, redis.TimeoutError, pybreaker.CircuitBreakerError)):
            lock.acquire(blocking=False)
    assert breaker.current_state == "open"


@ON_VALKEY
def test_reentrant_redlock_is_released_by_the_last_release(make: Make, fleet: Fleet) -> None:
    lock = make(reentrant=True)
    assert lock.acquire()
    held = values(fleet)
    assert lock.acquire()
    assert values(fleet) == held
    lock.release()
    assert lock.owned()
    lock.release()
    assert not lock.owned()
    with pytest.raises(LockError):
        lock.release()


@ON_VALKEY
@pytest.mark.usefixtures("fleet")
def test_ttl_is_learnt(make: Make) -> None:
    lock = make(timeout=AdaptiveTTL(FAR_S, floor=FAR_S / 2, ceiling=2 * FAR_S))
    before = lock.timeout
    for _ in range(129):
        assert lock.acquire()
        lock.release()
    assert lock.acquire()
    assert (before, FAR_S / 2) == (FAR_S, lock.timeout)
    lock.release()


def test_error_tells_the_name_and_the_time_that_it_took(world: World) -> None:
    lock = world.redlock([world.connect(port) for port in (1, 2, 3)], timeout=10, limit=0.05)
    with pytest.raises(redis.ConnectionError, match=r"the lock 'name': only 0 of 3 .* the call took 0\.\d{3} s"):
        lock.acquire(blocking=False)
