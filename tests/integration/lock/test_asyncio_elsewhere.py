"""A lock that one task has acquired is used by what runs elsewhere: other tasks, timers, signal handlers, threads.

Rules: each way acquires in the test's own task, which lives on, and prolongs, asks about and releases elsewhere; each
runs on a plain lock, with options, with a key that lingers, and on a Redlock. No key may stay behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError
from starlette.responses import StreamingResponse

from redislock_fast import LockLostError, LossReason
from redislock_fast.asyncio import Lock, Locker, Redlock
from redislock_fast.testing import assert_no_locks_left
from tests.conftest import Servers
from tests.support.async_helpers import AsyncClients, Owner, eventually, in_loop, in_task, run_in_loop, settle
from tests.support.helpers import PATIENCE_S
from tests.support.redlock import LIMIT_S, values

FAR: dict[str, Any] = {"timeout": 60}
OPTIONS: dict[str, dict[str, Any]] = {
    "Lock": {},
    "noted": {"auto_renew": True},
    "kept": {"auto_renew": True, "reentrant": True, "on_lost": print},
    "lingers": {"linger": 0.05},
    "lingers on options": {"linger": 0.05, "auto_renew": True},
    "Redlock": {},
    "renewed Redlock": {"auto_renew": True},
}


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


class Made:
    """Locks of one kind, and what their servers have."""

    def __init__(self, servers: Servers, connect: AsyncClients, kind: str) -> None:
        self._is_redlock = "Redlock" in kind
        self._settings = {**FAR, **OPTIONS[kind]}
        self._servers = [servers.get("valkey", number) for number in (range(1, 4) if self._is_redlock else range(1))]
        self._clients = [connect(server.port) for server in self._servers]
        for server in self._servers:
            with redis.Redis(port=server.port) as admin:
                admin.flushall()

    def __call__(self, **settings: Any) -> Any:
        """A lock."""
        settings = {**self._settings, **settings}
        if self._is_redlock:
            return Redlock(self._clients, "name", limit=LIMIT_S, **settings)
        return Lock(self._clients[0], "name", **settings)

    def anew(self) -> Made:
        """The same on clients of its own, which are left to the end of the loop."""
        made = copy.copy(self)
        made._clients = [redis.asyncio.Redis(port=server.port) for server in self._servers]
        return made

    def values(self) -> list[bytes | None]:
        """The value at the key, by server."""
        return values(self._servers)

    async def until_gone(self) -> None:
        """Return once no key is left, with what lingers given back."""
        await eventually(lambda: not any(self.values()), "no key is left")


@pytest.fixture(params=OPTIONS)
def make(request: pytest.FixtureRequest, servers: Servers, async_connect: AsyncClients) -> Made:
    return Made(servers, async_connect, request.param)


async def use(lock: Any) -> None:
    """Prolong the lock, and ask about it; a caller that may use it finds it held."""
    assert isinstance(lock.local.token, bytes)
    assert (lock.valid, lock.lost, await lock.owned()) == (True, False, True)
    assert await lock.extend(10) is True
    assert await lock.reacquire() is True
    assert 50 < lock.remaining() <= 60


async def use_and_release(lock: Any) -> None:
    await use(lock)
    await lock.release()


async def held_until_closed(lock: Any) -> AsyncIterator[bytes]:
    """Hold the lock for as long as the generator is not closed."""
    async with lock:
        yield b"held"


# The ways. Each is called by a task that has acquired the lock and lives on, except for those of a generator.


async def same_task(lock: Any) -> None:
    await use_and_release(lock)


async def child_task(lock: Any) -> None:
    await asyncio.create_task(use_and_release(lock))


async def gathered(lock: Any) -> None:
    await asyncio.gather(use(lock), use(lock))
    await asyncio.gather(lock.release())


async def task_group(lock: Any) -> None:
    group: Any = vars(asyncio)["TaskGroup"]()  # from Python 3.11 on
    async with group:
        group.create_task(use_and_release(lock))


async def anyio_task_group(lock: Any) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(use_and_release, lock)


async def heartbeat(lock: Any) -> None:
    beaten = asyncio.Event()

    async def beat() -> None:
        while True:
            await use(lock)
            beaten.set()

    beating = asyncio.create_task(beat())
    await asyncio.wait_for(beaten.wait(), PATIENCE_S)
    beating.cancel()
    await asyncio.wait([beating])
    await lock.release()


async def timer(lock: Any) -> None:
    released: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def release() -> None:
        assert lock.valid
        asyncio.ensure_future(lock.release()).add_done_callback(released.set_result)

    asyncio.get_running_loop().call_later(0.001, release)
    (await asyncio.wait_for(released, PATIENCE_S)).result()


async def soon(lock: Any) -> None:
    tasks: list[asyncio.Future[Any]] = []
    asyncio.get_running_loop().call_soon(lambda: tasks.append(asyncio.ensure_future(use_and_release(lock))))
    await asyncio.sleep(0)
    await tasks[0]


async def signal_handler(lock: Any) -> None:
    loop, handled = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Future[Any]] = []

    def handle() -> None:
        tasks.append(asyncio.ensure_future(lock.release()))
        handled.set()

    loop.add_signal_handler(signal.SIGUSR1, handle)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(handled.wait(), PATIENCE_S)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    await tasks[0]


def _by_the_loop(loop: asyncio.AbstractEventLoop, lock: Any) -> None:
    """Use the lock from a thread, by calls that are made there."""
    for call in (lock.owned, lock.reacquire, lambda: lock.extend(10), lock.release):
        asyncio.run_coroutine_threadsafe(call(), loop).result(PATIENCE_S)


async def thread(lock: Any) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, _by_the_loop, loop, lock)


async def thread_with_the_context(lock: Any) -> None:
    await asyncio.to_thread(_by_the_loop, asyncio.get_running_loop(), lock)


async def exit_stack(lock: Any) -> None:
    await lock.release()
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(lock)
    await asyncio.create_task(stack.aclose())


async def generator_closed(lock: Any) -> None:
    await lock.release()
    generator: Any = held_until_closed(lock)
    await anext(generator)
    await asyncio.create_task(generator.aclose())


async def generator_dropped(lock: Any) -> None:
    await lock.release()
    generator: Any = held_until_closed(lock)
    await anext(generator)
    del generator
    gc.collect()


async def fixture(lock: Any) -> None:
    """Setup and teardown in tasks of their own, as pytest-asyncio runs them."""
    await lock.release()
    generator: Any = held_until_closed(lock)
    await in_task(generator.__anext__)
    await asyncio.create_task(use(lock))
    with pytest.raises(StopAsyncIteration):
        await in_task(generator.__anext__)


async def streaming_response(lock: Any) -> None:
    sent: list[Any] = []

    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"held" if await lock.owned() else b"free"
        finally:
            await lock.release()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": "/", "headers": []}
    await StreamingResponse(body())(scope, receive, send)
    assert [b"held"] == [message["body"] for message in sent if message.get("body")]


async def shielded(lock: Any) -> None:
    await asyncio.shield(use_and_release(lock))


async def limited(lock: Any) -> None:
    await asyncio.wait_for(use_and_release(lock), PATIENCE_S)


async def copied_context(lock: Any) -> None:
    await contextvars.copy_context().run(asyncio.ensure_future, use_and_release(lock))


WAYS = [
    same_task,
    child_task,
    gathered,
    pytest.param(task_group, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="it came with Python 3.11")),
    anyio_task_group,
    heartbeat,
    timer,
    soon,
    signal_handler,
    thread,
    thread_with_the_context,
    exit_stack,
    generator_closed,
    generator_dropped,
    fixture,
    streaming_response,
    shielded,
    limited,
    copied_context,
]


@pytest.mark.parametrize("way", WAYS)
@in_loop
async def test_lock_is_used_and_released_elsewhere(make: Made, way: Callable[[Any], Awaitable[None]]) -> None:
    lock = make()
    await lock.acquire()
    await way(lock)
    await make.until_gone()
    await eventually(lambda: lock.local.token is None, "the reply has come")
    assert not lock.valid


def test_end_of_the_loop_closes_the_generator_that_holds(make: Made, loop_kind: str) -> None:
    generators: list[Any] = []

    async def held_a_little_longer(lock: Any) -> AsyncIterator[bytes]:
        async with lock:
            try:
                yield b"held"
            finally:
                await settle()

    async def leave_open() -> None:
        made = make.anew()
        generators.append(held_a_little_longer(made()))
        await anext(generators[0])

    run_in_loop(loop_kind, leave_open())
    assert not any(make.values())


# What stays as it is: a task holds the lock only by its own acquire.


@in_loop
async def test_task_that_acquires_waits_though_it_may_use_the_lock(make: Made) -> None:
    lock = make(sleep=0.01)
    async with Owner(lock) as holder:
        assert await lock.acquire(blocking=False) is False
        waiting = asyncio.create_task(lock.acquire())
        await use(lock)
        assert not waiting.done()
        await holder.ask(lock.release)
        assert await asyncio.wait_for(waiting, PATIENCE_S) is True
        assert await in_task(lock.owned) is True
        await lock.release()
    await make.until_gone()


@in_loop
async def test_reentrance_is_each_tasks_own(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", reentrant=True, **FAR)
    async with lock:
        assert await in_task(lock.try_acquire) is False
        async with lock:
            await in_task(lock.release)  # of the inner one
            assert await lock.owned()
            await lock.acquire()
    assert await lock.locked() is False


@in_loop
async def test_acquire_or_extend_does_not_hold_by_another_task(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", blocking=False, **FAR)
    async with Owner(lock):
        assert await lock.acquire_or_extend() is False
        assert await in_task(lock.acquire_or_extend) is False


@in_loop
async def test_attached_lock_is_not_entered_by_another_task(async_valkey_client: redis.asyncio.Redis) -> None:
    first = Lock(async_valkey_client, "name", **FAR)
    await first.acquire()
    lock = Lock.attach(async_valkey_client, first.detach(), blocking=False)

    async def enter() -> None:
        with pytest.raises(LockError, match="Unable to acquire"):
            async with lock:
                pass

    await asyncio.create_task(enter())
    async with lock:
        assert await lock.owned()


@in_loop
async def test_token_that_a_task_sets_is_its_own(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", **FAR)
    async with Owner(lock, token="first"):
        lock.local.token = b"second"
        assert await lock.owned() is False
        assert await in_task(_token_of(lock)) is None  # two have one
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        assert b"first" == valkey_client.get("name") == lock.local.token


def _token_of(lock: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def token() -> Any:
        return lock.local.token

    return token


@in_loop
async def test_own_lock_goes_first_though_it_was_lost(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", **FAR)
    await lock.acquire()
    valkey_client.delete("name")
    async with Owner(lock, token="others"):
        with pytest.raises(LockNotOwnedError):
            await lock.extend(10)
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        assert b"others" == valkey_client.get("name")


LATE: dict[str, dict[str, Any]] = {
    "plain": {},
    "on options": {"auto_renew": True},
    "lingers": {"linger": 5},
    "lingers on options": {"linger": 5, "auto_renew": True},
}


@pytest.mark.parametrize("settings", LATE.values(), ids=LATE)
@in_loop
async def test_release_that_begins_late_does_not_release_what_was_acquired_since(
    async_valkey_client: redis.asyncio.Redis, settings: dict[str, Any]
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=60, **settings)
    made: list[Any] = []
    await lock.acquire()
    asyncio.get_running_loop().call_soon(lambda: made.append(lock.release()))
    await asyncio.sleep(0)
    await lock.release()
    await lock.acquire()
    with pytest.raises(LockNotOwnedError):
        await made[0]
    assert (lock.valid, await lock.owned()) == (True, True)
    await lock.release()


# Refusals


REFUSED: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "release": lambda lock: lock.release(),
    "extend": lambda lock: lock.extend(10),
    "reacquire": lambda lock: lock.reacquire(),
}


async def _refusal_of(lock: Any, verb: str, caplog: pytest.LogCaptureFixture) -> LockError:
    """The error, which is logged."""
    caplog.clear()
    with pytest.raises(LockError) as caught:
        await in_task(lambda: REFUSED[verb](lock))
    assert LockError is type(caught.value)
    assert "name" == caught.value.lock_name
    assert [logging.WARNING] == [record.levelno for record in caplog.records]
    assert "'name'" in caplog.text
    return caught.value


@pytest.mark.parametrize("verb", REFUSED)
@in_loop
async def test_refusal_is_logged_where_nothing_is_held(make: Made, caplog: pytest.LogCaptureFixture, verb: str) -> None:
    lock = make()
    await _refusal_of(lock, verb, caplog)
    async with lock:
        pass
    await _refusal_of(lock, verb, caplog)


@pytest.mark.parametrize("verb", REFUSED)
@in_loop
async def test_refusal_is_logged_where_two_tasks_hold(
    async_valkey_client: redis.asyncio.Redis,
    valkey_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    verb: str,
) -> None:
    lock = Lock(async_valkey_client, "name", **FAR)
    async with Owner(lock):
        valkey_client.delete("name")
        async with Owner(lock) as second:
            error = await _refusal_of(lock, verb, caplog)
            assert "2 other tasks" in str(error)
            assert (lock.local.token, lock.valid, await lock.owned()) == (None, False, False)
            assert await second.ask(lock.owned) is True
            await second.ask(lock.release)


@in_loop
async def test_lease_that_has_ended_is_no_second_owner(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", timeout=0.05)
    async with Owner(lock):
        await eventually(lambda: not lock.valid, "the lease ends")
        lock.timeout = 60
        async with Owner(lock) as second:
            await use(lock)
            await lock.release()
            assert await second.ask(lock.owned) is False


# Along with losses and batches


@in_loop
async def test_callback_for_a_loss_uses_no_other_tasks_lock(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    refusals: list[Any] = []

    async def on_lost(lock: Any, _: LossReason) -> None:
        with pytest.raises(LockLostError) as caught:
            await lock.release()
        refusals.append(caught.value.reason)

    lock = Lock(async_valkey_client, "name", timeout=0.3, auto_renew=True, on_lost=on_lost)
    async with Owner(lock) as holder:
        valkey_client.delete("name")
        await eventually(lambda: refusals, "the loss is found")
        assert [LossReason.DELETED] == refusals
        with pytest.raises(LockLostError):
            await holder.ask(lock.release)


@in_loop
async def test_lost_lock_is_known_as_lost_elsewhere(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", auto_renew=True, **FAR)
    async with Owner(lock):
        valkey_client.delete("name")
        with pytest.raises(LockLostError):
            await lock.extend(10)
        assert (lock.lost, lock.valid) == (True, False)


@in_loop
async def test_batch_is_prolonged_and_released_elsewhere(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    batch = await Locker(async_valkey_client).acquire_many(["a", "b"], timeout=60)
    assert {"a": True, "b": True} == await asyncio.create_task(batch.extend(10))
    assert {"a": True, "b": True} == await asyncio.create_task(batch.release())
    assert_no_locks_left(valkey_client)


@in_loop
async def test_lock_is_detached_elsewhere(async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis) -> None:
    lock = Lock(async_valkey_client, "name", auto_renew=True, **FAR)
    async with Owner(lock) as holder:

        async def detach() -> Any:
            return lock.detach()

        handle = await in_task(detach)
        assert await holder.ask(lock.owned) is False
    attached = Lock.attach(async_valkey_client, handle)
    await in_task(attached.release)
    assert not valkey_client.exists("name")
