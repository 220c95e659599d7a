"""Many threads that use the same objects at once, for `pytest --parallel-threads=N` (`make test` runs it so).

Each test runs in N threads at a time on the same client and lock, so it may assume nothing of the server but its own
keys. Run alone it is an ordinary test.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import Lock, Locker
from redislock_fast.server import Server
from tests.conftest import Servers

_numbers = itertools.count()  # next() is atomic


def _own_name() -> str:
    return f"parallel:{threading.get_ident()}:{next(_numbers)}"


@pytest.fixture(scope="module")
def server(servers: Servers) -> Iterator[Server]:
    with servers.start("valkey") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port) as client:
        yield client


@pytest.fixture(scope="module")
def shared_lock(client: redis.Redis) -> Lock:
    return Lock(client, "parallel:shared", timeout=30, sleep=0.001)


@pytest.fixture(scope="module")
def shared_renewed_lock(client: redis.Redis) -> Lock:
    return Lock(client, "parallel:shared renewed", timeout=5, sleep=0.001, auto_renew=True)


inside = 0
inside_renewed = 0


def test_own_locks_are_taken_and_given_back(client: redis.Redis) -> None:
    lock = Lock(client, _own_name(), timeout=30)
    for _ in range(20):
        assert True is lock.acquire(blocking=False)
        assert True is lock.owned()
        assert True is lock.extend(1)
        lock.release()
    assert False is lock.locked()


def test_a_shared_lock_object_has_one_holder_at_a_time(shared_lock: Lock) -> None:
    global inside  # noqa: PLW0603  # what the lock protects
    for _ in range(10):
        with shared_lock:
            before = inside
            inside = before + 1
            assert before + 1 == inside
            assert True is shared_lock.owned()
        with pytest.raises(LockError):
            shared_lock.release()


def test_renewed_locks_are_held_until_they_are_given_back(client: redis.Redis) -> None:
    for _ in range(3):
        lock = Lock(client, _own_name(), timeout=1, auto_renew=True)
        assert True is lock.acquire(blocking=False)
        ends_at = time.monotonic() + 0.8  # beyond the first renewal
        while time.monotonic() < ends_at:
            assert True is lock.valid
            assert True is lock.extend(0.01)
        assert True is lock.owned()
        lock.release()
        assert False is lock.locked()


def test_a_shared_renewed_lock_object_has_one_holder_at_a_time(shared_renewed_lock: Lock) -> None:
    global inside_renewed  # noqa: PLW0603  # what the lock protects
    for _ in range(10):
        with shared_renewed_lock:
            before = inside_renewed
            inside_renewed = before + 1
            assert True is shared_renewed_lock.valid
            assert True is shared_renewed_lock.reacquire()
            assert before + 1 == inside_renewed


def test_batches_of_own_names_get_all_of_them(client: redis.Redis) -> None:
    locker = Locker(client)
    names = [_own_name() for _ in range(50)]
    for _ in range(5):
        batch = locker.acquire_many(names, timeout=30)
        assert (names, []) == (batch.acquired, batch.missed)
        assert dict.fromkeys(names, True) == batch.release()


def test_batches_of_the_same_names_exclude_each_other(client: redis.Redis) -> None:
    names = [f"parallel:same:{number}" for number in range(8)]
    with Locker(client).acquire_many(
        names, timeout=30, blocking_timeout=None, sleep=0.001, all_or_nothing=True
    ) as batch:
        assert names == batch.acquired
        values: list[Any] = client.mget(names)
        tokens = [value.rstrip(b"+") for value in values]  # without the flag of those that are waited for
        assert 1 == len(set(tokens))
