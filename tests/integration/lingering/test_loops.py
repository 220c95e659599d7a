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
from tests.integration.lingering.test_lingering import LINGERS, SOON_S
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


def test_loops_one_after_the_other_use_keys_of_their_own(valkey: Server, client: redis.Redis) -> None:
    shared = shared_lock(valkey)
    tokens = set()

    async def program() -> None:
        for _ in range(MANY):
            async with shared:
                assert client.get("name") == shared.local.token
            tokens.add(client.get("name"))

    for _ in range(LOOPS):
        asyncio.run(program())
        until_given_up(client)
    assert len(tokens) == LOOPS


def test_a_loop_releases_what_another_that_runs_has_acquired(valkey: Server, client: redis.Redis) -> None:
    shared = shared_lock(valkey, thread_local=False, linger=SOON_S)
    acquired, ends = threading.Event(), threading.Event()

    async def hold() -> None:
        assert await shared.acquire()
        acquired.set()
        while not ends.is_set():
            await asyncio.sleep(0.001)

    holder = start(lambda: asyncio.run(hold()))
    assert acquired.wait(PATIENCE_S)

    async def release() -> None:
        await shared.release()

    try:
        asyncio.run(release())
        until_given_up(client)
    finally:
        ends.set()
    holder.result(PATIENCE_S)
