"""The renewers themselves: what may come in between, at any moment, while they keep locks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

from redislock_fast import Lock, LossReason
from redislock_fast.asyncio import Lock as AsyncLock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import in_loop
from tests.support.forks import InFork
from tests.support.helpers import no_threads, run_script, signals_handled_by, start, wait_until
from tests.support.holding import Losses
from tests.support.transports import end_idle_renewers, let_owners_outlive_their_locks

_TTL_S = 1.2
_numbers = itertools.count()


@pytest.fixture
def client(valkey: Server, connect: Connect) -> redis.Redis:
    return connect(valkey.port)


def _renewed(client: redis.Redis, name: str = "name", timeout: float = _TTL_S) -> Lock:
    lock = Lock(client, name, timeout=timeout, auto_renew=True)
    assert lock.acquire(blocking=False)
    return lock


def _outlives(lock: Lock) -> bool:
    """Whether it is held for longer than two ttls."""
    ends_at = time.monotonic() + 2 * _TTL_S
    while time.monotonic() < ends_at:
        if not lock.valid:
            return False
        time.sleep(0.01)
    return bool(lock.owned())


# The thread


@pytest.mark.slow
def test_a_thread_that_ends_while_a_lock_comes_leaves_none_behind(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_idle_renewers(monkeypatch)

    def hold(number: int) -> bool:
        held = []
        for _ in range(100):
            lock = _renewed(client, f"short {number}")
            lock.release()
        for _ in range(3):
            lock = _renewed(client, f"long {number}")
            held.append(_outlives(lock))
            lock.release()
        return all(held)

    assert all(work.result(30) for work in [start(lambda number=number: hold(number)) for number in range(4)])  # type: ignore[misc]


def test_a_loss_is_told_where_no_thread_can_be_started(client: redis.Redis) -> None:
    told: list[LossReason] = []
    lock = Lock(client, "name", timeout=_TTL_S, auto_renew=True, on_lost=lambda _, reason: told.append(reason))
    assert lock.acquire(blocking=False)
    with no_threads():
        client.delete("name")
        wait_until(lambda: told, "the loss is told")
    assert [LossReason.DELETED] == told


# The loop


@pytest.mark.slow
@in_loop
@pytest.mark.parametrize("auto_renew", [True, "loop"], ids=str)
async def test_cancel_of_all_tasks_of_the_loop_ends_no_renewal(
    valkey: Server, auto_renew: Literal[True, "loop"]
) -> None:
    async with redis.asyncio.Redis(port=valkey.port) as client:
        lock = AsyncLock(client, "name", timeout=_TTL_S, auto_renew=auto_renew)
        assert await lock.acquire(blocking=False)
        ends_at = time.monotonic() + 3 * _TTL_S
        while time.monotonic() < ends_at:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0.05 * random.random())  # it hides nothing
        assert lock.valid
        await lock.release()


# Dropped handles


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_lock_is_released_where_warnings_are_errors(client: redis.Redis) -> None:
    lock = _renewed(client, timeout=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        del lock
        wait_until(lambda: not client.exists("name"), "the lock is released")


def test_a_dropped_lock_is_released_whose_owner_outlives_it(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_owners_outlive_their_locks(monkeypatch)
    locks = [_renewed(client, f"name {number}", timeout=30) for number in range(2)]
    owners = [lock.local for lock in locks]
    assert locks[1].extend(1)  # it has a lease, and the other one has none
    with pytest.warns(ResourceWarning, match="was dropped without a release") as caught:
        locks.clear()
    assert ["lock 'name 0' was", "lock 'name 1' was"] == sorted(str(one.message)[:17] for one in caught)
    wait_until(lambda: not client.keys("name *"), "they are released")
    del owners


@pytest.mark.parametrize("owners_outlive", [False, True])
def test_a_copy_holds_the_lock_when_the_object_that_acquired_is_dropped(
    client: redis.Redis, losses: Losses, monkeypatch: pytest.MonkeyPatch, owners_outlive: bool
) -> None:
    if owners_outlive:
        let_owners_outlive_their_locks(monkeypatch)
    lock = Lock(client, "name", timeout=_TTL_S, auto_renew=True, on_lost=losses)
    lock.acquire()
    lock = copy.copy(lock)
    gc.collect()
    assert lock.owned()
    client.delete("name")
    assert losses.until() == [LossReason.DELETED]
    assert lock.lost


@pytest.mark.slow
def test_a_lock_dropped_after_an_extend_that_could_not_connect_is_gone_at_once(
    spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    lock = _renewed(connect(server.port), timeout=30)
    server.close()
    gc.disable()
    try:
        with contextlib.suppress(redis.ConnectionError):
            lock.extend(1)
        seen = weakref.ref(lock)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del lock
        assert seen() is None
    finally:
        gc.enable()


@contextlib.contextmanager
def _garbage_collected_all_the_time() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_locks_may_be_dropped_at_any_moment(client: redis.Redis) -> None:
    def drop() -> int:
        for _ in range(60):
            cycle: list[Any] = [_renewed(client, f"dropped {next(_numbers)}", timeout=30)]
            cycle.append(cycle)
        return 60

    with _garbage_collected_all_the_time():
        assert [60] * 3 == [work.result(60) for work in [start(drop) for _ in range(3)]]
    gc.collect()
    wait_until(lambda: not client.keys("dropped*"), "all are released")
    lock = _renewed(client)
    assert _outlives(lock)
    lock.release()


class _ReleasesInItsFinalizer:
    """Garbage that releases a lock, which is none itself."""

    def __init__(self, lock: Lock) -> None:
        self.itself = self
        self.release = lock.release

    def __del__(self) -> None:
        self.release()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_finalizer_may_release_at_any_moment(client: redis.Redis) -> None:
    def work() -> list[Lock]:
        locks = []
        for _ in range(40):
            locks.append(Lock(client, f"final {next(_numbers)}", 30, auto_renew=True, thread_local=False))
            assert locks[-1].acquire(blocking=False)
            _ReleasesInItsFinalizer(locks[-1])
            with Lock(client, f"own {next(_numbers)}", timeout=_TTL_S, auto_renew=True) as lock:
                assert lock.valid
        return locks

    with _garbage_collected_all_the_time():
        locks = [lock for future in [start(work) for _ in range(3)] for lock in future.result(50)]
    gc.collect()
    assert [] == [lock for lock in locks if lock.local.token is not None]
    assert [] == client.keys("final*")


# Signals, forks, the interpreter's end


@pytest.mark.timeout(20)
def test_a_signal_handler_may_hold_renewed_locks(client: redis.Redis) -> None:
    handled: list[bool] = []

    def handle(number: int, frame: object) -> None:
        with Lock(client, f"in handler {next(_numbers)}", timeout=_TTL_S, auto_renew=True) as lock:
            handled.append(lock.valid)

    kept = _renewed(client, "kept")
    with signals_handled_by(handle):
        while len(handled) < 100:
            with Lock(client, "name", timeout=_TTL_S, auto_renew=True) as lock:
                assert lock.extend(0.1)
    assert all(handled)
    assert kept.valid
    kept.release()


@pytest.mark.slow
def test_a_child_forked_at_any_moment_neither_renews_nor_releases_nor_warns(
    in_fork: InFork, client: redis.Redis
) -> None:
    lock = _renewed(client, "held", 5 * _TTL_S)  # on a busy machine, five children may keep the renewer off for a while
    finished = threading.Event()

    def hold(name: str) -> bool:
        while not finished.is_set():
            with Lock(client, name, timeout=2 * _TTL_S, auto_renew=True):
                finished.wait(0.02)
        return True

    def child() -> str:
        nonlocal lock
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not lock.valid
            with pytest.raises(LockError):
                lock.release()
            del lock
            gc.collect()
            own = _renewed(client, "child")
            outlived = _outlives(own)
            own.release()
        return repr(outlived)

    holders = [start(lambda name=name: hold(name)) for name in ("a", "b", "c")]  # type: ignore[misc]
    try:
        assert ["True"] * 5 == [in_fork(child) for _ in range(5)]
    finally:
        finished.set()
    assert all(holder.result(10) for holder in holders)
    assert lock.owned()
    lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["held", "dropped", "in a thread", "by a task"])
def test_the_interpreter_ends_with_a_renewed_lock_without_a_word(valkey: Server, where: str) -> None:
    if where == "in a thread" and sys.version_info[:2] == (3, 12):
        pytest.skip("this Python starts no thread once the main thread has ended, also not the one that renews")
    script = """
