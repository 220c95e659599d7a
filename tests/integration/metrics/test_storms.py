"""The gauges after cancels and interrupts: what is not held is not counted, and nothing of it is left in memory.

Rules: one lock object lives through it all, as that of a module does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast
from redislock_fast.asyncio import Lock, Locker, Redlock
from redislock_fast.server import Server
from tests.conftest import Connect, Servers
from tests.integration.metrics.conftest import Exposed
from tests.support.async_helpers import AsyncClients, eventually, in_loop
from tests.support.helpers import PATIENCE_S
from tests.support.interrupts import interrupted_at
from tests.support.redlock import LIMIT_S, values

ROUNDS = 100
FAR: dict[str, Any] = {"timeout": 60}
KINDS: dict[str, dict[str, Any]] = {
    "metrics alone": {},
    "no ttl": {"timeout": None},
    "renewed": {"auto_renew": True},
    "kept": {"auto_renew": True, "reentrant": True},
    "shared": {"auto_renew": True, "thread_local": False},
    "lingers": {"linger": 0.05},
    "lingers and renewed": {"linger": 0.05, "auto_renew": True},
    "Redlock": {},
    "renewed Redlock": {"auto_renew": True},
}


def alive(*kinds: str) -> list[Any]:
    """The objects of classes of these names."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one).__name__ in kinds]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, servers: Servers, async_connect: AsyncClients) -> Callable[[], Any]:
    """Makes a lock of this kind for tasks."""
    is_redlock = "Redlock" in request.param
    chosen = [servers.get("valkey", number) for number in (range(1, 4) if is_redlock else range(1))]
    for server in chosen:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    clients = [async_connect(server.port) for server in chosen]
    settings = {**FAR, **KINDS[request.param]}
    if is_redlock:
        return lambda: Redlock(clients, "name", sleep=0.01, limit=LIMIT_S, **settings)
    return lambda: Lock(clients[0], "name", **settings)


async def release_cancelled(lock: Any) -> None:
    """Acquire, and be cancelled as the release waits for its reply."""
    await lock.acquire()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await lock.release()
    await asyncio.sleep(0)  # a key that lingers is released without waiting


async def cancelled_soon(lock: Any, iterations: int) -> None:
    """Acquire and release, and be cancelled after so many iterations of the loop."""

    async def hold() -> None:
        async with lock:
            pass

    holding = asyncio.create_task(hold())
    for _ in range(iterations):
        await asyncio.sleep(0)
    holding.cancel()
    await asyncio.wait([holding])


@in_loop
async def test_cancelled_releases_of_a_long_lived_lock_leave_nothing(exposed: Exposed, make: Callable[[], Any]) -> None:
    before = alive("Lease", "RedlockLease")
    lock = make()
    for _ in range(ROUNDS):
        releasing = asyncio.create_task(release_cancelled(lock))
        await asyncio.wait([releasing], timeout=PATIENCE_S)
        assert releasing.cancelled()
        assert exposed.held == 0
    del releasing  # its error keeps frames of the release
    assert ROUNDS == exposed.value("hold_duration_seconds_count")
    assert [one for one in alive("Lease", "RedlockLease") if one not in before] == []
    assert 20 > len([one for one in alive("_TaskOwner") if one.token is not None])
    assert await asyncio.wait_for(lock.acquire(), PATIENCE_S) is True
    assert exposed.held == 1
    await lock.release()
    assert exposed.held == 0


@in_loop
async def test_cancels_at_any_moment_leave_nothing_counted(exposed: Exposed, make: Callable[[], Any]) -> None:
    before = alive("Lease", "RedlockLease")
    lock = make()
    for number in range(ROUNDS):
        await cancelled_soon(lock, number % 25)
    assert await asyncio.wait_for(lock.acquire(), PATIENCE_S) is True
    await lock.release()
    assert (exposed.held, exposed.value("waiting")) == (0, 0)
    assert [one for one in alive("Lease", "RedlockLease") if one not in before] == []


