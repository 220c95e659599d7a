"""An interrupt at any line of an acquire or release with `linger`: it is raised, and the key goes on being usable.

Rules: threads alone; the interrupts strike the main thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, pause, start, wait_until
from tests.support.interrupts import INTERRUPTS, each_line, interrupt_kind, interrupted_at
from tests.support.waiting import FAR_S

__all__ = ["interrupt_kind"]

pytestmark = pytest.mark.usefixtures("interrupt_kind")

_FILES = (
    "_linger/key_cache.py",
    "_linger/procedures.py",
    "_procedures/acquire.py",
    "_linger/threads.py",
)


def _lock(client: redis.Redis, name: str, linger: float) -> Lock:
    return Lock(client, name, timeout=FAR_S, linger=linger)


def _take(lock: Lock) -> None:
    lock.acquire()


def _take_in_time(lock: Lock) -> None:
    lock.acquire(blocking_timeout=PATIENCE_S)


def _try(lock: Lock) -> None:
    lock.acquire(blocking=False)


def _use(lock: Lock) -> None:
    lock.acquire()
    lock.release()


class _Interrupted:
    """Interrupts some work at each line in turn, and lets another lock object use the key afterwards."""

    def __init__(self, client: redis.Redis, linger: float) -> None:
        self._client = client
        self._linger = linger
        self._raised = False

    def at(
        self, number: int, work: Callable[[Lock], None], name: str, then: Callable[[], object] = lambda: None
    ) -> str:
        """Interrupt it at this line, and call `then`. Returns the place; empty where there are fewer lines."""
        lock = _lock(self._client, name, self._linger)
        place = interrupted_at(number, lambda: self._note(work, lock), *_FILES)
        then()
        if place:
            assert self._raised, f"the interrupt was swallowed at {place}"
        with contextlib.suppress(LockError):
            lock.release()
        other = _lock(self._client, name, self._linger)
        assert other.acquire(blocking_timeout=PATIENCE_S), f"the key cannot be acquired after an interrupt at {place}"
        other.release()
        return place

    def _note(self, work: Callable[[Lock], None], lock: Lock) -> None:
        self._raised = False
        try:
            work(lock)
        except INTERRUPTS:
            self._raised = True
            raise


@pytest.mark.timeout(100)
@pytest.mark.parametrize("state", ["kept", "kept for too long", "free"])
@pytest.mark.parametrize("work", [_take, _take_in_time, _try, _use])
def test_interrupt_at_any_line_leaves_the_key_usable(
    work: Callable[[Lock], None], state: str, valkey: Server, connect: Connect
) -> None:
    client = connect(valkey.port)
    linger = 0.001 if state == "kept for too long" else FAR_S
    interrupted = _Interrupted(client, linger)
    _use(_lock(client, "name", linger))
    number = 1
    while interrupted.at(number, work, f"name {number}" if state == "free" else "name"):
        number += 1
    assert number > 10


@pytest.mark.timeout(100)
@pytest.mark.parametrize("work", [_take, _take_in_time, _use])
def test_interrupt_at_any_line_of_a_local_waiter_leaves_the_key_usable(
    work: Callable[[Lock], None], valkey: Server, connect: Connect
) -> None:
    client = connect(valkey.port)
    interrupted = _Interrupted(client, FAR_S)
    number, place = 0, "the first"
    while place:
        number += 1
        holder, holds, is_over = _lock(client, "name", FAR_S), threading.Event(), threading.Event()

        def hold(holder: Lock = holder, holds: threading.Event = holds, is_over: threading.Event = is_over) -> None:
            with holder:
                holds.set()
                while not (holder.wanted or is_over.is_set()):
                    pause()

        holding = start(hold)
        assert holds.wait(PATIENCE_S)
        place = interrupted.at(number, work, "name", is_over.set)
        holding.result(PATIENCE_S)
    assert number > 10


@pytest.mark.timeout(100)
def test_interrupt_at_any_line_of_a_release_forgets_no_local_waiter(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    for strike in each_line(10):
        holder, waiter = (_lock(client, "name", FAR_S) for _ in range(2))
        assert holder.acquire()
        waiting = start(partial(_use, waiter))
        wait_until(partial(getattr, holder, "wanted"), "a thread waits")
        strike(holder.release, *_FILES)
        with contextlib.suppress(LockError):
            holder.release()
        waiting.result(PATIENCE_S)