import asyncio, sys, threading, time
import redis, redis.asyncio
from redislock_fast import Lock
from redislock_fast.asyncio import Lock as AsyncLock
port, where = int(sys.argv[1]), sys.argv[2]
client = redis.Redis(port=port)

def hold():
    global lock
    lock = Lock(client, "name", timeout=1.0, auto_renew=True, on_lost=print)
    lock.acquire()

async def hold_in_loop():
    global lock, client
    client = redis.asyncio.Redis(port=port)
    lock = AsyncLock(client, "name", timeout=1.0, auto_renew=True, on_lost=print)
    await lock.acquire()
    await asyncio.sleep(1.2)

if where == "in a thread":
    threading.Thread(target=hold).start()
elif where == "by a task":
    asyncio.run(hold_in_loop())
else:
    hold()
    time.sleep(1.2)
    if where == "dropped":
        del lock
"""
    finished = run_script(script, valkey.port, where)
    assert (0, "", "") == (finished.returncode, finished.stderr, finished.stdout)


@pytest.mark.slow
def test_many_locks_are_renewed_together(client: redis.Redis) -> None:
    locks = [_renewed(client, f"many {number}", timeout=6) for number in range(2000)]
    leases: list[Any] = [lock._held().lease for lock in locks]
    ends = [lease.expires_at for lease in leases]
    wait_until(lambda: all(one.expires_at > end for one, end in zip(leases, ends, strict=True)), "all are renewed")
    assert all(lock.valid for lock in locks)
    for lock in locks:
        lock.release()
    assert [] == client.keys("many*")
