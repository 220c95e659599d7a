"""Objects that get the reports of all locks of the process, beside a lock's own `metrics`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import redislock_fast.asyncio
from redislock_fast import Lock, Redlock
from redislock_fast._lease.logs import CALL_LOG
from redislock_fast._lease.metrics import install, installed, report, uninstall


class Told:
    """Notes the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def record_acquisition(self, *args: object) -> None:
        self.calls.append(args)

    def record_release(self, *args: object) -> None:
        self.calls.append(args)


@pytest.fixture
def observer() -> Iterator[Told]:
    told = Told()
    install(told)
    yield told
    uninstall(told)
    assert installed == []


def observers_of(lock: Any) -> tuple[Any, ...] | None:
    options = lock._options
    return None if options is None else options.observers


def test_an_observer_is_installed_once(observer: Told) -> None:
    install(observer)
    assert installed == [observer]


def test_a_lock_that_is_made_later_reports_to_the_observer(observer: Told) -> None:
    client = redis.Redis()
    servers = [redis.Redis(port=port) for port in (1, 2, 3)]
    assert observers_of(Lock(client, "name")) == (observer,)
    assert observers_of(Lock(client, "name", timeout=10, linger=1)) == (observer,)
    assert observers_of(redislock_fast.asyncio.Lock(redis.asyncio.Redis(), "name")) == (observer,)
    assert observers_of(Redlock(servers, "name", timeout=10)) == (observer,)


def test_nothing_observes_a_lock_whose_calls_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = redis.Redis()
    with caplog.at_level(logging.INFO):
        assert observers_of(Lock(client, "name")) is None
        assert observers_of(Lock(client, "name", timeout=10, linger=1)) is None
        assert observers_of(Lock(client, "name", fencing=True)) == ()
    with caplog.at_level(logging.DEBUG):
        assert observers_of(Lock(client, "name")) == (CALL_LOG,)
        assert observers_of(Lock(client, "name", timeout=10, linger=1)) == (CALL_LOG,)


def test_a_locks_own_metrics_come_before_the_observer(observer: Told) -> None:
    own = Told()
    assert observers_of(Lock(redis.Redis(), "name", metrics=own)) == (own, observer)


def test_a_lock_that_was_made_before_is_not_observed() -> None:
    lock = Lock(redis.Redis(), "name")
    told = Told()
    install(told)
    uninstall(told)
    assert observers_of(lock) is None
    assert observers_of(Lock(redis.Redis(), "name")) is None


def test_an_observer_watches_no_lock(observer: Told) -> None:
    """A watched lock is released where its object is dropped: being observed must not change what a lock does."""
    observer.record_loss = observer.record_release  # type: ignore[attr-defined]
    options = Lock(redis.Redis(), "name", timeout=10)._options
    assert options is not None
    assert options.watches is False


def test_an_error_of_one_observer_is_logged_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def record_release(self, *_args: object) -> None:
            raise ValueError("planned")

    told = Told()
    with caplog.at_level(logging.ERROR, "redislock_fast"):
        report((Broken(), object(), told), "record_release", "name", 1.0, True)
    assert told.calls == [("name", 1.0, True)]
    assert [record.message for record in caplog.records] == ["metrics failed."]
