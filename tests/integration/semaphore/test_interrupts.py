"""Interrupts at any line, and cancels at any await, of calls of a semaphore that lives on.

Rules: afterwards no permit is held that was not returned, nobody is in the queue, and the semaphore can be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lock.test_asyncio_cancel import CANCELS, Cancelled
from tests.integration.lock.test_interrupts import CHANNELS, FACADE, LoopWorld, ThreadWorld, World
from tests.support.async_helpers import AsyncClients, eventually, in_loop
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.interrupts import each_line, handled, interrupt_kind, interrupted_at, skip_what_a_loop_takes
from tests.support.permits import QUEUE
from tests.support.waiting import FAR_S, LATE

__all__ = ["interrupt_kind"]

OWN = (
    "semaphore.py",
    "asyncio/semaphore.py",
    "_semaphore/callers.py",
    "_semaphore/permit_lock.py",
    "_protocol/permits.py",
)
ALL = (*OWN, *FACADE, *CHANNELS)


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    """Each kind of event loop."""
    return each_loop_kind


# ---- interrupts ----


@pytest.fixture(params=[ThreadWorld, LoopWorld], ids=["threads", "tasks"])
def caller(request: pytest.FixtureRequest, valkey: Server, interrupt_kind: None) -> Iterator[World]:
    """Makes calls of threads and of tasks, which run in this very thread."""
    if request.param is LoopWorld:
        skip_what_a_loop_takes()
    with contextlib.closing(request.param([valkey])) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a permit that nobody has got is dropped
        yield world


class Interrupting:
    """Calls of one semaphore, each interrupted before its n-th line. Each returns which line that is.

    Args:
        caller: makes the calls.
        admin: a client that looks on, and on which another semaphore stands.
        settings: of the semaphore.
    """

    def __init__(self, caller: World, admin: redis.Redis, settings: dict[str, Any]) -> None:
        self._caller = caller
        self._admin = admin
        self._settings = settings
        self._semaphore = caller.semaphore(1, sleep=FAR_S, **settings)
        self._other = redislock_fast.Semaphore(admin, "name", 1, **LATE)
        self.use()

    def use(self) -> None:
        """Acquire and release without an interrupt."""
        self._caller.do(self._caller.do(self._semaphore.acquire).release)

    def acquire(self, number: int) -> str:
        """Acquire, and release if a permit was returned."""
        permits: list[Any] = []
        place = interrupted_at(number, lambda: permits.append(self._caller.do(self._semaphore.acquire)), *ALL)
        for permit in permits:
            self._caller.do(permit.release)
        return place

    def wait(self, number: int) -> str:
        """The same, while another holds, which releases when this one waits."""
        permit, over = self._other.acquire(), threading.Event()
        assert permit is not None

        def hand_over() -> None:
            wait_until(lambda: over.is_set() or self._admin.zcard(QUEUE) == 1, "it waits, or did not")
            permit.release()

        handing_over = start(hand_over)
        place = self.acquire(number)
        over.set()
        handing_over.result(PATIENCE_S)
        return place

    def enter(self, number: int) -> str:
        """Enter a block, and leave it if it was entered."""
        entered: list[Any] = []
        place = interrupted_at(number, lambda: entered.append(self._caller.do(self._method("enter"))), *OWN)
        for _ in entered:
            self._caller.do(partial(self._method("exit"), None, None, None))
        return place

    def leave(self, number: int) -> str:
        """Leave a block of a semaphore that is gone afterwards: a permit stays where leaving has hardly begun."""
        self._semaphore = self._caller.semaphore(1, sleep=FAR_S, **self._settings)
        self._caller.do(self._method("enter"))
        leave = partial(self._method("exit"), None, None, None)
        place = interrupted_at(number, lambda: self._caller.do(leave), *OWN)
        self._semaphore = self._caller.semaphore(1, sleep=FAR_S, **self._settings)
        return place

    def _method(self, verb: str) -> Any:
        """The method by which a block is entered or left."""
        return getattr(self._semaphore, f"__{'' if isinstance(self._caller, ThreadWorld) else 'a'}{verb}__")

    def release(self, number: int) -> str:
        """Release, and once more."""
        return self._release(number, self._caller.do(self._semaphore.acquire).release)

    def release_all(self, number: int) -> str:
        """Release the caller's latest permit, and then all that it has. A task has none any more."""
        if isinstance(self._caller, LoopWorld):
            return ""
        semaphore = self._caller.semaphore(2, sleep=FAR_S, **self._settings)
        for _ in range(2):
            semaphore.acquire()
        place = interrupted_at(number, lambda: self._caller.do(semaphore.release), *ALL)
        for _ in range(3):  # one more may find out that the interrupted one was executed
            with contextlib.suppress(LockError):
                semaphore.release()
        self._caller.until(lambda: not self._admin.exists("name"), f"all are released after an interrupt at {place}")
        return place

    def hand_over(self, number: int) -> str:
        """Release while another waits, and once more."""
        permit, answer = self._caller.do(self._semaphore.acquire), start(self._other.acquire)
        wait_until(lambda: self._admin.zcard(QUEUE) == 1, "another waits")
        place = self._release(number, permit.release)
        self._caller.until(answer.done, f"the permit is handed over after an interrupt at {place}")
        granted = answer.result()
        assert granted is not None
        granted.release()
        return place

    def _release(self, number: int, release: Callable[[], Any]) -> str:
        place = interrupted_at(number, lambda: self._caller.do(release), *ALL)
        with contextlib.suppress(LockError):
            self._caller.do(release)
        return place


