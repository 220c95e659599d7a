"""A lock object with `linger` that several threads or tasks share: a call of one never ends what another one holds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from redis.exceptions import LockError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lingering.test_lingering import LINGERS
from tests.support.helpers import PATIENCE_S, pause, start
from tests.support.holding import Holders

MANY = 1000


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Have threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_an_attempt_that_does_not_wait_frees_nothing(holders: Holders, valkey: Server) -> None:
    shared = holders.hold(valkey.port, **LINGERS)
    other = holders.on(shared.lock.redis, **LINGERS)
    assert shared.call("acquire", blocking=False) is False
    assert shared.call("acquire", blocking_timeout=0.01) is False
    assert other.call("acquire", blocking=False) is False
    shared.release()
    assert other.call("acquire", blocking=False) is True


@pytest.mark.parametrize("callers", ["tasks"], indirect=True)
def test_a_cancelled_waiter_frees_nothing(holders: Holders, valkey: Server) -> None:
    shared = holders.hold(valkey.port, **LINGERS)
    other = holders.on(shared.lock.redis, **LINGERS)
    waiting = shared.acquire()
    pause()
    assert waiting.cancel()
    pause()
    assert other.call("acquire", blocking=False) is False
    assert shared.lock.remaining() > 0
    shared.release()


def test_a_release_takes_no_token_from_the_next_holder(valkey: Server, connect: Connect, switching_often: None) -> None:
    lock = redislock_fast.Lock(connect(valkey.port), "name", thread_local=False, **LINGERS)
    inside = threading.Semaphore()

    def use_often() -> int:
        for count in range(MANY):
            assert lock.acquire()
            if not inside.acquire(blocking=False):
                return count
            inside.release()
            lock.release()
        return MANY

    users = [start(use_often) for _ in range(3)]
    assert [user.result(3 * PATIENCE_S) for user in users] == [MANY] * 3


def test_of_two_releases_one_ends_the_holding(valkey: Server, connect: Connect, switching_often: None) -> None:
    lock = redislock_fast.Lock(connect(valkey.port), "name", thread_local=False, **LINGERS)

    def release(together: threading.Barrier) -> int:
        together.wait(PATIENCE_S)
        try:
            lock.release()
        except LockError:
            return 0
        return 1

    for _ in range(MANY // 10):
        assert lock.acquire(blocking=False)
        together = threading.Barrier(2)
        releases = [start(lambda together=together: release(together)) for _ in range(2)]  # type: ignore[misc]
        assert sum(one.result(PATIENCE_S) for one in releases) == 1
