"""What a semaphore refuses, before anything is sent. Each text names the semaphore, or the parameter."""

from __future__ import annotations

import decimal
import math
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import DataError

from redislock_fast.server import Server
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")

SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"limit": 0}, ValueError, "limit of the semaphore 'name' must be 1 or more, and below 2**53, not 0"),
    ({"limit": -1}, ValueError, "semaphore 'name'"),
    ({"limit": True}, ValueError, "semaphore 'name'"),
    ({"limit": 2.0}, TypeError, "limit of the semaphore 'name' must be a whole number, not 2.0"),
    ({"limit": "2"}, TypeError, "semaphore 'name'"),
    ({"limit": None}, TypeError, "semaphore 'name'"),
    ({"limit": decimal.Decimal(2)}, TypeError, "semaphore 'name'"),
    ({"limit": 1 << 64}, ValueError, "semaphore 'name'"),
    ({"timeout": 0}, ValueError, "semaphore 'name' needs a timeout above 0"),
    ({"timeout": None}, ValueError, "semaphore 'name' needs a timeout above 0"),
    ({"timeout": -1}, ValueError, "semaphore 'name'"),
    ({"timeout": math.nan}, ValueError, "semaphore 'name'"),
    ({"timeout": math.inf}, ValueError, "semaphore 'name'"),
    ({"timeout": "30"}, TypeError, "semaphore 'name'"),
    ({"sleep": "1"}, TypeError, "semaphore 'name'"),
    ({"blocking_timeout": "1"}, TypeError, "semaphore 'name'"),
    ({"blocking_timeout": math.nan}, ValueError, "semaphore 'name'"),
    ({"max_hold": -1}, ValueError, "semaphore 'name'"),
    ({"max_hold": 5, "auto_renew": False}, ValueError, "semaphore 'name'"),
    ({"on_lost": 1}, TypeError, "semaphore 'name'"),
    ({"on_lost": 1, "auto_renew": False}, TypeError, "semaphore 'name'"),
    ({"metrics": 1}, TypeError, "semaphore 'name'"),
    ({"linger": 1}, TypeError, "linger"),
    ({"blocking_timeouts": 1}, TypeError, "blocking_timeout"),
]


@pytest.mark.parametrize(("settings", "error", "text"), SETTINGS, ids=lambda value: str(value)[:40])
def test_a_wrong_setting_is_refused_when_the_semaphore_is_made(
    world: World, valkey: Server, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    arguments: dict[str, Any] = {"limit": 2, **settings}
    with pytest.raises(error) as caught:
        world.ours.Semaphore(world.connect(valkey.port), "name", **arguments)
    told = [str(caught.value), *getattr(caught.value, "__notes__", [text])]
    assert any(text in line for line in told), told


@pytest.mark.parametrize("name", [None, True, [], object], ids=str)
def test_a_name_that_is_no_text_is_refused(world: World, valkey: Server, name: Any) -> None:
    with pytest.raises(DataError):
        world.ours.Semaphore(world.connect(valkey.port), name, 2)


def test_a_client_of_the_other_kind_is_refused(world: World, valkey: Server) -> None:
    others = {True: redis.asyncio.Redis(port=valkey.port), False: redis.Redis(port=valkey.port)}
    for client in (others[world.in_threads], None, "localhost"):
        with pytest.raises(TypeError):
            world.ours.Semaphore(client, "name", 2)
    with pytest.raises(TypeError):
        world.ours.Semaphore(world.connect(valkey.port).pipeline(), "name", 2)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2", 1 << 64], ids=repr)
def test_a_wrong_limit_is_refused_by_resize(
    world: World, valkey: Server, valkey_client: redis.Redis, limit: Any
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port))
    with pytest.raises((TypeError, ValueError), match="limit of the semaphore 'name'"):
        semaphore.resize(limit)
    assert valkey_client.keys() == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"blocking_timeout": "1"}, TypeError),
        ({"blocking_timeout": math.nan}, ValueError),
        ({"blocking": False, "blocking_timeout": "x"}, TypeError),
        ({"token": "x"}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_argument_of_acquire_is_refused(
    world: World, valkey: Server, valkey_client: redis.Redis, arguments: dict[str, Any], error: type[Exception]
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port))
    with pytest.raises(error):
        semaphore.acquire(**arguments)
    assert valkey_client.keys() == []
    semaphore.acquire(blocking=False).release()


def test_numbers_that_are_whole_are_limits(world: World, valkey: Server) -> None:
    class Two:
        def __index__(self) -> int:
            return 2

    semaphore = world.ours.Semaphore(world.connect(valkey.port), "name", Two())
    assert (semaphore.limit, repr(semaphore)) == (2, "<Semaphore 'name': 2 at most>")
