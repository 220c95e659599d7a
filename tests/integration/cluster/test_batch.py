"""Batches over the nodes of a cluster: each lock is asked for once, at its own node, and all nodes at once.

Rules: those of `support/clusters.py`; a test runs for threads and for tasks unless it is about the one or the other.
Whether a node was asked is told by its own count of commands.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff

from redislock_fast import Locker
from tests.integration.batch.test_all_or_nothing import Holders
from tests.integration.batch.test_asyncio import cancelled_after
from tests.integration.waiting.test_giving_up import DropAt
from tests.support.clusters import Cluster, connect, remap_ports
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, signals_handled_by, start, wait_until
from tests.support.interrupts import interrupt_when, interrupted_at
from tests.support.proxy import Proxy
from tests.support.transports import clean_up, is_idle, node_of, threads_inside, trust_nodes_for
from tests.support.waiting import FAR_S, Callers, connections

VERBS: dict[str, tuple[Any, ...]] = {"release": (), "extend": (10,), "reacquire": ()}
"""The calls on a held batch, with their arguments."""

EACH_USE = pytest.mark.parametrize("use", ["acquire", *VERBS])


@pytest.fixture
def fast(callers: Callers, cluster: Cluster) -> Any:
    """A client of the cluster, for threads and tasks in turn."""
    return connect(callers, cluster)


def acquiring(callers: Callers, client: Any, names: list[str], *args: Any, **kwargs: Any) -> Future[Any]:
    """Begin to acquire a batch."""
    return callers.begin(lambda: callers.package.Locker(client).acquire_many(names, *args, **kwargs))


def acquire_many(callers: Callers, client: Any, names: list[str]) -> Any:
    """A batch that holds all these locks."""
    batch = acquiring(callers, client, names, FAR_S).result(PATIENCE_S)
    assert batch.acquired == names
    return batch


def calling(callers: Callers, batch: Any, verb: str) -> Future[Any]:
    """Begin to call a method of the batch."""
    return callers.begin(lambda: getattr(batch, verb)(*VERBS[verb]))


def call(callers: Callers, batch: Any, verb: str) -> Any:
    """The result or the error of the batch's method."""
    return calling(callers, batch, verb).result(PATIENCE_S)


def take_and_release(callers: Callers, client: Any, names: list[str]) -> None:
    """Hold these locks for a moment, which connects to their nodes."""
    assert call(callers, acquire_many(callers, client, names), "release") == dict.fromkeys(names, True)


# ---- which node is asked for what ----


def names_at(cluster: Cluster, count: int) -> dict[int, list[str]]:
    """So many new names at each primary, by the number of the node."""
    names: dict[int, list[str]] = {number: [] for number in cluster.primaries()}
    while any(len(at) < count for at in names.values()):
        name = cluster.name()
        for number, at in names.items():
            slot = cluster.admins[number].execute_command("CLUSTER", "KEYSLOT", name)
            if len(at) < count and cluster.has(number, slot):
                at.append(name)
    return names


def joined(names: dict[int, list[str]]) -> list[str]:
    """All names, those of one node after those of another."""
    return [name for at in names.values() for name in at]


def forget_calls(cluster: Cluster) -> None:
    """Let all nodes count from 0."""
    for number in cluster.primaries():
        cluster.admins[number].config_resetstat()


def asked(cluster: Cluster, number: int) -> int:
    """How many requests for locks a node has had."""
    stats = cluster.admins[number].info("commandstats")
    return sum(stats.get(f"cmdstat_{name.lower()}", {"calls": 0})["calls"] for name in ("SET", *RELEASE_COMMANDS))


def left(cluster: Cluster, names: dict[int, list[str]], number: int) -> int:
    """How many of its names a node has."""
    count: int = sum(cluster.admins[number].exists(name) for name in names[number])
    return count


def until_gone(cluster: Cluster, names: dict[int, list[str]], numbers: list[int] | None = None) -> None:
    """Return once these nodes, or all, have none of their names any more: it is released or undone."""
    nodes = list(names) if numbers is None else numbers
    wait_until(lambda: not any(left(cluster, names, number) for number in nodes), "the names are gone")


