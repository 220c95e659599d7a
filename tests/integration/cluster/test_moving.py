"""Locks whose slot is on the move: what has arrived is told by ASK, what has not is where it was.

Rules: those of `support/clusters.py`; each test runs for threads and for tasks. A lock's queue is several keys, and its
scripts can only be executed where all of them are, so a waiter tries meanwhile (TRYAGAIN).
"""

from __future__ import annotations

import signal
from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.lock
from redis.exceptions import LockNotOwnedError, MovedError

from tests.support.clusters import SOON, Cluster, Place, connect, remap_ports
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.transports import clean_up
from tests.support.waiting import FAR_S, Callers, Contender, Guard, serve, until_one_is_done, until_queued

EACH_STAGE = pytest.mark.parametrize("stage", ["before it has moved", "after it has moved", "after the slot has moved"])


def move_to(place: Place, stage: str) -> None:
    """Begin to move the slot, and move it as far as this stage."""
    place.begin_move()
    if stage == "after it has moved":
        place.move_keys()
    elif stage == "after the slot has moved":
        place.end_move()


def end_move(place: Place, stage: str) -> None:
    """Move the slot from this stage to the end."""
    if stage != "after the slot has moved":
        place.end_move()


@pytest.fixture
def fast(callers: Callers, cluster: Cluster) -> Any:
    """A client of the cluster, for threads and tasks in turn."""
    return connect(callers, cluster)


@EACH_STAGE
@pytest.mark.parametrize("operation", ["release", "extend", "reacquire", "owned", "locked"])
def test_a_held_lock_is_used_while_its_slot_moves(
    callers: Callers, fast: Any, place: Place, operation: str, stage: str
) -> None:
    lock = callers.contender(fast, place.name, timeout=FAR_S)
    assert lock.call("acquire")
    move_to(place, stage)
    result = lock.call(operation, *([10] if operation == "extend" else []))
    assert result is (None if operation == "release" else True)
    end_move(place, stage)
    if operation != "release":
        lock.release()
    assert not lock.call("locked")


def test_a_lock_is_taken_and_excludes_while_its_slot_moves(callers: Callers, fast: Any, place: Place) -> None:
    ours, others = (callers.contender(fast, place.name, timeout=FAR_S) for _ in range(2))
    place.begin_move()
    with redis.RedisCluster(host="127.0.0.1", port=place.cluster.port) as client:
        original = redis.lock.Lock(client, place.name, timeout=10)
        for _ in range(2):
            assert ours.call("acquire", blocking=False)
            assert (place.keys_at(place.home), place.keys_at(place.away)) == (0, 1)
            assert not others.call("acquire", blocking=False)
            assert not original.acquire(blocking=False)
            ours.release()
    assert ours.call("acquire", blocking=False)
    place.end_move()
    assert not others.call("acquire", blocking=False)
    ours.release()
    assert others.call("acquire", blocking=False)


@pytest.mark.parametrize("stage", ["before it has moved", "after the slot has moved"])
def test_a_client_that_reaches_the_nodes_at_other_addresses_follows_the_slot(
    callers: Callers, cluster: Cluster, place: Place, stage: str
) -> None:
    with cluster.proxied() as proxies:
        elsewhere = remap_ports({port: proxy.port for port, proxy in proxies.items()})
        lock = callers.contender(connect(callers, cluster, address_remap=elsewhere), place.name, timeout=FAR_S)
        assert lock.call("acquire")
        lock.release()
        move_to(place, stage)
        assert lock.call("acquire")
        assert proxies[cluster.nodes[place.away].port].requests["SET"] == 1
        end_move(place, stage)
        lock.release()
        assert not lock.call("locked")


@EACH_STAGE
@pytest.mark.parametrize("operation", ["release", "extend", "reacquire"])
def test_a_lost_lock_is_not_owned_while_its_slot_moves(
    callers: Callers, fast: Any, place: Place, operation: str, stage: str
) -> None:
    lock = callers.contender(fast, place.name, timeout=FAR_S)
    assert lock.call("acquire")
    place.cluster.admins[place.home].delete(place.name)
    move_to(place, stage)
    with pytest.raises(LockNotOwnedError):
        lock.call(operation, *([10] if operation == "extend" else []))
    end_move(place, stage)


def queue_up(contenders: list[Contender], place: Place) -> list[Future[Any]]:
    """Let them wait for the lock, in the queue where there is one."""
    answers = []
    for length, contender in enumerate(contenders, start=1):
        answers.append(contender.acquire())
        if place.cluster.kind != "redis-6.2":
            until_queued(place.cluster.admins[place.home], place.name, length)
    return answers


@pytest.mark.parametrize("released", ["before the keys move", "while they move", "after they have moved"])
def test_waiters_are_served_while_the_slot_moves(
    callers: Callers, cluster: Cluster, place: Place, released: str
) -> None:
    holder, *waiters = (callers.contender(connect(callers, cluster), place.name, **SOON) for _ in range(4))
    assert holder.call("acquire")
    answers = queue_up(waiters, place)
    place.begin_move()
    if released != "before the keys move":
        place.move_keys(None if released == "after they have moved" else place.name)
    holder.release()
    serve(waiters, answers)
    place.end_move()
    assert holder.call("acquire", blocking=False)


