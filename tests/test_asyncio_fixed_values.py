"""Bugs of redis-py's asyncio Lock that ours does not have: arithmetic of times, odd clients, keys, tokens, pickles.

Rules: as in test_fixed_bugs: on redis-py's class every test must fail (strict xfail).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast.server import Server
from tests.async_helpers import ASYNC_MODULES, AsyncClients, AsyncLockClass, eventually, in_loop
from tests.helpers import FakeTime, run_script
from tests.test_fixed_bugs import BAD_TIMEOUTS

FAILURES = (AssertionError, pytest.fail.Exception, redis.RedisError, TypeError, AttributeError)


@pytest.fixture(
    params=[
        pytest.param("redis-py", marks=pytest.mark.xfail(strict=True, raises=FAILURES)),
        "ours",
    ]
)
def lock_class_id(request: pytest.FixtureRequest) -> str:
    """Which of the two classes a test runs on; redis-py's is expected to fail it."""
    name: str = request.param
    return name


# Times


@pytest.mark.parametrize("use", ["extend", "reacquire"])
@in_loop
async def test_timeout_of_zero_is_no_timeout(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, use: str
) -> None:
    lock = async_lock_class(async_client, "name", timeout=0)
    assert await lock.acquire()
    with pytest.raises(LockError, match="with no timeout") as caught:
        await (lock.extend(10) if use == "extend" else lock.reacquire())
    assert LockError is type(caught.value)
    assert (True, -1) == (await lock.owned(), client.ttl("name"))


