"""Waiting for a contended lock in its queue: what is sent, and in which order the lock goes round.

Rules: a waiter that must be notified has an interval longer than any test, so that a test hangs where it is not.
Orders are made certain by the length of the queue.
"""

from __future__ import annotations

import gc
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, capabilities_of, start, wait_until
from tests.support.scenes import Scene
from tests.support.waiting import (
    CALLERS,
    FAR_S,
    LATE,
    Contender,
    Guard,
    Peer,
    Sent,
    Tasks,
    connections,
    hand_round,
    queue_up,
    sent_by,
)


@pytest.fixture
def holder(client: redis.Redis) -> Lock:
    """A lock of another client than the waiters'."""
    return Lock(client, "name", **LATE)


# The commands that are sent


def attempt_at(server: Server) -> list[str]:
    """An attempt that fails: Redis 6.2 does not say at once whose the lock is."""
    return ["SET"] if capabilities_of(server).set_get else ["SET", "GET"]


def release_at(server: Server) -> list[str]:
    """A release where nobody waits."""
    return [(capabilities_of(server).release or b"EVALSHA").decode()]


def warm(scene: Scene, client_name: str = "waiter") -> Any:
    """A client that has connected, subscribed and loaded every script."""
    client = scene.connect(client_name=client_name)
    first, *others = scene.holder_and(2, client)
    answers = scene.queue_up(others)
    first.release()
    hand_round(others, answers)
    return client


def test_an_uncontended_pair_is_two_commands(scene: Scene) -> None:
    contender = scene.contender(warm(scene))
    with sent_by(scene.client, "waiter") as sent:
        for _ in range(3):
            assert contender.call("acquire")
            contender.release()
    assert sent.commands == 3 * (["SET", *release_at(scene.server)])


def test_a_lock_handed_over_costs_an_attempt_a_wait_and_a_release(scene: Scene, holder: Lock) -> None:
    waiter = scene.contender(warm(scene))
    holder.acquire()
    with sent_by(scene.client, "waiter") as sent:
        answers = scene.queue_up([waiter])
        holder.release()
        hand_round([waiter], answers)
    assert sent.commands[:-1] == [*attempt_at(scene.server), "EVALSHA"]
    assert sent.commands[-1] in RELEASE_COMMANDS


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}, {"linger": 0.05}], ids=["plain", "renewed", "linger"])
def test_waiter_makes_one_attempt_before_it_queues(scene: Scene, holder: Lock, settings: dict[str, Any]) -> None:
    waiter = scene.callers._contender(scene.callers.package.Lock(warm(scene), "name", **LATE, **settings))
    holder.acquire()
    with sent_by(scene.client, "waiter") as sent:
        answer = waiter.use(Guard())
        scene.until_queued(1)
        holder.release()
        assert answer.result(PATIENCE_S) is True
    requests = [*attempt_at(scene.server), "EVALSHA"]
    assert sent.commands[: len(requests)] == requests


def test_acquire_makes_no_attempt_where_others_are_known_to_wait(scene: Scene, holder: Lock) -> None:
    waiters = scene.contenders(2, warm(scene))
    holder.acquire()
    first_answer = scene.queue_up(waiters[:1])
    waiters[1].call("locked")  # on the same connection, so the reply to the first one's wait has been read
    with sent_by(scene.client, "waiter") as sent:
        second_answer = scene.queue_up(waiters[1:])
        holder.release()
        hand_round(waiters, first_answer + second_answer)
    # The second one's wait; the first one's release, which hands over; the second one's release.
    assert sent.commands[:-1] == ["EVALSHA", "EVALSHA"]
    assert sent.commands[-1] in RELEASE_COMMANDS


def handing_on_and_coming_back(
    first: Contender, second: Contender, answers: list[Future[Any]], client: redis.Redis
) -> Sent:
    """The requests of the first, which hands the lock to the second, waits for it, gets it back and releases it."""
    with sent_by(client, "waiter") as sent:
        first.release()
        assert answers[0].result(PATIENCE_S)
        answers = queue_up([first], client)
        second.release()
        hand_round([first], answers)
    return sent


