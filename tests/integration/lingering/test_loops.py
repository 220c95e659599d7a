"""A lock object with `linger` that several event loops use, side by side or one after the other.

Rules: loops run in asyncio's debug mode, which raises where one is used from another's thread.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lingering.test_lingering import LINGERS
from tests.support.helpers import PATIENCE_S, start, wait_until

LOOPS = 3
MANY = 100


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")


@pytest.fixture
def client(valkey: Server, connect: Connect) -> redis.Redis:
    return connect(valkey.port)


def shared_lock(server: Server, **settings: Any) -> Lock:
    client = redis.asyncio.Redis(host="127.0.0.1", port=server.port)
    return Lock(client, "name", **{**LINGERS, **settings})


def until_given_up(client: redis.Redis) -> None:
    wait_until(lambda: not client.exists("name"), "the key is given up")


def test_loops_in_threads_exclude_one_another(valkey: Server, client: redis.Redis) -> None:
    shared = shared_lock(valkey)
    inside = threading.Semaphore()

    async def work() -> None:
        for _ in range(MANY):
            async with shared:
                assert inside.acquire(blocking=False)
                await asyncio.sleep(0)
                inside.release()

    async def program() -> None:
        await asyncio.gather(work(), work())

    programs = [start(lambda: asyncio.run(program())) for _ in range(LOOPS)]
    assert [one.result(PATIENCE_S) for one in programs] == [None] * LOOPS
    until_given_up(client)


def test_loops_side_by_side_keep_keys_of_their_own(valkey: Server, client: redis.Redis) -> None:
    shared = shared_lock(valkey)
    tokens: list[Any] = []

    async def use() -> None:
        for _ in range(2):
            async with shared:
                pass
            tokens.append(client.get("name"))

    loops = [asyncio.new_event_loop() for _ in range(2)]
    for loop in loops:
        loop.run_until_complete(use())
        client.delete("name")
    for loop in loops:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    assert None not in tokens
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=["plain", "renewed"])
@pytest.mark.parametrize("runs", [False, True], ids=["ended", "running"])
def test_a_loop_releases_what_another_has_acquired(
    valkey: Server, client: redis.Redis, runs: bool, settings: dict[str, Any]
) -> None:
    shared = shared_lock(valkey, thread_local=False, **settings)
    acquired, ends = threading.Event(), threading.Event()

    async def hold() -> None:
        assert await shared.acquire()
        acquired.set()
        while runs and not ends.is_set():
            await asyncio.sleep(0.001)

    async def release() -> None:
        await shared.release()

    holder = start(lambda: asyncio.run(hold()))
    assert acquired.wait(PATIENCE_S)
    if not runs:
        holder.result(PATIENCE_S)
    try:
        asyncio.run(release())
        assert client.exists("name") == 0
    finally:
        ends.set()
    holder.result(PATIENCE_S)


def test_a_release_by_another_loop_wakes_a_local_waiter(valkey: Server) -> None:
    shared = shared_lock(valkey, thread_local=False)
    acquired = threading.Event()

    async def hold_twice() -> None:
        assert await shared.acquire()
        waiting = asyncio.ensure_future(shared.acquire())
        await asyncio.sleep(0)
        acquired.set()
        assert await asyncio.wait_for(waiting, PATIENCE_S)
        await shared.release()

    async def release() -> None:
        await shared.release()

    holder = start(lambda: asyncio.run(hold_twice()))
    assert acquired.wait(PATIENCE_S)
    asyncio.run(release())
    holder.result(PATIENCE_S)
