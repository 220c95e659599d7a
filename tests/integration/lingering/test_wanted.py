"""`wanted` and `on_wanted`: the holder of a lock hears that another caller waits for it.

Rules: threads and tasks alike.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.holding import Holders
from tests.support.transports import local_waiters
from tests.support.waiting import FAR_S, queued, until_queued

HELD: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S}


class Listener:
    """An `on_wanted` that notes the locks that it is called with, and raises where it is to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.wanted: list[Any] = []
        self._error = error

    def __call__(self, lock: Any) -> None:
        self.wanted.append(lock)
        if self._error is not None:
            raise self._error


def _has_heard(listener: Listener, count: int) -> bool:
    return len(listener.wanted) == count


@pytest.mark.parametrize("linger", [None, FAR_S], ids=["plain", "linger"])
def test_the_holder_hears_of_a_waiter_once(
    holders: Holders, valkey: Server, connect: Connect, linger: float | None
) -> None:
    listener = Listener()
    holder = holders.make(valkey.port, **HELD, on_wanted=listener, linger=linger)
    waiters = [holders.make(valkey.port, timeout=FAR_S, sleep=0.02) for _ in range(2)]
    assert (holder.call("acquire"), holder.lock.wanted) == (True, False)
    answers = [waiter.acquire() for waiter in waiters]
    until_queued(connect(valkey.port), "name", 2)
    wait_until(lambda: listener.wanted, "it hears of a waiter")
    heard = holder.lock.wanted
    holder.release()
    wait_until(lambda: any(answer.done() for answer in answers), "a waiter gets it")
    assert (listener.wanted, heard, holder.lock.wanted) == ([holder.lock], True, False)


def test_each_holding_hears_anew(holders: Holders, valkey: Server) -> None:
    listener = Listener()
    holder, waiter = holders.make(valkey.port, **HELD, on_wanted=listener), holders.make(valkey.port, **HELD)
    for count in (1, 2):
        assert holder.call("acquire") is True
        answer = waiter.acquire()
        wait_until(partial(_has_heard, listener, count), "it hears of the waiter")
        holder.release()
        assert answer.result(PATIENCE_S) is True
        waiter.release()


def test_a_released_lock_hears_nothing(holders: Holders, valkey: Server, connect: Connect) -> None:
    listener, other = Listener(), Listener()
    first = holders.make(valkey.port, **HELD, on_wanted=listener)
    second = holders.on(first.lock.redis, **HELD, on_wanted=other)
    assert first.call("acquire") is True
    first.release()
    assert second.call("acquire") is True
    answer = holders.make(valkey.port, **HELD).acquire()
    wait_until(lambda: other.wanted, "the holder hears of the waiter")
    second.release()
    assert answer.result(PATIENCE_S) is True
    assert listener.wanted == []


def test_a_waiter_of_the_same_process_is_told_too(holders: Holders, valkey: Server, connect: Connect) -> None:
    listener = Listener()
    holder = holders.make(valkey.port, **HELD, on_wanted=listener, linger=FAR_S)
    waiter = holders.on(holder.lock.redis, **HELD, linger=FAR_S)
    assert holder.call("acquire") is True
    answer = waiter.acquire()
    wait_until(lambda: listener.wanted, "it hears of the local waiter")
    assert (holder.lock.wanted, queued(connect(valkey.port), "name")) == (True, 0)
    holder.release()
    assert answer.result(PATIENCE_S) is True


def test_a_waiter_that_came_before_the_holder_of_the_same_process_is_told_too(holders: Holders, valkey: Server) -> None:
    listener = Listener()
    first = holders.hold(valkey.port, **HELD, linger=FAR_S)
    second = holders.on(first.lock.redis, **HELD, linger=FAR_S, on_wanted=listener)
    third = holders.on(first.lock.redis, **HELD, linger=FAR_S)
    answers = []
    for waiter in (second, third):
        answers.append(waiter.acquire())
        wait_until(lambda: local_waiters(first.lock) == len(answers), "it waits")
    first.release()
    assert answers[0].result(PATIENCE_S) is True
    wait_until(lambda: listener.wanted, "another waiter has said that it wants the lock")
    assert (listener.wanted, second.lock.wanted) == ([second.lock], True)
    second.release()
    assert answers[1].result(PATIENCE_S) is True


def test_the_last_waiter_of_a_process_hears_nothing(holders: Holders, valkey: Server) -> None:
    listener = Listener()
    first = holders.hold(valkey.port, **HELD, linger=FAR_S)
    second = holders.on(first.lock.redis, **HELD, linger=FAR_S, on_wanted=listener)
    answer = second.acquire()
    wait_until(lambda: local_waiters(first.lock) == 1, "it waits")
    first.release()
    assert answer.result(PATIENCE_S) is True
    assert (listener.wanted, second.lock.wanted) == ([], False)


def test_an_error_of_on_wanted_is_logged(holders: Holders, valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    holder = holders.make(valkey.port, **HELD, on_wanted=Listener(ValueError("of no use")))
    assert holder.call("acquire") is True
    answer = holders.make(valkey.port, **HELD).acquire()
    wait_until(lambda: "on_wanted failed for the lock 'name'." in caplog.text, "it is logged")
    holder.release()
    assert answer.result(PATIENCE_S) is True


def test_an_idle_program_hears_it(holders: Holders, valkey: Server) -> None:
    heard = threading.Event()
    holder = holders.make(valkey.port, timeout=FAR_S, on_wanted=lambda _lock: heard.set())
    assert holder.call("acquire") is True
    answer = holders.make(valkey.port, **HELD).acquire()
    assert heard.wait(PATIENCE_S)
    holder.release()
    assert answer.result(PATIENCE_S) is True


def test_what_cannot_be_called_is_refused(holders: Holders, valkey: Server) -> None:
    with pytest.raises(TypeError, match="on_wanted is not callable: 3"):
        holders.make(valkey.port, timeout=10, on_wanted=3)