@pytest.mark.usefixtures("unhurried")
def test_waiters_that_come_while_the_slot_moves_get_the_lock(callers: Callers, cluster: Cluster, place: Place) -> None:
    holder, *waiters = (callers.contender(connect(callers, cluster), place.name, **SOON) for _ in range(4))
    place.begin_move()
    assert holder.call("acquire")
    early = waiters[0].acquire()
    late = waiters[1].acquire()
    assert waiters[2].call("locked")  # connects to both nodes
    assert not waiters[2].call("acquire", blocking_timeout=0.3)
    place.end_move()
    last = waiters[2].acquire()
    holder.release()
    serve(waiters, [early, late, last])


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_waiter_of_a_client_of_one_node_gets_redis_pys_error_for_a_slot_that_moves(
    callers: Callers, place: Place
) -> None:
    if place.cluster.kind == "redis-6.2":
        pytest.skip("it has no sharded messages")
    here, there = (place.cluster.nodes[number].port for number in (place.home, place.away))
    place.cluster.admins[place.home].set(place.name, "mine")
    with Proxy(here) as proxy:
        proxy.answer(f"-MOVED {place.slot} 127.0.0.1:{there}\r\n".encode(), "SSUBSCRIBE")
        waiter = callers.contender(callers.client(proxy.port), place.name, timeout=FAR_S)
        with pytest.raises(MovedError):
            waiter.call("acquire")


def test_a_waiter_that_gives_up_while_the_slot_moves_leaves_nothing_behind(
    callers: Callers, cluster: Cluster, place: Place
) -> None:
    holder, quitter, other = (callers.contender(connect(callers, cluster), place.name, **SOON) for _ in range(3))
    assert holder.call("acquire")
    answer = quitter.acquire(blocking_timeout=2.0)
    if cluster.kind != "redis-6.2":
        until_queued(cluster.admins[place.home], place.name, 1)
    place.begin_move()
    assert answer.result(PATIENCE_S) is False
    place.end_move()
    if cluster.kind != "redis-6.2":
        until_queued(cluster.admins[place.away], place.name, 0)
    holder.release()
    assert other.call("acquire", blocking=False)
    other.release()
    assert place.keys_at(place.away) == 0


def test_pollers_get_the_lock_through_all_of_a_move(callers: Callers, cluster: Cluster, place: Place) -> None:
    guard = Guard()
    holder, *pollers = (callers.contender(connect(callers, cluster), place.name, wait="poll", **SOON) for _ in range(5))
    assert holder.call("acquire")
    answers = [poller.use(guard, hold_s=0.01) for poller in pollers]
    place.begin_move()
    holder.release()
    until_one_is_done(answers)
    place.end_move()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 4
    assert (guard.entries, guard.overlaps) == (4, 0)


def test_contenders_never_meet_while_the_slot_goes_to_and_fro(callers: Callers, cluster: Cluster, place: Place) -> None:
    guard = Guard()
    contenders = [callers.contender(connect(callers, cluster), place.name, **SOON) for _ in range(4)]
    answers = [contender.use(guard) for contender in contenders]
    ways = [(place.home, place.away), (place.away, place.home)] * 2
    for source, target in ways:
        cluster.settle()
        cluster.begin_move(place.slot, source, target)
        until_one_is_done(answers)
        answers = [
            contender.use(guard) if answer.done() and answer.result() else answer
            for contender, answer in zip(contenders, answers, strict=True)
        ]
        cluster.end_move(place.slot, source, target)
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 4
    assert guard.overlaps == 0


@pytest.mark.parametrize("stage", ["on the move", "moved"])
def test_what_waits_to_be_undone_follows_the_slot(cluster_client: redis.RedisCluster, place: Place, stage: str) -> None:
    lock = cluster_client.lock(place.name, timeout=FAR_S)
    assert lock.acquire()
    place.begin_move()
    place.move_keys()
    if stage == "moved":
        place.end_move()
    clean_up(cluster_client, [(place.name.encode(), lock.local.token)])
    wait_until(lambda: place.keys_at(place.away) == 0, "it is undone")
    if stage == "on the move":
        place.end_move()


def test_what_has_moved_from_a_clients_only_node_keeps_nothing_else_from_being_undone(
    callers: Callers, cluster: Cluster
) -> None:
    stays, moves = cluster.place(), cluster.place()
    admin = cluster.admins[stays.home]
    client = callers.client(cluster.nodes[stays.home].port)
    assert not callers.contender(client, stays.name).call("locked")
    admin.set(stays.name, "token of stays")
    moves.move()
    admin.script_flush()  # so its cleanup needs a second request
    entries = [(moves.name.encode(), b"token of moves"), (stays.name.encode(), b"token of stays")]
    callers.run(lambda: clean_up(client, entries))
    wait_until(lambda: not admin.exists(stays.name), "it is undone")


def test_an_attempt_without_an_answer_is_undone_where_ask_has_led(callers: Callers, fast: Any, place: Place) -> None:
    ours, others = (callers.contender(fast, place.name, timeout=FAR_S) for _ in range(2))
    place.begin_move()
    place.cluster.admins[place.away].config_resetstat()
    assert ours.call("acquire", blocking=False)
    ours.release()
    target = place.cluster.nodes[place.away]
    target.signal(signal.SIGSTOP)
    try:
        with pytest.raises(redis.TimeoutError):
            ours.call("acquire", blocking_timeout=0.5)
    finally:
        target.signal(signal.SIGCONT)
    admin = place.cluster.admins[place.away]
    wait_until(lambda: admin.info("commandstats")["cmdstat_set"]["calls"] == 2, "the attempt has been executed")
    wait_until(lambda: place.keys_at(place.away) == 0, "it is undone")
    assert others.call("acquire", blocking=False)
    place.end_move()
    others.release()
