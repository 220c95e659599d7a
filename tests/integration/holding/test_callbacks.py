"""Callbacks for losses, for threads and for tasks: none waits for another, and what a lock does in its callback.

Rules: real servers. A lock is lost by DEL, and its renewal or a call of its owner finds that out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast.asyncio
from redislock_fast import Lock, LockLostError, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect, Servers
from tests.support.async_helpers import eventually, in_loop
from tests.support.helpers import PATIENCE_S, in_thread, start, wait_until
from tests.support.holding import BRIEF_S, RENEWED
from tests.support.redlock import Make, delete, wait_until_held
from tests.support.waiting import FAR_S
from tests.support.worlds import World

MANY = 100
WATCHED: dict[str, Any] = {"timeout": FAR_S, "auto_renew": True}
"""Settings of a lock whose loss only its owner finds out in time."""

SHARED = pytest.mark.parametrize("thread_local", [True, False], ids=["own", "shared"])
VERBS = pytest.mark.parametrize(
    ("verb", "arguments"), [("release", ()), ("extend", (FAR_S,)), ("reacquire", ())], ids=str
)
FINDERS = ("renewal", "release", "extend")


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

    def result(self) -> Any:
        """The outcome, once the callback has ended."""
        wait_until(self.outcome.done, "the callback ends")
        return self.outcome.result()


class Losable:
    """Locks of one kind in a test's world, whose keys can be deleted."""

    def __init__(self, world: World, servers: list[Server], kind: str) -> None:
        self._make = Make(world, servers)
        self._clients = self._make.clients()
        self._servers = servers
        self._lock: Callable[..., Any] = world.lock if kind == "Lock" else self._make.on
        self._on = self._clients[0] if kind == "Lock" else self._clients
        self._world = world

    def __call__(self, on_lost: Callable[..., object], **settings: Any) -> Any:
        """A lock."""
        return self._lock(self._on, "name", on_lost=self._world.callback(on_lost), **settings)

    def lose(self, lock: Any = None, finder: str = "renewal") -> None:
        """Delete the lock's key, and let its renewal or a call of its owner find that out."""
        wait_until_held(self._servers)  # a majority is enough for an acquire
        delete(self._servers)
        if finder != "renewal":
            with pytest.raises(LockLostError):
                lock.extend(FAR_S) if finder == "extend" else lock.release()


def settings_for(finder: str) -> dict[str, Any]:
    return RENEWED if finder == "renewal" else WATCHED


@pytest.fixture(params=["Lock", "Redlock"])
def losable(request: pytest.FixtureRequest, world: World, servers: Servers) -> Losable:
    """Locks on one server, and on a majority of three."""
    numbers = range(1) if request.param == "Lock" else range(1, 4)
    fleet = [servers.get("valkey", number) for number in numbers]
    for server in fleet:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    return Losable(world, fleet, request.param)


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
        callback.result()


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


# The lock in the callback


@SHARED
@VERBS
@pytest.mark.parametrize("finder", FINDERS)
def test_in_the_callback_the_lock_is_lost(
    losable: Losable, thread_local: bool, verb: str, arguments: tuple[Any, ...], finder: str
) -> None:
    callback = Callback(lambda lock: getattr(lock, verb)(*arguments))
    lock = losable(callback, thread_local=thread_local, **settings_for(finder))
    assert lock.acquire()
    losable.lose(lock, finder)
    with pytest.raises(LockLostError, match="was lost: deleted") as caught:
        callback.result()
    assert caught.value.reason == LossReason.DELETED


@SHARED
@pytest.mark.parametrize("releases", [False, True], ids=["acquires", "releases and acquires"])
@pytest.mark.parametrize("finder", FINDERS)
def test_callback_acquires_anew(losable: Losable, thread_local: bool, finder: str, releases: bool) -> None:
    def work(lock: Any) -> tuple[object, ...]:
        if releases:
            with pytest.raises(LockLostError):
                lock.release()
        outcome = (lock.acquire(blocking_timeout=PATIENCE_S), lock.valid, lock.owned(), lock.extend(FAR_S))
        lock.release()
        return (*outcome, lock.locked())

    callback = Callback(work)
    lock = losable(callback, thread_local=thread_local, **settings_for(finder))
    assert lock.acquire()
    losable.lose(lock, finder)
    assert (True, True, True, True, False) == callback.result()


def test_loss_in_the_callback_leaves_the_holder_its_own(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)

    def work(lock: Lock) -> None:
        with contextlib.suppress(LockLostError):
            lock.release()

    callback = Callback(work)
    lock = Lock(client, "name", on_lost=callback, **RENEWED)
    assert lock.acquire()
    client.delete("name")
    callback.result()
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
        assert (True, 1) == callback.result()
        wait_until(lambda: not client.exists("name"), "it is released")
        wait_until(lambda: caught, "it is warned of")
    assert ["lock 'name' was dropped without a release"] == [str(warning.message) for warning in caught]


@SHARED
def test_callback_for_what_was_held_before_does_not_release_what_is_held_now(
    losable: Losable, thread_local: bool
) -> None:
    callback = Callback(lambda lock: lock.release())
    lock = losable(callback, thread_local=thread_local, **WATCHED)
    assert lock.acquire()
    losable.lose()
    assert lock.acquire(blocking_timeout=PATIENCE_S)
    with pytest.raises(LockLostError):
        callback.result()
    assert (lock.valid, lock.owned()) == (True, True)
    lock.release()


def test_callback_for_what_was_held_before_waits_for_what_is_held_now(world: World, losable: Losable) -> None:
    def work(lock: Any) -> bool:
        acquired: bool = lock.acquire(blocking_timeout=PATIENCE_S)
        lock.release()
        return acquired

    callback = Callback(work)
    lock = losable(callback, **WATCHED)
    assert lock.acquire()
    losable.lose()
    assert world.beside(lambda: lock.acquire(blocking_timeout=PATIENCE_S) and lock.release() is None)
    # Each thread and task has an owner of its own: only the first one's acquire finds its loss out.
    assert lock.acquire(blocking_timeout=PATIENCE_S)
    lock.release()
    assert callback.result()


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
    assert (True, True) == (callback.result(), lock.owned())
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
    assert callback.result()


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
    assert callback.result()
    lock.release()
