"""What names, tokens and times an asyncio lock takes, and how it refuses the rest.

Rules: as in test_bad_input, whose values these are; both lock classes send the same bytes.
"""

from __future__ import annotations

import decimal
import fractions
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import DataError, LockError

from redislock_fast.asyncio import Lock, Locker
from redislock_fast.server import Server
from tests.integration.lock.test_bad_input import BAD_TERM_IDS, BAD_TERMS, NO_HANDLES, NO_TEXTS, TEXT_IDS, TEXTS
from tests.support.async_helpers import AsyncClients, AsyncLockClass, in_loop


@pytest.mark.parametrize(("name", "key"), TEXTS, ids=TEXT_IDS)
@in_loop
async def test_name_is_the_key(
    async_lock_class: AsyncLockClass,
    async_valkey_client: redis.asyncio.Redis,
    valkey_client: redis.Redis,
    name: Any,
    key: bytes,
) -> None:
    lock = async_lock_class(async_valkey_client, name, timeout=10)
    assert await lock.acquire(blocking=False)
    assert [key] == valkey_client.keys()
    assert await async_lock_class(async_valkey_client, name).acquire(blocking=False) is False
    assert await lock.owned()
    assert await lock.extend(10)
    assert await lock.extend(10, replace_ttl=True)
    assert await lock.reacquire()
    await lock.release()
    assert [] == valkey_client.keys()


@pytest.mark.parametrize(("token", "value"), TEXTS, ids=TEXT_IDS)
@in_loop
async def test_token_is_the_value(
    async_lock_class: AsyncLockClass,
    async_valkey_client: redis.asyncio.Redis,
    valkey_client: redis.Redis,
    token: Any,
    value: bytes,
) -> None:
    lock = async_lock_class(async_valkey_client, "name", timeout=10)
    assert await lock.acquire(blocking=False, token=token)
    assert value == valkey_client.get("name") == bytes(lock.local.token)
    assert await lock.extend(10)
    assert await lock.extend(10, replace_ttl=True)
    assert await lock.reacquire()
    await lock.release()
    assert [] == valkey_client.keys()


@pytest.mark.parametrize("name", NO_TEXTS, ids=repr)
@in_loop
async def test_name_that_is_no_text_is_refused(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis, name: Any
) -> None:
    with pytest.raises(DataError):
        await async_lock_class(async_valkey_client, name).acquire(blocking=False)
    assert [] == await async_valkey_client.keys()


@pytest.mark.parametrize("token", NO_TEXTS[1:], ids=repr)
@in_loop
async def test_token_that_is_no_text_is_refused(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis, token: Any
) -> None:
    with pytest.raises(DataError):
        await async_lock_class(async_valkey_client, "name").acquire(blocking=False, token=token)
    assert [] == await async_valkey_client.keys()


@pytest.mark.parametrize(
    "options", [{"encoding": "latin-1"}, {"encoding": "ascii", "encoding_errors": "replace"}], ids=str
)
@pytest.mark.parametrize("decodes", [False, True])
@in_loop
async def test_name_is_the_key_that_the_client_itself_would_use(
    async_lock_class: AsyncLockClass,
    valkey: Server,
    async_connect: AsyncClients,
    options: dict[str, Any],
    decodes: bool,
) -> None:
    client = async_connect(valkey.port, decode_responses=decodes, **options)
    lock = async_lock_class(client, "\u00fc", timeout=10)
    await lock.acquire(token="token")
    assert ("token" if decodes else b"token") == await client.get("\u00fc")
    assert await lock.owned()
    await lock.release()


@in_loop
async def test_token_is_encoded_as_the_client_does(
    async_lock_class: AsyncLockClass, valkey: Server, async_connect: AsyncClients
) -> None:
    client = async_connect(valkey.port, encoding="latin-1", decode_responses=True)
    lock = async_lock_class(client, "name", timeout=10)
    await lock.acquire(token="\u00e9")
    assert (b"\xe9", True) == (lock.local.token, await lock.owned())
    assert "\u00e9" == await client.get("name")
    await lock.release()


@in_loop
async def test_token_that_the_clients_encoding_has_not_is_refused(
    async_lock_class: AsyncLockClass, valkey: Server, async_connect: AsyncClients
) -> None:
    client = async_connect(valkey.port, encoding="ascii")
    with pytest.raises(UnicodeEncodeError):
        await async_lock_class(client, "name").acquire(blocking=False, token="\u00fc")
    assert [] == await client.keys()


