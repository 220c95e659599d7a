"""Holding a lock in tasks: the task that is cancelled for a loss, callbacks that are awaited, loops that end.

Rules: as in test_holding, which has what threads and tasks share; each test runs on both kinds of event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Iterator, Sized
from functools import partial
from typing import Any, Literal

import pytest
import redis
import redis.asyncio

from redislock_fast import LockLostError, LossReason
from redislock_fast.asyncio import Lock, Redlock
from redislock_fast.server import Server
from tests.conftest import Servers
from tests.support.async_helpers import AsyncClients, eventually, in_loop, in_task, run_in_loop
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.holding import BRIEF_S, LONG_S, RENEWED, SLOW_S, Losses, hold_the_gil, passing, with_gil
from tests.support.proxy import Proxy
from tests.support.redlock import LIMIT_S, delete, values
from tests.support.waiting import FAR_S

CANCELLING: dict[str, Any] = {"timeout": BRIEF_S, "cancel_on_lost": True}


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


async def forever() -> None:
    await asyncio.Event().wait()


async def hold(*locks: Lock) -> None:
    """Hold locks, one within the other, until something happens."""
    if locks:
        async with locks[0]:
            await hold(*locks[1:])
    else:
        await forever()


async def cancelled_by(task: asyncio.Task[Any]) -> asyncio.CancelledError:
    """The error that the task ends with."""
    with pytest.raises(asyncio.CancelledError) as caught:
        await asyncio.wait_for(task, PATIENCE_S)
    return caught.value


# On one server, and on a majority of several


class Kept:
    """Locks of one kind, whose keys can be deleted: `make(timeout=10)`."""

    def __init__(self, connect: AsyncClients, servers: list[Server], kind: str) -> None:
        self._connect = connect
        self._servers = servers
        self._kind = kind

    def __call__(self, name: str = "name", **settings: Any) -> Any:
        """A lock on clients of its own."""
        return self.on([self._connect(server.port) for server in self._servers], name, **settings)

    def on(self, clients: list[redis.asyncio.Redis], name: str, **settings: Any) -> Any:
        """A lock on these clients."""
        if self._kind == "Lock":
            return Lock(clients[0], name, **settings)
        return Redlock(clients, name, limit=LIMIT_S, **settings)

    def new_clients(self) -> list[redis.asyncio.Redis]:
        """Clients that the test closes."""
        return [redis.asyncio.Redis(port=server.port) for server in self._servers]

    async def delete(self) -> None:
        """Delete the key, once all servers have it."""
        await eventually(lambda: all(values(self._servers)), "it is held everywhere")
        delete(self._servers)


@pytest.fixture(params=["Lock", "Redlock"])
def make(request: pytest.FixtureRequest, servers: Servers, async_connect: AsyncClients) -> Kept:
    """Locks on one server, and on a majority of three."""
    numbers = range(1) if request.param == "Lock" else range(1, 4)
    chosen = [servers.get("valkey", number) for number in numbers]
    for server in chosen:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    return Kept(async_connect, chosen, request.param)


@pytest.mark.parametrize("reason", [LossReason.EXPIRED, LossReason.DELETED])
@in_loop
async def test_holding_task_is_cancelled_for_a_loss(make: Kept, reason: LossReason) -> None:
    causes: list[Any] = []
    held = asyncio.Event()
    settings = CANCELLING if reason is LossReason.EXPIRED else {**RENEWED, "cancel_on_lost": True}

    async def work() -> None:
        try:
            async with make(**settings):
                held.set()
                await forever()
        except asyncio.CancelledError as error:
            causes.append(error.__cause__)
            raise

    task = asyncio.create_task(work())
    await asyncio.wait_for(held.wait(), PATIENCE_S)
    if reason is LossReason.DELETED:
        await make.delete()
    await cancelled_by(task)
    assert [(type(cause), cause.reason, cause.lock_name) for cause in causes] == [(LockLostError, reason, "name")]


@in_loop
async def test_task_that_awaits_by_a_helper_is_the_one_that_holds(make: Kept) -> None:
    lock = make(**CANCELLING)

    async def work() -> None:
        await asyncio.wait_for(lock.acquire(), PATIENCE_S)
        await forever()

    await cancelled_by(asyncio.create_task(work()))


@in_loop
async def test_task_that_released_in_time_is_not_cancelled(make: Kept, valkey_client: redis.Redis) -> None:
    async with make(**CANCELLING):
        pass
    await eventually(passing(valkey_client, 2 * BRIEF_S), "the ttl passes")


@pytest.mark.parametrize("verb", ["release", "extend"])
@in_loop
async def test_task_that_finds_the_loss_itself_is_not_cancelled_as_well(make: Kept, verb: str) -> None:
    lock = make(timeout=FAR_S, auto_renew=True, cancel_on_lost=True)

    async def work() -> str:
        await lock.acquire()
        await make.delete()
        with pytest.raises(LockLostError):
            await (lock.release() if verb == "release" else lock.extend(1))
        await asyncio.sleep(0)
        return "not cancelled"

    assert await in_task(work) == "not cancelled"


@in_loop
async def test_callback_may_be_a_coroutine(make: Kept) -> None:
    told: asyncio.Queue[tuple[Any, LossReason]] = asyncio.Queue()

    async def on_lost(lock: Any, reason: LossReason) -> None:
        await asyncio.sleep(0)
        await told.put((lock, reason))

    lock = make(timeout=BRIEF_S, on_lost=on_lost)
    await lock.acquire()
    assert await asyncio.wait_for(told.get(), PATIENCE_S) == (lock, LossReason.EXPIRED)


@with_gil
@in_loop
async def test_blocked_loop_loses_the_lock_and_is_told(make: Kept, losses: Losses) -> None:
    lock = make(timeout=BRIEF_S, auto_renew=True, on_lost=losses)
    await lock.acquire()
    hold_the_gil(2 * BRIEF_S)
    assert not lock.valid
    await eventually(lambda: losses.reasons, "the loss is told")
    assert losses.reasons == [LossReason.EXPIRED]


@pytest.mark.slow
def test_two_loops_hold_side_by_side(make: Kept, valkey_client: redis.Redis, loop_kind: str) -> None:
    async def scenario(name: str) -> tuple[list[LossReason], bool]:
        losses = Losses()
        async with make.on(make.new_clients(), name, on_lost=losses, **RENEWED) as lock:
            await eventually(passing(valkey_client, LONG_S), "the ttl passes")
            return losses.reasons, lock.valid

    running = [start(partial(run_in_loop, loop_kind, scenario(name))) for name in ("name-1", "name-2")]
    assert [future.result(PATIENCE_S) for future in running] == [([], True), ([], True)]


# The holding task


@in_loop
async def test_holding_task_is_told_why_without_a_with(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", **CANCELLING)

    async def work() -> Any:
        await lock.acquire()
        try:
            await forever()
        except asyncio.CancelledError as error:
            with pytest.raises(LockLostError):
                await lock.release()
            return error.args[0]

    lost = await asyncio.wait_for(asyncio.create_task(work()), PATIENCE_S)
    assert (type(lost), lost.reason, lost.lock_name) == (LockLostError, LossReason.EXPIRED, "name")


@in_loop
async def test_cancel_for_another_reason_has_no_such_cause(async_valkey_client: redis.asyncio.Redis) -> None:
    causes: list[BaseException | None] = []
    lock = Lock(async_valkey_client, "name", timeout=FAR_S, cancel_on_lost=True)

    async def work() -> None:
        try:
            await hold(lock)
        except asyncio.CancelledError as error:
            causes.append(error.__cause__)

    task = asyncio.create_task(work())
    await eventually(lambda: async_valkey_client.exists("name"), "it holds")
    task.cancel()
    await asyncio.wait_for(task, PATIENCE_S)
    assert (causes, await async_valkey_client.exists("name")) == ([None], 0)


@in_loop
async def test_of_two_locks_of_a_task_the_lost_one_is_the_cause(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    outer = Lock(async_valkey_client, "outer", timeout=FAR_S, cancel_on_lost=True)
    inner = Lock(async_valkey_client, "inner", cancel_on_lost=True, **RENEWED)
    kept = Lock(async_valkey_client, "kept", cancel_on_lost=True, **RENEWED)
    lost: list[Any] = []

    async def work() -> None:
        try:
            await hold(outer, inner, kept)
        except asyncio.CancelledError as error:
            lost.append(error.__cause__)

    task = asyncio.create_task(work())
    await eventually(lambda: valkey_client.exists("kept"), "all are held")
    valkey_client.delete("inner")
    await asyncio.wait_for(task, PATIENCE_S)
    assert [(error.lock_name, error.reason) for error in lost] == [("inner", LossReason.DELETED)]
    assert valkey_client.keys() == []


@in_loop
async def test_all_locks_of_a_task_that_are_lost_at_once_cancel_it(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    locks = [Lock(async_valkey_client, f"name-{number}", cancel_on_lost=True, **RENEWED) for number in range(3)]
    task = asyncio.create_task(hold(*locks))
    await eventually(lambda: valkey_client.exists("name-2"), "all are held")
    valkey_client.flushall()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()


@in_loop
async def test_task_that_has_ended_is_cancelled_no_more(
    async_valkey_client: redis.asyncio.Redis, losses: Losses
) -> None:
    lock = Lock(async_valkey_client, "name", on_lost=losses, **CANCELLING)
    await in_task(lock.acquire)
    await eventually(lambda: losses.reasons, "the loss is told")
    with pytest.raises(LockLostError):
        await lock.release()


@in_loop
async def test_task_that_has_a_helper_release_is_not_cancelled(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=FAR_S, auto_renew=True, cancel_on_lost=True)

    async def work() -> str:
        await lock.acquire()
        valkey_client.delete("name")
        with pytest.raises(LockLostError):
            await asyncio.shield(lock.release())
        await asyncio.sleep(0)
        return "not cancelled"

    assert await in_task(work) == "not cancelled"


@in_loop
async def test_task_is_cancelled_where_another_finds_the_loss(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=FAR_S, auto_renew=True, cancel_on_lost=True, thread_local=False)
    task = asyncio.create_task(hold(lock))
    await eventually(lambda: lock.valid, "it holds")
    valkey_client.delete("name")
    with pytest.raises(LockLostError):
        await lock.extend(1)
    await cancelled_by(task)


@in_loop
async def test_task_that_attached_is_cancelled_for_a_loss(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", timeout=BRIEF_S)
    await lock.acquire()
    handle = lock.detach()

    async def work() -> None:
        attached = Lock.attach(async_valkey_client, handle, cancel_on_lost=True)
        assert attached.valid
        await forever()

    await cancelled_by(asyncio.create_task(work()))


@in_loop
async def test_body_that_fails_after_a_loss_keeps_its_exception(
    async_valkey_client: redis.asyncio.Redis, losses: Losses
) -> None:
    async def work() -> None:
        async with Lock(async_valkey_client, "name", timeout=BRIEF_S, on_lost=losses):
            await eventually(lambda: losses.reasons, "the loss is told")
            raise KeyError("the body's own")

    with pytest.raises(KeyError, match="the body's own"):
        await work()


@in_loop
async def test_body_that_succeeds_after_a_loss_does_not_pass_for_success(
    async_valkey_client: redis.asyncio.Redis, losses: Losses
) -> None:
    with pytest.raises(LockLostError, match="expired"):
        async with Lock(async_valkey_client, "name", timeout=BRIEF_S, on_lost=losses):
            await eventually(lambda: losses.reasons, "the loss is told")


# on_lost


@in_loop
async def test_callback_that_fails_later_is_logged(
    async_valkey_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_lock: Any, _reason: LossReason) -> None:
        raise RuntimeError("the callback's own")

    lock = Lock(async_valkey_client, "name", timeout=BRIEF_S, on_lost=fail)
    await lock.acquire()
    await eventually(lambda: caplog.records, "it is logged")
    assert caplog.records[0].getMessage() == "on_lost failed for the lock 'name', which was lost (expired)."


# Loops


@with_gil
@in_loop
async def test_lease_that_ended_unnoticed_is_told_by_acquire_or_extend(
    async_valkey_client: redis.asyncio.Redis, losses: Losses
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=BRIEF_S, auto_renew=True, on_lost=losses)
    await lock.acquire()
    hold_the_gil(2 * BRIEF_S)
    lock.timeout = FAR_S  # of the next lease
    async with contextlib.AsyncExitStack() as held:
        assert await lock.acquire_or_extend()
        held.push_async_callback(lock.release)
        gc.collect()  # what was lost is not taken for dropped
        await eventually(lambda: losses.reasons, "the loss is told, by the renewing thread if that was faster")
        assert (losses.reasons, lock.valid) == ([LossReason.EXPIRED], True)


@pytest.mark.slow
@in_loop
async def test_renewal_survives_a_cancel_of_all_other_tasks(
    valkey: Server, valkey_client: redis.Redis, async_connect: AsyncClients, losses: Losses
) -> None:
    with Proxy(valkey.port) as proxy:
        async with Lock(async_connect(proxy.port), "name", timeout=SLOW_S, auto_renew=True, on_lost=losses) as lock:
            sets = proxy.requests["SET"]
            proxy.hold()
            await eventually(lambda: proxy.requests["SET"] > sets, "a renewal is under way")
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            proxy.resume()
            await eventually(passing(valkey_client, 1.25 * SLOW_S), "the ttl passes")
            assert (losses.reasons, lock.valid, await lock.owned()) == ([], True, True)


@in_loop
async def test_dropped_lock_is_released_while_what_its_hook_has_started_goes_on(
    async_valkey_client: redis.asyncio.Redis,
) -> None:
    started: list[asyncio.Task[None]] = []

    class Starting(Lock):
        async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
            started.append(asyncio.create_task(forever()))
            return await super().do_extend(additional_time, replace_ttl)

    async def is_free() -> bool:
        return not await async_valkey_client.exists("name")

    lock = Starting(async_valkey_client, "name", timeout=FAR_S, auto_renew=True)
    await lock.acquire()
    await lock.extend(FAR_S)
    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release"):
        del lock
    await eventually(is_free, "the lock is released")
    assert not started[0].done()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No loop complains, such as of a task that was destroyed."""
    yield
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "settings",
    [{"timeout": BRIEF_S, "auto_renew": True}, {"timeout": FAR_S, "on_lost": print, "cancel_on_lost": True}],
    ids=str,
)
def test_program_that_ends_while_it_holds(
    valkey: Server, valkey_client: redis.Redis, loop_kind: str, settings: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            lock = Lock(client, "name", **settings)
            assert await lock.acquire()
            await eventually(passing(valkey_client, BRIEF_S / 3), "a renewal is due")

    def end(warned: Sized) -> None:
        run_in_loop(loop_kind, scenario())
        gc.collect()
        wait_until(lambda: len(warned) > 0, "the thread that has just renewed the lock drops it, too")

    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release") as warned:
        end(warned)


@pytest.mark.usefixtures("quiet")
def test_lock_that_is_acquired_outside_of_a_task(valkey: Server, valkey_client: redis.Redis, loop_kind: str) -> None:
    lock = Lock(redis.asyncio.Redis(port=valkey.port), "name", timeout=FAR_S, fencing=True)
    assert run_in_loop(loop_kind, lock.acquire()) is True
    assert lock.valid
    run_in_loop(loop_kind, lock.release())
    assert not valkey_client.exists("name")
