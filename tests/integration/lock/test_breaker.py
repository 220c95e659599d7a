"""A circuit breaker around acquire: what counts as a failure, what an open one does, and which calls it lets through.

Rules: the breaker is pybreaker's own; one failure opens it unless a test says otherwise. What threads and tasks do
alike is tested on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pybreaker
import pytest
import redis
from redis.exceptions import LockError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, once
from tests.support.interrupts import interrupt_when
from tests.support.waiting import FAR_S, LATE, Callers, Contender, Tasks, connections, queue_up, until_queued

OPEN, HALF_OPEN, CLOSED = pybreaker.STATE_OPEN, pybreaker.STATE_HALF_OPEN, pybreaker.STATE_CLOSED


@pytest.fixture
def breaker() -> pybreaker.CircuitBreaker:
    return pybreaker.CircuitBreaker(fail_max=1, reset_timeout=FAR_S)


@pytest.fixture
def dying(spare_server: Callable[..., Server], callers: Callers, breaker: pybreaker.CircuitBreaker) -> Dying:
    return Dying(spare_server(), callers, breaker)


class Dying:
    """A guarded lock on a server that the test may kill and start again."""

    def __init__(self, server: Server, callers: Callers, breaker: pybreaker.CircuitBreaker) -> None:
        self.server = server
        client = callers.client(server.port, retry=once(), client_name="guarded")
        self.contender = callers.contender(client, breaker=breaker, timeout=FAR_S)

    def fails(self) -> None:
        """The server does not answer; the failure that opens the circuit is told as pybreaker's own error."""
        self.server.kill()
        with pytest.raises((redis.ConnectionError, pybreaker.CircuitBreakerError)):
            self.contender.call("acquire")
        self.server.start()


# Failures


def test_server_that_is_gone_opens_the_circuit(dying: Dying, breaker: pybreaker.CircuitBreaker) -> None:
    breaker.fail_max = 3
    states = []
    for _ in range(3):
        states.append((breaker.fail_counter, breaker.current_state))
        dying.fails()
    assert states == [(0, CLOSED), (1, CLOSED), (2, CLOSED)]
    assert (breaker.fail_counter, breaker.current_state) == (3, OPEN)


@pytest.mark.slow
def test_server_that_is_silent_opens_the_circuit(
    valkey: Server, connect: Connect, callers: Callers, breaker: pybreaker.CircuitBreaker
) -> None:
    client = callers.client(valkey.port, retry=once(), socket_timeout=0.05)
    contender = callers.contender(client, breaker=breaker)
    connect(valkey.port).client_pause(timeout=1000)
    try:
        with pytest.raises(pybreaker.CircuitBreakerError):
            contender.call("acquire")
        assert breaker.current_state == OPEN
    finally:
        connect(valkey.port).client_unpause()


def test_open_circuit_fails_without_the_network(
    dying: Dying, connect: Connect, breaker: pybreaker.CircuitBreaker
) -> None:
    dying.fails()
    with pytest.raises(pybreaker.CircuitBreakerError):
        dying.contender.call("acquire")
    admin = connect(dying.server.port)
    assert (connections(admin, "guarded"), admin.keys()) == (0, [])
    assert dying.contender.lock.local.token is None


def test_circuit_closes_once_the_server_is_back(dying: Dying, breaker: pybreaker.CircuitBreaker) -> None:
    dying.fails()
    breaker.half_open()
    dying.fails()
    assert breaker.current_state == OPEN
    breaker.half_open()
    assert dying.contender.call("acquire") is True
    assert breaker.current_state == CLOSED


def test_what_is_held_can_be_given_back_while_the_circuit_is_open(
    dying: Dying, connect: Connect, breaker: pybreaker.CircuitBreaker
) -> None:
    dying.contender.call("acquire")
    breaker.open()
    assert dying.contender.call("reacquire") is True
    dying.contender.release()
    assert connect(dying.server.port).keys() == []


# Errors that are no failures


def _held_by_another(contender: Contender, admin: redis.Redis) -> Any:
    admin.set("name", "another's")
    return contender.call("acquire", blocking=False)


def _of_another_type(contender: Contender, admin: redis.Redis) -> Any:
    admin.lpush("name", "entry")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        contender.call("acquire")


def _of_no_sense(contender: Contender, admin: redis.Redis) -> Any:
    with pytest.raises(ValueError, match="blocking_timeout"):
        contender.call("acquire", blocking_timeout=math.nan)


def _not_replicated(contender: Contender, admin: redis.Redis) -> Any:
    with pytest.raises(LockError):
        contender.call("acquire")


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({}, _held_by_another),
        ({}, _of_another_type),
        ({}, _of_no_sense),
        ({"wait_replicas": 1, "wait_timeout": 0.05}, _not_replicated),
    ],
)
def test_what_the_server_has_answered_is_no_failure(
    valkey: Server,
    connect: Connect,
    callers: Callers,
    breaker: pybreaker.CircuitBreaker,
    options: dict[str, Any],
    outcome: Callable[[Contender, redis.Redis], Any],
) -> None:
    contender = callers.contender(callers.client(valkey.port), breaker=breaker, timeout=FAR_S, **options)
    assert not outcome(contender, connect(valkey.port))
    assert breaker.current_state == CLOSED


def test_interrupt_is_no_failure(valkey: Server, connect: Connect, breaker: pybreaker.CircuitBreaker) -> None:
    client = connect(valkey.port)
    redislock_fast.Lock(client, "name", timeout=FAR_S).acquire()
    interrupt_when(lambda: until_queued(client, "name", 1))
    with pytest.raises(KeyboardInterrupt):
        redislock_fast.Lock(client, "name", breaker=breaker, **LATE).acquire()
    assert breaker.current_state == CLOSED


def test_cancel_is_no_failure(valkey: Server, connect: Connect, breaker: pybreaker.CircuitBreaker) -> None:
    admin = connect(valkey.port)
    redislock_fast.Lock(admin, "name", timeout=FAR_S).acquire()
    with Tasks() as tasks:
        (waiter,) = queue_up([tasks.contender(tasks.client(valkey.port), breaker=breaker, **LATE)], admin)
        waiter.cancel()
        until_queued(admin, "name", 0)
    assert breaker.current_state == CLOSED


# Others


def test_guarded_callers_do_not_wait_for_one_another(
    valkey: Server, connect: Connect, callers: Callers, breaker: pybreaker.CircuitBreaker
) -> None:
    client = callers.client(valkey.port)
    holder, waiter = callers.contenders(2, client, breaker=breaker, **LATE)
    holder.call("acquire")
    answers: list[Future[Any]] = queue_up([waiter], connect(valkey.port))
    other = callers.contender(client, "other", breaker=breaker, **LATE)
    assert other.call("acquire") is True
    assert not answers[0].done()
    holder.release()
    assert answers[0].result(PATIENCE_S) is True


def test_what_is_no_breaker_is_refused(callers: Callers) -> None:
    with pytest.raises(TypeError, match="calling"):
        callers.contender(callers.client(1), breaker=object())
