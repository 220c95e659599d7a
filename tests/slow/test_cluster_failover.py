"""Locks through the failure of a cluster's primary, its change of place with a replica, and a slot that nobody serves.

Rules: those of `support/clusters.py`. What a test counts on is replicated before a primary dies: the rest may be lost,
which nobody can help. Each test runs for threads and for tasks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis.asyncio.retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ClusterDownError, LockNotOwnedError
from redis.retry import Retry

from redislock_fast import NotReplicatedError
from tests.support.clusters import SOON, Cluster, Place, connect
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.waiting import (
    FAR_S,
    Callers,
    Contender,
    Guard,
    Threads,
    queue_up,
    serve,
    until_one_is_done,
    until_queued,
)

pytestmark = pytest.mark.parametrize("cluster", ["valkey", "redis"], indirect=True)


@pytest.fixture(autouse=True)
def restored(cluster: Cluster) -> Iterator[None]:
    """Bring the nodes back that the test has killed."""
    yield
    cluster.restore()


def patient(callers: Callers) -> Any:
    """A retry policy that outlasts every failure of a test, for a client."""
    kind: Any = Retry if isinstance(callers, Threads) else redis.asyncio.retry.Retry
    return kind(ConstantBackoff(0.02), int(PATIENCE_S / 0.02))


@pytest.fixture
def fast(callers: Callers, cluster: Cluster) -> Any:
    """A patient client of the cluster, for threads and tasks in turn."""
    return connect(callers, cluster, retry=patient(callers))


@pytest.mark.parametrize("operation", ["release", "extend", "reacquire", "owned", "locked"])
def test_a_replicated_lock_survives_its_primary(
    callers: Callers, fast: Any, cluster: Cluster, place: Place, operation: str
) -> None:
    lock = callers.contender(fast, place.name, timeout=FAR_S)
    assert lock.call("acquire")
    cluster.until_replicated(place.home)
    cluster.nodes[place.home].kill()
    answer = lock.ask(operation, *([10] if operation == "extend" else []))
    cluster.take_over(place.home)
    assert answer.result(PATIENCE_S) is (None if operation == "release" else True)
    if operation != "release":
        lock.release()
    assert not lock.call("locked")


def test_a_free_lock_is_taken_where_its_primary_has_failed(
    callers: Callers, fast: Any, cluster: Cluster, place: Place
) -> None:
    lock = callers.contender(fast, place.name, timeout=FAR_S)
    assert lock.call("acquire")
    lock.release()
    cluster.nodes[place.home].kill()
    answer = lock.acquire()
    new = cluster.take_over(place.home)
    assert answer.result(PATIENCE_S) is True
    assert cluster.admins[new].exists(place.name)
    lock.release()


@pytest.mark.filterwarnings("ignore:.*read_from_replicas:DeprecationWarning")
@pytest.mark.parametrize("question", ["owned", "locked"])
def test_a_former_primary_answers_no_question_of_a_client_that_reads_from_replicas(
    callers: Callers, cluster: Cluster, place: Place, question: str
) -> None:
    client = connect(callers, cluster, retry=patient(callers), read_from_replicas=True)
    lock = callers.contender(client, place.name, timeout=FAR_S)
    assert lock.call("acquire")
    new = cluster.swap(place.home)
    former, known = cluster.admins[place.home], reads_of(cluster.admins[new])
    of_former = reads_of(former)
    assert lock.call(question) is True
    assert (reads_of(former), reads_of(cluster.admins[new])) == (of_former, known + 1)
    lock.release()


def reads_of(admin: Any) -> int:
    """How many reads a node has executed."""
    calls: int = admin.info("commandstats").get("cmdstat_get", {}).get("calls", 0)
    return calls


@pytest.mark.parametrize("change", ["failed", "changed places"])
def test_waiters_go_on_where_their_primary_has(callers: Callers, cluster: Cluster, place: Place, change: str) -> None:
    holder, *waiters = (
        callers.contender(connect(callers, cluster, retry=patient(callers)), place.name, **SOON) for _ in range(4)
    )
    assert holder.call("acquire")
    answers = []
    for length, waiter in enumerate(waiters, start=1):
        answers.append(waiter.acquire())
        until_queued(cluster.admins[place.home], place.name, length)
    cluster.until_replicated(place.home)
    if change == "failed":
        cluster.nodes[place.home].kill()
        cluster.take_over(place.home)
    else:
        cluster.swap(place.home)
    holder.release()
    serve(waiters, answers)
    assert holder.call("acquire", blocking=False)
    holder.release()


def test_contenders_go_on_and_never_meet_while_primaries_change_places(
    callers: Callers, cluster: Cluster, place: Place
) -> None:
    guard = Guard()
    contenders = [
        callers.contender(connect(callers, cluster, retry=patient(callers)), place.name, **SOON) for _ in range(4)
    ]
    answers = [contender.use(guard) for contender in contenders]
    primary = place.home
    for _ in range(3):
        primary = cluster.swap(primary)
        until_one_is_done(answers)
        answers = [
            contender.use(guard) if answer.done() and answer.result() else answer
            for contender, answer in zip(contenders, answers, strict=True)
        ]
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 4
    assert guard.overlaps == 0


@pytest.mark.parametrize("lost", [0, 1], ids=["with all replicated", "while it writes"])
def test_the_cluster_itself_replaces_a_primary_that_dies_under_load(
    callers: Callers, cluster: Cluster, place: Place, lost: int
) -> None:
    busy = cluster.place()
    assert busy.home == place.home

    def contend(name: str, **settings: Any) -> list[Contender]:
        clients = [connect(callers, cluster, retry=patient(callers)) for _ in range(4)]
        return [callers.contender(client, name, **{**SOON, **settings}) for client in clients]

    holder, *waiters = contend(place.name)
    assert holder.call("acquire")
    answers = queue_up(waiters, cluster.admins[place.home])
    cluster.until_replicated(place.home)
    # A release that is lost is made up for by its ttl alone. Where none is, nobody's ttl may end before the election.
    contenders = contend(busy.name, timeout=2 if lost else FAR_S)
    guard = Guard()
    uses = [0] * len(contenders)
    refusals: list[LockNotOwnedError] = []
    over = threading.Event()

    def keep_using(number: int) -> None:
        while not over.is_set():
            try:
                assert contenders[number].use(guard).result(2 * PATIENCE_S) is True
                uses[number] += 1
            except LockNotOwnedError as error:
                refusals.append(error)

    users = [start(partial(keep_using, number)) for number in range(len(contenders))]
    wait_until(lambda: all(uses), "each has used it")
    with cluster.watchful():
        if lost:
            cluster.nodes[place.home].kill()
        else:
            cluster.kill_replicated(place.home)
        new = cluster.until_taken_over(place.home)
    before = list(uses)
    wait_until(lambda: all(now > then for now, then in zip(uses, before, strict=True)), "each uses it again")
    over.set()
    for user in users:
        user.result(2 * PATIENCE_S)
    # Of a grant that died with the primary, its holder may not know, and another may get the lock beside it.
    assert guard.overlaps <= lost
    assert len(refusals) <= lost
    holder.release()
    serve(waiters, answers)
    assert holder.call("acquire", blocking=False)
    assert cluster.admins[new].exists(place.name)
    holder.release()


@pytest.mark.usefixtures("unhurried")
def test_a_slot_that_nobody_serves_is_waited_for(callers: Callers, fast: Any, cluster: Cluster, place: Place) -> None:
    held, free = place, cluster.place()
    holder, other = (callers.contender(fast, one.name, timeout=FAR_S) for one in (held, free))
    assert holder.call("acquire")
    with cluster.unserved(held.slot, held.home), cluster.unserved(free.slot, free.home):
        released = holder.ask("release")
        acquired = other.acquire(blocking_timeout=PATIENCE_S)
        with pytest.raises(ClusterDownError):
            callers.contender(fast, free.name, timeout=FAR_S).call("acquire", blocking_timeout=0.1)
        assert not released.done()
        assert not acquired.done()
    assert released.result(PATIENCE_S) is None
    assert acquired.result(PATIENCE_S) is True
    other.release()


REPLICATED: dict[str, Any] = {"timeout": FAR_S, "wait_replicas": 1, "wait_timeout": PATIENCE_S}
"""Settings of a lock that its primary's replica must have."""


