"""The metrics of semaphores: those of locks, with the label `kind`. Metrics of a user get the calls of a lock."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import LockError

from redislock_fast.server import Server
from tests.integration.metrics.conftest import Exposed
from tests.support.helpers import PATIENCE_S
from tests.support.holding import RENEWED
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, Callers

OF: dict[str, Any] = {"kind": "semaphore"}


def test_permits_are_recorded_beside_locks_of_the_same_name(exposed: Exposed, valkey_scene: Scene) -> None:
    client = valkey_scene.connect()
    lock = valkey_scene.holder(client, "name:lock", timeout=FAR_S)
    semaphore = valkey_scene.callers.package.Semaphore(client, "name", 2, timeout=FAR_S)
    permits = [valkey_scene.callers.run(semaphore.acquire) for _ in range(2)]
    answer = valkey_scene.callers.begin(semaphore.acquire)
    valkey_scene.until_queued(1)
    exposed.until("waiting", 1, **OF)
    assert (exposed.held, exposed.value("held", **OF), exposed.value("waiting")) == (1, 2, 0)
    valkey_scene.callers.run(permits.pop().release)
    permits.append(answer.result(PATIENCE_S))
    assert valkey_scene.callers.run(lambda: semaphore.acquire(blocking=False)) is None
    for permit in permits:
        valkey_scene.callers.run(permit.release)
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


def test_metrics_of_the_users_own_get_the_calls_of_a_lock(valkey_scene: Scene) -> None:
    of_lock, of_permit = Reports(), Reports()
    client = valkey_scene.connect()
    lock = valkey_scene.holder(client, "name", timeout=FAR_S, auto_renew=True, metrics=of_lock)
    lock.release()
    semaphore = valkey_scene.callers.package.Semaphore(client, "name", 1, timeout=FAR_S, metrics=of_permit)
    permit = valkey_scene.callers.run(semaphore.acquire)
    valkey_scene.callers.run(permit.release)
    assert sorted(of_permit.calls) == sorted(of_lock.calls) != []
