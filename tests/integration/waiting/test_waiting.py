"""Waiting for a contended lock in its queue: what is sent, in which order the lock goes round, what its holder may do.

Rules: a waiter that must be notified has an interval longer than any test, so that a test hangs where it is not.
Orders are made certain by the length of the queue. What a script did is read from the queue, never from a clock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast
from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, capabilities_of, start, wait_until
from tests.support.scenes import Scene
from tests.support.transports import run_pass_on_script, run_wait_script
from tests.support.waiting import (
    CALLERS,
    FAR_S,
    LATE,
    Contender,
    Guard,
    Peer,
    Sent,
    Tasks,
    Threads,
    connections,
    hand_round,
    identifier_of,
    queue_up,
    sent_by,
    until_queued,
)
from tests.support.worlds import World, waited


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
        wait_until(lambda: not client.exists("name"), "the last release is executed, for which linger does not wait")
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


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Has no wait be logged: on a busy machine, some are long, and the holder is asked for."""
    redislock_fast.log_waits(None)
    yield
    redislock_fast.log_waits()


@pytest.mark.usefixtures("unlogged")
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


# The calls of the holder while others wait, and the value at the key meanwhile


__all__ = ["holder"]


def test_a_lock_is_marked_from_when_somebody_waits(scene: Scene, holder: Lock) -> None:
    waiter = scene.contender()
    holder.acquire()
    assert scene.client.get("name") == holder.local.token
    answers = scene.queue_up([waiter])
    assert scene.client.get("name") == holder.local.token + b"+"
    holder.release()
    hand_round([waiter], answers)
    holder.acquire()
    assert scene.client.get("name") == holder.local.token


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_every_operation_on_a_marked_lock(scene: Scene, acl_user: MakeUser, scripts: bool) -> None:
    if not scripts and capabilities_of(scene.server).release is None:
        pytest.skip("without scripts, only native commands extend and release")
    user = acl_user(scene.server, *([] if scripts else ["-eval", "-evalsha", "-script"]))
    holder = scene.holder(scene.connect(**user.options()), timeout=10)
    waiter = scene.contender(timeout=FAR_S, sleep=FAR_S if scripts else 0.02)
    answers = scene.queue_up([waiter])
    for _ in range(2):
        assert (holder.call("locked"), holder.call("owned"), waiter.call("owned")) == (True, True, False)
        assert holder.call("extend", 10) is True
        assert 10_000 < scene.client.pttl("name") <= 20_000
        assert holder.call("extend", 5, replace_ttl=True) is True
        assert 0 < scene.client.pttl("name") <= 5_000
        assert holder.call("reacquire") is True
        assert 5_000 < scene.client.pttl("name") <= 10_000
        assert scene.client.get("name") == holder.lock.local.token
    holder.release()
    hand_round([waiter], answers)
    for verb in ("release", "extend", "reacquire"):
        with pytest.raises(LockError):
            holder.call(verb, *([1] if verb == "extend" else []))


@pytest.mark.parametrize("ask", ["owned", "reacquire"])
def test_local_token_is_the_value_once_a_reply_has_told_of_waiters(valkey_scene: Scene, ask: str) -> None:
    holder, waiter = valkey_scene.holder_and(1)
    answers = valkey_scene.queue_up([waiter])
    value = valkey_scene.client.get("name")
    assert value == holder.lock.local.token + b"+"
    holder.call(ask)
    assert value == holder.lock.local.token
    holder.release()
    assert answers[0].result(PATIENCE_S)
    assert valkey_scene.client.get("name") == waiter.lock.local.token
    waiter.release()


