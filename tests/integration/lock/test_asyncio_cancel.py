"""Cancelling whatever a lock does, at every point where it waits: no key stays behind, nobody else is disturbed.

Rules: on ours alone; redis-py leaves keys behind (test_asyncio_fixed_bugs). A cancel strikes at a counted point of the
work, or while a server is frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import signal
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import LockNotOwnedError

from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy

ROUNDS = 20
"""How often a race is run."""


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@pytest.fixture
def frozen(spare_server: Callable[..., Server]) -> Iterator[Server]:
    """A server that the test may freeze."""
    server = spare_server()
    yield server
    server.signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def freezing(server: Server) -> AsyncIterator[None]:
    """The server does nothing meanwhile."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


class CancelAt:
    """Awaits the work, and cancels the task that does so when the work is suspended for the n-th time, from 0."""

    def __init__(self, work: Awaitable[Any], count: int) -> None:
        self._work = work
        self._count = count

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        error: BaseException | None = None
        for suspended in itertools.count():
            try:
                waits_for = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            if suspended == self._count:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                error = thrown
        return None


async def _cancelled_at(work: Callable[[], Awaitable[Any]], count: int) -> Any:
    return await CancelAt(work(), count)


async def cancelled_at(work: Callable[[], Awaitable[Any]], count: int) -> bool:
    """Whether the work, in a task of its own, was cancelled at its n-th suspension, not finished before."""
    task = asyncio.create_task(_cancelled_at(work, count))
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.done(), "hangs"
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def cancelled_after(work: Callable[[], Coroutine[Any, Any, Any]], iterations: int) -> bool:
    """The same, after so many iterations of the loop."""
    task = asyncio.create_task(work())
    for _ in range(iterations):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.done(), "hangs"
    if not task.cancelled():
        task.result()
    return task.cancelled()


Cancelled = Callable[[Callable[[], Any], int], Awaitable[bool]]

CANCELS = [
    pytest.param(cancelled_at, range(1000), id="suspension"),
    pytest.param(cancelled_after, [*range(1, 40), *(int(40 * 1.3**n) for n in range(30))], id="iteration"),
]


def connections(client: redis.Redis) -> set[str]:
    """The server's ids of the connections that call themselves locks."""
    return {entry["id"] for entry in client.client_list() if entry["name"] == "locks"}


async def warm_up(client: redis.asyncio.Redis) -> None:
    """Connect, and let the server know all scripts."""
    async with Lock(client, "warm-up", timeout=10) as lock:
        await lock.extend(10)
        await lock.reacquire()


# Acquire, while the server is frozen


async def _by_cancel(lock: Lock) -> None:
    task = asyncio.create_task(lock.acquire())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _by_wait_for(lock: Lock) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(lock.acquire(), 0.005)


async def _by_timeout(lock: Lock) -> None:
    timeout = getattr(asyncio, "timeout", None)
    if timeout is None:
        pytest.skip("asyncio.timeout came with Python 3.11")
    with pytest.raises(asyncio.TimeoutError):
        async with timeout(0.005):
            await lock.acquire()


@pytest.mark.parametrize("give_up", [_by_cancel, _by_wait_for, _by_timeout])
@pytest.mark.parametrize("connected", [True, False])
@in_loop
async def test_acquire_cancelled_while_the_server_is_frozen_leaves_no_key(
    frozen: Server,
    connect: Connect,
    async_connect: AsyncClients,
    give_up: Callable[[Lock], Awaitable[None]],
    connected: bool,
) -> None:
    client = connect(frozen.port)
    locks = async_connect(frozen.port)
    for _ in range(ROUNDS):
        if connected:
            await warm_up(locks)
        else:
            locks = async_connect(frozen.port)
        lock = Lock(locks, "name")
        async with freezing(frozen):
            await give_up(lock)
        assert lock.local.token is None
        await lock.locked()  # answered behind whatever the attempt has sent
        await eventually(lambda: not client.exists("name"), "the attempt is undone")
        assert await lock.acquire(blocking=False) is True
        await lock.release()


