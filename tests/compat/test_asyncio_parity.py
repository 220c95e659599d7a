"""One suite on redis-py's asyncio Lock and on ours: what test_parity cannot say of both, threads and tasks.

Rules: each test passes on both classes, on every kind of server and in every kind of loop; what redis-py does wrong is
in test_asyncio_fixed_bugs.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

from tests.compat.test_parity import CONSTRUCTOR, LAST_OF_CLIENT_LOCK, assert_signature
from tests.compat.test_parity import SIGNATURES as OF_THREADS
from tests.support.async_helpers import AsyncLockClass, in_loop, run_in_loop
from tests.support.helpers import settings_of

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
