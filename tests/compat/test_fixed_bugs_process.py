"""Bugs of redis-py's Lock that ours does not have: frozen servers, forks.

Rules: as in test_fixed_bugs: on redis-py's class every test must fail. What both do right is in test_process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.forks import InFork
from tests.support.helpers import RELEASE_KEEPS_TOKEN, LockClass, once, redis_py_passes

FAILURES = (AssertionError, pytest.fail.Exception, redis.RedisError, TypeError)


@pytest.fixture(params=[pytest.param("redis-py", marks=pytest.mark.xfail(strict=True, raises=FAILURES)), "ours"])
def lock_class_id(request: pytest.FixtureRequest) -> str:
    """Which of the two classes a test runs on; redis-py's is expected to fail it."""
    name: str = request.param
    return name


# Frozen servers


@redis_py_passes(RELEASE_KEEPS_TOKEN, *FAILURES)
def test_release_from_a_frozen_server_can_be_repeated(
    lock_class: LockClass, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port, socket_timeout=0.5, retry=once())
    lock = lock_class(client, "name", timeout=30)
    lock.acquire()
    token = lock.local.token
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            lock.release()
    finally:
        server.signal(signal.SIGCONT)
    assert token == lock.local.token
    lock.release()
    assert lock.local.token is None
    assert not client.exists("name")


# Forks


def test_forked_child_cannot_release_its_parents_lock(
    in_fork: InFork, lock_class: LockClass, client: redis.Redis
) -> None:
    lock = lock_class(client, "name", timeout=30)
    lock.acquire()

    def child() -> str:
        outcomes: list[object] = [lock.owned()]
        for use in (lock.release, lambda: lock.extend(10), lock.reacquire):
            try:
                use()
            except LockError as error:
                outcomes.append(type(error).__name__)
            else:
                outcomes.append("done")
        return repr(outcomes)

    assert "[False, 'LockError', 'LockError', 'LockError']" == in_fork(child)
    assert lock.owned()
    lock.release()
    assert not client.exists("name")


def test_forked_child_cannot_release_a_lock_shared_by_threads(
    in_fork: InFork, lock_class: LockClass, client: redis.Redis
) -> None:
    lock = lock_class(client, "name", timeout=30, thread_local=False)
    lock.acquire()

    def child() -> str:
        with pytest.raises(LockError):
            lock.release()
        return "refused"

    assert "refused" == in_fork(child)
    assert lock.owned()
    lock.release()
