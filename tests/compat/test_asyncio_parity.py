"""One suite on redis-py's asyncio Lock and on ours: what test_parity cannot say of both; leases; shared tokens.

Rules: each test passes on both classes, on every kind of server and in every kind of loop; what redis-py does wrong is
in test_asyncio_fixed_bugs, and what is the same for threads in test_parity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

from tests.compat.test_parity import CONSTRUCTOR, LAST_OF_CLIENT_LOCK, assert_signature
from tests.compat.test_parity import SIGNATURES as OF_THREADS
from tests.support.async_helpers import (
    AsyncClients,
    AsyncLockClass,
    async_once,
    eventually,
    in_loop,
    in_task,
    run_in_loop,
)
from tests.support.helpers import ASYNC_RELEASE_KEEPS_TOKEN, redis_py_passes, settings_of
from tests.support.proxy import Proxy

SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    **{name: parameters for name, parameters in OF_THREADS.items() if name not in {"__enter__", "__exit__"}},
    "acquire": [parameter for parameter in OF_THREADS["acquire"] if parameter[0] != "sleep"],
    "__aenter__": OF_THREADS["__enter__"],
    "__aexit__": OF_THREADS["__exit__"],
}


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


@pytest.mark.usefixtures("raise_on_release_error")
def test_signature_of_the_constructor(async_lock_class: AsyncLockClass) -> None:
    assert_signature(async_lock_class.__init__, CONSTRUCTOR)


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(async_lock_class: AsyncLockClass, method: str) -> None:
    assert_signature(getattr(async_lock_class, method), SIGNATURES[method])


@pytest.mark.usefixtures("raise_on_release_error")
@in_loop
async def test_client_lock_makes_the_given_class(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_client.lock("name", 10, 0.2, False, 3, async_lock_class, False, *LAST_OF_CLIENT_LOCK)
    assert type(lock) is async_lock_class
    assert ("name", 10, 0.2, False, 3, False, not LAST_OF_CLIENT_LOCK) == settings_of(lock)


def test_lock_made_outside_of_a_loop(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, loop_kind: str
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)

    async def use() -> object:
        async with lock:
            held = await lock.owned(), client.get("name") == lock.local.token
        await async_client.aclose()
        return held

    # Connections belong to a loop; client and lock do not.
    for _ in range(2):
        assert (True, True) == run_in_loop(loop_kind, use())
    assert not client.exists("name")


@in_loop
async def test_context_manager_releases_when_the_body_is_cancelled(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    with pytest.raises(asyncio.CancelledError):
        async with async_lock_class(async_client, "name"):
            raise asyncio.CancelledError
    assert not client.exists("name")


@in_loop
async def test_what_cannot_be_prolonged_is_refused_at_the_call_itself(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    with pytest.raises(LockError, match="Cannot extend an unlocked lock"):
        lock.extend(1)
    with pytest.raises(LockError, match="Cannot reacquire an unlocked lock"):
        lock.reacquire()
    lock.timeout = None
    await lock.acquire()
    with pytest.raises(LockError, match="Cannot extend a lock with no timeout"):
        lock.extend(1)
    with pytest.raises(LockError, match="Cannot reacquire a lock with no timeout"):
        lock.reacquire()


# Prolonging a lease, and which tasks share a token


# Leases


@in_loop
async def test_extend_and_reacquire_return_awaitables_of_true(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    extending, reacquiring = lock.extend(10), lock.reacquire()
    assert await extending is True
    assert 10_000 < client.pttl("name") <= 20_000
    assert await reacquiring is True
    assert 5_000 < client.pttl("name") <= 10_000


@redis_py_passes(ASYNC_RELEASE_KEEPS_TOKEN, AssertionError)
@in_loop
async def test_release_that_fails_on_the_network_can_be_repeated(
    async_lock_class: AsyncLockClass, proxy: Proxy, async_connect: AsyncClients, client: redis.Redis
) -> None:
    lock = async_lock_class(async_connect(proxy.port, retry=async_once()), "name", timeout=30)
    await lock.acquire()
    token = lock.local.token
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        await lock.release()
    assert token == lock.local.token == client.get("name")
    proxy.accept()
    await lock.release()
    assert lock.local.token is None
    assert not client.exists("name")


# Tasks


Take = Callable[[Awaitable[Any]], Awaitable[Any]]


async def _in_a_task(work: Awaitable[Any]) -> Any:
    return await asyncio.ensure_future(work)


async def _in_wait_for(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, 10)


async def _in_gather(work: Awaitable[Any]) -> Any:
    (answer,) = await asyncio.gather(work)
    return answer


async def _in_a_shield(work: Awaitable[Any]) -> Any:
    return await asyncio.shield(work)


INDIRECTLY: list[Take] = [_in_a_task, _in_wait_for, _in_gather, _in_a_shield]


@pytest.mark.parametrize("take", INDIRECTLY)
@in_loop
async def test_lock_acquired_by_a_task_that_ended_can_be_used_and_released(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, take: Take
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    for _ in range(2):
        assert await take(lock.acquire()) is True
        assert client.get("name") == lock.local.token
        assert await lock.owned()
        assert await lock.extend(10)
        assert await lock.reacquire()
        await lock.release()
        assert lock.local.token is None
        assert not client.exists("name")


@pytest.mark.parametrize("contended", [True, False], ids=["contended", "free"])
@in_loop
async def test_lock_acquired_long_after_its_task_has_ended_can_be_released(
    async_lock_class: AsyncLockClass,
    proxy: Proxy,
    async_connect: AsyncClients,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    contended: bool,
) -> None:
    holder = async_lock_class(async_client, "name")
    lock = async_lock_class(async_connect(proxy.port), "name", sleep=0.01)
    await lock.locked()

    async def ask() -> asyncio.Task[Any]:
        acquiring: Any = lock.acquire()
        return asyncio.create_task(acquiring)

    async def look() -> None:
        assert getattr(lock.local, "token", None) is None

    if contended:
        await holder.acquire()
    else:
        proxy.hold()
    acquiring = await asyncio.create_task(ask())
    for _ in range(20):  # enough for what others have left to be tidied up
        await in_task(look)
    if contended:
        await holder.release()
    else:
        proxy.resume()
    assert await acquiring is True
    await lock.release()
    assert not client.exists("name")


@pytest.mark.parametrize("take", INDIRECTLY)
@in_loop
async def test_lock_acquired_and_released_by_tasks_of_their_own(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, take: Take
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    assert await take(lock.acquire()) is True
    assert await take(lock.owned()) is True
    assert await take(lock.extend(10)) is True
    assert await take(lock.reacquire()) is True
    await take(lock.release())
    assert not client.exists("name")


@pytest.mark.parametrize("take", INDIRECTLY)
@in_loop
async def test_holder_can_wrap_what_it_awaits(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, take: Take
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    # The holder makes the call, whatever task then runs it: as in `asyncio.shield(lock.release())`.
    assert await take(lock.extend(10)) is True
    assert await take(lock.reacquire()) is True
    assert await take(lock.owned()) is True
    await take(lock.release())
    assert lock.local.token is None
    assert not client.exists("name")


# Cancelling


@in_loop
async def test_task_cancelled_inside_the_body_releases(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    entered = asyncio.Event()

    async def hold() -> None:
        async with async_lock_class(async_client, "name"):
            entered.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await entered.wait()
    assert client.exists("name")
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    assert not client.exists("name")


@pytest.mark.parametrize("how", ["cancel", "wait_for"])
@in_loop
async def test_waiter_cancelled_in_its_sleep_leaves_nothing_behind(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, how: str
) -> None:
    client.set("name", "taken")
    tried = asyncio.Event()

    class Noting(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_acquire(self, token: Any) -> bool:
            acquired = bool(await super().do_acquire(token))
            tried.set()
            return acquired

    lock = Noting(async_client, "name", sleep=60)
    if how == "cancel":
        waiter = asyncio.create_task(lock.acquire())
        await tried.wait()
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    else:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lock.acquire(), 0.1)
    assert lock.local.token is None
    assert b"taken" == client.get("name")
    client.delete("name")
    assert await lock.acquire(blocking=False) is True
    await lock.release()


@in_loop
async def test_waiter_cancelled_in_its_sleep_does_not_disturb_the_others(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    client.set("name", "taken")
    tries = 0

    class Counting(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_acquire(self, token: Any) -> bool:
            nonlocal tries
            acquired = bool(await super().do_acquire(token))
            tries += 1
            return acquired

    async def take_and_release(sleep_s: float) -> bool:
        async with Counting(async_client, "name", sleep=sleep_s):
            return True

    sleepers = [asyncio.create_task(take_and_release(60)) for _ in range(3)]
    await eventually(lambda: tries == 3, "they sleep")
    others = [asyncio.create_task(take_and_release(0.002)) for _ in range(3)]
    await eventually(lambda: tries > 20, "the others poll")
    for sleeper in sleepers:
        sleeper.cancel()
    client.delete("name")
    assert [True] * 3 == await asyncio.wait_for(asyncio.gather(*others), 10)
    answers = await asyncio.gather(*sleepers, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)