@pytest.mark.parametrize("timeout_s", [1, 1.0, True, decimal.Decimal("1.0"), fractions.Fraction(1)], ids=repr)
@in_loop
async def test_timeout_may_be_any_real_number(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis, timeout_s: Any
) -> None:
    lock = async_lock_class(async_valkey_client, "name", timeout=timeout_s)
    assert await lock.acquire(blocking=False)
    assert 0 < await async_valkey_client.pttl("name") <= 1000
    assert await lock.extend(timeout_s)
    assert await lock.extend(timeout_s, replace_ttl=True)
    assert await lock.reacquire()


@pytest.mark.parametrize("timeout_s", [0, 0.0, None])
@in_loop
async def test_timeout_of_zero_or_none_is_no_expiry(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis, timeout_s: Any
) -> None:
    lock = async_lock_class(async_valkey_client, "name", timeout=timeout_s)
    assert await lock.acquire(blocking=False)
    assert -1 == await async_valkey_client.ttl("name")
    await lock.release()


# What redis-py's class has accidents for


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("additional_s", [float("nan"), float("inf"), float("-inf"), 1e300])
@in_loop
async def test_extend_by_what_is_not_finite_is_refused(
    async_valkey_client: redis.asyncio.Redis, additional_s: float, replaces: bool
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=10)
    await lock.acquire()
    with pytest.raises(ValueError, match="additional_time") as caught:
        await lock.extend(additional_s, replace_ttl=replaces)
    assert not isinstance(caught.value, LockError)
    assert await lock.owned()
    assert 7_000 < await async_valkey_client.pttl("name") <= 10_000


@pytest.mark.parametrize("additional", ["1", b"1", None, []], ids=repr)
@in_loop
async def test_extend_by_what_is_no_number_is_refused(
    async_valkey_client: redis.asyncio.Redis, additional: Any
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=10)
    await lock.acquire()
    with pytest.raises(TypeError, match="additional_time"):
        await lock.extend(additional)
    assert await lock.owned()


@pytest.mark.parametrize("sleep_s", [-1, -0.001, float("nan")])
@in_loop
async def test_sleep_that_cannot_be_is_refused(async_valkey_client: redis.asyncio.Redis, sleep_s: float) -> None:
    await async_valkey_client.set("name", "taken")
    with pytest.raises(ValueError, match="sleep"):
        await Lock(async_valkey_client, "name", sleep=sleep_s).acquire(blocking_timeout=1)


@in_loop
async def test_blocking_timeout_that_is_no_number_is_refused(async_valkey_client: redis.asyncio.Redis) -> None:
    await async_valkey_client.set("name", "taken")
    with pytest.raises(ValueError, match="blocking_timeout"):
        await Lock(async_valkey_client, "name").acquire(blocking_timeout=float("nan"))
    with pytest.raises(ValueError, match="blocking_timeout"):
        await Lock(async_valkey_client, "name", blocking_timeout=float("nan")).acquire()
    with pytest.raises(TypeError, match="blocking_timeout"):
        await Lock(async_valkey_client, "name").acquire(blocking_timeout="1")  # type: ignore[arg-type]


@pytest.mark.parametrize("sleep", ["1", b"1", []], ids=repr)
@in_loop
async def test_sleep_of_a_wrong_type_is_refused(async_valkey_client: redis.asyncio.Redis, sleep: Any) -> None:
    await async_valkey_client.set("name", "taken")
    with pytest.raises(TypeError):
        await Lock(async_valkey_client, "name", sleep=sleep).acquire(blocking_timeout=1)


@pytest.mark.parametrize("client", [None, "redis://localhost", object], ids=repr)
def test_client_that_is_none_is_refused(client: Any) -> None:
    with pytest.raises(TypeError):
        Lock(client, "name")


@pytest.mark.parametrize(("terms", "error", "match"), BAD_TERMS, ids=BAD_TERM_IDS)
@in_loop
async def test_terms_that_cannot_be_are_refused(
    async_connect: AsyncClients, terms: dict[str, Any], error: type[Exception], match: str
) -> None:
    client = async_connect(1)
    with pytest.raises(error, match=match):
        Lock(client, "name", **terms)
    with pytest.raises(error, match=match):
        Locker(client).lock("name", **terms)


@pytest.mark.parametrize("handle", NO_HANDLES, ids=repr)
@in_loop
async def test_handle_that_is_none_is_not_attached(async_connect: AsyncClients, handle: Any) -> None:
    with pytest.raises(TypeError, match="attach"):
        Lock.attach(async_connect(1), handle)
