"""An interrupt while a thread of the package is started or told of work, or while the caller connects: nothing hangs.

Threads alone; the interrupts strike the main thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.interrupts import each_line, handled, interrupt_noting, interrupted_at
from tests.support.transports import end_idle_renewers
from tests.support.waiting import FAR_S

_THREADING: str = threading.__file__
_RENEWER = ("_renewal/threads.py", "_renewal/schedule.py", "_transport/threads/starting.py", _THREADING)
_CLEANUP = ("_transport/cleanup.py", "_transport/threads/cleanup.py", "_transport/threads/starting.py", _THREADING)

_CONNECTING = ("_transport/threads/server.py", "_transport/threads/connect.py", "_transport/threads/cleanup.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(bool(sys.gettrace() or sys.getprofile()), reason="somebody else traces"),
]


@pytest.fixture
def client(valkey: Server, connect: Connect) -> redis.Redis:
    """One that is connected."""
    client = connect(valkey.port)
    with Lock(client, "name", timeout=FAR_S):
        pass
    return client


def _use(client: redis.Redis, **settings: Any) -> bool:
    with Lock(client, "name", timeout=FAR_S, **settings):
        return True


@pytest.mark.parametrize("is_idle", [False, True], ids=["a thread renews", "a thread is started"])
@pytest.mark.parametrize("settings", [{}, {"thread_local": False}, {"linger": 0.05}], ids=str)
def test_renewer_can_be_used_after_an_interrupt_at_any_line(
    settings: dict[str, Any], is_idle: bool, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_idle:
        end_idle_renewers(monkeypatch)
    for strike in each_line(10):
        lock = Lock(client, "name", timeout=FAR_S, auto_renew=True, **settings)

        def use(lock: Lock = lock) -> None:
            lock.acquire()
            lock.extend(FAR_S, replace_ttl=True)
            lock.release()

        place = strike(use, *_RENEWER)
        assert " raises " not in place
        with contextlib.suppress(LockError):
            lock.release()
        others = [start(lambda: _use(client, auto_renew=True, **settings)) for _ in range(2)]
        assert [other.result(PATIENCE_S) for other in others] == [True, True]


@pytest.mark.parametrize("is_renewed", [False, True])
def test_lock_that_was_extended_in_vain_is_still_renewed(is_renewed: bool, client: redis.Redis) -> None:
    number, place = 0, "the first"
    held = []
    while place:
        number += 1
        lock = Lock(client, f"name {number}", timeout=0.5, auto_renew=True, thread_local=False)
        assert lock.acquire()
        ttl_s = 0.3 if is_renewed else 0.5
        place = interrupted_at(number, lambda: lock.extend(ttl_s, replace_ttl=True), *_RENEWER)  # noqa: B023
        held.append(lock)
    pause_until = client.time()[0] + 2
    wait_until(lambda: client.time()[0] >= pause_until, "their leases would have ended")
    assert [lock.valid for lock in held] == [True] * number
    for lock in held:
        lock.release()
    assert number > 5


def test_second_interrupt_while_a_cleanup_is_started_loses_no_cleanup(client: redis.Redis) -> None:
    for strike in each_line(10):
        lock = Lock(client, "name", timeout=FAR_S, thread_local=False)
        interrupt_noting(lock)

        def acquire(lock: Lock = lock) -> None:
            with pytest.raises(KeyboardInterrupt):  # where the second one does not come any more
                lock.acquire()

        place = strike(acquire, *_CLEANUP)
        assert lock.local.token is None
        wait_until(lambda: not client.exists("name"), f"nothing is left of what was interrupted at {place}")
        assert start(lambda: _use(client)).result(PATIENCE_S) is True


def test_interrupt_at_any_place_of_connecting_lets_others_connect(valkey: Server, valkey_client: redis.Redis) -> None:
    for strike in each_line(20, handled):
        with redis.Redis(port=valkey.port) as client:
            strike(Lock(client, "name", timeout=FAR_S).locked, *_CONNECTING, contextlib.__file__)
            valkey_client.client_kill_filter(_type="normal", skipme=True)  # so that another one is needed
            assert start(lambda: _use(client)).result(PATIENCE_S) is True