@in_loop
async def test_release_after_a_cancelled_one_is_a_success_and_counted_once(
    exposed: Exposed, make: Callable[[], Any]
) -> None:
    lock = make()
    await lock.acquire()

    async def release() -> None:
        await lock.release()

    releasing = asyncio.create_task(release())
    asyncio.get_running_loop().call_soon(releasing.cancel)
    await asyncio.wait([releasing])
    if lock.local.token is not None:  # a key that lingers has been released
        await lock.release()
    assert (exposed.value("hold_duration_seconds_count"), exposed.held) == (1, 0)
    with pytest.raises(LockError):
        await lock.release()


@in_loop
async def test_cancelled_release_of_a_renewed_batch_leaves_no_lease(
    async_valkey_client: redis.asyncio.Redis, valkey: Server
) -> None:
    before = alive("Lease")
    for _ in range(10):
        batch = await Locker(async_valkey_client).acquire_many(
            ["a", "b"], timeout=60, blocking_timeout=PATIENCE_S, auto_renew=True
        )
        releasing = asyncio.create_task(batch.release())
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait([releasing])
        await eventually(lambda: not any([*values([valkey], "a"), *values([valkey], "b")]), "they are released")
    del batch, releasing
    assert [one for one in alive("Lease") if one not in before] == []


SHARED = (
    "_procedures/acquire.py",
    "_procedures/acquire.py",
    "_procedures/release.py",
    "_procedures/lease.py",
    "_lease/holding.py",
    "_lease/lease.py",
    "_lease/metrics.py",
)
OUTPUT = ("_observe/recorder.py", "prometheus.py")
IN_THREADS = ("lock.py", "_transport/threads/server.py", *SHARED, *OUTPUT)
IN_TASKS = ("asyncio/lock.py", "_transport/loop/server.py", *SHARED, *OUTPUT)

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"auto_renew": True}, {"reentrant": True}], ids=["plain", "renewed", "reentrant"]
)


def interrupt_each_line(
    exposed: Exposed, hold: Callable[[], object], lock: Any, end: Callable[[], object], files: tuple[str, ...]
) -> None:
    """Hold the lock again and again, interrupted before each line, and assert that nothing is counted then."""
    hold()
    wrong: dict[str, float] = {}
    number = 0
    while place := interrupted_at(number := number + 1, hold, *files):
        if lock.local.token is not None:
            with contextlib.suppress(LockError):  # the interrupted release has been executed
                end()
        if exposed.held or exposed.value("waiting"):
            wrong[place] = exposed.held
    assert number > 50
    assert {} == wrong


@pytest.mark.slow
@SETTINGS
def test_interrupt_at_any_line_leaves_nothing_counted(
    exposed: Exposed, valkey: Server, connect: Connect, settings: dict[str, Any]
) -> None:
    client = connect(valkey.port)
    lock = redislock_fast.Lock(client, "name", **FAR, **settings)

    def hold() -> None:
        client.delete("name")
        with lock:
            pass

    interrupt_each_line(exposed, hold, lock, lock.release, IN_THREADS)


@pytest.mark.slow
@SETTINGS
def test_interrupt_of_a_task_at_any_line_leaves_nothing_counted(
    exposed: Exposed, valkey: Server, connect: Connect, settings: dict[str, Any]
) -> None:
    admin = connect(valkey.port)
    loop = asyncio.new_event_loop()
    client = redis.asyncio.Redis(port=valkey.port)
    lock = Lock(client, "name", **FAR, **settings)

    async def hold_once() -> None:
        async with lock:
            pass

    async def release() -> None:
        await lock.release()

    def hold() -> None:
        admin.delete("name")
        holding = loop.create_task(hold_once())
        try:
            loop.run_until_complete(holding)
        except KeyboardInterrupt:
            holding.cancel()  # another task may have been interrupted
            loop.run_until_complete(asyncio.wait([holding]))
            raise

    try:
        interrupt_each_line(exposed, hold, lock, lambda: loop.run_until_complete(release()), IN_TASKS)
    finally:
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
