"""Locks that are acquired only when replicas have them: enough, too few, and every way to fail in between.

Rules: a real primary with two replicas of each kind, which a test may freeze; a frozen replica acknowledges nothing.
What threads and tasks do alike is tested on both.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from secrets import token_hex
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, NoPermissionError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import LockLostError, LossReason, NotReplicatedError
from redislock_fast.server import KINDS, Server
from tests.conftest import Connect, MakeUser, Servers
from tests.integration.lock.test_asyncio_cancel import cancelled_at
from tests.integration.waiting.test_giving_up import DropAt
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.interrupts import interrupt_when
from tests.support.waiting import FAR_S, LATE, Callers, connections, queue_up

SOON: dict[str, Any] = {"wait_replicas": 2, "wait_timeout": 0.5, "timeout": FAR_S}
"""Both replicas must have the lock, or else it is soon given up."""

LONG: dict[str, Any] = {"wait_replicas": 2, "wait_timeout": PATIENCE_S, "timeout": FAR_S}
"""Both replicas must have the lock, however long that takes."""


class Group:
    """A primary and its replicas, connected."""

    def __init__(self, primary: Server, replicas: list[Server]) -> None:
        self.primary = primary
        self.replicas = replicas
        self.admin = redis.Redis(port=primary.port)
        for replica in replicas:
            wait_until(partial(_is_in_sync, replica.port), "a replica is in sync")

    def freeze(self, count: int = 2) -> None:
        """Stop so many replicas."""
        for replica in self.replicas[:count]:
            replica.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them all go on."""
        for replica in self.replicas:
            replica.signal(signal.SIGCONT)

    def values(self, name: str) -> list[bytes | None]:
        """The values of the replicas under a name."""
        values = []
        for replica in self.replicas:
            with redis.Redis(port=replica.port) as client:
                values.append(client.get(name))
        return values

    def waiting(self) -> list[dict[str, Any]]:
        """The connections that wait for replicas."""
        return [row for row in self.admin.client_list() if row["cmd"] == "wait" and "b" in row["flags"]]


def _is_in_sync(port: int) -> bool:
    with redis.Redis(port=port) as client:
        return bool(client.info("replication")["master_link_status"] == "up")


@contextmanager
def group_of(servers: Servers, kind: str) -> Iterator[Group]:
    primary = servers.start(kind, {"repl-diskless-sync-delay": "0"})
    replicas = [servers.start(kind, {"replicaof": f"127.0.0.1 {primary.port}"}) for _ in range(2)]
    running = Group(primary, replicas)
    try:
        yield running
    finally:
        running.admin.close()
        for server in (*replicas, primary):
            server.close()


@pytest.fixture(scope="module", params=KINDS)
def groups(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Group]:
    with group_of(servers, request.param) as running:
        yield running


@pytest.fixture
def group(groups: Group) -> Iterator[Group]:
    """A primary and two replicas of each kind in turn, empty and connected."""
    groups.admin.flushall()
    yield groups
    groups.thaw()
    wait_until(lambda: groups.admin.wait(2, 100) == 2, "both are there again")


# Enough


def test_replicas_have_the_lock_when_acquire_returns(group: Group, callers: Callers) -> None:
    contender = callers.contender(callers.client(group.primary.port), **LONG)
    for _ in range(3):
        assert contender.call("acquire") is True
        assert group.values("name") == [contender.lock.local.token] * 2
        contender.release()
        assert not group.admin.exists("name")


def test_as_many_as_asked_for_are_enough(group: Group, callers: Callers) -> None:
    group.freeze(1)
    contender = callers.contender(callers.client(group.primary.port), **{**LONG, "wait_replicas": 1})
    assert contender.call("acquire") is True


def test_replicas_that_come_in_time_are_enough(group: Group, callers: Callers) -> None:
    group.freeze()
    answer = callers.contender(callers.client(group.primary.port), **LONG).acquire()
    wait_until(group.waiting, "it waits for the replicas")
    assert not answer.done()
    group.thaw()
    assert answer.result(PATIENCE_S) is True


