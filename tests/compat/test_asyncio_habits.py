"""Mocks, frameworks and warnings take the methods for tasks as coroutine functions."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import redis.asyncio

from redislock_fast.asyncio import Lock, Locker, Redlock
from tests.support.async_helpers import in_loop

METHODS = ["acquire", "extend", "locked", "owned", "reacquire", "release"]
OF_CLASSES = [pytest.param(kind, name, id=f"{kind.__name__}.{name}") for kind in (Lock, Redlock) for name in METHODS]


@pytest.fixture
def loop_kind() -> str:
    return "asyncio"


@pytest.mark.parametrize(("kind", "name"), OF_CLASSES)
def test_method_is_a_coroutine_function(kind: Any, name: str) -> None:
    is_coroutine_function = inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction
    assert is_coroutine_function(getattr(kind, name))


@pytest.mark.parametrize(("kind", "name"), OF_CLASSES)
def test_autospec_makes_a_mock_that_can_be_awaited(kind: Any, name: str) -> None:
    assert isinstance(getattr(mock.create_autospec(kind, instance=True), name), mock.AsyncMock)


def redlock(client: redis.asyncio.Redis) -> Redlock:
    """A Redlock that is never used."""
    servers = [client, redis.asyncio.Redis(port=1), redis.asyncio.Redis(port=2)]
    return Redlock(servers, "name", timeout=10)


CALLS: dict[str, Callable[[redis.asyncio.Redis], object]] = {
    "Lock.acquire": lambda client: Lock(client, "name").acquire(),
    "Lock.acquire, with options": lambda client: Lock(client, "name", timeout=10, auto_renew=True).acquire(),
    "Lock.locked": lambda client: Lock(client, "name").locked(),
    "Lock.owned": lambda client: Lock(client, "name").owned(),
    "Lock.release": lambda client: held(client).release(),
    "Lock.release, of no lock": lambda client: Lock(client, "name").release(),
    "Lock.extend": lambda client: held(client).extend(1),
    "Lock.reacquire": lambda client: held(client).reacquire(),
    "Locker.acquire_many": lambda client: Locker(client).acquire_many(["name"]),
    "Redlock.acquire": lambda client: redlock(client).acquire(),
    "Redlock.owned": lambda client: redlock(client).owned(),
    "Redlock.release": lambda client: redlock(client).release(),
    "Redlock.extend": lambda client: redlock(client).extend(1),
    "Redlock.reacquire": lambda client: redlock(client).reacquire(),
}


def held(client: redis.asyncio.Redis) -> Lock:
    """A lock that has a token."""
    lock = Lock(client, "name", timeout=10)
    lock.local.token = b"token"
    return lock


@pytest.mark.parametrize("call", CALLS)
@in_loop
async def test_forgotten_await_names_the_public_method(async_valkey_client: redis.asyncio.Redis, call: str) -> None:
    name = call.partition(",")[0]
    with pytest.warns(RuntimeWarning, match=f"^coroutine '{name}' was never awaited$"):
        CALLS[call](async_valkey_client)
