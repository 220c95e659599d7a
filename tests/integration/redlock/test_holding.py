"""Holding a Redlock on options: what a minority and a majority of its servers may do to it; forks, ends of processes.

What it has in common with a lock on one server is in holding/test_holding. Rules: as there, on five servers; what only
threads have is at the end. `valkey` is none of the five: it tells the time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import LockLostError, LossReason, Redlock
from redislock_fast.server import Server
from tests.integration.holding.conftest import Held
from tests.integration.holding.test_holding import renewers
from tests.support.helpers import in_thread, no_threads, run_script, wait_until
from tests.support.holding import KEPT_S, LONG_S, RENEWED, SLOW_S, Holders, Losses, assert_lost, until_passed
from tests.support.redlock import (
    LIMIT_S,
    SHORT_S,
    believes_no_more_than_is_true,
    clients_of,
    delete,
    freezing,
    take,
    values,
    wait_until_free,
    wait_until_held,
)
from tests.support.waiting import FAR_S, Contender

Fleet = list[Server]
pytestmark = pytest.mark.parametrize("fleet", ["mixed"], indirect=True)

SLOW: dict[str, Any] = {"timeout": SLOW_S, "auto_renew": True, "limit": SHORT_S}
"""Settings of a lock that is to be kept through a fault."""


OPERATIONS = pytest.mark.parametrize(
    ("operate", "reason"), [(delete, LossReason.DELETED), (take, LossReason.TAKEN)], ids=["DEL", "SET"]
)


@pytest.fixture
def hold(holders: Holders, fleet: Fleet) -> Held:
    """Makes a lock that is held at all five servers, on clients of its own."""
    return Held(holders, fleet)


@contextlib.contextmanager
def renewing_in_vain(holder: Contender, fleet: Fleet) -> Iterator[None]:
    """A majority is frozen, and a renewal is under way, while the block lasts."""
    with freezing(*fleet[:3]):
        wait_until(lambda: holder.lock._held().lease.renewing, "a renewal is under way")
        yield


# Renewal


@pytest.mark.slow
def test_no_renewal_follows_a_release(hold: Held, fleet: Fleet, valkey_client: redis.Redis) -> None:
    holder = hold(**RENEWED)
    until_passed(valkey_client, KEPT_S)
    holder.release()
    wait_until_free(fleet)
    for client in clients_of(fleet):
        client.config_resetstat()
    until_passed(valkey_client, KEPT_S)
    for client in clients_of(fleet):
        assert not {"cmdstat_set", "cmdstat_eval", "cmdstat_evalsha"} & set(client.info("commandstats"))


@pytest.mark.slow
def test_extend_adds_to_the_lease_that_was_renewed(hold: Held, fleet: Fleet, valkey_client: redis.Redis) -> None:
    holder = hold(**RENEWED)
    until_passed(valkey_client, LONG_S)
    assert holder.call("extend", 0) is True
    assert believes_no_more_than_is_true(holder.lock, fleet)


@pytest.mark.slow
def test_locks_on_the_same_clients_are_renewed_together_while_a_minority_is_frozen(
    holders: Holders, fleet: Fleet, valkey_client: redis.Redis
) -> None:
    clients = holders.clients(fleet)
    others = renewers()
    many = [
        holders.hold_redlock(clients, f"name-{number}", timeout=2 * KEPT_S, auto_renew=True) for number in range(40)
    ]
    assert len(renewers() - others) <= 1
    with freezing(*fleet[:2]):
        until_passed(valkey_client, 2 * LONG_S)
    assert [holder.lock.valid for holder in many] == [True] * 40
    assert all(holder.call("owned") for holder in many)
    for holder in many:
        holder.release()
    wait_until(lambda: not renewers() - others, "the renewing thread ends")


# Faults


@pytest.mark.slow
def test_lock_is_kept_while_a_minority_is_frozen_and_another_dead(
    hold: Held, fleet: Fleet, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = hold(on_lost=losses, **SLOW)
    fleet[1].kill()
    with freezing(fleet[0]):
        until_passed(valkey_client, 1.5 * SLOW_S)
        assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)
        assert believes_no_more_than_is_true(holder.lock, fleet[2:])


@pytest.mark.slow
def test_lock_is_lost_where_a_majority_is_frozen_until_the_lease_ends(
    hold: Held, fleet: Fleet, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = hold(on_lost=losses, **RENEWED)
    with freezing(*fleet[:3]):
        wait_until(lambda: not holder.lock.valid, "the lease ends")
        assert losses.until() == [LossReason.SERVER_GONE]
    wait_until_free(fleet)  # renewals that they read only now may be executed, but are undone
    until_passed(valkey_client, KEPT_S)
    assert values(fleet) == [None] * 5
    assert_lost(holder, losses, LossReason.SERVER_GONE)


@pytest.mark.slow
def test_lock_is_lost_where_a_majority_is_dead_until_the_lease_ends(hold: Held, fleet: Fleet, losses: Losses) -> None:
    holder = hold(on_lost=losses, **RENEWED)
    for server in fleet[:3]:
        server.kill()
    wait_until(lambda: not holder.lock.valid, "the lease ends")
    assert_lost(holder, losses, LossReason.SERVER_GONE)
    wait_until_free(fleet[3:])


@pytest.mark.slow
def test_lock_is_kept_where_a_majority_is_frozen_for_less_than_the_lease(
    hold: Held, fleet: Fleet, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = hold(on_lost=losses, **SLOW)
    with renewing_in_vain(holder, fleet):
        pass
    until_passed(valkey_client, 1.25 * SLOW_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)
    assert believes_no_more_than_is_true(holder.lock, fleet)


@pytest.mark.slow
@OPERATIONS
def test_lock_is_kept_where_a_minority_has_lost_it(
    hold: Held,
    fleet: Fleet,
    valkey_client: redis.Redis,
    losses: Losses,
    operate: Callable[[Fleet], None],
    reason: LossReason,
) -> None:
    holder = hold(on_lost=losses, **RENEWED)
    operate(fleet[:2])
    until_passed(valkey_client, LONG_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


# Loss


@pytest.mark.slow
@OPERATIONS
def test_loss_is_told_once_with_its_reason_and_its_rest_is_given_back(
    hold: Held,
    fleet: Fleet,
    valkey_client: redis.Redis,
    losses: Losses,
    operate: Callable[[Fleet], None],
    reason: LossReason,
) -> None:
    holder = hold(on_lost=losses, **RENEWED)
    operate(fleet[:3])
    assert losses.until() == [reason]
    for client in clients_of(fleet[3:]):
        client.persist("name")  # what is not given back stays
    wait_until_free(fleet[3:])
    until_passed(valkey_client, KEPT_S)
    assert_lost(holder, losses, reason)
    assert values(fleet[:3]) == [None if reason is LossReason.DELETED else b"another's"] * 3


# Calls of the holder while a renewal is under way


@pytest.mark.slow
def test_release_while_a_renewal_is_under_way(
    hold: Held, fleet: Fleet, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = hold(on_lost=losses, **SLOW)
    with renewing_in_vain(holder, fleet):
        with pytest.raises(redis.TimeoutError):
            holder.release()
        assert not holder.lock.valid
    wait_until_free(fleet)
    holder.release()
    until_passed(valkey_client, SLOW_S)
    assert (values(fleet), losses.reasons) == ([None] * 5, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "arguments"), [("extend", (FAR_S,)), ("extend", (SLOW_S / 2, True)), ("reacquire", ())], ids=str
)
def test_prolonging_while_a_renewal_is_under_way(
    hold: Held, fleet: Fleet, valkey_client: redis.Redis, losses: Losses, verb: str, arguments: tuple[Any, ...]
) -> None:
    holder = hold(on_lost=losses, **{**SLOW, "limit": LIMIT_S})
    with renewing_in_vain(holder, fleet):
        answer = holder.ask(verb, *arguments)
        wait_until(lambda: holder.lock._held().lease.busy, "it is under way, too")
        assert holder.lock.remaining() < SLOW_S
    assert answer.result(SLOW_S) is True
    assert believes_no_more_than_is_true(holder.lock, fleet)
    until_passed(valkey_client, 1.25 * SLOW_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)
    assert believes_no_more_than_is_true(holder.lock, fleet)


@pytest.mark.parametrize("options", [{}, {"auto_renew": True}], ids=["plain", "renewed"])
def test_lock_whose_release_failed_is_not_believed(hold: Held, fleet: Fleet, options: dict[str, Any]) -> None:
    holder = hold(timeout=FAR_S, limit=SHORT_S, **options)
    with freezing(*fleet[:3]):
        with pytest.raises(redis.TimeoutError):
            holder.release()
        assert (holder.lock.valid, holder.lock.lost) == (False, False)


# Handles that are dropped


def test_dropped_lock_that_is_not_held_any_more_is_no_matter(hold: Held, holders: Holders) -> None:
    hold(timeout=FAR_S, auto_renew=True).release()
    holders.drop()
    gc.collect()


def test_lock_of_a_thread_that_ended_is_released_everywhere(fleet: Fleet) -> None:
    lock = Redlock(clients_of(fleet), "name", timeout=FAR_S, auto_renew=True, limit=LIMIT_S)

    def end_holding() -> None:
        in_thread(lock.acquire)
        wait_until_free(fleet)

    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release"):
        end_holding()


# Threads alone


def test_lock_is_not_waited_for_by_its_owner(fleet: Fleet) -> None:
    clients = clients_of(fleet)
    with Redlock(clients, "name", timeout=FAR_S, auto_renew=True, limit=LIMIT_S) as lock:
        wait_until_held(fleet)
        with pytest.raises(LockError, match="would wait for itself"):
            lock.acquire()
        assert lock.acquire(blocking_timeout=0.01) is False
        assert lock.owned()


def test_thread_that_cannot_be_started_fails_one_acquire_only(fleet: Fleet) -> None:
    lock = Redlock(clients_of(fleet), "name", timeout=FAR_S, auto_renew=True, limit=LIMIT_S)
    with no_threads(), pytest.raises(RuntimeError, match="start new thread"):
        lock.acquire()
    assert (lock.local.token, lock._held().lease) == (None, None)
    wait_until_free(fleet)
    with lock:
        assert lock.valid


@pytest.mark.parametrize("raises", [True, False])
def test_leaving_a_with_after_a_loss_raises_or_logs(fleet: Fleet, losses: Losses, raises: bool) -> None:
    lock = Redlock(clients_of(fleet), "name", on_lost=losses, raise_on_release_error=raises, limit=LIMIT_S, **RENEWED)
    with pytest.raises(LockLostError, match="deleted") if raises else contextlib.nullcontext(), lock:
        delete(fleet)
        losses.until()


# A process that forks, or ends


_HOLDERS = {
    "threads": """
