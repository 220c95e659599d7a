"""The beginning of the lease of an acquire that the first request settles.

Rules: no server. The clock goes on while the request is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._transport.loop import server as loop_server
from redislock_fast._transport.threads import server as thread_server

SENT_AT = 100.0
TTL_S = 10


class Pipe:
    """A server that takes five seconds to grant the lock.

    Attributes:
        now: the clock's time.
    """

    def __init__(self) -> None:
        self.now = SENT_AT

    def clock(self) -> float:
        """The time."""
        return self.now

    def ask(self, *_: Any) -> bytes:
        """Grant the lock to a thread."""
        self.now += 5
        return b"OK"

    async def call(self, *_: Any) -> bytes:
        """Grant the lock to a task."""
        return self.ask()


def acquired_by_thread(connection: Any) -> Any:
    """A lock that a thread has acquired on this connection."""
    lock: Any = redislock_fast.Lock(redis.Redis(), "name", timeout=TTL_S)
    lock._transport.connection = connection
    assert lock.acquire() is True
    return lock._held()


def acquired_by_task(connection: Any) -> Any:
    """The same for a task."""

    async def scenario() -> Any:
        lock: Any = redislock_fast.asyncio.Lock(redis.asyncio.Redis(), "name", timeout=TTL_S, thread_local=False)
        lock._transport.of_running_loop().connection = connection
        assert await lock.acquire() is True
        return lock._held()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("acquired", "module"),
    [(acquired_by_thread, thread_server), (acquired_by_task, loop_server)],
    ids=["threads", "tasks"],
)
def test_lease_counts_from_the_time_before_the_request(
    acquired: Callable[..., Any], module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipe()
    monkeypatch.setattr(module, "clock", pipe.clock)
    connection = SimpleNamespace(pipe=pipe, capabilities=Capabilities(), registry=None, timeout_s=-1.0, ending=None)
    owner = acquired(connection)
    assert owner.expiry == (owner.token, SENT_AT + TTL_S)