@in_loop
async def test_cancel_of_some_tasks_disturbs_no_other_and_keeps_the_connection(
    frozen: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    client = connect(frozen.port)
    locks = async_connect(frozen.port, client_name="locks")
    await warm_up(locks)
    before = connections(client)
    for _ in range(5):
        made = [Lock(locks, f"name-{number}", thread_local=False) for number in range(20)]
        async with freezing(frozen):
            tasks = [asyncio.create_task(lock.acquire()) for lock in made]
            await asyncio.sleep(0.005)
            for task in tasks[1::2]:
                task.cancel()
            await asyncio.wait(tasks[1::2], timeout=PATIENCE_S)
            assert all(task.cancelled() for task in tasks[1::2])
        assert [True] * 10 == await asyncio.wait_for(asyncio.gather(*tasks[::2]), PATIENCE_S)
        assert [True] * 10 == await asyncio.gather(*[lock.owned() for lock in made[::2]])
        await eventually(lambda: len(client.keys()) == 10, "the cancelled attempts are undone")
        await asyncio.gather(*[lock.release() for lock in made[::2]])
    assert [] == client.keys()
    assert before == connections(client)


# Acquire, at every point


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_acquire_cancelled_at_any_point_is_undone_or_done(
    valkey: Server,
    connect: Connect,
    async_connect: AsyncClients,
    cancelled: Cancelled,
    counts: list[int],
    connected: bool,
) -> None:
    client = connect(valkey.port)
    locks = async_connect(valkey.port)
    await warm_up(locks)
    for count in counts:
        lock = Lock(locks if connected else async_connect(valkey.port), f"name-{count}", thread_local=False)
        struck = await cancelled(lock.acquire, count)
        assert struck == (lock.local.token is None)
        if not struck:
            assert lock.local.token == client.get(f"name-{count}")
            await lock.release()
            break
        await lock.locked()
    else:
        pytest.fail("never acquired")
    await eventually(lambda: not client.keys(), "all attempts are undone")


@pytest.mark.parametrize("blocking_timeout", [None, 1])
@in_loop
async def test_waiter_cancelled_at_any_point_leaves_no_key(
    server: Server, connect: Connect, async_connect: AsyncClients, blocking_timeout: float | None
) -> None:
    client = connect(server.port)
    locks = async_connect(server.port)
    client.set("name", "taken")
    for count in range(12):
        waiter = Lock(locks, "name", sleep=0.001, blocking_timeout=blocking_timeout, thread_local=False)
        assert await cancelled_at(waiter.acquire, count)
        assert b"taken" == client.get("name")
        assert waiter.local.token is None
    client.delete("name")
    assert await waiter.acquire(blocking=False)
    await waiter.release()
    await eventually(lambda: not client.keys(), "nothing is left")


@in_loop
async def test_acquire_cancelled_at_any_point_of_a_retry_is_undone(
    proxy: Proxy, client: redis.Redis, async_connect: AsyncClients
) -> None:
    for count in range(100):
        locks = async_connect(proxy.port, retry=Retry(ConstantBackoff(0.01), 2))
        await warm_up(locks)
        lock = Lock(locks, f"name-{count}", thread_local=False)
        proxy.drop_reply("SET")
        proxy.refuse()
        try:
            assert await cancelled_at(lock.acquire, count)
        except redis.ConnectionError:
            break
        finally:
            proxy.accept()
        assert lock.local.token is None
    assert count > 3, "the request, a pause, connecting, another pause"
    await eventually(lambda: not client.keys(), "all attempts are undone")


# Release, extend, reacquire


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_release_cancelled_at_any_point_goes_on_and_can_be_repeated(
    proxy: Proxy,
    client: redis.Redis,
    async_connect: AsyncClients,
    cancelled: Cancelled,
    counts: list[int],
    connected: bool,
) -> None:
    locks = async_connect(proxy.port)
    await warm_up(locks)
    for count in counts:
        lock = Lock(locks, "name", timeout=60, thread_local=False)
        assert await lock.acquire(blocking=False)
        token = lock.local.token
        if not connected:
            proxy.cut()
        if not await cancelled(lock.release, count):
            assert lock.local.token is None
            break
        assert token == lock.local.token
        await eventually(lambda: not client.exists("name"), "it is released all the same")
        await lock.release()
        assert lock.local.token is None
    else:
        pytest.fail("never released")
    assert not client.exists("name")


@in_loop
async def test_release_cancelled_by_a_timeout_is_repeated_by_the_holder(
    frozen: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    client = connect(frozen.port)
    lock = Lock(async_connect(frozen.port), "name", timeout=60)
    await warm_up(lock.redis)
    for _ in range(ROUNDS):
        assert await lock.acquire(blocking=False)
        async with freezing(frozen):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(lock.release(), 0.005)
        await lock.release()
        assert not client.exists("name")


@in_loop
async def test_release_cancelled_after_the_lease_ended_says_so_when_repeated(
    frozen: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    client = connect(frozen.port)
    lock = Lock(async_connect(frozen.port), "name", timeout=0.02, thread_local=False)
    assert await lock.acquire()
    await eventually(lambda: not client.exists("name"), "the lease ends")
    assert client.set("name", "another")
    async with freezing(frozen):
        task = asyncio.create_task(lock.release())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(LockNotOwnedError):
        await lock.release()
    assert b"another" == client.get("name")


@pytest.mark.parametrize("use", ["extend", "replace", "reacquire"])
@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_extend_and_reacquire_cancelled_at_any_point_keep_the_lock(
    server: Server,
    client: redis.Redis,
    async_connect: AsyncClients,
    cancelled: Cancelled,
    counts: list[int],
    use: str,
) -> None:
    async def prolong() -> None:
        await (lock.reacquire() if use == "reacquire" else lock.extend(20, replace_ttl=use == "replace"))

    locks = async_connect(server.port)
    await warm_up(locks)
    for count in counts:
        lock = Lock(locks, "name", timeout=30, thread_local=False)
        assert await lock.acquire(blocking=False)
        struck = await cancelled(prolong, count)
        assert await lock.owned()
        assert 15_000 < client.pttl("name") <= 50_000
        await lock.release()
        assert not client.exists("name")
        if not struck:
            return
    pytest.fail("never finished")


@in_loop
async def test_own_token_used_again_is_not_undone(
    proxy: Proxy, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(proxy.port, retry=Retry(ConstantBackoff(0.2), 5))
    await warm_up(locks)
    lock = Lock(locks, "name", thread_local=False)
    proxy.drop_request("SET")
    proxy.refuse()
    task = asyncio.create_task(lock.acquire(token="mine"))
    await eventually(proxy.dropped.is_set, "the request is lost")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cleaning_up = [task for task in asyncio.all_tasks() if "clean_up" in repr(task.get_coro())]
    assert [] == cleaning_up  # no reply said that the request took the key
    proxy.accept()
    assert await lock.acquire(token="mine") is True
    assert b"mine" == client.get("name")
    await lock.release()


# The end of the loop


async def _slow_to_close() -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["acquire", "release"])
@pytest.mark.parametrize("cancels", [True, False])
def test_program_that_ends_with_a_cancel_leaves_no_key(
    frozen: Server,
    connect: Connect,
    loop_kind: str,
    caplog: pytest.LogCaptureFixture,
    use: str,
    cancels: bool,
) -> None:
    client = connect(frozen.port)
    locks = redis.asyncio.Redis(port=frozen.port)

    async def program() -> None:
        await warm_up(locks)
        lock = Lock(locks, "name", thread_local=False)
        if use == "release":
            await lock.acquire()
        other = _slow_to_close()  # of the program's own, it keeps the ending loop running for a while
        await anext(other)
        frozen.signal(signal.SIGSTOP)
        task = asyncio.create_task(getattr(lock, use)())
        await asyncio.sleep(0.005)
        if cancels:
            task.cancel()  # else the end of the loop does it

    for _ in range(3):
        # Recorded, not raised: within the end of a uvloop, an exception would hang it.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run_in_loop(loop_kind, program())
            gc.collect()
        frozen.signal(signal.SIGCONT)
        wait_until(lambda: not client.exists("name"), "no key stays")
        assert [] == [str(warning.message) for warning in warned]
    assert [] == caplog.messages


# Many tasks


@in_loop
async def test_random_cancels_of_many_tasks_break_no_exclusion(
    server: Server, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port, client_name="locks")
    await warm_up(locks)
    before = connections(client)
    holders: Counter[str] = Counter()
    entered = 0

    async def use(name: str) -> None:
        nonlocal entered
        async with Lock(locks, name, timeout=30, sleep=0.001):
            holders[name] += 1
            try:
                assert holders[name] == 1
                entered += 1
                await asyncio.sleep(0)
            finally:
                holders[name] -= 1

    async def work(worker: int) -> None:
        dice = random.Random(worker)
        for _ in range(10):
            task = asyncio.create_task(use(f"name-{dice.randrange(3)}"))
            await asyncio.wait([task], timeout=dice.choice([0, 0.001, 0.01, 0.1]))
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.done(), "hangs"
            if not task.cancelled():
                task.result()

    await asyncio.gather(*map(work, range(100)))
    assert entered > 0
    await eventually(lambda: not client.keys(), "no key is left")
    assert before == connections(client)
