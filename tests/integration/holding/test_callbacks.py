"""Callbacks for losses: none waits for another, and what a lock does when its callback calls it.

Rules: real servers; threads and tasks alike where both have it. A lock is lost by DEL, and its renewal or a call of its
holder finds that out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast.asyncio
from redislock_fast import Lock, LockLostError, LossReason, Redlock
from redislock_fast._procedures.renewal import LeaseLoss
from redislock_fast._transport.threads.renewer import tell_in_background
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import AsyncClients, eventually, in_loop
from tests.support.helpers import PATIENCE_S, in_thread, start, wait_until
from tests.support.holding import BRIEF_S, RENEWED
from tests.support.redlock import clients_of, delete, wait_until_held
from tests.support.waiting import FAR_S

MANY = 100
WATCHED: dict[str, Any] = {"timeout": FAR_S, "auto_renew": True}
"""Settings of a lock whose loss only its holder finds out in time."""

SHARED = pytest.mark.parametrize("thread_local", [True, False], ids=["own", "shared"])
VERBS = pytest.mark.parametrize(
    ("verb", "arguments"), [("release", ()), ("extend", (FAR_S,)), ("reacquire", ())], ids=str
)
FINDERS = ("renewal", "release", "extend")
MakeLock = Callable[..., Any]


class Callback:
    """An `on_lost` that does something with the lock.

    Attributes:
        outcome: what came of it.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.outcome: Future[Any] = Future()
        self._work = work

    def __call__(self, lock: Any, _reason: LossReason) -> None:
        """As a lock for threads calls it."""
        try:
            self.outcome.set_result(self._work(lock))
        except BaseException as error:
            self.outcome.set_exception(error)

    async def in_task(self, lock: Any, _reason: LossReason) -> None:
        """As a lock for tasks calls it; the work is a coroutine function."""
        try:
            self.outcome.set_result(await self._work(lock))
        except BaseException as error:
            self.outcome.set_exception(error)


def lose(lock: Any, finder: str, delete_keys: Callable[[], object]) -> None:
    """Lose a lock, and let it be found out by its renewal or by a call of its holder."""
    delete_keys()
    if finder != "renewal":
        with pytest.raises(LockLostError):
            lock.extend(FAR_S) if finder == "extend" else lock.release()


def delete_everywhere(fleet: list[Server]) -> None:
    """Delete the lock's key once all servers have it: a majority is enough for an acquire."""
    wait_until_held(fleet)
    delete(fleet)


def settings_for(finder: str) -> dict[str, Any]:
    return RENEWED if finder == "renewal" else WATCHED


@pytest.fixture
def make_lock(
    kind: str, request: pytest.FixtureRequest, valkey: Server, connect: Connect
) -> Iterator[tuple[MakeLock, Callable[[], object]]]:
    """Makes locks of a kind for threads; and what deletes them."""
    if kind == "Lock":
        client = connect(valkey.port)
        yield (lambda **settings: Lock(client, "name", **settings)), (lambda: client.delete("name"))
        return
    fleet: list[Server] = [request.getfixturevalue("servers").get("valkey", number) for number in range(1, 4)]
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(client) for client in clients_of(fleet)]
        for client in clients:
            client.flushall()
        yield (
            (lambda **settings: Redlock(clients, "name", limit=PATIENCE_S, **settings)),
            (lambda: delete_everywhere(fleet)),
        )


KINDS = pytest.mark.parametrize("kind", ["Lock", "Redlock"])


# No callback waits for another


def test_no_callback_waits_for_another(valkey: Server, connect: Connect) -> None:
    """All that are lost in one burst are told though each callback blocks."""
    client = connect(valkey.port)
    all_told = threading.Barrier(MANY + 1)
    callbacks = [Callback(lambda _lock: all_told.wait(PATIENCE_S)) for _ in range(MANY)]
    locks = [Lock(client, f"name-{number}", on_lost=on_lost, **RENEWED) for number, on_lost in enumerate(callbacks)]
    for lock in locks:
        assert lock.acquire()
    client.flushall()
    all_told.wait(PATIENCE_S)
    for callback in callbacks:
        callback.outcome.result(PATIENCE_S)


