"""One `once` that many threads or tasks of a process use, and tasks that are cancelled."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.support.async_helpers import eventually, in_loop
from tests.support.helpers import wait_until
from tests.support.interrupts import each_line, handled, interrupted_at
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S

CALLERS = 8
AT_LEAST_S = 3 * FAR_S


def test_threads_share_a_decorated_function(valkey_client: redis.Redis, threads: ThreadPoolExecutor) -> None:
    begin = Barrier(CALLERS)

    @redislock_fast.once(valkey_client, "nightly", timeout=FAR_S, at_least=AT_LEAST_S, on_skip=lambda _: "skipped")
    def run() -> str:
        return "ran"

    def call() -> str:
        begin.wait()
        return run()

    done = [future.result() for future in [threads.submit(call) for _ in range(CALLERS)]]
    assert sorted(done) == ["ran"] + ["skipped"] * (CALLERS - 1)


@in_loop
async def test_tasks_share_a_decorated_function(async_valkey_client: redis.asyncio.Redis) -> None:
    async def skip(_: redislock_fast.Skipped) -> str:
        return "skipped"

    @redislock_fast.asyncio.once(async_valkey_client, "nightly", timeout=FAR_S, at_least=AT_LEAST_S, on_skip=skip)
    async def run() -> str:
        return "ran"

    done = await asyncio.gather(*(run() for _ in range(CALLERS)))
    assert sorted(done) == ["ran"] + ["skipped"] * (CALLERS - 1)


@in_loop
async def test_cancelled_job_keeps_its_key_until_at_least(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    begun = asyncio.Event()

    @redislock_fast.asyncio.once(async_valkey_client, "nightly", timeout=FAR_S, at_least=AT_LEAST_S)
    async def run() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert valkey_client.pttl("nightly") > 1000 * FAR_S


@in_loop
async def test_task_that_is_cancelled_as_it_looks_whether_the_job_is_done_is_cancelled(
    valkey: Server, valkey_client: redis.Redis
) -> None:
    with Proxy(valkey.port) as proxy:
        async with redis.asyncio.Redis(port=proxy.port, socket_timeout=0.2, retry=Retry(NoBackoff(), 0)) as client:

            @redislock_fast.asyncio.once(client, "nightly", timeout=FAR_S, others="wait", done_for=FAR_S)
            async def run() -> None:
                """Do nothing."""

            await run()  # it is connected, and the server has the script
            valkey_client.flushdb()
            proxy.hold_from("EVALSHA", nth=2)
            task = asyncio.create_task(run())
            await eventually(lambda: valkey_client.exists("nightly"), "it has the lock, and looks once more")
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            proxy.resume()
            await eventually(lambda: not valkey_client.keys(), "it is given back")


def test_kept_key_outlives_its_object_without_a_warning(valkey_client: redis.Redis) -> None:
    with redislock_fast.once(valkey_client, "nightly", timeout=FAR_S, at_least=AT_LEAST_S) as run:
        pass
    del run
    gc.collect()
    assert valkey_client.pttl("nightly") > 1000 * FAR_S


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("settings", [{}, {"others": "wait", "done_for": 0.001}], ids=["skip", "wait"])
@pytest.mark.parametrize("at", [interrupted_at, handled])
def test_run_that_is_interrupted_frees_the_lock(
    valkey_client: redis.Redis, at: Callable[..., str], settings: dict[str, Any]
) -> None:
    run = redislock_fast.once(valkey_client, "nightly", timeout=FAR_S, **settings)(lambda: None)
    for strike in each_line(10, at):
        place = strike(run, "single.py", "lock.py")
        wait_until(lambda: not valkey_client.keys(), f"nothing is left after one at {place}")


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
def test_run_that_is_interrupted_after_the_job_keeps_the_key(valkey_client: redis.Redis) -> None:
    ran: list[str] = []
    run = redislock_fast.once(valkey_client, "nightly", timeout=FAR_S, at_least=AT_LEAST_S)(lambda: ran.append("ran"))
    for strike in each_line(3, handled):
        ran.clear()
        strike(run, "single.py")
        assert bool(ran) == valkey_client.exists("nightly")
        valkey_client.delete("nightly")


def test_decorated_function_keeps_its_name(valkey: Server, valkey_client: redis.Redis) -> None:
    @redislock_fast.once(valkey_client, "nightly", timeout=FAR_S)
    def report() -> None:
        """Send the report."""

    assert (report.__name__, report.__doc__) == ("report", "Send the report.")