@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("call", "auto_renew"),
    [
        *itertools.product(["acquire", "enter", "leave", "release", "release_all"], [True, False]),
        ("wait", True),
        ("hand_over", True),
    ],
)
def test_an_interrupt_at_any_line_leaves_nothing(
    caller: World, valkey_client: redis.Redis, call: str, auto_renew: bool
) -> None:
    interrupting = Interrupting(caller, valkey_client, {"auto_renew": auto_renew})
    for number in range(1, 1000):
        place = getattr(interrupting, call)(number)
        left = f"nothing is left after an interrupt at {place}"
        caller.until(lambda: gc.collect() >= 0 and not valkey_client.keys(), left)
        interrupting.use()
        if not place:
            break
        assert " raises " not in place.removesuffix(" raises nothing")
    assert number > 8 or (call == "release_all" and isinstance(caller, LoopWorld))


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("at", [interrupted_at, handled])
def test_an_interrupt_of_a_limited_call_leaves_nothing(valkey_client: redis.Redis, at: Callable[..., str]) -> None:
    limited = redislock_fast.limited(valkey_client, "name", 1, **LATE)(lambda: "done")
    for strike in each_line(15, at):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # as above
            place = strike(limited, "semaphore.py", "_semaphore/callers.py")
            wait_until(lambda: gc.collect() >= 0 and not valkey_client.keys(), f"nothing is left after one at {place}")
        assert "done" == limited()


# ---- cancels ----


class Cancelling:
    """Calls of tasks of one semaphore, each cancelled at a counted await. Each returns whether it was.

    Args:
        client: of the tasks.
        admin: a client that looks on.
        cancelled: has a call be cancelled.
    """

    def __init__(self, client: redis.asyncio.Redis, admin: redis.Redis, cancelled: Cancelled) -> None:
        self._admin = admin
        self._cancelled = cancelled
        self._semaphore = redislock_fast.asyncio.Semaphore(client, "name", 1, **LATE)
        self._other = redislock_fast.asyncio.Semaphore(client, "name", 1, **LATE)

    async def use(self) -> None:
        """Acquire and release without a cancel."""
        permit = await self._semaphore.acquire(blocking=False)
        assert permit is not None
        await permit.release()

    async def acquire(self, count: int, **arguments: Any) -> bool:
        """Acquire, and release if a permit was returned."""
        permits: list[Any] = []

        async def acquire() -> None:
            permits.append(await self._semaphore.acquire(**arguments))

        was_cancelled = await self._cancelled(acquire, count)
        assert len(permits) == (not was_cancelled)
        for permit in permits:
            await permit.release()
        return was_cancelled

    async def wait(self, count: int, **arguments: Any) -> bool:
        """The same, while another holds, which releases when this one waits."""
        holder = await self._other.acquire()
        assert holder is not None
        is_over = False

        async def hand_over() -> None:
            await eventually(lambda: is_over or self._admin.zcard(QUEUE) == 1, "it waits, or did not")
            await holder.release()

        handing_over = asyncio.create_task(hand_over())
        was_cancelled = await self.acquire(count, **arguments)
        is_over = True
        await handing_over
        return was_cancelled

    async def wait_for_a_while(self, count: int) -> bool:
        """The same, with a deadline."""
        return await self.wait(count, blocking_timeout=PATIENCE_S)

    async def block(self, count: int) -> bool:
        """Enter and leave a block that awaits something."""

        async def block() -> None:
            async with self._semaphore:
                await asyncio.sleep(0)

        return await self._cancelled(block, count)

    async def release(self, count: int) -> bool:
        """Release, and once more if it was cancelled: the release goes on all the same."""
        permit = await self._semaphore.acquire()
        assert permit is not None
        was_cancelled = await self._cancelled(permit.release, count)
        if was_cancelled:
            await eventually(lambda: not self._admin.exists("name"), "it is released all the same")
            await permit.release()
        assert not permit.valid
        return was_cancelled

    async def hand_over(self, count: int) -> bool:
        """Release while another waits."""
        permit, answer = await self._semaphore.acquire(), asyncio.create_task(self._other.acquire())
        assert permit is not None
        await eventually(lambda: self._admin.zcard(QUEUE) == 1, "another waits")
        was_cancelled = await self._cancelled(permit.release, count)
        granted = await asyncio.wait_for(answer, PATIENCE_S)
        assert granted is not None
        await granted.release()
        with contextlib.suppress(LockError):
            await permit.release()
        return was_cancelled


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@pytest.mark.parametrize("call", ["acquire", "wait", "wait_for_a_while", "block", "release", "hand_over"])
@in_loop
async def test_a_cancel_at_any_await_leaves_nothing(
    valkey: Server, connect: Connect, async_connect: AsyncClients, call: str, cancelled: Cancelled, counts: list[int]
) -> None:
    admin = connect(valkey.port)
    cancelling = Cancelling(async_connect(valkey.port), admin, cancelled)
    await cancelling.use()
    for count in counts:
        was_cancelled = await getattr(cancelling, call)(count)
        await eventually(lambda: not admin.keys(), "nothing is left")
        await cancelling.use()
        if not was_cancelled:
            break
    else:
        pytest.fail("never finished")


@in_loop
async def test_the_permit_of_a_limited_call_is_given_back_where_its_task_is_dropped(
    valkey: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    admin = connect(valkey.port)

    @redislock_fast.asyncio.limited(async_connect(valkey.port), "name", 1, timeout=FAR_S)
    async def work() -> None:
        await asyncio.sleep(FAR_S)

    running = work()
    task = asyncio.ensure_future(running)
    await eventually(lambda: admin.zcard("name") == 1, "it has a permit")
    with pytest.warns(ResourceWarning, match="was dropped without a release"):
        await asyncio.to_thread(running.close)  # as the garbage collector may
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: not admin.keys(), "it is given back")