def test_lease_never_outlasts_the_servers(group: Group, callers: Callers) -> None:
    contender = callers.contender(callers.client(group.primary.port), **LONG)
    contender.call("acquire")
    ttl_ms = group.admin.pttl("name")  # before: time may pass between the two
    assert 0 < 1000 * contender.lock.remaining() <= ttl_ms


def test_lock_that_was_handed_over_with_a_number_is_replicated(group: Group, callers: Callers) -> None:
    client = callers.client(group.primary.port)
    first, second, third = callers.contenders(3, client, fencing=True, sleep=FAR_S, **LONG)
    first.call("acquire")
    answers = queue_up([second, third], group.admin)
    first.release()
    assert answers[0].result(PATIENCE_S) is True
    assert group.values("name") == [group.admin.get("name")] * 2
    second.release()
    assert answers[1].result(PATIENCE_S) is True
    assert (first.lock.fence, second.lock.fence, third.lock.fence) == (None, None, 3)
    third.release()


def test_lock_by_a_token_of_ones_own_is_replicated(group: Group, callers: Callers) -> None:
    client = callers.client(group.primary.port)
    for contender in callers.contenders(2, client, **LONG):
        assert contender.call("acquire", token="job") is True
        assert group.values("name") == [b"job"] * 2


def test_each_holder_of_a_key_that_lingers_is_replicated(
    group: Group, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The machine may be busy for a second.
    monkeypatch.setattr("redislock_fast._linger.key_cache.LONGEST_KEPT_S", FAR_S)
    client = callers.client(group.primary.port)
    first, second = callers.contenders(2, client, linger=FAR_S, **LONG)
    for contender in (first, second, first):
        assert contender.call("acquire") is True
        assert group.values("name") == [contender.lock.local.token] * 2
        ttl_ms = group.admin.pttl("name")  # before: time may pass between the two
        assert 0 < 1000 * contender.lock.remaining() <= ttl_ms
        contender.release()
        assert group.admin.exists("name"), "it lingers"


# Too few


def test_too_few_replicas_for_a_key_that_lingers_raise_and_it_is_given_back(group: Group, callers: Callers) -> None:
    contender = callers.contender(callers.client(group.primary.port), linger=FAR_S, **SOON)
    assert contender.call("acquire") is True
    contender.release()
    group.freeze(1)
    with pytest.raises(NotReplicatedError, match="1 of 2 replicas"):
        contender.call("acquire")
    wait_until(lambda: not group.admin.exists("name"), "it is given back")


def test_too_few_raise_and_the_lock_is_given_back(group: Group, callers: Callers) -> None:
    group.freeze(1)
    contender = callers.contender(callers.client(group.primary.port), **SOON)
    with pytest.raises(NotReplicatedError, match=r"1 of 2 replicas had the lock within 0\.5 s") as caught:
        contender.call("acquire")
    assert isinstance(caught.value, LockError)
    assert (caught.value.replicas, caught.value.lock_name) == (1, "name")
    assert contender.lock.local.token is None
    wait_until(lambda: not group.admin.exists("name"), "it is given back")
    group.thaw()
    wait_until(lambda: group.admin.wait(2, 100) == 2, "all are there again")
    assert contender.call("acquire") is True


def test_more_than_there_are_raise(group: Group, callers: Callers) -> None:
    contender = callers.contender(callers.client(group.primary.port), **{**SOON, "wait_replicas": 3})
    with pytest.raises(NotReplicatedError) as caught:
        contender.call("acquire")
    assert caught.value.replicas == 2


def test_waiter_is_granted_a_lock_that_could_not_be_replicated(group: Group, callers: Callers) -> None:
    client = callers.client(group.primary.port)
    holder = callers.contender(client, timeout=FAR_S)
    holder.call("acquire")
    unlucky = callers.contender(client, sleep=FAR_S, **SOON)
    answers = queue_up([unlucky, callers.contender(client, **LATE)], group.admin)
    group.freeze()
    holder.release()
    with pytest.raises(NotReplicatedError):
        answers[0].result(PATIENCE_S)
    assert answers[1].result(PATIENCE_S) is True


@pytest.mark.slow
def test_replicas_may_be_slower_than_the_clients_patience(group: Group, callers: Callers) -> None:
    group.freeze()
    client = callers.client(group.primary.port, socket_timeout=0.5)
    with pytest.raises(NotReplicatedError):
        callers.contender(client, **{**SOON, "wait_timeout": 1.0}).call("acquire")


def test_lock_that_is_lost_meanwhile_says_so(group: Group, callers: Callers) -> None:
    group.freeze()
    contender = callers.contender(callers.client(group.primary.port), **LONG)
    answer = contender.acquire()
    wait_until(group.waiting, "it waits for the replicas")
    group.admin.delete("name")
    group.admin.client_kill_filter(_id=group.waiting()[0]["id"])  # so the reacquire is sent again
    group.thaw()
    with pytest.raises(LockLostError) as caught:
        answer.result(PATIENCE_S)
    assert caught.value.reason is LossReason.EXPIRED
    assert contender.lock.local.token is None


def test_what_another_has_taken_meanwhile_is_left_alone(group: Group, callers: Callers) -> None:
    group.freeze()
    answer = callers.contender(callers.client(group.primary.port), **SOON).acquire()
    wait_until(group.waiting, "it waits for the replicas")
    executed = scripts_executed(group.admin)
    group.admin.set("name", "another's")
    with pytest.raises(NotReplicatedError):
        answer.result(PATIENCE_S)
    wait_until(lambda: scripts_executed(group.admin) > executed, "it is undone")
    assert group.admin.get("name") == b"another's"


def scripts_executed(admin: redis.Redis) -> int:
    stats = admin.info("commandstats")
    rows = [stats[name] for name in ("cmdstat_eval", "cmdstat_evalsha") if name in stats]
    return sum(row["calls"] - row["failed_calls"] for row in rows)


# Nobody is in the way of others


def test_waiting_for_replicas_holds_up_no_other(group: Group, callers: Callers) -> None:
    client = callers.client(group.primary.port)
    group.freeze()
    slow = [callers.contender(client, f"slow-{number}", **LONG).acquire() for number in range(3)]
    wait_until(lambda: len(group.waiting()) == 3, "all wait for the replicas at the same time")
    quick = callers.contender(client, timeout=FAR_S)
    for _ in range(3):
        assert quick.call("acquire") is True
        quick.release()
    assert not any(answer.done() for answer in slow)
    group.thaw()
    assert [answer.result(PATIENCE_S) for answer in slow] == [True] * 3


def test_connections_are_kept_for_the_next(group: Group, callers: Callers) -> None:
    name = type(callers).__name__
    contender = callers.contender(callers.client(group.primary.port, client_name=name), **LONG)
    for _ in range(3):
        contender.call("acquire")
        contender.release()
    assert connections(group.admin, name) == 2


# Errors


def test_connection_lost_while_waiting_is_made_again(group: Group, callers: Callers) -> None:
    group.freeze()
    contender = callers.contender(callers.client(group.primary.port), **LONG)
    answer = contender.acquire()
    wait_until(group.waiting, "it waits for the replicas")
    lost = group.waiting()[0]["id"]
    group.admin.client_kill_filter(_id=lost)
    wait_until(lambda: [row["id"] for row in group.waiting()] not in ([], [lost]), "it waits on another connection")
    group.thaw()
    assert answer.result(PATIENCE_S) is True
    contender.release()


@pytest.mark.slow
def test_lock_outlives_the_primary_where_it_was_replicated(
    servers: Servers, connect: Connect, callers: Callers
) -> None:
    with group_of(servers, "valkey") as group:
        contender = callers.contender(callers.client(group.primary.port), **LONG)
        contender.call("acquire")
        group.primary.kill()
        for replica in group.replicas:
            promoted = connect(replica.port)
            promoted.replicaof("NO", "ONE")
            assert not redislock_fast.Lock(promoted, "name").acquire(blocking=False)
            assert promoted.get("name") == contender.lock.local.token


@pytest.mark.slow
def test_primary_that_dies_meanwhile_raises_what_the_client_does(servers: Servers, callers: Callers) -> None:
    with group_of(servers, "valkey") as group:
        contender = callers.contender(callers.client(group.primary.port), **LONG)
        group.freeze()
        answer = contender.acquire()
        wait_until(group.waiting, "it waits for the replicas")
        group.primary.kill()
        with pytest.raises(redis.ConnectionError):
            answer.result(2 * PATIENCE_S)
        assert contender.lock.local.token is None


def test_user_that_may_not_wait_is_told_and_holds_nothing(group: Group, callers: Callers, acl_user: MakeUser) -> None:
    user = acl_user(group.primary, "-wait")
    contender = callers.contender(callers.client(group.primary.port, **user.options()), **LONG)
    with pytest.raises(NoPermissionError, match=r"(?i)wait"):
        contender.call("acquire")
    assert contender.lock.local.token is None
    wait_until(lambda: not group.admin.exists("name"), "it is undone")


# Interrupted, cancelled, forked, ended


def test_interrupted_acquire_leaves_no_lock(group: Group, connect: Connect) -> None:
    group.freeze()
    lock = redislock_fast.Lock(connect(group.primary.port), "name", **LONG)
    interrupt_when(lambda: wait_until(group.waiting, "it waits for the replicas"))
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert lock.local.token is None
    wait_until(lambda: not group.admin.exists("name"), "it is undone")


@in_loop
async def test_acquire_cancelled_at_any_point_leaves_no_lock(group: Group, async_connect: AsyncClients) -> None:
    client = async_connect(group.primary.port)
    for count in range(100):
        lock = redislock_fast.asyncio.Lock(client, f"name-{count}", thread_local=False, **LONG)
        struck = await cancelled_at(lock.acquire, count)
        assert struck == (lock.local.token is None)
        if not struck:
            await lock.release()
            break
    assert count > 2, "the acquire, and waiting for the replicas"
    await eventually(lambda: not group.admin.keys(), "all attempts are undone")


@in_loop
async def test_task_that_is_cancelled_while_it_waits_disturbs_no_other(
    group: Group, async_connect: AsyncClients
) -> None:
    client = async_connect(group.primary.port)
    group.freeze()
    locks = [redislock_fast.asyncio.Lock(client, f"name-{n}", thread_local=False, **LONG) for n in range(3)]
    tasks = [asyncio.create_task(lock.acquire()) for lock in locks]
    await eventually(lambda: len(group.waiting()) == 3, "all wait for the replicas")
    tasks[1].cancel()
    await eventually(lambda: not group.admin.exists("name-1"), "it is undone")
    group.thaw()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answers[0], answers[2]] == [True, True]
    assert isinstance(answers[1], asyncio.CancelledError)