@pytest.mark.parametrize("moves", [False, True], ids=["at home", "after its slot has moved"])
def test_the_replica_has_the_lock_when_acquire_returns(
    callers: Callers, fast: Any, cluster: Cluster, place: Place, moves: bool
) -> None:
    lock = callers.contender(fast, place.name, **REPLICATED)
    assert lock.call("acquire")
    lock.release()
    if moves:
        place.move()
    assert lock.call("acquire")
    replica = cluster.admins[cluster.replica_of(place.away if moves else place.home)]
    assert replica.execute_command("CLUSTER", "COUNTKEYSINSLOT", place.slot) == 1
    lock.release()


def test_a_lock_that_the_replica_does_not_get_is_given_back(
    callers: Callers, fast: Any, cluster: Cluster, place: Place
) -> None:
    lock = callers.contender(fast, place.name, **{**REPLICATED, "wait_timeout": 0.1})
    lock.call("locked")  # a client for tasks meets the cluster only now, perhaps by this very replica
    replica = cluster.nodes[cluster.replica_of(place.home)]
    replica.signal(signal.SIGSTOP)
    try:
        with pytest.raises(NotReplicatedError):
            lock.call("acquire")
        wait_until(lambda: place.keys_at(place.home) == 0, "it is given back")
    finally:
        replica.signal(signal.SIGCONT)
