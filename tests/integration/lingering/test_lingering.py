"""A key that lingers: taken in memory, given up when another process wants it, and given back when nobody uses it.

Rules: threads and tasks alike. Another client stands for another process: it has a connection of its own.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from redis.exceptions import LockNotOwnedError

from redislock_fast import LossReason
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.holding.test_watching import FailureWatcher
from tests.support.helpers import PATIENCE_S, pause, wait_until
from tests.support.holding import Holders
from tests.support.transports import local_waiters
from tests.support.waiting import FAR_S, queued, until_queued

LINGERS: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S, "linger": FAR_S}
"""Only a message makes another process get the key within a test's patience."""

SOON_S = 0.03


def _are_done(answers: list[Future[Any]], count: int) -> bool:
    return sum(answer.done() for answer in answers) == count


def test_a_released_key_is_taken_again_without_a_request(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, **LINGERS)
    assert lock.call("acquire") is True
    lock.release()
    before = admin.info("commandstats")
    for _ in range(3):
        assert lock.call("acquire") is True
        lock.release()
    after = admin.info("commandstats")
    changed = {name for name, stats in after.items() if stats["calls"] != before.get(name, {"calls": 0})["calls"]}
    assert changed == {"cmdstat_info"}
    assert admin.exists("name") == 1


def test_other_objects_of_the_process_take_the_key_too(holders: Holders, valkey: Server, connect: Connect) -> None:
    first = holders.make(valkey.port, **LINGERS)
    assert first.call("acquire") is True
    token = connect(valkey.port).get("name")
    first.release()
    second = holders.on(first.lock.redis, **LINGERS)
    assert second.call("acquire") is True
    assert connect(valkey.port).get("name") == token
    assert first.call("acquire", blocking=False) is False
    second.release()
    assert first.call("acquire", blocking=False) is True


def test_a_lock_that_gets_another_name_takes_the_key_of_that_name(
    holders: Holders, valkey: Server, connect: Connect
) -> None:
    lock = holders.hold(valkey.port, **LINGERS)
    lock.release()
    lock.lock.name = "other"
    assert lock.call("acquire") is True
    assert (True, 1) == (lock.call("owned"), connect(valkey.port).exists("other"))
    lock.release()


def test_the_key_outlives_the_timeout_of_each_holder(holders: Holders, valkey: Server, connect: Connect) -> None:
    lock = holders.make(valkey.port, timeout=10, linger=5)
    for _ in range(2):
        assert lock.call("acquire") is True
        assert 14_000 < connect(valkey.port).pttl("name") <= 15_000
        assert 9 < lock.lock.remaining() <= 10
        lock.release()


def test_a_key_that_another_process_waits_for_is_given_up_at_once(holders: Holders, valkey: Server) -> None:
    keeper, waiter = (holders.make(valkey.port, **LINGERS) for _ in range(2))
    assert keeper.call("acquire") is True
    keeper.release()
    assert waiter.call("acquire") is True
    waiter.release()


@pytest.mark.parametrize("settings", [LINGERS, {"timeout": FAR_S, "sleep": FAR_S}], ids=["linger", "plain"])
def test_an_attempt_that_does_not_wait_gets_a_key_that_lingers_elsewhere(
    holders: Holders, valkey: Server, settings: dict[str, Any]
) -> None:
    keeper = holders.make(valkey.port, **LINGERS)
    waiter = holders.make(valkey.port, **settings)
    assert keeper.call("acquire") is True
    assert waiter.call("acquire", blocking=False) is False
    keeper.release()
    wait_until(lambda: waiter.call("acquire", blocking=False), "the keeper gives it up")


def test_a_held_key_that_is_wanted_goes_to_the_other_process(
    holders: Holders, valkey: Server, connect: Connect
) -> None:
    keeper, waiter = holders.make(valkey.port, **LINGERS), holders.make(valkey.port, timeout=FAR_S, sleep=FAR_S)
    assert keeper.call("acquire") is True
    answer = waiter.acquire()
    until_queued(connect(valkey.port), "name", 1)
    keeper.release()
    assert answer.result(PATIENCE_S) is True


