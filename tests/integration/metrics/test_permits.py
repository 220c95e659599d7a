"""The metrics of semaphores: those of locks, with the label `kind`. Metrics of a user get the calls of a lock."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast.server import Server
from tests.integration.metrics.conftest import Exposed
from tests.support.helpers import PATIENCE_S
from tests.support.holding import RENEWED
from tests.support.waiting import FAR_S, Callers, until_queued

OF: dict[str, Any] = {"kind": "semaphore"}


def test_permits_are_recorded_beside_locks_of_the_same_name(
    exposed: Exposed, callers: Callers, valkey: Server, valkey_client: redis.Redis
) -> None:
    client = callers.client(valkey.port)
    lock = callers.contender(client, "name:lock", timeout=FAR_S)
    assert lock.call("acquire")
    semaphore = callers.package.Semaphore(client, "name", 2, timeout=FAR_S)
    permits = [callers.run(semaphore.acquire) for _ in range(2)]
    answer = callers.begin(semaphore.acquire)
    until_queued(valkey_client, "name", 1)
    exposed.until("waiting", 1, **OF)
    assert (exposed.held, exposed.value("held", **OF), exposed.value("waiting")) == (1, 2, 0)
    callers.run(permits.pop().release)
    permits.append(answer.result(PATIENCE_S))
    assert callers.run(lambda: semaphore.acquire(blocking=False)) is None
    for permit in permits:
        callers.run(permit.release)
    lock.release()
    assert [exposed.acquired(result, **OF) for result in ("acquired", "not_acquired", "error")] == [3, 1, 0]
    assert (exposed.value("hold_duration_seconds_count", **OF), exposed.value("hold_duration_seconds_count")) == (3, 1)
    assert (exposed.value("waits_total", mode="queue", **OF), exposed.value("handovers_total", **OF)) == (1, 1)
    assert (exposed.acquired(), exposed.held, exposed.value("held", **OF)) == (1, 0, 0)


def test_losses_and_failed_renewals_of_permits_are_recorded(
    exposed: Exposed, callers: Callers, spare_server: Callable[..., Server]
) -> None:
    server = spare_server()
    semaphore = callers.package.Semaphore(callers.client(server.port), "name", 2, **RENEWED)
    permit = callers.run(semaphore.acquire)
    server.signal(signal.SIGSTOP)
    exposed.until("lost_total", 1, reason="server_gone", **OF)
    server.signal(signal.SIGCONT)
    assert exposed.value("renewal_failures_total", **OF) > 0
    assert (exposed.value("renewal_failures_total"), exposed.value("held", **OF)) == (0, 0)
    with pytest.raises(LockError):
        callers.run(permit.release)


class Reports:
    """Metrics of a user's own, which have what `of_semaphores` could be taken for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method.startswith("__"):
            raise AttributeError(method)
        return lambda name, *_: self.calls.append((method, name))


def test_metrics_of_the_users_own_get_the_calls_of_a_lock(
    callers: Callers, valkey: Server, valkey_client: redis.Redis
) -> None:
    of_lock, of_permit = Reports(), Reports()
    client = callers.client(valkey.port)
    lock = callers.contender(client, "name", timeout=FAR_S, auto_renew=True, metrics=of_lock)
    assert lock.call("acquire")
    lock.release()
    semaphore = callers.package.Semaphore(client, "name", 1, timeout=FAR_S, metrics=of_permit)
    permit = callers.run(semaphore.acquire)
    callers.run(permit.release)
    assert sorted(of_permit.calls) == sorted(of_lock.calls) != []
