"""The running loop, as the pipes know it: what asyncio says, wherever it is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis.asyncio

from redislock_fast._pipe.loop_py import running_loop
from redislock_fast.asyncio import Lock
from tests.support.async_helpers import in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S


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
