"""An interrupt at any line of calls with `linger`, for threads, threads that share locks and tasks, and on options."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import redis

import redislock_fast
from redislock_fast.server import Server
from tests.integration.lock.test_interrupts import CHANNELS, FACADE, LoopWorld, ThreadWorld, World, collected, untraced
from tests.support.helpers import PATIENCE_S, pause, start, wait_until
from tests.support.interrupts import each_line, interrupt_kind, interrupted_at, skip_what_a_loop_takes
from tests.support.transports import queue_at_once, wait_by_steps
from tests.support.waiting import queued

__all__ = ["collected", "interrupt_kind"]

LINGERING = (
    "_linger/key_cache.py",
    "_lease/owner.py",
    "_linger/procedures.py",
    "_linger/threads.py",
    "_linger/loop.py",
)
TIMED = ("watch_keys", "_watch_later", "_sweep_keys", "_cancel")
"""What the timer of a loop calls: an interrupt there strikes the loop, and ends it."""
BRIEF_S = 0.01
SOON_S = 0.003

pytestmark = [
    pytest.mark.slow,
    untraced,
    pytest.mark.usefixtures("collected", "interrupt_kind"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited"),
    pytest.mark.parametrize("fleet", ["valkey"], indirect=True),
]


class _Threads(ThreadWorld):
    """With locks that threads do not share: these take fewer steps."""

    shared = ThreadWorld.lock

    def lock(self, **settings: Any) -> Any:
        return redislock_fast.Lock(self.client, "name", 60, **settings)


class _SharingThreads(_Threads):
    """With locks that threads share."""

    lock = ThreadWorld.lock


@pytest.fixture(params=[_Threads, _SharingThreads, LoopWorld], ids=["threads", "sharing threads", "tasks"])
def world(
    request: pytest.FixtureRequest, fleet: list[Server], interrupt_kind: None, caplog: pytest.LogCaptureFixture
) -> Iterator[Any]:
    """All worlds in turn, connected and subscribed. Afterwards, no key is said to be lost that was given back."""
    if request.param is LoopWorld:
        skip_what_a_loop_takes()
    running: World = request.param(fleet[:1])
    lock = running.lock(linger=BRIEF_S)
    running.do(lock.acquire)
    running.do(lock.release)
    yield running
    running.close()
    assert [record.getMessage() for record in caplog.records if "was lost" in record.getMessage()] == []


only_threads = pytest.mark.parametrize(
    "world", [_Threads, _SharingThreads], indirect=True, ids=["threads", "sharing threads"]
)
"""In a loop, the interrupt may strike the other task."""


def _interrupted(number: int, world: Any, call: Callable[[], Any]) -> str:
    place = interrupted_at(number, lambda: world.do(call), *FACADE, *CHANNELS, *LINGERING, spared=TIMED)
    assert " raises " not in place
    return place


def _listeners() -> int:
    return sum(thread.name == "redislock_fast-linger" for thread in threading.enumerate())


def _assert_whole(world: Any, lock: Any, place: str) -> None:
    """Assert that the lock is held by this object or by none, and can be taken by one other then."""
    wait_until(lambda: _listeners() <= 1, f"one thread listens after {place}")
    other = world.lock(linger=BRIEF_S)
    if lock.local.token is not None:  # returned, or about to
        assert world.do(lambda: other.acquire(blocking=False)) is False, place
        world.do(lock.release)
    assert world.do(lambda: other.acquire(blocking_timeout=PATIENCE_S)) is True, place
    assert world.do(lambda: world.lock(linger=BRIEF_S).acquire(blocking=False)) is False, place
    world.do(other.release)
    world.until_free()


SETTINGS = pytest.mark.parametrize("settings", [{}, {"auto_renew": True}, {"blocking_timeout": 10}], ids=str)


@SETTINGS
@pytest.mark.parametrize("lingers", [False, True], ids=["free", "lingering"])
def test_acquire_interrupted_at_any_line(world: Any, settings: dict[str, Any], lingers: bool) -> None:
    for strike in each_line(15, _interrupted):
        if lingers:
            earlier = world.lock(linger=60)
            world.do(earlier.acquire)
            world.do(earlier.release)
        lock = world.lock(**settings, linger=BRIEF_S)
        place = strike(world, lock.acquire)
        _assert_whole(world, lock, place)


def test_acquire_of_a_key_of_another_client_interrupted_at_any_line(world: Any, fleet: list[Server]) -> None:
    world.until_free()
    with redis.Redis(port=fleet[0].port) as client:
        holder = redislock_fast.Lock(client, "name", 60)
        for strike in each_line(30, _interrupted):
            assert holder.acquire(blocking=False)
            lock = world.lock(linger=BRIEF_S)
            place = strike(world, partial(lock.acquire, blocking=False))
            holder.release()
            _assert_whole(world, lock, place)


@SETTINGS
@pytest.mark.parametrize("timeout", [60, 70], ids=["takes the key", "asks for the key"])
@only_threads
def test_local_waiter_interrupted_at_any_line(world: Any, timeout: int, settings: dict[str, Any]) -> None:
    for strike in each_line(30, _interrupted):
        holder = world.shared(linger=BRIEF_S)
        world.do(holder.acquire)
        lock = world.lock(**settings, linger=BRIEF_S)
        lock.timeout = timeout

        def release_soon(holder: Any = holder) -> None:
            pause(SOON_S)
            holder.release()

        released = start(release_soon)
        place = strike(world, lock.acquire)
        released.result(PATIENCE_S)
        _assert_whole(world, lock, place)


@pytest.fixture
def handing_over(
    world: Any, fleet: list[Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Begins a context in which another client holds the lock, and hands it over to the first waiter."""
    queue_at_once(monkeypatch)
    world.until_free()
    with redis.Redis(port=fleet[0].port) as client, ThreadPoolExecutor() as pool:
        holder = redislock_fast.Lock(client, "name", 60, thread_local=False)

        @contextmanager
        def begin() -> Iterator[None]:
            holder.acquire()
            is_over = threading.Event()

            def hand_over() -> None:
                wait_until(lambda: is_over.is_set() or queued(client, "name") == 1, "there is a waiter, or was none")
                holder.release()

            done = pool.submit(hand_over)
            yield
            is_over.set()
            done.result(PATIENCE_S)

        yield begin


