"""Times may be any real numbers, and what one caller gives as a Decimal is no number of another caller's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

import redislock_fast
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, Callers, gets_and_frees

NUMBER = pytest.mark.parametrize("number", [Decimal, Fraction])
_SLEEPS_S = itertools.count(61)  # each one is used by one test alone: a cache would know the others


@pytest.mark.parametrize("options", [{}, {"auto_renew": True}, {"linger": 0.5}], ids=str)
@NUMBER
def test_waiter_takes_any_number_and_leaves_it_to_nobody(
    valkey_scene: Scene, options: dict[str, Any], number: Callable[[str], Any]
) -> None:
    client, other = valkey_scene.connect(), valkey_scene.connect()
    sleep_s = next(_SLEEPS_S) + 0.5
    for sleep in (number(str(sleep_s)), sleep_s):
        holder = valkey_scene.contender(client)
        holder.call("acquire")
        waiter = valkey_scene.contender(other, timeout=FAR_S, sleep=sleep, **options)
        answer = valkey_scene.wait(waiter)
        holder.release()
        if options.get("linger"):
            assert answer.result(PATIENCE_S) is True
            waiter.release()
            valkey_scene.client.flushdb()
        else:
            gets_and_frees(waiter, answer, valkey_scene.client)


@NUMBER
def test_poller_takes_any_number(valkey_scene: Scene, number: Callable[[str], Any]) -> None:
    client = valkey_scene.connect()
    holder = valkey_scene.contender(client)
    holder.call("acquire")
    waiter = valkey_scene.contender(client, timeout=FAR_S, sleep=number("0.01"), wait="poll")
    assert waiter.call("acquire", blocking_timeout=number("0.05")) is False
    answer = waiter.acquire(blocking_timeout=number(str(FAR_S)))
    holder.release()
    gets_and_frees(waiter, answer, valkey_scene.client)


@NUMBER
def test_redlock_takes_any_number(callers: Callers, fleet: list[Server], number: Callable[[str], Any]) -> None:
    clients = [callers.client(server.port) for server in fleet]
    holder = callers.redlock(clients, timeout=FAR_S)
    holder.call("acquire")
    waiter = callers.redlock(clients, timeout=FAR_S, sleep=number("0.01"))
    assert waiter.call("acquire", blocking_timeout=number("0.05")) is False
    answer = waiter.acquire()
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


@pytest.fixture
def long_waits() -> Iterator[None]:
    """The log of long waits as it is by default, after the test."""
    yield
    redislock_fast.log_waits()


@pytest.mark.usefixtures("long_waits")
@NUMBER
def test_long_wait_may_be_any_number_for_all_callers(valkey_scene: Scene, number: Callable[[str], Any]) -> None:
    redislock_fast.log_waits(number("0.5"))
    client = valkey_scene.connect()
    holder, waiter = (valkey_scene.contender(client) for _ in range(2))
    holder.call("acquire")
    answer = valkey_scene.wait(waiter)
    holder.release()
    gets_and_frees(waiter, answer, valkey_scene.client)


@NUMBER
def test_adaptive_ttl_takes_any_number(valkey_scene: Scene, number: Callable[[str], Any]) -> None:
    ttl = redislock_fast.AdaptiveTTL(
        number("10"), floor=number("1"), ceiling=number("60"), quantile=number("0.5"), factor=number("2")
    )
    lock = valkey_scene.contender(timeout=ttl)
    for _ in range(2):
        lock.call("acquire")
        lock.release()
    ttl.observe("name", number("20"))
    assert 10_000 <= ttl.ttl_ms("name") <= 60_000
