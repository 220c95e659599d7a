"""A client that is closed: its lock connection ends at once, unless somebody uses it, and the locks work on.

No test relies on the garbage collector, which is off.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast.server import Server
from tests.support.clusters import Cluster
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, Callers, connections, gets_and_frees, queue_of

NAME = "of-a-client-that-is-closed"


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """The garbage collector is off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def make(callers: Callers, valkey: Server) -> Callable[..., Any]:
    """Makes clients, which have the same name on the server."""
    return lambda **settings: callers.client(valkey.port, client_name=NAME, **settings)


def close(callers: Callers, client: Any) -> None:
    """Close a client."""
    callers.run(client.aclose if callers.kind == "tasks" else client.close)


def until_closed(admin: redis.Redis) -> None:
    """Return once no client of this name is connected."""
    wait_until(lambda: connections(admin, NAME) == 0, "all connections are closed")


@pytest.mark.parametrize("options", [{}, {"auto_renew": True}, {"linger": FAR_S}, {"fencing": True}], ids=str)
def test_clients_that_are_closed_leave_no_connection(
    valkey_scene: Scene, make: Callable[..., Any], options: dict[str, Any]
) -> None:
    clients = [make() for _ in range(20)]
    for number, client in enumerate(clients):
        lock = valkey_scene.holder(client, f"name-{number}", timeout=FAR_S, **options)
        lock.release()
    assert connections(valkey_scene.client, NAME) >= len(clients)
    for client in clients:
        close(valkey_scene.callers, client)
    until_closed(valkey_scene.client)
    keys: Any = valkey_scene.client.keys("*[^e]")  # without those of fences
    assert keys == []


def test_cluster_client_that_is_closed_leaves_no_connection(callers: Callers, cluster: Cluster) -> None:
    kind: Any = redis.asyncio.RedisCluster if callers.kind == "tasks" else redis.RedisCluster
    for number in range(20):
        client = callers.run(lambda: _made(kind, cluster.port))
        for name in ("a", "b", "c"):
            lock = callers.contender(client, f"{name}{number}", timeout=FAR_S)
            assert lock.call("acquire")
            lock.release()
        assert sum(connections(admin, NAME) for admin in cluster.admins) > 0
        close(callers, client)
    wait_until(lambda: sum(connections(admin, NAME) for admin in cluster.admins) == 0, "all connections are closed")


def _made(kind: Any, port: int) -> Any:
    return kind(host="127.0.0.1", port=port, client_name=NAME)


@pytest.mark.parametrize("options", [{}, {"auto_renew": True}, {"linger": FAR_S}], ids=str)
def test_lock_works_on_after_each_close(valkey_scene: Scene, make: Callable[..., Any], options: dict[str, Any]) -> None:
    client = make()
    lock = valkey_scene.contender(client, timeout=FAR_S, **options)
    for _ in range(3):
        assert lock.call("acquire")
        close(valkey_scene.callers, client)
        assert lock.call("owned")
        close(valkey_scene.callers, client)
        lock.release()
        close(valkey_scene.callers, client)
        until_closed(valkey_scene.client)
        wait_until(lambda: valkey_scene.client.keys() == [], "nothing is left")


def test_client_that_is_closed_takes_no_connection_from_a_waiter(valkey_scene: Scene, make: Callable[..., Any]) -> None:
    holder = valkey_scene.holder(valkey_scene.connect(valkey_scene.client.connection_pool.connection_kwargs["port"]))
    client = make()
    waiters = valkey_scene.contenders(3, client)
    answers = valkey_scene.queue_up(waiters)
    places: Any = valkey_scene.client.zrange(queue_of("name"), 0, -1)
    close(valkey_scene.callers, client)
    holder.release()
    for waiter, answer, token in zip(waiters, answers, places, strict=True):
        assert answer.result(PATIENCE_S) is True
        value: Any = valkey_scene.client.get("name")
        assert value.removesuffix(b"+") == token  # it has kept its place
        waiter.release()
    close(valkey_scene.callers, client)
    until_closed(valkey_scene.client)


@pytest.mark.slow
def test_lock_that_is_renewed_is_renewed_after_the_close(valkey_scene: Scene, make: Callable[..., Any]) -> None:
    client = make()
    lock = valkey_scene.holder(client, timeout=2, auto_renew=True)
    close(valkey_scene.callers, client)
    until = time.monotonic() + 3
    wait_until(lambda: time.monotonic() > until or not valkey_scene.client.exists("name"), "its first lease is over")
    assert lock.call("owned")
    lock.release()


def test_pool_that_others_share_is_left_open(valkey_scene: Scene, make: Callable[..., Any]) -> None:
    client = make()
    other = valkey_scene.callers.keep(type(client)(connection_pool=client.connection_pool))
    lock = valkey_scene.holder(other, timeout=FAR_S)
    before = connections(valkey_scene.client, NAME)
    close(valkey_scene.callers, other)
    lock.release()
    assert connections(valkey_scene.client, NAME) == before


def test_closing_beside_callers_costs_no_lock(valkey_scene: Scene, make: Callable[..., Any]) -> None:
    client = make()
    contenders = [valkey_scene.contender(client, f"name-{number}", timeout=FAR_S) for number in range(4)]
    for _ in range(100):
        answers = [contender.acquire() for contender in contenders]
        close(valkey_scene.callers, client)
        assert [answer.result(PATIENCE_S) for answer in answers] == [True] * len(contenders)
        ends = [contender.ask("release") for contender in contenders]
        close(valkey_scene.callers, client)
        assert [end.result(PATIENCE_S) for end in ends] == [None] * len(contenders)
    assert valkey_scene.client.keys() == []
    close(valkey_scene.callers, client)
    until_closed(valkey_scene.client)


def test_two_waiters_of_one_client_that_is_closed_each_time(valkey_scene: Scene, make: Callable[..., Any]) -> None:
    client = make()
    holder, waiter = valkey_scene.contenders(2, client)
    for _ in range(20):
        assert holder.call("acquire")
        answer = valkey_scene.wait(waiter)
        close(valkey_scene.callers, client)
        holder.release()
        gets_and_frees(waiter, answer, valkey_scene.client)
        close(valkey_scene.callers, client)
    until_closed(valkey_scene.client)
