"""One suite on redis-py's asyncio Lock and on ours: the surface, ownership, expiry, errors.

Rules: each test passes on both classes, on every kind of server and in every kind of loop; what redis-py does wrong is
in test_asyncio_fixed_bugs.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast.server import Server
from tests.support.async_helpers import AsyncClients, AsyncLockClass, in_loop, run_in_loop
from tests.support.helpers import settings_of

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "__init__": [
        ("self", REQUIRED),
        ("redis", REQUIRED),
        ("name", REQUIRED),
        ("timeout", None),
        ("sleep", 0.1),
        ("blocking", True),
        ("blocking_timeout", None),
        ("thread_local", True),
        ("raise_on_release_error", True),
    ],
    "register_scripts": [("self", REQUIRED)],
    "acquire": [("self", REQUIRED), ("blocking", None), ("blocking_timeout", None), ("token", None)],
    "do_acquire": [("self", REQUIRED), ("token", REQUIRED)],
    "locked": [("self", REQUIRED)],
    "owned": [("self", REQUIRED)],
    "release": [("self", REQUIRED)],
    "do_release": [("self", REQUIRED), ("expected_token", REQUIRED)],
    "extend": [("self", REQUIRED), ("additional_time", REQUIRED), ("replace_ttl", False)],
    "do_extend": [("self", REQUIRED), ("additional_time", REQUIRED), ("replace_ttl", REQUIRED)],
    "reacquire": [("self", REQUIRED)],
    "do_reacquire": [("self", REQUIRED)],
    "__aenter__": [("self", REQUIRED)],
    "__aexit__": [("self", REQUIRED), ("exc_type", REQUIRED), ("exc_value", REQUIRED), ("traceback", REQUIRED)],
}


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(async_lock_class: AsyncLockClass, method: str) -> None:
    parameters = inspect.signature(getattr(async_lock_class, method)).parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    added = [p for p in parameters if p not in positional]
    assert SIGNATURES[method] == [(p.name, p.default) for p in positional]
    assert all(p.kind is p.VAR_KEYWORD or (p.kind is p.KEYWORD_ONLY and p.default is not p.empty) for p in added)


@in_loop
async def test_attributes_hold_what_the_constructor_was_given(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_lock_class(async_client, "name", 10, 0.2, False, 3, False, False)
    assert lock.redis is async_client
    assert ("name", 10, 0.2, False, 3, False, False) == settings_of(lock)
    assert isinstance(lock.local, SimpleNamespace)


@in_loop
async def test_attributes_have_redis_pys_defaults(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_lock_class(async_client, "name")
    assert ("name", None, 0.1, True, None, True, True) == settings_of(lock)
    assert lock.local.token is None


@in_loop
async def test_client_lock_makes_the_given_class(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_client.lock("name", 10, 0.2, False, 3, async_lock_class, False, False)
    assert type(lock) is async_lock_class
    assert ("name", 10, 0.2, False, 3, False, False) == settings_of(lock)


@in_loop
async def test_attributes_can_be_changed_after_construction(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    client.set("second", "taken")
    lock = async_lock_class(async_client, "first", timeout=10)
    lock.name = "second"
    lock.blocking = False
    assert not await lock.acquire()
    client.delete("second")
    lock.timeout = 100
    assert await lock.acquire()
    assert 10_000 < client.pttl("second") <= 100_000
    assert not client.exists("first")
    await lock.release()


@in_loop
async def test_client_can_be_changed_after_construction(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, server: Server, async_connect: AsyncClients
) -> None:
    lock = async_lock_class(async_client, "name")
    lock.redis = other = async_connect(server.port, db=1)
    assert await lock.acquire()
    assert (0, 1) == (await async_client.exists("name"), await other.exists("name"))
    await lock.release()
    assert not await other.exists("name")


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
async def test_acquire_sets_the_name_to_the_token(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name")
    assert await lock.acquire(blocking=False) is True
    assert isinstance(lock.local.token, bytes)
    assert lock.local.token == client.get("name")
    assert [b"name"] == client.keys()
    assert -1 == client.ttl("name")


@in_loop
async def test_release_deletes_the_key_and_forgets_the_token(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock: Any = async_lock_class(async_client, "name")
    await lock.acquire()
    assert await lock.release() is None
    assert lock.local.token is None
    assert [] == client.keys()


@in_loop
async def test_acquire_of_a_taken_lock_returns_false(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    first, second = async_lock_class(async_client, "name"), async_lock_class(async_client, "name")
    assert await first.acquire(blocking=False)
    assert await second.acquire(blocking=False) is False
    assert second.local.token is None
    assert first.local.token == client.get("name")
    await first.release()
    assert await second.acquire(blocking=False) is True


@in_loop
async def test_acquire_again_without_blocking_returns_false_while_held(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name")
    assert await lock.acquire(blocking=False)
    token = lock.local.token
    assert await lock.acquire(blocking=False) is False
    assert token == lock.local.token == client.get("name")
    await lock.release()


@pytest.mark.parametrize("timeout_s", [10, 10.0, 9.5])
@in_loop
async def test_timeout_is_the_keys_expiry(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, timeout_s: float
) -> None:
    lock = async_lock_class(async_client, "name", timeout=timeout_s)
    assert await lock.acquire()
    assert 8_000 < client.pttl("name") <= timeout_s * 1000
    await lock.release()


@in_loop
async def test_copy_shares_the_client_and_the_ownership(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    twin = copy.copy(lock)
    assert twin.redis is async_client
    assert await twin.owned()
    await twin.release()
    assert not client.exists("name")


@in_loop
async def test_locked_tells_of_anybodys_lock(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock, other = async_lock_class(async_client, "name"), async_lock_class(async_client, "name")
    assert await lock.locked() is False
    await lock.acquire()
    assert (True, True) == (await lock.locked(), await other.locked())
    await lock.release()
    assert (False, False) == (await lock.locked(), await other.locked())
    client.set("name", "")
    assert await lock.locked() is True


@in_loop
async def test_owned_tells_of_this_lock_only(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock, other = async_lock_class(async_client, "name"), async_lock_class(async_client, "name")
    assert await lock.owned() is False
    await lock.acquire()
    assert (True, False) == (await lock.owned(), await other.owned())
    client.set("name", "stolen")
    assert await lock.owned() is False
    client.delete("name")
    assert await lock.owned() is False


@pytest.mark.parametrize(
    ("given", "stored"),
    [("token", b"token"), (b"token", b"token"), ("t\u00f6ken", b"t\xc3\xb6ken"), (b"\xff\0\r\n",) * 2],
)
@in_loop
async def test_own_token_is_used(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    given: Any,
    stored: bytes,
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    assert await lock.acquire(token=given)
    assert stored == client.get("name") == lock.local.token
    assert await lock.owned()
    assert await lock.extend(10)
    await lock.release()
    assert not client.exists("name")


@in_loop
async def test_tokens_differ_from_acquire_to_acquire(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_lock_class(async_client, "name")
    tokens = set()
    for _ in range(20):
        await lock.acquire()
        tokens.add(lock.local.token)
        await lock.release()
    assert 20 == len(tokens)


@in_loop
async def test_token_is_in_no_message_and_no_log(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    lock = async_lock_class(async_client, "name", timeout=10, raise_on_release_error=False)
    seen: list[str] = []
    async with lock:
        token = lock.local.token.decode()
        seen += [repr(lock), str(lock)]
        client.delete("name")
        uses: list[Callable[[], Awaitable[object]]] = [lambda: lock.extend(1), lock.reacquire]
        for fails in uses:
            with pytest.raises(LockNotOwnedError) as caught:
                await fails()
            seen += [str(caught.value), repr(caught.value), repr(vars(caught.value))]
    seen += [record.getMessage() for record in caplog.records]
    assert any("no longer owned" in text for text in seen)
    assert not [text for text in seen if token in text]


@in_loop
async def test_context_manager_holds_the_lock(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    async with async_lock_class(async_client, "name") as lock:
        assert isinstance(lock, async_lock_class)
        assert lock.local.token == client.get("name")
    assert not client.exists("name")


@pytest.mark.parametrize("error", [KeyError, asyncio.CancelledError])
@in_loop
async def test_context_manager_releases_when_the_body_raises(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    error: type[BaseException],
) -> None:
    with pytest.raises(error):
        async with async_lock_class(async_client, "name"):
            raise error
    assert not client.exists("name")


@pytest.mark.parametrize("settings", [{"blocking": False}, {"blocking_timeout": 0.05}])
@in_loop
async def test_context_manager_that_cannot_acquire_raises_lock_error(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    settings: dict[str, Any],
) -> None:
    client.set("name", "taken")
    with pytest.raises(LockError) as caught:
        async with async_lock_class(async_client, "name", **settings):
            pass
    assert "Unable to acquire lock within the time specified" == caught.value.message
    assert b"taken" == client.get("name")


@in_loop
async def test_context_manager_raises_when_no_longer_owned(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    with pytest.raises(LockNotOwnedError):
        async with async_lock_class(async_client, "name"):
            client.set("name", "stolen")
    assert b"stolen" == client.get("name")


@in_loop
async def test_context_manager_raises_when_already_released(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    with pytest.raises(LockError, match="already unlocked"):
        async with async_lock_class(async_client, "name") as lock:
            await lock.release()


@pytest.mark.parametrize("releases", [False, True])
@in_loop
async def test_raise_on_release_error_false_logs_a_warning(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    releases: bool,
) -> None:
    async with async_lock_class(async_client, "name", raise_on_release_error=False) as lock:
        if releases:
            await lock.release()
        else:
            client.set("name", "stolen")
    (record,) = (record for record in caplog.records if record.name == async_lock_class.__module__)
    assert "WARNING" == record.levelname
    assert "no longer owned" in record.getMessage()


def _assert_error(error: LockError, kind: type[LockError], message: str) -> None:
    assert kind is type(error)
    assert isinstance(error, (ValueError, redis.RedisError))
    assert message == error.message == str(error)


@in_loop
async def test_unlocked_lock_raises_lock_error(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    with pytest.raises(LockError) as caught:
        await lock.release()
    _assert_error(caught.value, LockError, "Cannot release a lock that's not owned or is already unlocked.")
    # At the call, before anything is awaited.
    with pytest.raises(LockError) as caught:
        lock.extend(1)
    _assert_error(caught.value, LockError, "Cannot extend an unlocked lock")
    with pytest.raises(LockError) as caught:
        lock.reacquire()
    _assert_error(caught.value, LockError, "Cannot reacquire an unlocked lock")


@in_loop
async def test_released_lock_raises_lock_error_on_a_second_release(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    lock = async_lock_class(async_client, "name")
    await lock.acquire()
    await lock.release()
    with pytest.raises(LockError) as caught:
        await lock.release()
    assert LockError is type(caught.value)


@pytest.mark.parametrize("is_stolen", [True, False])
@in_loop
async def test_lost_lock_raises_not_owned(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, is_stolen: bool
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    token = lock.local.token
    if is_stolen:
        client.set("name", "stolen")
    else:
        client.delete("name")
    with pytest.raises(LockNotOwnedError) as caught:
        await lock.extend(1)
    _assert_error(caught.value, LockNotOwnedError, "Cannot extend a lock that's no longer owned")
    with pytest.raises(LockNotOwnedError) as caught:
        await lock.reacquire()
    _assert_error(caught.value, LockNotOwnedError, "Cannot reacquire a lock that's no longer owned")
    assert token == lock.local.token
    with pytest.raises(LockNotOwnedError) as caught:
        await lock.release()
    _assert_error(caught.value, LockNotOwnedError, "Cannot release a lock that's no longer owned")
    assert lock.local.token is None
    assert (b"stolen" if is_stolen else None) == client.get("name")


@in_loop
async def test_release_after_expiry_raises_not_owned(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    client.pexpire("name", 1)
    other = async_lock_class(async_client, "name", timeout=10, sleep=0.001)
    assert await other.acquire(blocking_timeout=5)
    with pytest.raises(LockNotOwnedError):
        await lock.release()
    assert await other.owned()
