"""Where no thread can be started, no key is left, no release is lost, and nothing hangs. Threads alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import redis

from redislock_fast import Lock, Locker, Redlock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import no_threads, run_script, start, wait_until
from tests.support.interrupts import interrupt_noting
from tests.support.redlock import LIMIT_S, wait_until_free
from tests.support.waiting import FAR_S, until_queued


@pytest.fixture
def client(valkey: Server, connect: Connect) -> redis.Redis:
    """One that is connected, and whose idle renewer has ended or never was. Its server knows no script."""
    client = connect(valkey.port)
    client.script_flush()
    with Lock(client, "other", timeout=FAR_S):
        pass
    return client


@pytest.mark.parametrize(
    "settings",
    [{}, {"thread_local": False}, {"reentrant": True}, {"linger": FAR_S}, {"fencing": True}, {"max_hold": FAR_S}],
    ids=str,
)
def test_lock_that_cannot_be_renewed_is_not_held(settings: dict[str, Any], client: redis.Redis) -> None:
    lock = Lock(client, "name", timeout=FAR_S, auto_renew=True, **settings)
    with no_threads():
        with pytest.raises(RuntimeError, match="start new thread"):
            lock.acquire()
        assert lock.local.token is None
        wait_until(lambda: not client.exists("name"), "the key is gone")
    with lock:
        assert lock.valid


@pytest.mark.parametrize("is_granted", [False, True])
def test_interrupted_acquire_leaves_no_key(is_granted: bool, client: redis.Redis, valkey_client: redis.Redis) -> None:
    lock = Lock(client, "name", timeout=FAR_S, thread_local=False)
    if is_granted:
        holder = Lock(valkey_client, "name", timeout=FAR_S, thread_local=False)
        holder.acquire()
        releasing = start(lambda: [until_queued(valkey_client, "name", 1), holder.release()])  # type: ignore[func-returns-value]
    interrupt_noting(lock)
    with no_threads():
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
        if is_granted:
            releasing.result()
        wait_until(lambda: not client.exists("name"), "the key is gone")


def test_batch_that_cannot_be_renewed_is_not_held(client: redis.Redis) -> None:
    with no_threads():
        with pytest.raises(RuntimeError, match="start new thread"):
            Locker(client).acquire_many(["a", "b", "c"], FAR_S, auto_renew=True)
        wait_until(lambda: client.keys("?") == [], "the keys are gone")


def test_key_does_not_linger(client: redis.Redis) -> None:
    with no_threads():
        for _ in range(3):
            with Lock(client, "name", timeout=FAR_S, linger=FAR_S):
                pass
        wait_until(lambda: not client.exists("name"), "the key is gone")


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
def test_redlock_connects_in_the_calling_thread(fleet: list[Server]) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis(port=server.port)) for server in fleet[:3]]
        lock = Redlock(clients, "name", timeout=FAR_S, limit=LIMIT_S)
        with no_threads():
            for _ in range(3):
                with lock:
                    assert lock.valid
            wait_until_free(fleet[:3])


@pytest.mark.parametrize("settings", [{"auto_renew": True}, {}], ids=str)
def test_cluster_is_left_without_a_key(settings: dict[str, Any], cluster_client: redis.RedisCluster) -> None:
    with Lock(cluster_client, "name", timeout=FAR_S):
        pass
    lock = Lock(cluster_client, "name", timeout=FAR_S, thread_local=False, **settings)
    if not settings:
        interrupt_noting(lock)
    with no_threads():
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            lock.acquire()
        wait_until(lambda: not cluster_client.exists("name"), "the key is gone")


def test_stale_topology_of_a_cluster_is_read_in_the_calling_thread(cluster_client: redis.RedisCluster) -> None:
    cluster_client.nodes_manager.slots_cache.clear()
    with no_threads(), Lock(cluster_client, "name", timeout=FAR_S) as lock:
        assert lock.valid
    assert not cluster_client.exists("name")


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["auto_renew=True", "auto_renew=True, linger=9", "linger=9"])
def test_thread_that_outlives_the_main_one_leaves_no_key(settings: str, valkey: Server, client: redis.Redis) -> None:
    """From Python 3.12 on, no thread can be started by then."""
    script = f"""
import sys, threading
import redis
from redislock_fast import Lock
client = redis.Redis(port=int(sys.argv[1]))
Lock(client, "other", timeout=9).locked()
def work():
    threading.main_thread().join()
    lock = Lock(client, "name", timeout=60, {settings})
    try:
        lock.acquire()
    except RuntimeError:
        print(lock.local.token is None)
    else:
        lock.release()
        print(True)
threading.Thread(target=work).start()
"""
    done = run_script(script, valkey.port)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert not client.exists("name")