def test_acquire_after_a_hand_over_makes_no_attempt(scene: Scene) -> None:
    first = scene.holder(warm(scene))
    second = scene.contender()
    answers = scene.queue_up([second])
    sent = handing_on_and_coming_back(first, second, answers, scene.client)
    # A release that hands over, perhaps behind one that does not; a wait; a release.
    assert sent.commands[-3:] == 3 * ["EVALSHA"]
    assert "SET" not in sent.commands


@pytest.mark.parametrize("lingers", [{}, {"linger": LATE["timeout"]}], ids=["plain", "linger"])
def test_acquire_after_a_hand_over_of_a_granted_lock_makes_no_attempt(scene: Scene, lingers: dict[str, Any]) -> None:
    first = scene.contender(warm(scene), **LATE, **lingers)
    second = scene.holder()
    answers = scene.queue_up([first])
    second.release()
    assert answers[0].result(PATIENCE_S)
    answers = scene.queue_up([second])
    sent = handing_on_and_coming_back(first, second, answers, scene.client)
    # The first one's release, wait and release.
    assert sent.commands == 3 * ["EVALSHA"]


def test_an_attempt_is_left_out_only_once_and_a_free_lock_taken_nevertheless(scene: Scene) -> None:
    first = scene.holder(warm(scene))
    second = scene.contender()
    answers = scene.queue_up([second])
    first.release()
    assert answers[0].result(PATIENCE_S)
    with sent_by(scene.client, "waiter") as sent:
        assert first.call("acquire", blocking=False) is False
        second.release()
        for _ in range(3):
            assert first.call("acquire")
            assert first.call("owned")
            first.release()
    pair = ["SET", "GET", *release_at(scene.server)]
    no_attempt = ["EVALSHA", "GET", "EVALSHA"]
    assert sent.commands == [*attempt_at(scene.server), *no_attempt, *pair, *pair]
    assert scene.client.keys() == []


def test_acquire_with_little_time_makes_an_attempt(scene: Scene) -> None:
    first = scene.holder(warm(scene))
    second = scene.contender()
    answers = scene.queue_up([second])
    first.release()
    assert answers[0].result(PATIENCE_S)
    second.release()
    with sent_by(scene.client, "waiter") as sent:
        assert first.call("acquire", blocking_timeout=0.01)
    assert sent.commands == ["SET"]
    first.release()


def release_after(contender: Contender, _: Future[Any]) -> None:
    """To be called by the thread that completes the contender's acquire."""
    contender.ask("release")


def calls_of_scripts(admin: redis.Redis) -> int:
    calls: int = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


def test_waiters_share_a_connection_and_one_look_an_interval(scene: Scene, holder: Lock) -> None:
    interval_s = 0.05
    count = 500 if isinstance(scene.callers, Tasks) else 50
    names = [f"{what}-{type(scene.callers).__name__}" for what in ("silent", "looking")]
    silent = scene.contenders(count, warm(scene, names[0]))
    looking = scene.contenders(50, warm(scene, names[1]), timeout=FAR_S, sleep=interval_s)
    holder.acquire()
    answers = [contender.acquire() for contender in silent]
    scene.until_queued(count)
    with sent_by(scene.client, names[0]) as none:
        answers += [contender.acquire() for contender in looking]
        scene.until_queued(count + 50)
        began = time.monotonic()
        with sent_by(scene.client, names[1]) as looks:
            before = calls_of_scripts(scene.client)
            wait_until(lambda: calls_of_scripts(scene.client) >= before + 5, "5 looks")
            took_s = time.monotonic() - began
    assert none.commands == []
    assert set(looks.commands) == {"EVALSHA"}
    assert 5 <= len(looks.commands) <= took_s / interval_s + 2
    assert [connections(scene.client, name) for name in names] == [1, 1]
    holder.release()
    for answer, contender in zip(answers, silent + looking, strict=True):
        answer.add_done_callback(partial(release_after, contender))
    assert all(answer.result(PATIENCE_S) for answer in answers)
    wait_until(lambda: not scene.client.exists("name"), "the last one has released")


