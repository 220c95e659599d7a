"""`lose` and what only asyncio locks have: callbacks that are awaited, holders that are cancelled.

Rules: as in test_lose.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from redislock_fast import LockLostError, LossReason
from redislock_fast.asyncio import Lock
from redislock_fast.testing import lose
from tests.support.async_helpers import in_loop
from tests.support.waiting import FAR_S

WATCHED: dict[str, Any] = {"timeout": FAR_S, "auto_renew": True}


@in_loop
async def test_awaitable_callback_has_ended_when_the_call_returns(async_valkey_client: redis.asyncio.Redis) -> None:
    told: list[LossReason] = []

    async def on_lost(_: object, reason: LossReason) -> None:
        await asyncio.sleep(0)
        told.append(reason)

    lock = Lock(async_valkey_client, "name", on_lost=on_lost, **WATCHED)
    await lock.acquire()
    await lose(lock, "deleted")
    assert told == [LossReason.DELETED]


@in_loop
async def test_holder_is_cancelled_by_the_loss(async_valkey_client: redis.asyncio.Redis) -> None:
    causes: list[BaseException | None] = []

    async def work() -> None:
        try:
            async with Lock(async_valkey_client, "name", cancel_on_lost=True, **WATCHED) as lock:
                await lose(lock)
        except asyncio.CancelledError as error:
            causes.append(error.__cause__)
            raise

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(map(type, causes)) == [LockLostError]