@contextmanager
def frozen(cluster: Cluster, number: int) -> Iterator[None]:
    """A node does nothing within the block."""
    cluster.nodes[number].signal(signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.nodes[number].signal(signal.SIGCONT)


@pytest.mark.slow
def test_each_lock_is_asked_for_once_and_at_its_own_node(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = [cluster.name() for _ in range(300)]
    take_and_release(callers, fast, names)
    forget_calls(cluster)
    admins = [cluster.admins[number] for number in cluster.primaries()]
    batch = acquire_many(callers, fast, names)
    held = [sum(key.decode() in names for key in admin.keys("name-*")) for admin in admins]
    assert (sum(held), min(held) > 0) == (len(names), True)
    assert held == [admin.info("commandstats")["cmdstat_set"]["calls"] for admin in admins]
    assert call(callers, batch, "release") == dict.fromkeys(names, True)
    for number, count in zip(cluster.primaries(), held, strict=True):
        assert asked(cluster, number) == 2 * count
        assert not cluster.admins[number].info("errorstats")


@EACH_USE
def test_no_node_waits_for_another(callers: Callers, fast: Any, cluster: Cluster, use: str) -> None:
    names = names_at(cluster, 3)
    first, *others = names  # which is the first to be asked
    batch = acquire_many(callers, fast, joined(names))
    if use == "acquire":
        call(callers, batch, "release")
    forget_calls(cluster)
    with frozen(cluster, first):
        answer = acquiring(callers, fast, joined(names), FAR_S) if use == "acquire" else calling(callers, batch, use)
        for number in others:
            wait_until(lambda: asked(cluster, number) >= 3, "it is asked")  # noqa: B023  # called at once
        assert not answer.done()
    if use == "acquire":
        assert answer.result(PATIENCE_S).acquired == joined(names)
    else:
        assert answer.result(PATIENCE_S) == dict.fromkeys(joined(names), True)


def test_all_or_nothing_asks_one_node_after_the_other(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = names_at(cluster, 3)
    take_and_release(callers, fast, joined(names))
    first, second, third = sorted(names, key=lambda number: min(names[number]))
    forget_calls(cluster)
    with frozen(cluster, second):
        answer = acquiring(callers, fast, joined(names), FAR_S, all_or_nothing=True)
        wait_until(lambda: left(cluster, names, first) == 3, "the first node is asked")
        assert (left(cluster, names, third), answer.done()) == (0, False)
    assert call(callers, answer.result(PATIENCE_S), "release") == dict.fromkeys(joined(names), True)


def test_more_than_a_window_of_each_node(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = [cluster.name() for _ in range(3 * 1300)]
    batch = acquire_many(callers, fast, names)
    assert call(callers, batch, "extend") == dict.fromkeys(names, True)
    assert call(callers, batch, "release") == dict.fromkeys(names, True)
    assert call(callers, batch, "release") == {}


def test_batches_of_many_callers_of_one_client_exclude_each_other(
    callers: Callers, fast: Any, cluster: Cluster
) -> None:
    names = joined(names_at(cluster, 4))
    holders = Holders()

    def work(seed: int) -> int:
        rng = random.Random(seed)
        for _ in range(20):
            batch = acquiring(callers, fast, rng.sample(names, 8), FAR_S).result(PATIENCE_S)
            holders.enter(batch.acquired)
            holders.leave(batch.acquired)
            assert call(callers, batch, "release") == dict.fromkeys(batch.acquired, True)
        return seed

    workers = [start(lambda seed=seed: work(seed)) for seed in range(8)]  # type: ignore[misc]
    assert [worker.result(60) for worker in workers] == list(range(8))
    assert holders.trespasses == []


@pytest.mark.slow
@pytest.mark.parametrize("callers", ["threads"], indirect=True)
def test_a_signal_handler_may_take_a_batch_of_the_same_client(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names, of_handler = (joined(names_at(cluster, 3)) for _ in range(2))
    verdicts: list[dict[Any, bool]] = []

    def handle(number: int, frame: object) -> None:
        verdicts.append(Locker(fast).acquire_many(of_handler, FAR_S).release())

    with signals_handled_by(handle):
        for _ in range(100):
            assert Locker(fast).acquire_many(names, FAR_S).release() == dict.fromkeys(names, True)
    assert verdicts == [dict.fromkeys(of_handler, True)] * len(verdicts)
    assert verdicts


# ---- slots that move ----


def test_batches_are_taken_and_given_back_while_slots_move(callers: Callers, fast: Any, cluster: Cluster) -> None:
    leaving, arriving, moved = ([cluster.place() for _ in range(3)] for _ in range(3))
    places = [*leaving, *arriving, *moved]
    names = [*(place.name for place in places), *(cluster.name() for _ in range(20))]
    for place in [*leaving, *arriving]:
        place.begin_move()
    batch = acquire_many(callers, fast, names)
    for place in arriving:
        place.end_move()
    for place in moved:
        place.move()
    assert call(callers, batch, "extend") == dict.fromkeys(names, True)
    for place in leaving:
        place.end_move()
    assert call(callers, batch, "release") == dict.fromkeys(names, True)
    assert not any(cluster.admins[place.away].exists(place.name) for place in places)


# ---- a node that fails ----


@pytest.mark.slow
def test_a_frozen_node_fails_the_acquire_and_keeps_no_caller_from_the_others(
    callers: Callers, fast: Any, cluster: Cluster
) -> None:
    names = names_at(cluster, 3)
    take_and_release(callers, fast, joined(names))
    first, *others = names
    with frozen(cluster, first):
        with pytest.raises(redis.TimeoutError):
            acquiring(callers, fast, joined(names), FAR_S, 1.0).result(PATIENCE_S)
        until_gone(cluster, names, others)
    until_gone(cluster, names, [first])
    take_and_release(callers, fast, joined(names))


@pytest.mark.slow
def test_what_a_frozen_node_has_to_undo_keeps_no_caller_from_the_others(
    callers: Callers, fast: Any, cluster: Cluster
) -> None:
    names = names_at(cluster, 3)
    take_and_release(callers, fast, joined(names))
    for number, at in names.items():
        for name in at:
            cluster.admins[number].set(name, "mine")
    first, *others = names
    with frozen(cluster, first):
        callers.run(lambda: clean_up(fast, [(name.encode(), b"mine") for name in joined(names)]))
        until_gone(cluster, names, others)
    until_gone(cluster, names, [first])


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_frozen_node_costs_the_others_no_verdict(callers: Callers, cluster: Cluster, verb: str) -> None:
    names = names_at(cluster, 3)
    first, *others = names
    batch = acquire_many(
        callers, connect(callers, cluster, socket_timeout=1.0, retry=callers.retry(NoBackoff(), 0)), joined(names)
    )
    taken = names[others[0]][0]
    cluster.admins[others[0]].set(taken, "thief")
    with frozen(cluster, first), pytest.raises(redis.TimeoutError):
        call(callers, batch, verb)
    # Of the others, what was released has left the batch. What turned out to be lost is told by the next call.
    still = names[first] if verb == "release" else joined(names)
    assert call(callers, batch, "release") == {**dict.fromkeys(still, True), taken: False}
    assert call(callers, batch, "release") == {}
    cluster.admins[others[0]].delete(taken)
    assert not any(left(cluster, names, number) for number in names)


@pytest.mark.parametrize("callers", ["tasks"], indirect=True)
def test_what_a_dropped_task_has_begun_is_undone(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = names_at(cluster, 2)
    take_and_release(callers, fast, joined(names))
    callers.run(lambda: DropAt(callers.package.Locker(fast).acquire_many(joined(names)), 0))
    until_gone(cluster, names)


def test_what_a_node_without_the_slot_is_to_undo_is_left_to_its_ttl(callers: Callers, cluster: Cluster) -> None:
    names = names_at(cluster, 1)
    first, second, *_ = names
    client = callers.client(cluster.nodes[first].port)  # as of a single server
    entries = [(name.encode(), b"mine") for name in (*names[second], *names[first])]
    callers.run(lambda: clean_up(client, entries))
    wait_until(lambda: callers.run(lambda: is_idle(client)), "nothing is tried forever")


def test_an_error_of_one_node_leaves_nothing_at_the_others(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = names_at(cluster, 3)
    take_and_release(callers, fast, joined(names))
    spoilt = names[cluster.primaries()[1]].pop()
    cluster.admins[cluster.primaries()[1]].lpush(spoilt, "x")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        acquiring(callers, fast, [spoilt, *joined(names)], FAR_S).result(PATIENCE_S)
    until_gone(cluster, names)


@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
@EACH_USE
def test_a_lost_message_of_one_node_is_made_good(callers: Callers, cluster: Cluster, use: str, fault: str) -> None:
    names = names_at(cluster, 3)
    first = cluster.nodes[next(iter(names))].port
    with Proxy(first) as proxy:
        client = connect(callers, cluster, address_remap=remap_ports({first: proxy.port}))
        batch = acquire_many(callers, client, joined(names))
        if use == "acquire":
            call(callers, batch, "release")
        getattr(proxy, fault)("SET", *RELEASE_COMMANDS, nth=2)
        if use == "acquire":
            batch = acquire_many(callers, client, joined(names))
        else:
            assert call(callers, batch, use) == dict.fromkeys(joined(names), True)
        assert proxy.dropped.is_set()
        assert call(callers, batch, "release") == ({} if use == "release" else dict.fromkeys(joined(names), True))
    assert not any(left(cluster, names, number) for number in names)


def test_a_connection_that_was_closed_while_idle_leaves_no_doubt(callers: Callers, cluster: Cluster) -> None:
    names = names_at(cluster, 2)
    client_name = f"idle-{cluster.name()}"
    batch = acquire_many(callers, connect(callers, cluster, client_name=client_name), joined(names))
    for number, at in names.items():
        admin = cluster.admins[number]
        admin.delete(at[0])
        for row in admin.client_list():
            if row["name"] == client_name:
                admin.client_kill_filter(_id=row["id"])
        wait_until(lambda: not connections(admin, client_name), "it is closed")  # noqa: B023  # called at once
    closed_at = time.monotonic()
    wait_until(lambda: time.monotonic() > closed_at + 0.01, "it has been idle")
    lost = {at[0] for at in names.values()}
    assert call(callers, batch, "release") == {name: name not in lost for name in joined(names)}


@pytest.mark.parametrize("callers", ["threads"], indirect=True)
def test_a_connection_that_another_has_just_found_broken_leaves_no_doubt(
    callers: Callers, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust_nodes_for(FAR_S, monkeypatch)  # nobody looks whether it still stands
    names = names_at(cluster, 2)
    client = connect(callers, cluster)
    batch = acquire_many(callers, client, joined(names))
    lost = {at[0] for at in names.values()}
    for number, at in names.items():
        cluster.admins[number].delete(at[0])
        node_of(client, at[0]).connection.pipe.close()
    assert call(callers, batch, "release") == {name: name not in lost for name in joined(names)}


# ---- interrupts and cancels ----


def may_be_released_again(verdicts: dict[str, bool], names: list[str]) -> None:
    """These locks, at least, were in the batch still, and no verdict says that one was lost."""
    assert verdicts == dict.fromkeys(verdicts, True)
    assert verdicts.keys() >= set(names)


one_kind = pytest.mark.parametrize("cluster", ["valkey"], indirect=True)


@pytest.mark.parametrize("callers", ["threads"], indirect=True)
@pytest.mark.parametrize("verb", ["acquire", "release"])
@one_kind
def test_interrupted_while_one_node_is_frozen_it_leaves_nothing(
    callers: Callers, fast: Any, cluster: Cluster, verb: str
) -> None:
    names = names_at(cluster, 3)
    first, *others = names
    batch = acquire_many(callers, fast, joined(names))
    if verb == "acquire":
        batch.release()
    forget_calls(cluster)
    with frozen(cluster, first):
        interrupt_when(lambda: wait_until(lambda: all(asked(cluster, at) >= 3 for at in others), "they are asked"))
        with pytest.raises(KeyboardInterrupt):
            _ = batch.release() if verb == "release" else Locker(fast).acquire_many(joined(names), FAR_S)
        until_gone(cluster, names, others)
    until_gone(cluster, names, [first])
    if verb == "release":
        may_be_released_again(batch.release(), names[first])


@pytest.mark.parametrize("callers", ["tasks"], indirect=True)
@pytest.mark.parametrize("verb", ["acquire", "release"])
@one_kind
def test_cancelled_while_one_node_is_frozen_it_leaves_nothing(
    callers: Callers, fast: Any, cluster: Cluster, verb: str
) -> None:
    names = names_at(cluster, 3)
    first, *others = names
    batch = acquire_many(callers, fast, joined(names))
    if verb == "acquire":
        call(callers, batch, "release")
    forget_calls(cluster)
    ended = threading.Event()

    async def work() -> None:
        try:
            await (
                batch.release()
                if verb == "release"
                else callers.package.Locker(fast).acquire_many(joined(names), FAR_S)
            )
        finally:
            ended.set()

    with frozen(cluster, first):
        answer = callers.begin(work)
        wait_until(lambda: all(asked(cluster, at) >= 3 for at in others), "the others are asked")
        answer.cancel()
        wait_until(ended.is_set, "it is cancelled")
        until_gone(cluster, names, others)
    until_gone(cluster, names, [first])
    if verb == "release":
        may_be_released_again(call(callers, batch, "release"), names[first])


@pytest.mark.slow
@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("callers", ["threads"], indirect=True)
@one_kind
def test_acquire_interrupted_at_any_line_leaves_nothing(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = names_at(cluster, 2)
    home = cluster.primaries()[0]
    taken = names[home].pop()
    cluster.admins[home].set(taken, "other")
    Locker(fast).acquire_many(joined(names)).release()  # connects
    leaks: list[str] = []
    number = 0
    while True:
        number += 1
        place = interrupted_at(
            number, lambda: Locker(fast).acquire_many([taken, *joined(names)], FAR_S), "_transport/threads/cluster.py"
        )
        threads_inside(fast).clear()  # which an interrupt in the very line that leaves would not
        if not place:
            break
        wait_until(lambda: is_idle(fast), "what is known of is undone")
        if any(left(cluster, names, at) for at in names):
            leaks.append(place)
            fast.delete(*joined(names))
    assert number > 100
    assert leaks == []


@pytest.mark.parametrize("callers", ["tasks"], indirect=True)
@EACH_USE
@one_kind
def test_cancelled_at_any_iteration_it_leaves_nothing(callers: Callers, fast: Any, cluster: Cluster, use: str) -> None:
    names = names_at(cluster, 2)
    locker = callers.package.Locker(fast)
    batch = acquire_many(callers, fast, joined(names))

    async def used() -> Any:
        if use == "acquire":
            return await locker.acquire_many(joined(names), FAR_S)
        return await getattr(batch, use)(*VERBS[use])

    if use == "acquire":
        call(callers, batch, "release")
    steps = 1  # cancelled before its first, a coroutine is never called at all
    while callers.run(lambda: cancelled_after(steps, used)):  # noqa: B023  # called at once
        steps += 1
        if use in ("acquire", "release"):
            until_gone(cluster, names)
        if use == "release":
            call(callers, batch, "release")
            batch = acquire_many(callers, fast, joined(names))
    assert steps > 2
    if use in ("extend", "reacquire"):
        assert call(callers, batch, "release") == dict.fromkeys(joined(names), True)
