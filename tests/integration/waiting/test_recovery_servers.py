"""A waiter gets the lock in the end though its server restarts, is paused, or stays away.

Rules: as in test_recovery.
"""

from __future__ import annotations

import pytest
import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import LockNotOwnedError
from redis.retry import Retry

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.waiting.test_recovery import LOOKS, Callers, patient
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.waiting import (
    FAR_S,
    LATE,
    Guard,
    until_queued,
)


@pytest.mark.parametrize("blocking_timeout", [None, FAR_S])
def test_server_restarted_with_waiters(
    callers_kind: str, callers: Callers, mortal_server: Server, connect: Connect, blocking_timeout: float | None
) -> None:
    guard = Guard()
    client = connect(mortal_server.port, retry=Retry(ConstantBackoff(0.02), 400))
    settings = {**LATE, "blocking_timeout": blocking_timeout}
    holder = callers.contender(callers.client(mortal_server.port, retry=patient(callers_kind)), **LATE)
    waiters = callers.contenders(5, callers.client(mortal_server.port, retry=patient(callers_kind)), **settings)
    assert holder.call("acquire")
    answers = [waiter.use(guard) for waiter in waiters]
    until_queued(client, "name", 5)
    mortal_server.kill()
    mortal_server.start()
    assert [answer.result(2 * PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    with pytest.raises(LockNotOwnedError):
        holder.release()
    assert client.keys() == []


def test_server_that_stays_away_raises_connection_error(
    callers_kind: str, callers: Callers, mortal_server: Server, connect: Connect
) -> None:
    once = (Retry if callers_kind == "threads" else AsyncRetry)(NoBackoff(), 0)
    holder, *waiters = callers.contenders(4, callers.client(mortal_server.port, retry=once), **LATE)
    assert holder.call("acquire")
    answers = [waiter.acquire() for waiter in waiters]
    until_queued(connect(mortal_server.port), "name", 3)
    mortal_server.kill()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert isinstance(answer.exception(PATIENCE_S), redis.ConnectionError)
        assert waiter.lock.local.token is None
    mortal_server.start()
    assert waiters[0].call("acquire")


def test_connection_that_another_finds_broken_while_somebody_waits(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    with Proxy(server.port) as proxy:
        ours = callers.client(proxy.port, retry=patient(callers_kind))
        waiter, other = callers.contenders(2, ours, **LATE)
        assert holder.call("acquire")
        answer = waiter.acquire()
        until_queued(client, "name", 1)
        proxy.hold()
        proxy.requests.clear()
        asked = other.ask("locked")
        wait_until(lambda: proxy.requests["GET"], "its request is under way")
        proxy.refuse()
        proxy.cut()
        proxy.resume()
        proxy.accept()
        assert asked.result(PATIENCE_S) is True
        until_queued(client, "name", 1)
        holder.release()
        assert answer.result(PATIENCE_S) is True
        waiter.release()
    assert client.keys() == []


def test_acquire_that_has_less_time_than_another_needs_to_connect(callers: Callers, server: Server) -> None:
    with Proxy(server.port) as proxy:
        patient, other = callers.contenders(2, callers.client(proxy.port), **LATE)
        proxy.hold()
        answer = patient.ask("locked")
        wait_until(lambda: proxy.requests, "it connects")
        with pytest.raises(redis.TimeoutError):
            other.call("acquire", blocking_timeout=0.05)
        proxy.resume()
        assert answer.result(PATIENCE_S) is False


@pytest.mark.parametrize("mode", ["ALL", "WRITE"])
def test_paused_server(callers: Callers, mortal_server: Server, connect: Connect, mode: str) -> None:
    guard = Guard()
    client = connect(mortal_server.port)
    contenders = callers.contenders(8, callers.client(mortal_server.port), **LOOKS)
    answers = [contender.use(guard, hold_s=0.01) for contender in contenders]
    wait_until(lambda: guard.entries, "somebody holds")
    client.client_pause(150, all=mode == "ALL")
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 8
    assert (guard.entries, guard.overlaps) == (8, 0)
    assert client.keys() == []


@pytest.mark.slow
def test_server_paused_for_longer_than_a_lease(callers: Callers, mortal_server: Server, connect: Connect) -> None:
    client = connect(mortal_server.port)
    holder = callers.contender(callers.client(mortal_server.port), timeout=1.0)
    waiter = callers.contender(callers.client(mortal_server.port), **LATE)
    waiter.call("locked")  # connects: the lease is short
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    client.client_pause(1500, all=False)
    assert answer.result(PATIENCE_S) is True
    assert waiter.call("owned")
    with pytest.raises(LockNotOwnedError):
        holder.release()
    waiter.release()
    assert client.keys() == []