def test_what_is_not_used_is_given_back_soon(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    locks = [holders.make(valkey.port, f"name:{number}", timeout=FAR_S, linger=SOON_S) for number in range(3)]
    for lock in locks:
        assert lock.call("acquire") is True
        lock.release()
    wait_until(lambda: admin.exists(*(f"name:{number}" for number in range(3))) == 0, "all are given back")


def test_waiters_of_one_process_stand_in_the_queue_once(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    holder = holders.hold(valkey.port, timeout=FAR_S, sleep=FAR_S)
    first = holders.make(valkey.port, **LINGERS)
    waiters = [first, *(holders.on(first.lock.redis, **LINGERS) for _ in range(4))]
    answers = [waiter.acquire() for waiter in waiters]
    until_queued(admin, "name", 1)
    holder.release()
    for number in range(1, 6):
        wait_until(partial(_are_done, answers, number), "the next one gets it")
        assert queued(admin, "name") == 0
        next(waiter for waiter in waiters if waiter.lock.remaining() > 0).release()


def test_local_waiters_get_the_key_in_order_and_without_a_request(
    holders: Holders, valkey: Server, connect: Connect
) -> None:
    admin = connect(valkey.port)
    first = holders.make(valkey.port, **LINGERS)
    others = [holders.on(first.lock.redis, **LINGERS) for _ in range(4)]
    assert first.call("acquire") is True
    token = admin.get("name")
    answers = []
    for other in others:
        answers.append(other.acquire())
        wait_until(lambda: local_waiters(first.lock) == len(answers), "it waits")
    first.release()
    for other, answer in zip(others, answers, strict=True):
        assert answer.result(PATIENCE_S) is True
        assert admin.get("name") == token
        other.release()


def test_a_local_waiter_that_gives_up_is_passed_over(holders: Holders, valkey: Server) -> None:
    first = holders.make(valkey.port, **LINGERS)
    second, third = (holders.on(first.lock.redis, **LINGERS) for _ in range(2))
    assert first.call("acquire") is True
    assert second.call("acquire", blocking_timeout=0.01) is False
    answer = third.acquire()
    first.release()
    assert answer.result(PATIENCE_S) is True


def test_an_expired_lock_is_not_released(holders: Holders, valkey: Server, connect: Connect) -> None:
    lock = holders.make(valkey.port, timeout=0.02, linger=FAR_S)
    assert lock.call("acquire") is True
    wait_until(lambda: lock.lock.remaining() == 0, "the lease ends")
    pause(0.03)
    with pytest.raises(LockNotOwnedError, match="Cannot release"):
        lock.release()
    wait_until(lambda: connect(valkey.port).exists("name") == 0, "the key is given up")
    lock.lock.timeout = FAR_S  # else it may expire before its release
    assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    lock.release()


def test_a_key_that_would_not_outlive_the_timeout_is_confirmed(
    holders: Holders, valkey: Server, connect: Connect
) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, timeout=10, linger=FAR_S)
    longer = holders.on(lock.lock.redis, timeout=FAR_S + 20, linger=FAR_S)
    assert lock.call("acquire") is True
    token = admin.get("name")
    lock.release()
    assert longer.call("acquire") is True
    assert admin.get("name") == token
    assert FAR_S + 20 < admin.pttl("name") / 1000 <= 2 * FAR_S + 20


def test_a_loss_that_the_confirmation_finds_is_logged(
    holders: Holders, valkey: Server, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, timeout=10, linger=FAR_S)
    longer = holders.on(lock.lock.redis, timeout=FAR_S + 20, linger=FAR_S)
    assert lock.call("acquire") is True
    token = admin.get("name")
    lock.release()
    admin.delete("name")
    with caplog.at_level(logging.WARNING, "redislock_fast"):
        assert longer.call("acquire") is True
    assert [record.getMessage() for record in caplog.records] == ["The lock 'name' was lost while its key lingered."]
    assert admin.get("name") != token


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
@pytest.mark.parametrize(("method", "args"), [("extend", [1]), ("reacquire", [])])
def test_key_whose_holder_has_found_it_lost_does_not_linger(
    holders: Holders,
    valkey: Server,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    method: str,
    args: list[Any],
) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, timeout=10, linger=FAR_S, **settings)
    other = holders.on(lock.lock.redis, timeout=10, linger=FAR_S, **settings)
    with caplog.at_level(logging.WARNING, "redislock_fast"):
        assert lock.call("acquire") is True
        admin.delete("name")
        with pytest.raises(LockNotOwnedError):
            lock.call(method, *args)
        with pytest.raises(LockNotOwnedError):
            lock.release()
        assert other.call("acquire", blocking=False) is True
        assert admin.exists("name") == 1
        other.release()
        assert other.call("locked") is True  # all replies before have come
    assert caplog.records == []


def test_a_loss_that_is_found_while_the_key_lingers_is_told_to_metrics(
    holders: Holders, valkey: Server, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = FailureWatcher()
    lock = holders.make(valkey.port, timeout=FAR_S, linger=SOON_S, metrics=watcher)
    with caplog.at_level(logging.WARNING, "redislock_fast"):
        assert lock.call("acquire") is True
        connect(valkey.port).delete("name")
        lock.release()
        wait_until(lambda: watcher.lost, "the loss is found")
    assert watcher.lost == [("name", LossReason.DELETED)]
    assert [record.getMessage() for record in caplog.records] == ["The lock 'name' was lost while its key lingered."]
    assert [success for _, _, success in watcher.released] == [True]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"linger": 1}, "linger needs a timeout"),
        ({"timeout": 10, "linger": -1}, "linger must be a positive"),
        ({"timeout": 10, "linger": float("nan")}, "linger must be a positive"),
        ({"timeout": 10, "linger": float("inf")}, "linger must be a positive"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    holders: Holders, valkey: Server, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        holders.make(valkey.port, **settings)


def test_lock_object_whose_key_was_given_back_lets_it_linger_again(
    holders: Holders, valkey: Server, connect: Connect
) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, timeout=FAR_S, linger=0.3)
    for _ in range(2):
        assert lock.call("acquire") is True
        lock.release()
        assert admin.exists("name") == 1
        wait_until(lambda: not admin.exists("name"), "the key is given back")


def test_caller_does_not_wait_for_a_holder_that_has_forgotten_its_lock(holders: Holders, valkey: Server) -> None:
    client = holders.make(valkey.port).lock.redis
    forgetful, other, caller = (holders.on(client, timeout=0.2, linger=SOON_S) for _ in range(3))
    assert caller.call("acquire") is True
    caller.release()
    assert forgetful.call("acquire") is True
    assert other.call("acquire") is True
    other.release()
    assert caller.call("acquire") is True
    caller.release()
