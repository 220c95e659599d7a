"""Batches of locks for asyncio: awaiting and entering, cancelling at every await, many tasks, ends of loops.

What both kinds of Locker have in common stands in `test_batch.py` and its neighbours. Rules: as in the other asyncio
modules: a loop per test, of each kind.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast.asyncio
from redislock_fast.asyncio import Locker
from redislock_fast.server import Server
from tests.integration.waiting.test_giving_up import DropAt
from tests.support.async_helpers import AsyncClients, async_few, eventually, in_loop, run_in_loop
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS
from tests.support.holding import until_passed
from tests.support.proxy import Proxy

_MANY = [f"name:{number}" for number in range(1100)]
"""More than one window of requests."""


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Every test here runs in each kind of loop."""
    return each_loop_kind


async def nothing_left(client: redis.Redis, *but: bytes) -> None:
    """Wait until the server has no keys but these."""
    await eventually(lambda: set(client.keys()) == set(but), "everything is undone")


# Awaiting and entering


@in_loop
async def test_acquire_is_awaited_or_entered(async_client: redis.asyncio.Redis, client: redis.Redis) -> None:
    locker = Locker(async_client)
    async with locker.acquire_many(["a", "b"], 10) as batch:
        assert (["a", "b"], 2) == (batch.acquired, client.dbsize())
    assert 0 == client.dbsize()
    async with await locker.acquire_many(["a", "b"], 10) as batch:
        assert isinstance(batch, redislock_fast.asyncio.Batch)
        assert (["a", "b"], 2) == (batch.acquired, client.dbsize())
    assert 0 == client.dbsize()


