"""Holding a lock on options: how it is renewed, how its loss is told, what its owner knows of it.

Rules: real servers; threads and tasks alike. A test with `hold` is for one server and for a majority of several; what
only tasks have is in test_asyncio, what only a majority has in redlock/test_holding. A lock that is to outlive its ttl
is looked at after half as much again, by a server's clock.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import Lock, LockLostError, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.holding.conftest import Held
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, no_threads, wait_until
from tests.support.holding import (
    BRIEF_S,
    KEPT_S,
    LONG_S,
    RENEWED,
    Holders,
    Losses,
    assert_believes_no_more_than_is_true,
    assert_lost,
    until_passed,
)
from tests.support.proxy import Proxy
from tests.support.redlock import believes_no_more_than_is_true, delete, take, values, wait_until_free
from tests.support.waiting import FAR_S, Callers, Threads, until_queued

Operate = Callable[[redis.Redis], object]
OPERATIONS = pytest.mark.parametrize(
    ("operate", "reason"),
    [
        (lambda admin: admin.delete("name"), LossReason.DELETED),
        (lambda admin: admin.flushall(), LossReason.DELETED),
        (lambda admin: admin.set("name", "another's"), LossReason.TAKEN),
    ],
    ids=["DEL", "FLUSHALL", "SET"],
)
VERBS = pytest.mark.parametrize(
    ("verb", "arguments"),
    [("release", ()), ("extend", (1,)), ("extend", (1, True)), ("reacquire", ())],
    ids=["release", "extend", "extend replacing", "reacquire"],
)


def renewers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "redislock_fast-renewal"}


# Log


def test_loss_without_a_callback_is_logged(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    holders.hold(valkey.port, timeout=KEPT_S, auto_renew=True)
    valkey_client.delete("name")
    wait_until(lambda: "The lock 'name' was lost: deleted." in caplog.messages, "the renewal finds it out")
    assert {"WARNING"} == {record.levelname for record in caplog.records}


# Renewal


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["valkey", "redis", "redis-6.2", "mixed"], indirect=True)
def test_renewed_lock_outlives_its_ttl(hold: Held, valkey_client: redis.Redis) -> None:
    holder = hold(**RENEWED)
    until_passed(valkey_client, LONG_S)
    assert (holder.lock.valid, holder.lock.lost, holder.call("owned")) == (True, False, True)
    assert all(values(hold.servers))
    holder.release()
    assert (holder.lock.valid, holder.lock.lost) == (False, False)
    wait_until_free(hold.servers)


@pytest.mark.slow
def test_renewed_lock_that_is_waited_for_is_kept_and_handed_over(
    holders: Holders, server: Server, connect: Connect
) -> None:
    admin = connect(server.port)
    holder = holders.hold(server.port, **RENEWED)
    waiter = holders.make(server.port, timeout=FAR_S, sleep=FAR_S)
    answer = waiter.acquire()
    until_queued(admin, "name", 1)
    until_passed(admin, LONG_S)
    assert not answer.done()
    assert holder.call("owned")
    holder.release()
    assert answer.result(PATIENCE_S) is True


@pytest.mark.slow
def test_lock_that_was_waited_for_is_renewed(holders: Holders, server: Server, connect: Connect) -> None:
    admin = connect(server.port)
    holder = holders.hold(server.port, timeout=FAR_S)
    waiter = holders.make(server.port, sleep=FAR_S, **RENEWED)
    answer = waiter.acquire()
    until_queued(admin, "name", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    until_passed(admin, LONG_S)
    assert (waiter.lock.valid, waiter.call("owned")) == (True, True)


@pytest.mark.slow
def test_no_renewal_follows_a_release(holders: Holders, valkey: Server, valkey_client: redis.Redis) -> None:
    with Proxy(valkey.port) as proxy:
        holder = holders.make(proxy.port, **RENEWED)
        holder.call("acquire")
        proxy.wait_for_reply("SET", 2)
        holder.release()
        sent = proxy.requests["SET"]
        until_passed(valkey_client, KEPT_S)
        assert proxy.requests["SET"] == sent


@pytest.mark.slow
def test_each_holding_of_a_lock_is_renewed(hold: Held, valkey_client: redis.Redis, losses: Losses) -> None:
    holder = hold(on_lost=losses, **RENEWED)
    holder.release()
    assert holder.call("acquire")
    until_passed(valkey_client, LONG_S)
    assert (losses.reasons, holder.call("owned")) == ([], True)


@pytest.mark.slow
def test_lock_is_renewed_until_max_hold(hold: Held, valkey_client: redis.Redis, losses: Losses) -> None:
    holder = hold(max_hold=2 * KEPT_S, on_lost=losses, **RENEWED)
    until_passed(valkey_client, LONG_S)
    assert holder.lock.valid
    assert losses.until() == [LossReason.EXPIRED]
    wait_until_free(hold.servers)


@pytest.mark.slow
def test_lock_that_was_extended_is_not_shortened_by_a_renewal(hold: Held, valkey_client: redis.Redis) -> None:
    holder = hold(**RENEWED)
    assert holder.call("extend", FAR_S)
    until_passed(valkey_client, KEPT_S)
    assert holder.lock.remaining() > FAR_S / 2
    assert holder.call("extend", FAR_S)
    assert holder.lock.remaining() > 1.9 * FAR_S
    assert believes_no_more_than_is_true(holder.lock, hold.servers)


@pytest.mark.slow
def test_lock_whose_ttl_was_shortened_is_renewed_in_time(hold: Held, valkey_client: redis.Redis) -> None:
    holder = hold(timeout=5 * KEPT_S, auto_renew=True)
    assert holder.call("extend", KEPT_S, True)
    until_passed(valkey_client, LONG_S)
    assert (holder.lock.valid, holder.call("owned")) == (True, True)


@pytest.mark.slow
def test_locks_of_one_server_are_renewed_together(
    callers: Callers, holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    client = callers.client(valkey.port)
    many = [holders.on(client, f"name-{number}", **RENEWED) for number in range(20)]
    others = renewers()
    assert all(holder.call("acquire") for holder in many)
    assert len(renewers() - others) <= 1
    until_passed(valkey_client, LONG_S)
    assert all(holder.call("owned") for holder in many)
    for holder in many:
        holder.release()
    wait_until(lambda: not renewers() - others, "the renewing thread ends")


@pytest.mark.slow
def test_short_and_long_leases_are_renewed_side_by_side(
    callers: Callers, holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    client = callers.client(valkey.port)
    many = [holders.on(client, f"name-{ttl_s}", timeout=ttl_s, auto_renew=True) for ttl_s in (3600, KEPT_S)]
    assert all(holder.call("acquire") for holder in many)
    until_passed(valkey_client, LONG_S)
    assert all(holder.call("owned") for holder in many)


@pytest.mark.usefixtures("unhurried")
def test_lock_that_never_ends_by_itself_is_not_waited_for_by_its_holder(valkey_client: redis.Redis) -> None:
    with Lock(valkey_client, "name", **RENEWED) as lock:
        with pytest.raises(LockError, match="would wait for itself"):
            lock.acquire()
        assert lock.acquire(blocking_timeout=0.01) is False
        assert lock.owned()


@pytest.mark.slow
def test_thread_that_cannot_be_started_fails_one_acquire_only(
    spare_server: Callable[..., Server], connect: Connect
) -> None:
    client = connect(spare_server().port)
    lock = Lock(client, "name", **RENEWED)
    with no_threads(), pytest.raises(RuntimeError, match="start new thread"):
        lock.acquire()
    assert lock.local.token is None
    with lock:
        until_passed(client, LONG_S)
        assert (lock.valid, lock.owned()) == (True, True)


class _Own(Lock):
    """Acquires by its own means, so the start of its lease is not known."""

    def do_acquire(self, token: Any) -> bool:
        """Make one attempt."""
        return bool(self.redis.set(self.name, token, nx=True, px=60_000))


@pytest.mark.slow
def test_lock_of_a_class_with_its_own_acquire_is_renewed(valkey_client: redis.Redis) -> None:
    with _Own(valkey_client, "name", **RENEWED) as lock:
        assert_believes_no_more_than_is_true(lock, valkey_client)
        until_passed(valkey_client, LONG_S)
        assert (lock.valid, lock.owned()) == (True, True)


# Handles that are dropped


def drop(holders: Holders, condition: Callable[[], object], what: str) -> None:
    """Drop the last references, and return once the condition is true."""
    holders.drop()
    wait_until(lambda: gc.collect() >= 0 and condition(), what)  # an event loop has cycles of its own


def test_dropped_lock_is_released_with_a_warning(hold: Held, holders: Holders) -> None:
    hold(timeout=FAR_S, auto_renew=True)
    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release"):
        drop(holders, lambda: not any(values(hold.servers)), "the lock is released")


def test_dropped_lock_does_not_take_anothers_with_it(
    holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    with Proxy(valkey.port) as proxy:
        holders.hold(proxy.port, timeout=FAR_S, auto_renew=True)
        valkey_client.set("name", "another's")
        with pytest.warns(ResourceWarning, match="dropped"):
            drop(holders, lambda: any(proxy.replies[command] for command in RELEASE_COMMANDS), "it is undone")
    assert valkey_client.get("name") == b"another's"


@pytest.mark.parametrize("ended_by", ["release", "detach", "detach elsewhere", "local.token"])
def test_dropped_lock_that_is_not_held_any_more_is_no_matter(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, ended_by: str
) -> None:
    holder = holders.hold(valkey.port, timeout=FAR_S, auto_renew=True)
    if ended_by == "release":
        holder.release()
    elif ended_by == "detach":
        holder.call("detach")
    elif ended_by == "detach elsewhere":  # for tasks, outside of their event loop
        holder.lock.detach()
    else:
        holder.lock.local.token = None
    del holder
    holders.drop()
    gc.collect()
    assert valkey_client.exists("name") == (ended_by != "release")


# Loss


def test_lock_that_is_not_renewed_is_lost_when_its_lease_ends(
    hold: Held, losses: Losses, valkey_client: redis.Redis
) -> None:
    holder = hold(everywhere=False, timeout=BRIEF_S, on_lost=losses)
    assert (holder.lock.valid, holder.lock.lost) == (True, False)
    assert losses.until() == [LossReason.EXPIRED]
    assert (holder.lock.valid, holder.lock.lost, holder.lock.remaining()) == (False, True, 0.0)
    with pytest.raises(LockLostError, match="was lost: expired") as caught:
        holder.release()
    assert (caught.value.reason, caught.value.lock_name) == (LossReason.EXPIRED, "name")
    assert (holder.lock.lost, holder.lock.local.token) == (False, None)
    until_passed(valkey_client, BRIEF_S)
    assert losses.reasons == [LossReason.EXPIRED]


@pytest.mark.slow
@OPERATIONS
def test_loss_is_told_once_with_its_reason_and_is_for_good(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses, operate: Operate, reason: LossReason
) -> None:
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    operate(valkey_client)
    stands_there = valkey_client.get("name")
    assert losses.until() == [reason]
    assert (holder.lock.valid, holder.lock.lost) == (False, True)
    until_passed(valkey_client, KEPT_S)
    assert valkey_client.get("name") == stands_there
    with pytest.raises(LockLostError) as caught:
        holder.release()
    assert caught.value.reason == reason
    assert valkey_client.get("name") == stands_there
    assert losses.reasons == [reason]


def test_lost_lock_is_not_believed_again_when_its_key_is_put_back(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    token = holder.lock.local.token
    valkey_client.delete("name")
    losses.until()
    valkey_client.set("name", token, px=60_000)
    assert holder.lock.lost
    for verb, arguments in (("extend", (1,)), ("reacquire", ()), ("release", ())):
        with pytest.raises(LockLostError):
            holder.call(verb, *arguments)
    assert valkey_client.get("name") == token


@pytest.mark.parametrize(
    ("operate", "reason"), [(delete, LossReason.DELETED), (take, LossReason.TAKEN)], ids=["DEL", "SET"]
)
@VERBS
def test_loss_is_found_by_the_first_call(
    hold: Held,
    losses: Losses,
    verb: str,
    arguments: tuple[Any, ...],
    operate: Callable[[list[Server]], None],
    reason: LossReason,
) -> None:
    holder = hold(timeout=FAR_S, auto_renew=True, on_lost=losses)
    operate(hold.majority)
    with pytest.raises(LockLostError, match=f"Cannot {verb}") as caught:
        holder.call(verb, *arguments)
    assert (caught.value.reason, losses.reasons) == (reason, [reason])
    wait_until_free(hold.minority)
    if verb != "release":
        assert_lost(holder, losses, reason)
    assert (holder.lock.lost, holder.lock.local.token, holder.lock._held().lease) == (False, None, None)


@VERBS
def test_reason_of_a_loss_is_found_where_no_renewer_watches(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, verb: str, arguments: tuple[Any, ...]
) -> None:
    holder = holders.hold(valkey.port, timeout=FAR_S, fencing=True)
    valkey_client.set("name", "another's")
    with pytest.raises(LockLostError) as caught:
        holder.call(verb, *arguments)
    assert caught.value.reason == LossReason.TAKEN


@pytest.mark.slow
def test_lock_is_acquired_anew_after_a_loss(hold: Held, valkey_client: redis.Redis, losses: Losses) -> None:
    holder = hold(on_lost=losses, **RENEWED)
    delete(hold.servers)
    losses.until()
    assert holder.call("acquire")
    assert (holder.lock.valid, holder.lock.lost) == (True, False)
    until_passed(valkey_client, LONG_S)
    assert holder.call("owned")
    holder.release()
    assert losses.reasons == [LossReason.DELETED]


def test_loss_that_was_not_noticed_is_told_by_the_next_acquire(hold: Held, losses: Losses) -> None:
    holder = hold(timeout=FAR_S, auto_renew=True, on_lost=losses)
    delete(hold.servers)
    assert holder.call("acquire")
    assert (losses.until(), holder.lock.valid) == ([LossReason.DELETED], True)


# on_lost


def test_callback_that_raises_is_logged_and_keeps_no_other_from_its_own(
    callers: Callers, holders: Holders, valkey: Server, losses: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_lock: Any) -> None:
        raise RuntimeError("the callback's own")

    failing = Losses(fail)
    client = callers.client(valkey.port)
    for name, on_lost in (("name-1", failing), ("name-2", losses)):
        holders.on(client, name, timeout=BRIEF_S, on_lost=on_lost).call("acquire")
    assert (failing.until(), losses.until()) == ([LossReason.EXPIRED], [LossReason.EXPIRED])
    said = "on_lost failed for the lock 'name-1', which was lost (expired)."
    wait_until(lambda: said in [record.getMessage() for record in caplog.records], "it is logged")


@pytest.mark.slow
def test_slow_callback_holds_up_no_renewal(valkey: Server, valkey_client: redis.Redis) -> None:
    over = threading.Event()
    slow = Losses(lambda _lock: over.wait(PATIENCE_S))
    with Threads() as callers:
        client = callers.client(valkey.port)
        lost = callers.contender(client, "lost", timeout=BRIEF_S, on_lost=slow)
        kept = callers.contender(client, "kept", **RENEWED)
        assert (lost.call("acquire"), kept.call("acquire")) == (True, True)
        slow.until()
        until_passed(valkey_client, LONG_S)
        assert (kept.lock.valid, kept.call("owned")) == (True, True)
        over.set()
        kept.release()