import os, signal, sys, time
import redis
from redislock_fast import Redlock

clients = [redis.Redis(port=int(port)) for port in sys.argv[1:]]
lock = Redlock(clients, "name", timeout=4.5, auto_renew=True, on_lost=print)
lock.acquire()
time.sleep(1.8)
print(lock.valid)
""",
    "tasks": """
import asyncio, os, signal, sys
import redis.asyncio
from redislock_fast.asyncio import Redlock

clients = [redis.asyncio.Redis(port=int(port)) for port in sys.argv[1:]]
lock = Redlock(clients, "name", timeout=4.5, auto_renew=True, on_lost=print)

async def hold():
    await lock.acquire()
    await asyncio.sleep(1.8)
    print(lock.valid)

asyncio.run(hold())
""",
}
"""Hold a lock, by a process of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", _HOLDERS)
def test_interpreter_that_ends_while_it_holds_says_nothing(fleet: Fleet, kind: str) -> None:
    finished = run_script(_HOLDERS[kind], *(server.port for server in fleet))
    assert (finished.stdout, finished.stderr, finished.returncode) == ("True\n", "", 0)


_CHILD = """
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
print(lock.valid)
del lock
own = Redlock(clients, "own", timeout=1.5, auto_renew=True)
own.acquire()
give_up = time.monotonic() + 10
while any(client.exists("name") for client in clients) and time.monotonic() < give_up:
    time.sleep(0.01)
print(own.valid, any(client.exists("name") for client in clients))
own.release()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_forked_child_renews_and_releases_nothing_of_its_parents(fleet: Fleet) -> None:
    """The parent is killed; the child, which renews a lock of its own, lets the parent's end."""
    finished = run_script(_HOLDERS["threads"] + _CHILD, *(server.port for server in fleet))
    assert finished.stdout == "True\nFalse\nTrue False\n"
