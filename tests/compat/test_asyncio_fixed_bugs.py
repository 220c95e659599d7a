"""Bugs of redis-py's asyncio Lock that ours does not have: lost connections, cancelling, tasks, names in errors.

Rules: as in test_fixed_bugs, where those stand that are the same for threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from tests.support.async_helpers import AsyncClients, AsyncLockClass, Owner, eventually, in_loop, settle
from tests.support.helpers import ASYNC_RELEASE_KEEPS_TOKEN, PATIENCE_S, redis_py_passes
from tests.support.proxy import Proxy

MANY = 20
FAILURES = (AssertionError, pytest.fail.Exception, redis.RedisError)


@pytest.fixture(params=[pytest.param("redis-py", marks=pytest.mark.xfail(strict=True, raises=FAILURES)), "ours"])
def lock_class_id(request: pytest.FixtureRequest) -> str:
    """Which of the two classes a test runs on; redis-py's is expected to fail it."""
    name: str = request.param
    return name


@pytest.fixture
def patience_s(lock_class_id: str) -> float:
    """How long an undoing may take; redis-py's class has none to wait for."""
    return PATIENCE_S if lock_class_id == "ours" else 0.3


async def warm_up(lock_class: AsyncLockClass, client: redis.asyncio.Redis) -> None:
    """Connect, and let the server know all scripts."""
    lock = lock_class(client, "warm-up", timeout=10)
    await lock.acquire()
    await lock.extend(10)
    await lock.extend(10, replace_ttl=True)
    await lock.reacquire()
    await lock.release()


async def connect_many(proxied: redis.asyncio.Redis, client: redis.Redis) -> None:
    """Have as many connections in the client's pool as `MANY` of its tasks may need at once."""
    waiting = asyncio.gather(*(proxied.blpop(["connect"]) for _ in range(MANY)))
    await eventually(lambda: client.info("clients")["blocked_clients"] == MANY, "each has its connection")
    client.rpush("connect", *range(MANY))
    await waiting


# Lost replies


@in_loop
async def test_connection_cut_while_tasks_share_it_loses_nobodys_result(
    async_lock_class: AsyncLockClass, proxy: Proxy, async_connect: AsyncClients, client: redis.Redis
) -> None:
    proxied = async_connect(proxy.port)
    await warm_up(async_lock_class, proxied)
    await connect_many(proxied, client)
    locks = [async_lock_class(proxied, f"name-{number}", timeout=10) for number in range(MANY)]
    proxy.hold()
    attempts = [asyncio.create_task(lock.acquire(blocking=False)) for lock in locks]
    await eventually(lambda: len(client.keys("name-*")) == MANY, "the server executes them")
    proxy.cut()
    proxy.resume()
    assert [True] * MANY == await asyncio.gather(*attempts)
    await asyncio.gather(*(lock.release() for lock in locks))
    assert [] == client.keys("name-*")


# Cancelling


async def _directly(work: Awaitable[Any]) -> Any:
    return await work


async def _in_wait_for(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, 60)


async def _in_gather(work: Awaitable[Any]) -> Any:
    return await asyncio.gather(work)


@pytest.mark.parametrize("take", [_directly, _in_wait_for, _in_gather])
@in_loop
async def test_cancelled_acquire_leaves_no_key_behind(
    async_lock_class: AsyncLockClass,
    proxy: Proxy,
    async_connect: AsyncClients,
    client: redis.Redis,
    patience_s: float,
    take: Callable[[Awaitable[Any]], Coroutine[Any, Any, Any]],
) -> None:
    proxied = async_connect(proxy.port)
    await warm_up(async_lock_class, proxied)
    lock = async_lock_class(proxied, "name")
    proxy.hold()
    attempt = asyncio.create_task(take(lock.acquire()))
    await eventually(lambda: client.exists("name"), "the server executes it")
    await settle()  # or a redis-py that is still sending swallows the cancel, on Python 3.11
    attempt.cancel()
    proxy.resume()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert lock.local.token is None
    await eventually(lambda: not client.exists("name"), "the attempt is undone", patience_s)
    assert await lock.acquire(blocking=False) is True