@SETTINGS
@pytest.mark.parametrize("goes_on_by_steps", [False, True], ids=["at once", "by steps"])
def test_acquire_by_the_queue_interrupted_at_any_line(
    world: Any,
    settings: dict[str, Any],
    handing_over: Callable[[], AbstractContextManager[None]],
    goes_on_by_steps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if goes_on_by_steps:
        wait_by_steps(monkeypatch)
    for strike in each_line(30, _interrupted):
        lock = world.lock(**settings, linger=BRIEF_S)
        with handing_over():
            place = strike(world, lock.acquire)
        _assert_whole(world, lock, place)


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
@only_threads
def test_release_of_a_wanted_key_interrupted_at_any_line(
    world: Any, settings: dict[str, Any], handing_over: Callable[[], AbstractContextManager[None]]
) -> None:
    for strike in each_line(10, _interrupted):
        lock = world.lock(**settings, linger=60)  # for longer than the test waits
        with handing_over():
            world.do(lock.acquire)
        strike(world, lock.release)
        if lock.local.token is not None:
            world.do(lock.release)
        world.until_free()


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
def test_release_interrupted_at_any_line(world: Any, settings: dict[str, Any]) -> None:
    for strike in each_line(10, _interrupted):
        lock = world.lock(**settings, linger=BRIEF_S)
        world.do(lock.acquire)
        place = strike(world, lock.release)
        if lock.local.token is not None:
            world.do(lock.release)
        _assert_whole(world, lock, place)


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
@only_threads
def test_release_with_a_local_waiter_interrupted_at_any_line(world: Any, settings: dict[str, Any]) -> None:
    for strike in each_line(10, _interrupted):
        lock, waiter = world.lock(**settings, linger=BRIEF_S), world.lock(linger=BRIEF_S)

        def use(waiter: Any = waiter) -> None:
            waiter.acquire()
            waiter.release()

        world.do(lock.acquire)
        served = start(use)
        pause(SOON_S)
        place = strike(world, lock.release)
        if lock.local.token is not None:
            world.do(lock.release)
        served.result(PATIENCE_S)
        _assert_whole(world, lock, place)