def test_value_releases_the_lock_by_hook_as_its_token_does(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    answers = scene.queue_up([waiter])
    holder.call("do_release", scene.client.get("name"))
    hand_round([waiter], answers)


def test_every_operation_on_a_lock_that_was_handed_over(scene: Scene, holder: Lock) -> None:
    first, second = scene.contenders(2, timeout=10, sleep=FAR_S)
    holder.acquire()
    answers = scene.queue_up([first, second])
    holder.release()
    assert answers[0].result(PATIENCE_S)
    assert (first.call("locked"), first.call("owned"), second.call("owned")) == (True, True, False)
    assert scene.client.get("name") == first.lock.local.token
    assert first.call("extend", 10) is True
    assert 10_000 < scene.client.pttl("name") <= 20_000
    assert first.call("reacquire") is True
    assert 0 < scene.client.pttl("name") <= 10_000
    hand_round([first, second], answers)
    assert not scene.client.exists("name")


@pytest.mark.parametrize("holders_ttl_s", [FAR_S, None])
@pytest.mark.parametrize("ttl_s", [None, 3, 7.5])
def test_a_lock_handed_over_has_the_waiters_ttl(scene: Scene, holders_ttl_s: float | None, ttl_s: float | None) -> None:
    holder = scene.holder(timeout=holders_ttl_s)
    waiter = scene.contender(timeout=ttl_s, sleep=FAR_S)
    answer = scene.wait(waiter)
    holder.release()
    assert answer.result(PATIENCE_S)
    left_ms = scene.client.pttl("name")
    if ttl_s is None:
        assert left_ms == -1
    else:
        assert 0.7 * ttl_s * 1000 < left_ms <= ttl_s * 1000
    waiter.release()


def test_a_marked_lock_that_was_lost_is_not_owned(scene: Scene) -> None:
    """The value of another lock's holder, marked, is never taken for one's own."""
    holder = scene.holder(timeout=10)
    stolen = holder.lock.local.token[:-1] + b"x+"
    scene.client.set("name", stolen)
    for verb, arguments in (("extend", [1]), ("reacquire", []), ("release", [])):
        with pytest.raises(LockNotOwnedError):
            holder.call(verb, *arguments)
    assert scene.client.get("name") == stolen


@pytest.mark.parametrize("by_value", [False, True], ids=["token", "value"])
def test_another_lock_object_with_the_token_hands_over(scene: Scene, holder: Lock, by_value: bool) -> None:
    deputy, waiter = scene.contenders(2)
    holder.acquire()
    answers = scene.queue_up([waiter])
    deputy.lock.local.token = scene.client.get("name") if by_value else holder.local.token
    assert deputy.call("owned")
    assert deputy.call("extend", 1)
    assert deputy.call("reacquire")
    deputy.release()
    hand_round([waiter], answers)
    with pytest.raises(LockNotOwnedError):
        holder.release()


def test_a_holder_whose_ttl_has_ended_takes_nothing_from_the_next(scene: Scene) -> None:
    holder = scene.holder(timeout=0.1)
    waiter = scene.contender()
    assert waiter.acquire().result(PATIENCE_S) is True
    for verb, arguments in (("extend", [1]), ("reacquire", []), ("release", [])):
        with pytest.raises(LockNotOwnedError):
            holder.call(verb, *arguments)
    assert waiter.call("owned")
    waiter.release()
    assert scene.client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_holder_that_acquires_again_waits_for_the_end_of_its_lease(scene: Scene) -> None:
    contender = scene.holder(timeout=1.5, sleep=FAR_S)
    first = contender.lock.local.token
    assert contender.call("acquire", blocking_timeout=0.01) is False
    assert contender.lock.local.token == first
    assert contender.call("owned")
    assert contender.call("acquire") is True
    assert contender.lock.local.token != first
    contender.release()
    assert scene.client.keys() == []


def test_a_lock_is_handed_over_when_the_server_has_no_memory_left(scene: Scene) -> None:
    holder, *waiters = scene.holder_and(3)
    answers = scene.queue_up(waiters)
    scene.client.config_set("maxmemory", 1)
    try:
        holder.release()
        hand_round(waiters, answers)
    finally:
        scene.client.config_set("maxmemory", 0)
    assert scene.client.keys() == []


# Batches


def test_a_batch_hands_over_what_others_wait_for(world: World, server: Server, client: redis.Redis) -> None:
    names = [f"name-{number}" for number in range(20)]
    locker = world.ours.Locker(world.client(client))
    batch = waited(locker.acquire_many(names, timeout=10))
    with Threads() as threads:
        waiting_client = threads.client(server.port)
        waiters = {name: threads.contender(waiting_client, name, **LATE) for name in names[::2]}
        answers = {name: waiter.acquire() for name, waiter in waiters.items()}
        for name in waiters:
            until_queued(client, name, 1)
        assert waited(batch.extend(10)) == dict.fromkeys(names, True)
        assert all(10_000 < client.pttl(name) <= 20_000 for name in names)
        assert waited(batch.reacquire()) == dict.fromkeys(names, True)
        assert all(0 < client.pttl(name) <= 10_000 for name in names)
        assert waited(locker.acquire_many(names, timeout=10)).acquired == []
        assert waited(batch.release()) == dict.fromkeys(names, True)
        for name, waiter in waiters.items():
            assert answers[name].result(PATIENCE_S) is True
            assert waiter.call("owned")
            waiter.release()
    assert client.keys() == []


# The identifier in a token: that of the connection, which its channel has, too


def test_token_has_the_identifier_of_the_channel(scene: Scene) -> None:
    holder, waiter = scene.contenders(2)
    assert holder.call("acquire")  # the first one of the client: before its token, there was no connection
    first = identifier_of(scene.client)
    answers = scene.queue_up([waiter])
    assert b"rlf:" + first in scene.client.pubsub_channels("rlf:*")  # of other tests, too
    holder.release()
    wait_until(answers[0].done, "the lock is handed over")
    assert first == identifier_of(scene.client)
    hand_round([waiter], answers)
    assert holder.call("acquire")
    assert first == identifier_of(scene.client)


def test_connections_one_after_the_other_have_identifiers_that_begin_alike(scene: Scene) -> None:
    lock = scene.contender()
    identifiers = set()
    for _ in range(3):
        assert lock.call("acquire")  # connects again, with the token that was drawn before
        lock.release()
        assert lock.call("acquire")
        identifiers.add(identifier_of(scene.client))
        lock.release()
        scene.client.client_kill_filter(_type="normal", skipme=True)
    assert 3 == len(identifiers)
    assert 1 == len({one[:8] for one in identifiers})


def test_a_waiter_comes_last_though_the_servers_clock_was_set_back(scene: Scene) -> None:
    holder, first, second = scene.holder_and(2)
    answers = [scene.wait(first)]
    token: Any = scene.client.zrange(QUEUE, 0, 0)[0]
    scene.client.zincrby(QUEUE, 1_000_000, token)
    answers.append(scene.wait(second))
    holder.release()
    hand_round([first, second], answers)


# Queues with thousands of waiters that are gone: each script does a limited part of the work


QUEUE, WAITERS = "{name}:rlf:queue", "{name}:rlf:waiters"
_DEAD = 1000
_MOST_PASSES = 50
_MOST_FIELDS = 1000  # that one script looks at: 200, and what shares their places


def queue_up_the_dead(client: redis.Redis, channels: int = 1) -> None:
    """Let waiters whose processes are gone be the first in the queue."""
    tokens = [f"rlf:{number:032x}" for number in range(_DEAD)]
    client.zadd(QUEUE, {token: number for number, token in enumerate(tokens)})
    fields = {f"t{token}": f"1000 publish rlf:gone{number % channels}" for number, token in enumerate(tokens)}
    client.hset(WAITERS, mapping=fields)  # type: ignore[arg-type]


def test_a_release_passes_over_a_limited_number_of_waiters_and_the_client_goes_on(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    answer = waiter.acquire()
    wait_until(lambda: scene.client.zcard(QUEUE) == 1, "it waits")
    queue_up_the_dead(scene.client)
    value = scene.client.get("name")
    assert isinstance(value, bytes)
    assert run_pass_on_script(scene.client, value[:-1]) == 3
    assert scene.client.zcard(QUEUE) == _DEAD + 1 - _MOST_PASSES
    assert scene.client.get("name") == value
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert scene.client.keys() == []


def test_a_lock_that_was_deleted_is_taken_by_a_waiter_behind_many_that_are_gone(scene: Scene) -> None:
    _, waiter = scene.holder_and(1, timeout=None)
    answer = scene.wait(waiter)
    queue_up_the_dead(scene.client, channels=_DEAD)
    scene.client.delete("name")
    assert answer.result(PATIENCE_S) is True
    waiter.release()


def test_a_waiter_that_has_the_lock_leaves_no_field_of_its_token(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    answer = waiter.acquire()
    wait_until(lambda: scene.client.zcard(QUEUE) == 1, "it waits")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert [] == [field for field in scene.client.hgetall(WAITERS) if field[:1] in (b"t", "t")]
    waiter.release()


@pytest.mark.parametrize("is_awake", [False, True], ids=["processes that are gone", "processes that wait"])
def test_a_health_check_drops_old_fields_in_pieces(client: redis.Redis, is_awake: bool) -> None:
    awake_until_ms = int(1000 * time.time()) + (1_000_000 if is_awake else -1)
    client.hset(WAITERS, mapping={f"c{number}": awake_until_ms for number in range(10 * _MOST_FIELDS)})
    client.set("name", "another's")
    token = b"rlf:" + 32 * b"0"
    client.config_resetstat()
    before = client.hlen(WAITERS)
    run_wait_script(client, token)
    assert before + 2 - _MOST_FIELDS < client.hlen(WAITERS) <= before + 2
    while not is_awake and client.hlen(WAITERS) > 103:  # else pytest's own time limit ends the test
        run_wait_script(client, token)
    calls = client.info("commandstats")  # of all fields at once: never
    assert "cmdstat_hgetall" not in calls


@pytest.mark.parametrize("command", ["hscan", "unlink"])
def test_a_lock_is_handed_over_where_the_scripts_may_not_tidy_up(
    server: Server, acl_user: MakeUser, client: redis.Redis, command: str
) -> None:
    options: dict[str, Any] = {"port": server.port, **acl_user(server, f"-{command}").options()}
    token = b"rlf:" + 32 * b"0"
    with redis.Redis(**options) as restricted:
        client.hset(WAITERS, mapping={f"c{number}": 0 for number in range(_MOST_FIELDS)})
        assert run_wait_script(restricted, token) == [1, token + b"+"]
        assert run_pass_on_script(restricted, token) == 1
    assert client.get("name") is None