@in_loop
async def test_cancelled_acquires_of_many_tasks_are_all_undone(
    async_lock_class: AsyncLockClass, proxy: Proxy, async_connect: AsyncClients, client: redis.Redis, patience_s: float
) -> None:
    proxied = async_connect(proxy.port)
    await warm_up(async_lock_class, proxied)
    await connect_many(proxied, client)
    proxy.hold()

    async def hold(number: int) -> None:
        async with async_lock_class(proxied, f"name-{number}"):
            await asyncio.Event().wait()

    holders = [asyncio.create_task(hold(number)) for number in range(MANY)]
    await eventually(lambda: len(client.keys("name-*")) == MANY, "the server executes them")
    await settle()
    for holder in holders:
        holder.cancel()
    proxy.resume()
    answers = await asyncio.gather(*holders, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)
    await eventually(lambda: not client.keys("name-*"), "the attempts are undone", patience_s)


@in_loop
async def test_cancelled_release_can_be_repeated_though_the_server_has_released(
    async_lock_class: AsyncLockClass, proxy: Proxy, async_connect: AsyncClients, client: redis.Redis
) -> None:
    proxied = async_connect(proxy.port)
    await warm_up(async_lock_class, proxied)
    lock = async_lock_class(proxied, "name", timeout=30)
    held = asyncio.Event()

    async def hold() -> None:
        await lock.acquire()
        held.set()
        proxy.hold()
        await lock.release()

    holder = asyncio.create_task(hold())
    await held.wait()
    await eventually(lambda: not client.exists("name"), "the server executes the release")
    await settle()
    holder.cancel()
    proxy.resume()
    with pytest.raises(asyncio.CancelledError):
        await holder
    await lock.release()
    assert lock.local.token is None
    assert await lock.acquire(blocking=False) is True


# Tasks

Use = Callable[[Any], Awaitable[Any]]


@in_loop
async def test_task_whose_lease_expired_cannot_release_the_next_tasks_lock(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    async with Owner(lock, token="first") as first:
        client.delete("name")
        async with Owner(lock, token="second") as second:
            with pytest.raises(LockNotOwnedError):
                await first.ask(lock.release)
            assert b"second" == client.get("name")
            assert await second.ask(lock.owned) is True
            await second.ask(lock.release)
    assert not client.exists("name")


@redis_py_passes(not ASYNC_RELEASE_KEEPS_TOKEN, *FAILURES)
@in_loop
async def test_release_that_ends_late_does_not_take_the_next_tasks_token(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    released, acquired = asyncio.Event(), asyncio.Event()

    class Late(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_release(self, expected_token: Any) -> None:
            await super().do_release(expected_token)
            if expected_token == b"first":
                released.set()
                await acquired.wait()

    lock = Late(async_client, "name", timeout=10)
    async with Owner(lock, token="first") as first:
        releasing = asyncio.create_task(first.ask(lock.release))
        await released.wait()
        async with Owner(lock, token="second") as second:
            acquired.set()
            await releasing
            assert await second.ask(lock.owned) is True
            await second.ask(lock.release)
    assert not client.exists("name")


# Errors


async def _enter(lock: Any) -> None:
    lock.blocking = False
    async with lock:
        pass


FAILING: dict[str, tuple[str, Use]] = {
    "enter": ("taken", _enter),
    "extend unlocked": ("unlocked", lambda lock: lock.extend(1)),
    "reacquire unlocked": ("unlocked", lambda lock: lock.reacquire()),
    "extend without timeout": ("without timeout", lambda lock: lock.extend(1)),
    "reacquire without timeout": ("without timeout", lambda lock: lock.reacquire()),
    "extend lost": ("lost", lambda lock: lock.extend(1)),
    "reacquire lost": ("lost", lambda lock: lock.reacquire()),
    "release lost": ("lost", lambda lock: lock.release()),
}


@pytest.mark.parametrize("case", FAILING)
@in_loop
async def test_error_carries_the_locks_name(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, case: str
) -> None:
    state, use = FAILING[case]
    lock = async_lock_class(async_client, "name", timeout=None if state == "without timeout" else 10)
    if state in ("lost", "without timeout"):
        await lock.acquire()
    if state in ("lost", "taken"):
        client.set("name", "another's")
    with pytest.raises(LockError) as caught:
        await use(lock)
    assert "name" == caught.value.lock_name


@in_loop
async def test_failing_exit_does_not_replace_a_cancel_of_the_body(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    entered = asyncio.Event()

    async def hold() -> None:
        async with async_lock_class(async_client, "name"):
            client.delete("name")
            entered.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await entered.wait()
    holder.cancel()
    (answer,) = await asyncio.gather(holder, return_exceptions=True)
    assert asyncio.CancelledError is type(answer)
