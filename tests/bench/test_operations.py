"""The operations that pytest-benchmark tracks: `pytest tests/bench/test_operations.py --benchmark-only`.

`--benchmark-save=NAME` saves a run, `--benchmark-compare` compares a later one with it. The figure of redis-py stands
beside that of the package for every operation that both have. Results are checked outside the timed part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import redis
import redis.lock

from redislock_fast import Lock
from redislock_fast.server import KINDS, Server, find_binary

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

LEASE_S = 10

pytest.importorskip("pytest_benchmark", reason="it tracks the operations")

both_locks = pytest.mark.parametrize("lock_class", [redis.lock.Lock, Lock], ids=["redis-py", "redislock_fast"])


@pytest.fixture(scope="module", params=KINDS)
def client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A client of a server of each kind that is installed."""
    if find_binary(request.param) is None:
        pytest.skip(f"no {request.param} server is installed")
    with Server(request.param) as server, redis.Redis.from_url(server.url) as connected:
        yield connected


@pytest.mark.benchmark(group="acquire+release")
@both_locks
def test_acquire_and_release(
    benchmark: BenchmarkFixture, client: redis.Redis, lock_class: type[redis.lock.Lock]
) -> None:
    """One acquire and one release of a free lock."""
    lock = client.lock("bench:pair", timeout=LEASE_S, lock_class=lock_class)

    def pair() -> bool:
        acquired: bool = lock.acquire()
        lock.release()
        return acquired

    assert benchmark(pair) is True
    assert client.exists("bench:pair") == 0


@pytest.mark.benchmark(group="acquire fails")
@both_locks
def test_acquire_of_a_held_lock(
    benchmark: BenchmarkFixture, client: redis.Redis, lock_class: type[redis.lock.Lock]
) -> None:
    """One attempt to acquire a held lock."""
    contender = client.lock("bench:held", timeout=LEASE_S, blocking=False, lock_class=lock_class)
    with client.lock("bench:held"):
        assert benchmark(contender.acquire) is False


@pytest.mark.benchmark(group="extend")
@both_locks
def test_extend(benchmark: BenchmarkFixture, client: redis.Redis, lock_class: type[redis.lock.Lock]) -> None:
    """Renewal of the lease of a held lock to its full time."""
    with client.lock("bench:extend", timeout=LEASE_S, lock_class=lock_class) as lock:
        assert benchmark(lock.extend, LEASE_S, replace_ttl=True) is True