@pytest.mark.slow
def test_waiter_after_a_long_wait_puts_its_health_check_off_for_as_long(scene: Scene, holder: Lock) -> None:
    interval_s = 0.4
    waiter = scene.contender(warm(scene), timeout=FAR_S, sleep=interval_s)
    newcomer = scene.contender(warm(scene, "newcomer"), timeout=FAR_S, sleep=interval_s)

    def contend(contenders: list[Contender], looks: int) -> None:
        holder.acquire()
        before = calls_of_scripts(scene.client)
        answers = scene.queue_up(contenders)
        wait_until(lambda: calls_of_scripts(scene.client) >= before + len(contenders) + looks, f"{looks} looks")
        holder.release()
        hand_round(contenders, answers)

    contend([waiter], looks=2)
    with sent_by(scene.client, "newcomer") as newcomers, sent_by(scene.client, "waiter") as waiters:
        contend([waiter, newcomer], looks=1)
    # The wait and the release of each, and the newcomer's health check, though it came later.
    assert [sent.commands.count("EVALSHA") for sent in (waiters, newcomers)] == [2, 3]


def test_waiting_leaves_nothing_to_the_garbage_collector(scene: Scene) -> None:
    name = "of no other test"  # whose garbage may be found here
    holder = Lock(scene.client, name, **LATE)
    waiters = scene.contenders(3, warm(scene), name)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for contenders in (waiters, waiters[:1]):
            holder.acquire()
            answers = scene.queue_up(contenders)
            holder.release()
            hand_round(contenders, answers)
        gc.collect()
        left = [
            type(found)
            for found in gc.garbage
            if type(found).__module__.startswith("redislock_fast.") and getattr(found, "key", None) == name.encode()
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []


# Order


def test_the_lock_goes_round_in_the_order_of_arrival(scene: Scene, holder: Lock) -> None:
    clients = [scene.connect() for _ in range(3)]
    waiters = [scene.contender(clients[number % 3]) for number in range(12)]
    holder.acquire()
    answers = scene.queue_up(waiters)
    holder.release()
    hand_round(waiters, answers)
    assert scene.client.keys() == []


class PeerContender(Contender):
    """A contender in another process."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(SimpleNamespace(name="name"))
        self._peer = peer

    def ask(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return start(lambda: self._peer.call(verb, *args, **kwargs))

    def use(self, *_: Any, **__: Any) -> Future[bool]:
        raise NotImplementedError


def test_threads_tasks_and_processes_stand_in_one_queue(server: Server, client: redis.Redis, holder: Lock) -> None:
    with ExitStack() as ending:
        peers = [ending.enter_context(Peer(kind, server.port, **LATE)) for kind in 2 * ("threads", "tasks")]
        threads, tasks = (ending.enter_context(kind()) for kind in CALLERS.values())
        client_of_threads, client_of_tasks = threads.client(server.port), tasks.client(server.port)
        waiters: list[Contender] = []
        for peer in peers:
            waiters.append(PeerContender(peer))
            waiters.append(threads.contender(client_of_threads, **LATE))
            waiters.append(tasks.contender(client_of_tasks, **LATE))
        holder.acquire()
        answers = queue_up(waiters, client)
        holder.release()
        hand_round(waiters, answers)


def test_a_newcomer_does_not_barge(scene: Scene, holder: Lock) -> None:
    waiters = scene.contenders(5)
    newcomer = scene.contender()
    holder.acquire()
    answers = scene.queue_up(waiters)
    holder.release()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert newcomer.call("acquire", blocking=False) is False
        assert answer.result(PATIENCE_S) is True
        assert newcomer.call("acquire", blocking=False) is False
        waiter.release()
    assert newcomer.call("acquire", blocking=False) is True


def test_what_stands_there_while_the_lock_goes_round_is_always_a_waiters_token(scene: Scene, holder: Lock) -> None:
    waiters = scene.contenders(20)
    holder.acquire()
    answers = scene.queue_up(waiters)
    values: list[Any] = [scene.client.get("name")]
    tokens: list[Any] = [holder.local.token]

    def release(waiter: Contender, _: Future[Any]) -> None:
        tokens.append(waiter.lock.local.token.removesuffix(b"+"))
        waiter.ask("release")

    for waiter, answer in zip(waiters, answers, strict=True):
        answer.add_done_callback(partial(release, waiter))
    holder.release()
    while not answers[-1].done():
        values.append(scene.client.get("name"))
    wait_until(lambda: not scene.client.exists("name"), "the last one has released")
    held = [value for value in values if value is not None]
    assert None not in values[: len(held)], "free in between"
    seen = [token for token, _ in groupby(value.removesuffix(b"+") for value in held)]
    assert seen == [token for token in tokens if token in seen]
