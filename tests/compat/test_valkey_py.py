"""Locks with the clients of valkey-py: they work as with redis-py's, and the errors are redis-py's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis.exceptions
import valkey
import valkey.asyncio
import valkey.cluster

from redislock_fast.server import Server, free_port
from tests.support.helpers import PATIENCE_S
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def make(world: World, valkey: Server) -> Callable[..., Any]:
    """Makes clients of valkey-py; of the Valkey where no port is given."""
    return lambda **options: world.keep(client_class(world)(**{"port": valkey.port} | options))


def client_class(world: World) -> Any:
    """The class of clients for threads or tasks."""
    return valkey.Valkey if world.in_threads else valkey.asyncio.Valkey


def test_lock_is_held_waited_for_and_released(world: World, make: Callable[..., Any]) -> None:
    holder, waiter = world.lock(make(), timeout=10), world.lock(make(), timeout=10, thread_local=False)
    assert holder.acquire()
    assert (holder.extend(1), holder.reacquire(), holder.owned(), waiter.owned()) == (True, True, True, False)
    answer = world.start(waiter.acquire)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    with pytest.raises(redis.exceptions.LockError):
        waiter.release()


@pytest.mark.parametrize(
    ("options", "name", "error"),
    [
        ({"port": free_port()}, "name", redis.exceptions.ConnectionError),
        ({"username": "nobody", "password": "none"}, "name", redis.exceptions.AuthenticationError),
        ({}, object(), redis.exceptions.DataError),
    ],
    ids=["no server", "wrong password", "no name"],
)
def test_errors_are_redis_pys(
    world: World, make: Callable[..., Any], options: dict[str, Any], name: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        world.lock(make(**options), name).acquire()
    assert str(raised.value)


def test_errors_of_a_client_with_methods_of_its_own_are_redis_pys(world: World, make: Callable[..., Any]) -> None:
    class Own(client_class(world)):  # type: ignore[misc]
        def execute_command(self, *args: Any, **options: Any) -> Any:
            return super().execute_command(*args, **options)

    client = world.keep(Own(port=free_port()))
    with pytest.raises(redis.exceptions.ConnectionError):
        world.lock(client).acquire()


def test_pipeline_is_refused(world: World, make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="pipeline"):
        world.lock(make().pipeline())


def test_client_of_the_other_kind_is_refused(world: World) -> None:
    other: Any = valkey.asyncio.Valkey if world.in_threads else valkey.Valkey
    with pytest.raises(TypeError, match="asyncio"):
        world.lock(other())


def test_cluster_client_is_refused(world: World) -> None:
    kind: Any = valkey.cluster.ValkeyCluster if world.in_threads else valkey.asyncio.ValkeyCluster
    with pytest.raises(TypeError, match=r"redis\.RedisCluster"):
        world.lock(kind.__new__(kind))