@pytest.mark.slow
@in_loop
async def test_dropped_at_any_point_leaves_no_lock(group: Group, async_connect: AsyncClients) -> None:
    client = async_connect(group.primary.port, client_name="dropped")
    await redislock_fast.asyncio.Lock(client, "name").locked()
    group.freeze()
    for count in range(3):  # the acquire, connecting once more, and waiting for the replicas
        lock = redislock_fast.asyncio.Lock(client, "name", thread_local=False, **LONG)
        await asyncio.wait_for(DropAt(lock.acquire(), count), PATIENCE_S)
        assert lock.local.token is None
        await eventually(lambda: not group.admin.exists("name"), "it is undone")
    gc.collect()
    await eventually(lambda: connections(group.admin, "dropped") == 1, "the connections beside are closed")


def test_forked_child_has_connections_of_its_own(in_fork: InFork, group: Group, connect: Connect) -> None:
    name = f"forked-{token_hex(4)}"  # the connections of an earlier test may be there still
    client = connect(group.primary.port, client_name=name)

    def replicated(key: str) -> str:
        return str(redislock_fast.Lock(client, key, **LONG).acquire())

    assert replicated("before") == "True"
    assert in_fork(lambda: replicated("child")) == "True"
    assert replicated("after") == "True"
    wait_until(lambda: connections(group.admin, name) == 2, "the parent's are as they were")


def test_loop_that_ends_closes_its_connections(group: Group, each_loop_kind: str) -> None:
    client = redis.asyncio.Redis(port=group.primary.port, client_name="ended")

    async def program() -> None:
        assert await redislock_fast.asyncio.Lock(client, "name", **LONG).acquire()
        assert connections(group.admin, "ended") == 2

    run_in_loop(each_loop_kind, program())
    wait_until(lambda: connections(group.admin, "ended") == 0, "they are closed")
