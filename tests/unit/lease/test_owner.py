"""Threads of a forked child that use an object of their parent at once: one of them has all begin with nothing.

Rules: no server, and no fork, but another generation. One thread is overtaken by another one in the midst.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from redislock_fast import Lock, Redlock, Semaphore
from redislock_fast._lease import owner
from redislock_fast._util import fork
from tests.support.helpers import PATIENCE_S, start

CLIENTS = [redis.Redis(port=port) for port in (1, 2, 3)]  # which connect to nothing

HELD: dict[str, Callable[[], Callable[[], Any]]] = {
    "Lock": lambda: Lock(CLIENTS[0], "name", timeout=1)._held,
    "Redlock": lambda: Redlock(CLIENTS, "name", timeout=1)._held,
    "Semaphore": lambda: Semaphore(CLIENTS[0], "name", 2, timeout=1)._callers.mine,
}
"""Each makes an object, and returns what finds out what the calling thread holds by it."""


@pytest.mark.parametrize("kind", HELD)
def test_thread_that_overtakes_another_one_keeps_what_it_holds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HELD[kind]()
    of_parent = held()
    of_threads = owner.of_threads
    is_overtaken, goes_on = threading.Event(), threading.Event()

    def overtaken() -> Any:
        monkeypatch.setattr(owner, "of_threads", of_threads)
        is_overtaken.set()
        assert goes_on.wait(PATIENCE_S)
        return of_threads()

    monkeypatch.setattr(owner, "of_threads", overtaken)
    monkeypatch.setattr(fork, "generation", lambda: -2)
    other = start(held)
    assert is_overtaken.wait(PATIENCE_S)
    mine = held()
    goes_on.set()
    other.result(PATIENCE_S)
    assert [held() is mine, mine is of_parent] == [True, False]
