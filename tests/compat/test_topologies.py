"""One suite on redis-py's Lock and on ours: Sentinel and Cluster.

Rules: each test passes on both classes; the servers are real, as small as the topology allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.exceptions import LockError, LockNotOwnedError
from redis.sentinel import Sentinel

import redislock_fast
from redislock_fast.server import Server, free_port
from tests.compat.test_clients import exercise
from tests.compat.test_parity import LAST_OF_CLIENT_LOCK
from tests.conftest import Connect
from tests.support.async_helpers import async_few
from tests.support.helpers import RETRIED, LockClass, wait_until
from tests.support.worlds import World


@pytest.fixture
def sentinel(world: World, spare_server: Callable[..., Server], tmp_path: Path) -> Iterator[tuple[Server, Any]]:
    """A server, and a client that finds it by the sentinel which watches it under the name "service"."""
    primary = spare_server("redis")
    # The binary becomes a sentinel by its name.
    binary = tmp_path / "redis-sentinel"
    binary.symlink_to(primary.binary)
    options = {"sentinel monitor": f"service 127.0.0.1 {primary.port} 1"}
    sentinel_class: Any = Sentinel if world.in_threads else AsyncSentinel
    with Server(str(binary), options) as watcher:
        watchers = sentinel_class([("127.0.0.1", watcher.port)])
        for client in watchers.sentinels:
            world.keep(client)
        settings = {} if world.in_threads else {"retry": async_few(), "retry_on_error": RETRIED}
        yield primary, world.keep(watchers.master_for("service", **settings))


def test_sentinel(lock_class: LockClass, sentinel: tuple[Server, Any], connect: Connect) -> None:
    primary, client = sentinel
    exercise(lock_class, client, connect(primary.port))


def test_sentinel_whose_primary_restarts(lock_class: LockClass, sentinel: tuple[Server, Any]) -> None:
    primary, client = sentinel
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    primary.kill()
    primary.start()
    assert lock.locked() is False
    assert lock.acquire(blocking=False)


@pytest.fixture
def cluster(spare_server: Callable[..., Server]) -> Iterator[redis.RedisCluster]:
    """A client of a cluster of one node."""
    server = spare_server("valkey", {"cluster-enabled": "yes", "cluster-port": str(free_port())})
    with redis.Redis(port=server.port) as node:
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), "the cluster is up")
    with redis.RedisCluster(host="127.0.0.1", port=server.port) as client:
        yield client


@pytest.mark.usefixtures("raise_on_release_error")
@pytest.mark.slow
def test_cluster(lock_class: LockClass, cluster: redis.RedisCluster) -> None:
    lock = cluster.lock("name", 10, 0.2, False, 3, lock_class, False, *LAST_OF_CLIENT_LOCK)
    assert type(lock) is lock_class
    for _ in range(2):
        assert lock.acquire() is True
        assert lock.local.token == cluster.get("name")
        assert (True, True) == (lock.owned(), lock.locked())
        assert lock_class(cluster, "name").acquire(blocking=False) is False
        assert lock.extend(10) is True
        assert lock.reacquire() is True
        lock.release()
        assert not lock.locked()
    with pytest.raises(LockError):
        lock.release()
    lock.acquire()
    cluster.delete("name")
    with pytest.raises(LockNotOwnedError):
        lock.release()


@pytest.mark.slow
def test_cluster_pipeline_as_the_client_is_refused(cluster: redis.RedisCluster) -> None:
    with pytest.raises(TypeError, match=r"(?i)pipeline"):
        redislock_fast.Lock(cluster.pipeline(), "name")  # type: ignore[no-untyped-call]
