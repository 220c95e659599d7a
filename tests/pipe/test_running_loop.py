"""The running loop, as the pipes know it: what asyncio says, wherever it is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import redis.asyncio

from redislock_fast._pipe.loop_py import running_loop
from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.support.async_helpers import in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S, run_script


@pytest.fixture
def loop_kind(each_loop_kind: str) -> Iterator[str]:
    yield each_loop_kind
    with pytest.raises(RuntimeError):
        running_loop()


async def is_known() -> bool:
    return running_loop() is asyncio.get_running_loop()


@in_loop
async def test_a_task_that_a_reply_has_woken_is_told_its_loop(async_valkey_client: redis.asyncio.Redis) -> None:
    async with Lock(async_valkey_client, "name", timeout=10):
        assert await is_known()
        assert await asyncio.create_task(is_known())
        await asyncio.sleep(0)
        assert await is_known()
    assert await is_known()


@in_loop
async def test_other_threads_are_not_told_of_it(async_valkey_client: redis.asyncio.Redis, loop_kind: str) -> None:
    told: list[Any] = []

    def elsewhere() -> None:
        with pytest.raises(RuntimeError):
            running_loop()
        told.append(run_in_loop(loop_kind, is_known()))

    async with Lock(async_valkey_client, "name", timeout=10):  # so this step, which blocks, is one of the pipe's
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(PATIENCE_S)
        assert [True] == told


@in_loop
async def test_debug_mode_names_the_task_that_takes_long_after_a_reply(
    async_valkey_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 0

    async def hold() -> None:
        async with Lock(async_valkey_client, "name", timeout=10):
            pass

    await hold()  # connects
    caplog.clear()
    await asyncio.create_task(hold(), name="holder")
    assert [text for text in caplog.messages if text.startswith("Executing <Task finished name='holder' ")]


def run_within(loop_kind: str, scenario: Coroutine[Any, Any, Any]) -> Any:
    """Run a loop within a step of the running one, as `nest_asyncio` and notebooks do."""
    outer, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asyncio._leave_task(outer, task)  # CPython 3.14 runs no task within another one
    asyncio._set_running_loop(None)
    try:
        return run_in_loop(loop_kind, scenario)
    finally:
        asyncio._set_running_loop(outer)
        asyncio._enter_task(outer, task)


async def hold_once(client: redis.asyncio.Redis) -> list[bool]:
    known = [await is_known()]
    async with Lock(client, "within", timeout=10):
        known.append(await is_known())
    return [*known, await is_known()]


@in_loop
async def test_another_loop_that_runs_within_a_step_is_the_running_one(
    async_valkey_client: redis.asyncio.Redis, loop_kind: str
) -> None:
    async with Lock(async_valkey_client, "name", timeout=10):  # so this step is one of the pipe's
        assert [True] * 3 == run_within(loop_kind, hold_once(async_valkey_client))
        async with Lock(async_valkey_client, "other", timeout=10):
            assert await is_known()
            assert [True] * 3 == run_within(loop_kind, hold_once(async_valkey_client))
            assert await is_known()


NESTING = """
import asyncio
import sys
import nest_asyncio
import redis.asyncio
from redislock_fast.asyncio import Lock

async def hold(client, name):
    async with Lock(client, name, timeout=10):
        return name

async def hold_nested(client, name, within):
    async with Lock(client, name, timeout=10):
        if within:
            nest_asyncio.apply()
        loop = asyncio.get_running_loop()
        names = [loop.run_until_complete(hold(client, "inner"))]
        names += loop.run_until_complete(asyncio.gather(hold(client, "one"), hold(client, "two")))
        for _ in range(100):  # the loop's own iteration, not patched yet, runs as many callbacks as it had begun with
            loop.call_soon(int)
        return names

async def main(port, within):
    client = redis.asyncio.Redis(port=port)
    assert await hold_nested(client, "outer", within) == ["inner", "one", "two"]
    jobs = [hold_nested(client, f"outer-{number % 3}", within) for number in range(9)]
    assert await asyncio.gather(*jobs) == [["inner", "one", "two"]] * 9
    assert not await client.dbsize()
    await client.aclose()

within = sys.argv[2] == "within a step"
if not within:
    asyncio.set_event_loop(asyncio.new_event_loop())
    nest_asyncio.apply()
asyncio.run(asyncio.wait_for(main(int(sys.argv[1]), within), float(sys.argv[3])))
"""


@pytest.mark.parametrize("applied", ["before", "within a step"])
def test_a_loop_that_is_run_again_within_a_step_has_replies_delivered(valkey: Server, applied: str) -> None:
    pytest.importorskip("nest_asyncio")
    ended = run_script(NESTING, valkey.port, applied, PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (0, "")
