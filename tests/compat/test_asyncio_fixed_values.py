"""Bugs of redis-py's asyncio Lock that ours does not have: odd clients.

Rules: as in test_fixed_bugs, where those stand that are the same for threads.
"""

from __future__ import annotations

import pytest
import redis
import redis.asyncio

from redislock_fast.server import Server
from tests.support.async_helpers import ASYNC_MODULES, AsyncLockClass, in_loop
from tests.support.helpers import run_script

FAILURES = (AssertionError, pytest.fail.Exception, redis.RedisError, TypeError, AttributeError)


@pytest.fixture(params=[pytest.param("redis-py", marks=pytest.mark.xfail(strict=True, raises=FAILURES)), "ours"])
def lock_class_id(request: pytest.FixtureRequest) -> str:
    """Which of the two classes a test runs on; redis-py's is expected to fail it."""
    name: str = request.param
    return name


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