@pytest.mark.parametrize(
    ("additional_s", "replaces"),
    [(-10, False), (-20, False), (-10, True), (0, True)],
)
@in_loop
async def test_extend_by_what_is_no_ttl_is_refused(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    additional_s: float,
    replaces: bool,
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its exact type is asserted
        await lock.extend(additional_s, replace_ttl=replaces)
    assert ValueError is type(caught.value)
    assert await lock.owned()
    assert 7_000 < client.pttl("name") <= 10_000
    await lock.release()


@in_loop
async def test_extend_below_a_millisecond_is_one_millisecond(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    client.config_set("notify-keyspace-events", "KA")
    events: list[str] = []
    with client.pubsub() as subscription:  # type: ignore[no-untyped-call]
        subscription.subscribe("__keyspace@0__:name")
        assert await lock.extend(0.0001, replace_ttl=True) is True

        def is_gone() -> bool:
            client.exists("name")  # makes the server notice an expiry
            message = subscription.get_message(ignore_subscribe_messages=True, timeout=0.01)
            if message:
                events.append(str(message["data"], "ascii"))
            return bool({"del", "expired"} & set(events))

        await eventually(is_gone, "the key expires")
    client.config_set("notify-keyspace-events", "")
    # A key that is deleted by its new ttl gets none.
    assert ["expire", "expired"] == events[-2:]


@pytest.mark.parametrize("timeout_s", [0.0005, 0.0000001])
@in_loop
async def test_timeout_below_a_millisecond_is_one_millisecond(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, timeout_s: float
) -> None:
    lock = async_lock_class(async_client, "name", timeout=timeout_s)
    assert await lock.acquire(blocking=False) is True
    assert client.pttl("name") in (-2, 0, 1)


@in_loop
async def test_timeout_is_rounded_up(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name", timeout=1.0005)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    await lock.acquire()
    sent = [entry["command"] for entry in client.slowlog_get()]
    client.config_set("slowlog-log-slower-than", 10_000)
    assert any(b"1001" in command.split() for command in sent)


@pytest.mark.parametrize("timeout_s", BAD_TIMEOUTS)
@in_loop
async def test_timeout_that_cannot_be_is_refused(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis, timeout_s: float
) -> None:
    with pytest.raises(ValueError, match="timeout"):
        async_lock_class(async_valkey_client, "name", timeout=timeout_s)
    lock = async_lock_class(async_valkey_client, "name", timeout=10)
    with pytest.raises(ValueError, match="timeout"):
        lock.timeout = timeout_s
    assert 10 == lock.timeout


@pytest.mark.parametrize("timeout", ["10", b"10", [], object], ids=repr)
@in_loop
async def test_timeout_of_a_wrong_type_is_refused(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis, timeout: Any
) -> None:
    with pytest.raises(TypeError, match="timeout"):
        async_lock_class(async_valkey_client, "name", timeout=timeout)
    lock = async_lock_class(async_valkey_client, "name")
    with pytest.raises(TypeError, match="timeout"):
        lock.timeout = timeout


# Clients


@in_loop
async def test_pipeline_as_the_client_is_refused(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    async with async_client.pipeline() as pipeline:
        with pytest.raises(TypeError, match=r"(?i)pipeline"):
            async_lock_class(pipeline, "name")
        with pytest.raises(TypeError, match=r"(?i)pipeline"):
            pipeline.lock("name", lock_class=async_lock_class)


@in_loop
async def test_cluster_pipeline_as_the_client_is_refused(async_lock_class: AsyncLockClass) -> None:
    cluster = redis.asyncio.RedisCluster(host="127.0.0.1", port=1)
    with pytest.raises(TypeError, match=r"(?i)pipeline"):
        async_lock_class(cluster.pipeline(), "name")  # type: ignore[arg-type]


def test_client_without_asyncio_is_refused(async_lock_class: AsyncLockClass, valkey_client: redis.Redis) -> None:
    with pytest.raises(TypeError, match=r"(?i)asyncio"):
        async_lock_class(valkey_client, "name")  # type: ignore[arg-type]


@pytest.mark.usefixtures("async_lock_class")
def test_class_does_not_keep_its_first_client_alive(lock_class_id: str, valkey: Server) -> None:
    script = f"""
import asyncio, gc, weakref
import redis.asyncio
from {ASYNC_MODULES[lock_class_id].__name__} import Lock

async def use():
    async with redis.asyncio.Redis(port={valkey.port}) as client:
        async with Lock(client, "name", timeout=10) as lock:
            await lock.extend(1)
            await lock.reacquire()
        return weakref.ref(client), weakref.ref(client.connection_pool)

async def main():
    alive = await use()
    gc.collect()
    print([one() for one in alive])
    await use()

asyncio.run(main())
"""
    finished = run_script(script)
    assert "" == finished.stderr
    assert "[None, None]\n" == finished.stdout


# Keys and tokens


@in_loop
async def test_empty_token_with_decode_responses_is_owned(
    async_lock_class: AsyncLockClass, server: Server, async_connect: AsyncClients
) -> None:
    client = async_connect(server.port, decode_responses=True)
    lock = async_lock_class(client, "name", timeout=10)
    assert await lock.acquire(token="")
    assert await lock.owned() is True
    await lock.release()
    assert not await client.exists("name")


@pytest.mark.parametrize("blocking", [True, False])
@in_loop
async def test_acquire_of_a_key_that_is_no_string_raises(
    async_lock_class: AsyncLockClass,
    async_client: redis.asyncio.Redis,
    client: redis.Redis,
    fake_async_time: FakeTime,
    blocking: bool,
) -> None:
    fake_async_time.at_most = 3
    client.hset("name", "field", "value")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        await async_lock_class(async_client, "name").acquire(blocking=blocking)
    assert [] == fake_async_time.sleeps_s
    assert {b"field": b"value"} == client.hgetall("name")


@in_loop
async def test_key_that_is_no_string_is_locked_and_not_owned(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    client.hset("name", "field", "value")
    lock = async_lock_class(async_client, "name")
    assert (True, False) == (await lock.locked(), await lock.owned())


@pytest.mark.parametrize("use", ["release", "extend", "reacquire"])
@in_loop
async def test_held_lock_whose_key_became_no_string_is_not_owned(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis, use: str
) -> None:
    lock = async_lock_class(async_client, "name", timeout=10)
    await lock.acquire()
    client.delete("name")
    client.hset("name", "field", "value")
    assert await lock.owned() is False
    with pytest.raises(LockNotOwnedError):
        await (lock.extend(10) if use == "extend" else getattr(lock, use)())
    assert {b"field": b"value"} == client.hgetall("name")


@in_loop
async def test_tokens_have_128_unguessable_bits(
    async_lock_class: AsyncLockClass, async_valkey_client: redis.asyncio.Redis
) -> None:
    drawn: list[bytes] = []

    class Drawing(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_acquire(self, token: Any) -> bool:
            drawn.append(token)
            return False

    lock = Drawing(async_valkey_client, "name", blocking=False)
    for _ in range(3000):
        await lock.acquire()
    assert 3000 == len(set(drawn))
    # An unguessable byte takes every value of its alphabet in so many draws; clocks and addresses hardly change.
    columns = [len(set(column)) for column in zip(*drawn, strict=True)]
    assert 127.9 <= sum(math.log2(values) for values in columns)