@in_loop
async def test_no_callback_in_a_loop_waits_for_another(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    count = 0
    all_told = asyncio.Event()

    async def on_lost(_lock: Any, _reason: LossReason) -> None:
        nonlocal count
        count += 1
        await all_told.wait()

    locks = [
        redislock_fast.asyncio.Lock(async_valkey_client, f"name-{number}", on_lost=on_lost, **RENEWED)
        for number in range(MANY)
    ]
    for lock in locks:
        assert await lock.acquire()
    valkey_client.flushall()
    await eventually(lambda: count == MANY, "all are told")
    all_told.set()


def test_callbacks_that_have_returned_leave_no_thread(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    told: list[object] = []
    locks = [
        Lock(client, f"name-{number}", timeout=BRIEF_S, on_lost=lambda lock, _: told.append(lock))
        for number in range(MANY)
    ]
    for lock in locks:
        assert lock.acquire()
    wait_until(lambda: len(told) == MANY, "all are told")
    wait_until(
        lambda: not any(thread.name == "redislock_fast-lost" for thread in threading.enumerate()), "the threads end"
    )


def test_where_one_callback_gets_no_thread_the_others_do_not_wait(
    valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(valkey.port)
    over = threading.Event()
    blocked, *free = (Callback(work) for work in (lambda _: over.wait(PATIENCE_S), lambda _: True, lambda _: True))
    losses = []
    locks = [Lock(client, f"name-{number}", on_lost=it, **WATCHED) for number, it in enumerate((blocked, *free))]
    for lock in locks:
        assert lock.acquire()
        losses.append(LeaseLoss(lock.local.lease, LossReason.DELETED))
    real_start = threading.Thread.start

    def fail_once(thread: threading.Thread) -> None:
        if threading.current_thread().name == "redislock_fast-lost":  # the first thread, which starts the others
            monkeypatch.setattr(threading.Thread, "start", real_start)
            raise RuntimeError("can't start new thread")
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    tell_in_background(losses)
    assert free[0].outcome.result(PATIENCE_S)
    over.set()
    assert (blocked.outcome.result(PATIENCE_S), free[1].outcome.result(PATIENCE_S)) == (True, True)
    for lock in locks:
        lock.release()


# What the lock does in the callback, for threads


@KINDS
@SHARED
@VERBS
@pytest.mark.parametrize("finder", FINDERS)
def test_in_the_callback_the_lock_is_lost(
    make_lock: tuple[MakeLock, Callable[[], object]],
    thread_local: bool,
    verb: str,
    arguments: tuple[Any, ...],
    finder: str,
) -> None:
    make, delete_keys = make_lock
    callback = Callback(lambda lock: getattr(lock, verb)(*arguments))
    lock = make(on_lost=callback, thread_local=thread_local, **settings_for(finder))
    assert lock.acquire()
    lose(lock, finder, delete_keys)
    with pytest.raises(LockLostError, match="was lost: deleted") as caught:
        callback.outcome.result(PATIENCE_S)
    assert caught.value.reason == LossReason.DELETED


@KINDS
@SHARED
@pytest.mark.parametrize("releases", [False, True], ids=["acquires", "releases and acquires"])
@pytest.mark.parametrize("finder", FINDERS)
def test_callback_acquires_anew(
    make_lock: tuple[MakeLock, Callable[[], object]], thread_local: bool, finder: str, releases: bool
) -> None:
    make, delete_keys = make_lock

    def work(lock: Any) -> tuple[object, ...]:
        if releases:
            with pytest.raises(LockLostError):
                lock.release()
        outcome = (lock.acquire(blocking_timeout=PATIENCE_S), lock.valid, lock.owned(), lock.extend(FAR_S))
        lock.release()
        return (*outcome, lock.locked())

    callback = Callback(work)
    lock = make(on_lost=callback, thread_local=thread_local, **settings_for(finder))
    assert lock.acquire()
    lose(lock, finder, delete_keys)
    assert (True, True, True, True, False) == callback.outcome.result(PATIENCE_S)


def test_loss_in_the_callback_leaves_the_holder_its_own(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)

    def work(lock: Lock) -> None:
        with contextlib.suppress(LockLostError):
            lock.release()

    callback = Callback(work)
    lock = Lock(client, "name", on_lost=callback, **RENEWED)
    assert lock.acquire()
    client.delete("name")
    callback.outcome.result(PATIENCE_S)
    assert lock.lost
    with pytest.raises(LockLostError):
        lock.release()


def test_what_a_callback_does_not_release_ends_with_its_thread(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        callback = Callback(lambda lock: (lock.acquire(), client.exists("name")))
        lock = Lock(client, "name", on_lost=callback, **RENEWED)
        assert lock.acquire()
        client.delete("name")
        assert (True, 1) == callback.outcome.result(PATIENCE_S)
        wait_until(lambda: not client.exists("name"), "it is released")
        wait_until(lambda: caught, "it is warned of")
    assert ["lock 'name' was dropped without a release"] == [str(warning.message) for warning in caught]


@KINDS
@SHARED
def test_callback_for_what_was_held_before_does_not_release_what_is_held_now(
    make_lock: tuple[MakeLock, Callable[[], object]], thread_local: bool
) -> None:
    make, delete_keys = make_lock
    callback = Callback(lambda lock: lock.release())
    lock = make(on_lost=callback, thread_local=thread_local, **WATCHED)
    assert lock.acquire()
    delete_keys()
    assert lock.acquire(blocking_timeout=PATIENCE_S)
    with pytest.raises(LockLostError):
        callback.outcome.result(PATIENCE_S)
    assert (lock.valid, lock.owned()) == (True, True)
    lock.release()


@KINDS
def test_callback_for_what_was_held_before_waits_for_what_is_held_now(
    make_lock: tuple[MakeLock, Callable[[], object]],
) -> None:
    make, delete_keys = make_lock

    def work(lock: Any) -> bool:
        acquired: bool = lock.acquire(blocking_timeout=PATIENCE_S)
        lock.release()
        return acquired

    callback = Callback(work)
    lock = make(on_lost=callback, **WATCHED)
    assert lock.acquire()
    delete_keys()
    assert start(lambda: lock.acquire(blocking_timeout=PATIENCE_S) and lock.release() is None).result(PATIENCE_S)
    # Another thread has its own holding: only the first one's own acquire finds its loss out.
    assert lock.acquire(blocking_timeout=PATIENCE_S)
    lock.release()
    assert callback.outcome.result(PATIENCE_S)


def test_reentered_lock_is_lost_as_a_whole_in_the_callback(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)

    def work(lock: Lock) -> bool:
        with pytest.raises(LockLostError):
            lock.release()
        return lock.acquire(blocking_timeout=PATIENCE_S)

    callback = Callback(work)
    lock = Lock(client, "name", on_lost=callback, reentrant=True, **WATCHED)
    assert (lock.acquire(), lock.acquire()) == (True, True)
    client.delete("name")
    with pytest.raises(LockLostError):
        lock.extend(FAR_S)
    assert (True, True) == (callback.outcome.result(PATIENCE_S), lock.owned())
    lock.release()
    with pytest.raises(LockError):
        lock.release()


def test_callback_of_one_lock_uses_another(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    other = Lock(client, "other", on_lost=lambda *_: None, **RENEWED)

    def work(_lock: Lock) -> bool:
        with pytest.raises(LockError) as caught:
            other.release()
        with other:
            return type(caught.value) is LockError and other.owned()

    callback = Callback(work)
    lock = Lock(client, "name", on_lost=callback, **RENEWED)
    assert lock.acquire()
    client.delete("name")
    assert callback.outcome.result(PATIENCE_S)


def test_no_other_thread_is_refused_while_a_callback_runs(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    over = threading.Event()
    callback = Callback(lambda _lock: over.wait(PATIENCE_S))
    lock = Lock(client, "name", on_lost=callback, thread_local=False, **WATCHED)
    assert lock.acquire()
    client.delete("name")
    losing = start(lambda: lock.extend(FAR_S))
    wait_until(lambda: lock.lost, "it is lost")
    assert in_thread(lambda: lock.acquire(blocking_timeout=PATIENCE_S) and lock.extend(FAR_S))
    over.set()
    with pytest.raises(LockLostError):
        losing.result(PATIENCE_S)
    assert callback.outcome.result(PATIENCE_S)
    lock.release()


# What the lock does in the callback, for tasks


async def lose_in_loop(lock: Any, finder: str, delete_keys: Callable[[], object]) -> None:
    await asyncio.to_thread(delete_keys)  # it waits for the keys, which the loop sends
    if finder != "renewal":
        with pytest.raises(LockLostError):
            await (lock.extend(FAR_S) if finder == "extend" else lock.release())


@pytest.fixture
def make_async_lock(
    kind: str, request: pytest.FixtureRequest, valkey: Server, valkey_client: redis.Redis, async_connect: AsyncClients
) -> tuple[MakeLock, Callable[[], object]]:
    """Makes locks of a kind for tasks; and what deletes them."""
    if kind == "Lock":
        client = async_connect(valkey.port)
        return (lambda **settings: redislock_fast.asyncio.Lock(client, "name", **settings)), (
            lambda: valkey_client.delete("name")
        )
    fleet: list[Server] = [request.getfixturevalue("servers").get("valkey", number) for number in range(1, 4)]
    for server in fleet:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    clients = [async_connect(server.port) for server in fleet]
    return (lambda **settings: redislock_fast.asyncio.Redlock(clients, "name", limit=PATIENCE_S, **settings)), (
        lambda: delete_everywhere(fleet)
    )


@KINDS
@SHARED
@VERBS
@pytest.mark.parametrize("finder", FINDERS)
@in_loop
async def test_in_the_callback_of_a_task_the_lock_is_lost(
    make_async_lock: tuple[MakeLock, Callable[[], object]],
    thread_local: bool,
    verb: str,
    arguments: tuple[Any, ...],
    finder: str,
) -> None:
    make, delete_keys = make_async_lock

    async def work(lock: Any) -> None:
        await getattr(lock, verb)(*arguments)

    callback = Callback(work)
    lock = make(on_lost=callback.in_task, thread_local=thread_local, **settings_for(finder))
    assert await lock.acquire()
    await lose_in_loop(lock, finder, delete_keys)
    with pytest.raises(LockLostError, match="was lost: deleted"):
        await asyncio.wait_for(asyncio.wrap_future(callback.outcome), PATIENCE_S)


@KINDS
@SHARED
@pytest.mark.parametrize("releases", [False, True], ids=["acquires", "releases and acquires"])
@pytest.mark.parametrize("finder", FINDERS)
@in_loop
async def test_callback_in_a_task_acquires_anew(
    make_async_lock: tuple[MakeLock, Callable[[], object]], thread_local: bool, finder: str, releases: bool
) -> None:
    make, delete_keys = make_async_lock

    async def work(lock: Any) -> tuple[object, ...]:
        if releases:
            with pytest.raises(LockLostError):
                await lock.release()
        acquired = await lock.acquire(blocking_timeout=PATIENCE_S)
        outcome = (acquired, lock.valid, await lock.owned(), await lock.extend(FAR_S))
        await lock.release()
        return (*outcome, await lock.locked())

    callback = Callback(work)
    lock = make(on_lost=callback.in_task, thread_local=thread_local, **settings_for(finder))
    assert await lock.acquire()
    await lose_in_loop(lock, finder, delete_keys)
    outcome = await asyncio.wait_for(asyncio.wrap_future(callback.outcome), PATIENCE_S)
    assert (True, True, True, True, False) == outcome


@KINDS
@SHARED
@in_loop
async def test_callback_for_what_a_task_held_before_does_not_release_what_it_holds_now(
    make_async_lock: tuple[MakeLock, Callable[[], object]], thread_local: bool
) -> None:
    make, delete_keys = make_async_lock

    async def work(lock: Any) -> None:
        await lock.release()

    callback = Callback(work)
    lock = make(on_lost=callback.in_task, thread_local=thread_local, **WATCHED)
    assert await lock.acquire()
    await asyncio.to_thread(delete_keys)
    assert await lock.acquire(blocking_timeout=PATIENCE_S)
    with pytest.raises(LockLostError):
        await asyncio.wait_for(asyncio.wrap_future(callback.outcome), PATIENCE_S)
    assert (lock.valid, await lock.owned()) == (True, True)
    await lock.release()
