"""Reports of a lock: metrics of each holding, and hold times to a ttl that is learnt from them.

What is learnt stands in test_adaptive. Rules: threads and tasks alike.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import redis

from redislock_fast import AdaptiveTTL, LockLostError, LossReason, NotReplicatedError
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, until_queued


class Watcher:
    """Notes what it is told, and is of no use where it raises.

    Attributes:
        acquired: names, times and attempts.
        released: names, times and whether they were still held.
        error: what to raise.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.acquired: list[tuple[Any, float, int]] = []
        self.released: list[tuple[Any, float, bool]] = []
        self.error = error

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        self.acquired.append((name, seconds, attempts))
        if self.error is not None:
            raise self.error

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        self.released.append((name, hold_s, success))
        if self.error is not None:
            raise self.error


class FailureWatcher(Watcher):
    """Notes failures and losses, too.

    Attributes:
        failed: names, attempts and classes of errors.
        lost: names and reasons.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[tuple[Any, int, type[BaseException] | None]] = []
        self.lost: list[tuple[Any, LossReason]] = []

    def record_failure(self, name: str | bytes, seconds: float, attempts: int, error: BaseException | None) -> None:
        assert seconds >= 0
        self.failed.append((name, attempts, None if error is None else type(error)))

    def record_loss(self, name: str | bytes, hold_s: float, reason: LossReason) -> None:
        assert hold_s >= 0
        self.lost.append((name, reason))


class Learning:
    """In place of an `AdaptiveTTL`: one more second each time that it is asked."""

    def __init__(self) -> None:
        self.observed: list[tuple[Any, float]] = []
        self._next_ms = 59_000

    def ttl_ms(self, _name: str | bytes) -> int:
        self._next_ms += 1000
        return self._next_ms

    def observe(self, name: str | bytes, hold_s: float) -> None:
        self.observed.append((name, hold_s))


@pytest.mark.parametrize("name", ["name", b"name"])
def test_metrics_are_told_of_each_holding(holders: Holders, valkey: Server, name: str | bytes) -> None:
    watcher = Watcher()
    lock = holders.make(valkey.port, name, timeout=FAR_S, metrics=watcher)
    for _ in range(2):
        assert lock.call("acquire") is True
        lock.release()
    assert [(told, attempts) for told, _, attempts in watcher.acquired] == [(name, 1)] * 2
    assert [(told, success) for told, _, success in watcher.released] == [(name, True)] * 2
    assert all(seconds >= 0 for _, seconds, _ in (*watcher.acquired, *watcher.released))


def test_metrics_count_the_waiting_and_the_attempts(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin, holder, watcher = connect(valkey.port), holders.make(valkey.port, timeout=FAR_S), Watcher()
    waits = holders.make(valkey.port, timeout=FAR_S, metrics=watcher)
    assert holder.call("acquire") is True
    answer = waits.acquire()
    until_queued(admin, "name", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waits.release()
    admin.set("name", "another's")
    polls = holders.make(valkey.port, timeout=FAR_S, sleep=0.02, wait="poll", metrics=watcher)
    attempts = admin.info("commandstats")["cmdstat_set"]["calls"]
    answer = polls.acquire()
    wait_until(lambda: admin.info("commandstats")["cmdstat_set"]["calls"] > attempts + 2, "it polls")
    admin.delete("name")
    assert answer.result(PATIENCE_S) is True
    (_, waited_s, once), (_, polled_s, often) = watcher.acquired
    assert (waited_s > 0, once, polled_s > 0.02, often > 1) == (True, 1, True, True)


def test_metrics_are_not_told_of_what_was_not_acquired(holders: Holders, valkey: Server, connect: Connect) -> None:
    connect(valkey.port).set("name", "another's")
    watcher = Watcher()
    lock = holders.make(valkey.port, timeout=FAR_S, metrics=watcher)
    assert lock.call("acquire", blocking=False) is False
    assert watcher.acquired == []


@pytest.mark.slow
def test_metrics_are_told_of_failures(holders: Holders, valkey: Server, connect: Connect) -> None:
    connect(valkey.port).set("name", "another's")
    watcher = FailureWatcher()
    lock = holders.make(valkey.port, timeout=FAR_S, metrics=watcher)
    assert lock.call("acquire", blocking=False) is False
    assert lock.call("acquire", blocking_timeout=0.01) is False
    with pytest.raises(redis.ConnectionError):
        holders.make(1, timeout=FAR_S, metrics=watcher).call("acquire")
    assert watcher.failed == [("name", 1, None), ("name", 1, None), ("name", 1, redis.ConnectionError)]
    assert watcher.acquired == []


def test_metrics_are_told_of_a_loss_without_a_release(holders: Holders, valkey: Server) -> None:
    watcher = FailureWatcher()
    lock = holders.make(valkey.port, timeout=0.05, metrics=watcher)
    assert lock.call("acquire") is True
    wait_until(lambda: watcher.lost == [("name", LossReason.EXPIRED)], "the loss is noticed")
    assert watcher.released == []
    with pytest.raises(LockLostError):
        lock.release()
    assert [success for _, _, success in watcher.released] == [False]
    assert len(watcher.lost) == 1


@pytest.mark.parametrize("verb", ["release", "extend"])
def test_metrics_are_told_that_a_lock_was_lost(holders: Holders, valkey: Server, connect: Connect, verb: str) -> None:
    watcher, learning = Watcher(), Learning()
    lock = holders.make(valkey.port, timeout=learning, metrics=watcher)
    lock.call("acquire")
    connect(valkey.port).delete("name")
    if verb == "extend":
        with pytest.raises(LockLostError):
            lock.call("extend", 10)
    with pytest.raises(LockLostError):
        lock.release()
    assert [(told, success) for told, _, success in watcher.released] == [("name", False)]
    assert [name for name, _ in learning.observed] == ["name"]


def test_metrics_that_fail_are_logged_and_lose_no_lock(
    holders: Holders, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = Watcher(RuntimeError("out of order"))
    lock = holders.make(valkey.port, timeout=FAR_S, metrics=watcher)
    assert lock.call("acquire") is True
    assert lock.call("owned") is True
    lock.release()
    told = [(record.levelno, record.getMessage()) for record in caplog.records if record.name.startswith("redislock")]
    assert told == [(logging.ERROR, "metrics failed.")] * 2
    assert (len(watcher.acquired), len(watcher.released)) == (1, 1)


def test_ttl_is_asked_for_anew_and_told_the_hold_times(holders: Holders, valkey: Server, connect: Connect) -> None:
    learning, admin = Learning(), connect(valkey.port)
    lock = holders.make(valkey.port, timeout=learning)
    assert lock.lock.timeout == 60
    for ttl_s in (61, 62):
        lock.call("acquire")
        assert ttl_s - 1 < admin.pttl("name") / 1000 <= ttl_s == lock.lock.timeout
        assert ttl_s - 2 < lock.lock.remaining() < ttl_s
        lock.release()
    assert [name for name, _ in learning.observed] == ["name"] * 2
    assert all(0 <= hold_s < FAR_S for _, hold_s in learning.observed)


class Falling(Learning):
    """In place of an `AdaptiveTTL`: long when the lock is made, and short from then on."""

    def __init__(self) -> None:
        super().__init__()
        self._ttls_ms = iter([60_000])

    def ttl_ms(self, _name: str | bytes) -> int:
        return next(self._ttls_ms, 50)


def test_adaptive_ttl_is_longer_than_the_wait_for_replicas(holders: Holders, valkey: Server) -> None:
    lock = holders.make(valkey.port, timeout=Falling(), wait_replicas=1, wait_timeout=0.1)
    with pytest.raises(NotReplicatedError):
        lock.call("acquire")
    assert 0.2 == lock.lock.timeout


def test_lock_is_made_though_its_adaptive_ttl_is_shorter_than_the_wait_for_replicas(
    holders: Holders, valkey: Server
) -> None:
    ttl = AdaptiveTTL(10)
    for _ in range(128):
        ttl.observe("name", 0.1)
    lock = holders.make(valkey.port, timeout=ttl, wait_replicas=1, wait_timeout=2)
    assert (1_000, 4) == (ttl.ttl_ms("name"), lock.lock.timeout)


def test_adaptive_ttl_is_no_longer_than_max_hold(holders: Holders, valkey: Server, connect: Connect) -> None:
    ttl = AdaptiveTTL(10)
    settings: dict[str, Any] = {"timeout": ttl, "auto_renew": True, "max_hold": 30}
    before = holders.make(valkey.port, **settings)
    ttl.observe("name", 20)
    for lock in (before, holders.make(valkey.port, **settings)):
        assert lock.call("acquire") is True
        assert 0 < connect(valkey.port).pttl("name") <= 30_000 < ttl.ttl_ms("name")
        lock.release()


def test_adaptive_ttl_serves_a_lock(holders: Holders, valkey: Server) -> None:
    ttl = AdaptiveTTL(60, ceiling=900)
    lock = holders.make(valkey.port, timeout=ttl, auto_renew=True)
    for _ in range(3):
        assert lock.call("acquire") is True
        assert lock.call("reacquire") is True
        lock.release()
    assert ttl.ttl_ms("name") == 60_000


def test_ttl_that_is_assigned_takes_the_place_of_an_adaptive_one(holders: Holders, valkey: Server) -> None:
    lock, other = (holders.make(valkey.port, name, timeout=AdaptiveTTL(60)) for name in ("name", "other"))
    copied = copy.copy(other.lock)
    for contender in (lock, other):
        contender.lock.timeout = 20
        assert contender.call("acquire") is True
    assert (20, 20) == (lock.lock.timeout, other.lock.timeout)
    assert copied.timeout == 60