@in_loop
async def test_entering_all_or_nothing_that_missed_raises(
    async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    client.set("b", "other")
    with pytest.raises(LockError) as caught:
        async with Locker(async_client).acquire_many(["a", "b"], 10, all_or_nothing=True):
            client.set("entered", 1)
    assert ("b", [b"b"]) == (caught.value.lock_name, client.keys())


@in_loop
async def test_leaving_what_was_entered_raises_for_what_was_lost(
    async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    with pytest.raises(LockNotOwnedError):
        async with Locker(async_client).acquire_many(["a", "b"], 10):
            client.delete("a")
    assert 0 == client.dbsize()


@in_loop
async def test_bad_arguments_are_refused_at_the_call(async_valkey_client: redis.asyncio.Redis) -> None:
    locker = Locker(async_valkey_client)
    for names, settings, error in (
        ("abc", {}, TypeError),
        (["a", "a"], {}, ValueError),
        (["a"], {"timeout": -1}, ValueError),
        (["a"], {"sleep": -1}, ValueError),
    ):
        with pytest.raises(error):
            locker.acquire_many(names, **settings)  # type: ignore[arg-type]


@in_loop
async def test_what_is_never_awaited_takes_nothing(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    with pytest.warns(RuntimeWarning, match="Locker.acquire_many"):
        Locker(async_valkey_client).acquire_many(["a"])
    async with Locker(async_valkey_client).acquire_many(["b"]):
        assert [b"b"] == valkey_client.keys()


@in_loop
async def test_a_client_that_blocks_is_refused(valkey_client: redis.Redis) -> None:
    with pytest.raises(TypeError, match="asyncio"):
        Locker(valkey_client)  # type: ignore[arg-type]


# Many tasks


@in_loop
async def test_tasks_race_for_batches_and_each_name_has_one_winner(
    async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    locker = Locker(async_client)
    names = [f"name:{number}" for number in range(50)]

    async def take() -> Any:
        return await locker.acquire_many(names, 60)

    batches = await asyncio.gather(*[take() for _ in range(20)])
    assert sorted(names) == sorted(name for batch in batches for name in batch.acquired)
    assert all(len(batch.acquired) + len(batch.missed) == 50 for batch in batches)
    for batch in batches:
        assert dict.fromkeys(batch.acquired, True) == await batch.release()
    assert 0 == client.dbsize()


# Cancelling


async def cancelled_after(steps: int, work: Callable[[], Awaitable[Any]]) -> bool:
    """Cancel the work after so many iterations of the loop. False when it has ended before."""

    async def run() -> Any:
        return await work()

    task = asyncio.create_task(run())
    for _ in range(steps):
        await asyncio.sleep(0)
    if task.done():
        await task
        return False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return True


@pytest.mark.parametrize("all_or_nothing", [False, True])
@in_loop
async def test_acquire_cancelled_at_any_iteration_leaves_nothing(
    async_client: redis.asyncio.Redis, client: redis.Redis, all_or_nothing: bool
) -> None:
    locker = Locker(async_client)

    async def acquire() -> None:
        batch = await locker.acquire_many(_MANY, 60, all_or_nothing=all_or_nothing)
        finished.append(batch)

    finished: list[redislock_fast.asyncio.Batch] = []
    steps = 0
    while await cancelled_after(steps, acquire):
        await nothing_left(client)
        steps = steps + 1 if steps < 20 else steps * 2
    assert steps > 2
    assert dict.fromkeys(_MANY, True) == await finished[0].release()


@pytest.mark.slow
@pytest.mark.parametrize("awaits", [1, 2, 3, 4])
@pytest.mark.parametrize("all_or_nothing", [False, True])
@in_loop
async def test_acquire_cancelled_while_the_server_is_at_it_leaves_nothing(
    async_connect: AsyncClients, server: Server, client: redis.Redis, all_or_nothing: bool, awaits: int
) -> None:
    client.set(_MANY[500], "other")
    with Proxy(server.port) as proxy:
        locker = Locker(async_connect(proxy.port, retry=async_few()))
        async with locker.acquire_many(["warm-up"]):
            pass
        # In the first window, between the two, at the second one's end, and while it waits or gives back.
        command, count = {1: ("SET", 2), 2: ("SET", 1024), 3: ("SET", 1101), 4: ("SET", 1102)}[awaits]
        if all_or_nothing and awaits == 4:
            command, count = "EVALSHA", 1  # it waits in the queue
        task = asyncio.ensure_future(
            _awaited(locker.acquire_many(_MANY, 60, None, sleep=0.001, all_or_nothing=all_or_nothing))
        )
        await eventually(lambda: proxy.requests[command] >= count, "so many requests")
        proxy.hold()
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, PATIENCE_S)
        proxy.resume()
        await nothing_left(client, _MANY[500].encode())


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@in_loop
async def test_a_wait_that_is_cancelled_leaves_nothing(async_client: redis.asyncio.Redis, client: redis.Redis) -> None:
    client.set("b", "other")
    for all_or_nothing, held in ((False, {b"a", b"b", b"c"}), (True, {b"a", b"b"})):
        task = asyncio.ensure_future(
            _awaited(
                Locker(async_client).acquire_many(["a", "b", "c"], 60, None, sleep=60, all_or_nothing=all_or_nothing)
            )
        )
        await eventually(lambda keys=held: keys == set(client.keys("?")), "it waits")  # type: ignore[misc]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_left(client, b"b")


@in_loop
async def test_wait_for_cancels_an_acquire_cleanly(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    valkey_client.set("b", "other")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(
            _awaited(Locker(async_valkey_client).acquire_many(["a", "b"], 60, None, sleep=0.01)), 0.05
        )
    await nothing_left(valkey_client, b"b")


@in_loop
async def test_a_cancelled_acquire_disturbs_no_other_task(async_client: redis.asyncio.Redis) -> None:
    locker = Locker(async_client)
    tasks = [
        asyncio.ensure_future(_awaited(locker.acquire_many([f"{number}:{name}" for name in range(30)], 60)))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks, timeout=PATIENCE_S)
    for task in tasks[1::2]:
        batch = task.result()
        assert dict.fromkeys(batch.acquired, True) == await batch.release()
        assert 30 == len(batch.acquired)


@in_loop
async def test_release_cancelled_at_any_iteration_goes_on(
    async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    locker = Locker(async_client)
    steps = 1  # cancelled before its first, a coroutine is never called at all
    cancelled = True
    while cancelled:
        batch = await locker.acquire_many(_MANY, 60)
        cancelled = await cancelled_after(steps, batch.release)
        await nothing_left(client)
        # A second release finds it done; the windows that had their verdicts are not told again.
        again = await batch.release()
        assert dict.fromkeys(again, True) == again
        steps = steps + 1 if steps < 20 else steps * 2
    assert steps > 2


@in_loop
async def test_release_of_a_dropped_task_goes_on(async_client: redis.asyncio.Redis, client: redis.Redis) -> None:
    for count in range(2):
        batch = await Locker(async_client).acquire_many(_MANY, 60)
        await DropAt(batch.release(), count)
        await nothing_left(client)
        again = await batch.release()
        assert dict.fromkeys(again, True) == again


@in_loop
async def test_a_release_cancelled_before_its_reply_is_a_success_when_repeated(
    async_connect: AsyncClients, server: Server, client: redis.Redis
) -> None:
    with Proxy(server.port) as proxy:
        batch = await Locker(async_connect(proxy.port)).acquire_many(["a", "b"], 60)
        proxy.hold()
        task = asyncio.ensure_future(batch.release())
        await eventually(lambda: any(proxy.requests[command] for command in RELEASE_COMMANDS), "it has left")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.resume()
        await nothing_left(client)
        assert {"a": True, "b": True} == await batch.release()
        assert {} == await batch.release()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "dropped"])
@in_loop
async def test_release_of_a_renewed_batch_that_does_not_end_is_no_loss(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis, how: str
) -> None:
    losses: list[Any] = []
    ttl_s = 3.0
    batch = await Locker(async_valkey_client).acquire_many(
        _MANY, ttl_s, auto_renew=True, on_lost=lambda *loss: losses.append(loss)
    )
    if how == "cancelled":
        assert await cancelled_after(1, batch.release)
    else:
        await DropAt(batch.release(), 0)
    await nothing_left(valkey_client)
    await asyncio.to_thread(until_passed, valkey_client, ttl_s)
    assert losses == []


@pytest.mark.parametrize("use", ["extend", "reacquire"])
@in_loop
async def test_prolonging_cancelled_at_any_iteration_loses_nothing(
    async_client: redis.asyncio.Redis, client: redis.Redis, use: str
) -> None:
    batch = await Locker(async_client).acquire_many(["a", "b", "c"], 60)
    steps = 0
    while await cancelled_after(steps, lambda: batch.extend(1) if use == "extend" else batch.reacquire()):
        steps += 1
    assert steps > 0
    assert dict.fromkeys("abc", True) == await batch.release()
    assert 0 == client.dbsize()


@in_loop
async def test_a_body_that_is_cancelled_releases(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    async def work() -> None:
        async with Locker(async_valkey_client).acquire_many(["a", "b"], 60):
            entered.set()
            await asyncio.sleep(60)

    entered = asyncio.Event()
    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 == valkey_client.dbsize()


# Ends


def test_a_batch_can_be_released_in_another_loop(loop_kind: str, valkey: Server) -> None:
    client = redis.asyncio.Redis(port=valkey.port)

    async def take() -> redislock_fast.asyncio.Batch:
        return await Locker(client).acquire_many(["a", "b"], 60)

    batch: redislock_fast.asyncio.Batch = run_in_loop(loop_kind, take())

    async def give_back() -> dict[Any, bool]:
        try:
            return await batch.release()
        finally:
            await client.aclose()

    assert {"a": True, "b": True} == run_in_loop(loop_kind, give_back())


def test_a_wait_that_ends_with_its_loop_raises_nothing_into_the_void(loop_kind: str, valkey: Server) -> None:
    client = redis.asyncio.Redis(port=valkey.port)
    with redis.Redis(port=valkey.port) as admin:
        admin.set("b", "other")

        async def leave_it_waiting() -> None:
            task = asyncio.ensure_future(_awaited(Locker(client).acquire_many(["a", "b"], 60, None, sleep=0.01)))
            await eventually(lambda: admin.exists("a"), "it waits")
            assert not task.done()  # and the loop's end cancels it

        run_in_loop(loop_kind, leave_it_waiting())
        gc.collect()


def test_a_forked_child_holds_nothing(in_fork: InFork, valkey: Server) -> None:
    client = redis.asyncio.Redis(port=valkey.port)

    async def take() -> redislock_fast.asyncio.Batch:
        return await Locker(client).acquire_many(["a", "b"], 60)

    batch: redislock_fast.asyncio.Batch = asyncio.run(take())

    def in_child() -> str:
        async def told() -> list[Any]:
            return [await batch.release(), await batch.extend(1), await batch.reacquire()]

        return repr(asyncio.run(told()))

    assert repr([{}, {}, {}]) == in_fork(in_child)

    async def give_back() -> dict[Any, bool]:
        try:
            return await batch.release()
        finally:
            await client.aclose()

    assert {"a": True, "b": True} == asyncio.run(give_back())
