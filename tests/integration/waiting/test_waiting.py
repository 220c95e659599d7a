"""Waiting for a contended lock in its queue: what is sent, in which order the lock goes round, what its holder can do.

Rules: whoever must be told waits with an interval that no test lives to see, so that a test hangs where he is not.
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
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast import Lock, Locker
from redislock_fast._procedures.waiters import Waiter
from redislock_fast._procedures.waiting import Waiting
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, capabilities_of, start, wait_until
from tests.support.waiting import (
    CALLERS,
    FAR_S,
    LATE,
    Callers,
    Contender,
    Peer,
    Sent,
    Tasks,
    Threads,
    connections,
    hand_round,
    queue_up,
    sent_by,
    until_queued,
)


@pytest.fixture
def holder(client: redis.Redis) -> Lock:
    """A lock of another client than the waiters'."""
    return Lock(client, "name", **LATE)


# What is sent


def attempt_at(server: Server) -> list[str]:
    """An attempt that fails: Redis 6.2 does not say at once whose the lock is."""
    return ["SET"] if capabilities_of(server).set_get else ["SET", "GET"]


def release_at(server: Server) -> list[str]:
    """A release where nobody waits."""
    return [(capabilities_of(server).release or b"EVALSHA").decode()]


def warm(callers: Callers, server: Server, admin: redis.Redis, client_name: str = "waiter") -> Any:
    """A client that has connected, subscribed and loaded every script."""
    client = callers.client(server.port, client_name=client_name)
    first, *others = callers.contenders(3, client, **LATE)
    assert first.call("acquire")
    answers = queue_up(others, admin)
    first.release()
    hand_round(others, answers)
    return client


def test_an_uncontended_pair_is_two_commands(callers: Callers, server: Server, client: redis.Redis) -> None:
    contender = callers.contender(warm(callers, server, client), **LATE)
    with sent_by(client, "waiter") as sent:
        for _ in range(3):
            assert contender.call("acquire")
            contender.release()
    assert sent.commands == 3 * (["SET", *release_at(server)])


def test_a_lock_handed_over_costs_an_attempt_a_wait_and_a_release(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    waiter = callers.contender(warm(callers, server, client), **LATE)
    holder.acquire()
    with sent_by(client, "waiter") as sent:
        answers = queue_up([waiter], client)
        holder.release()
        hand_round([waiter], answers)
    assert sent.commands[:-1] == [*attempt_at(server), "EVALSHA"]
    assert sent.commands[-1] in RELEASE_COMMANDS


def test_who_knows_that_others_wait_makes_no_attempt(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    waiters = callers.contenders(2, warm(callers, server, client), **LATE)
    holder.acquire()
    first_answer = queue_up(waiters[:1], client)
    waiters[1].call("locked")  # on the same connection, so the reply to the first one's wait has been read
    with sent_by(client, "waiter") as sent:
        second_answer = queue_up(waiters[1:], client)
        holder.release()
        hand_round(waiters, first_answer + second_answer)
    # The second one's wait; the first one's release, which hands over; the second one's release.
    assert sent.commands[:-1] == ["EVALSHA", "EVALSHA"]
    assert sent.commands[-1] in RELEASE_COMMANDS


def handing_on_and_coming_back(
    first: Contender, second: Contender, answers: list[Future[Any]], client: redis.Redis
) -> Sent:
    """What the first sends who hands the lock to the second, waits for it, is handed it back and releases it."""
    with sent_by(client, "waiter") as sent:
        first.release()
        assert answers[0].result(PATIENCE_S)
        answers = queue_up([first], client)
        second.release()
        hand_round([first], answers)
    return sent


def test_who_hands_over_makes_no_attempt_when_he_is_back(callers: Callers, server: Server, client: redis.Redis) -> None:
    first = callers.contender(warm(callers, server, client), **LATE)
    second = callers.contender(callers.client(server.port), **LATE)
    assert first.call("acquire")
    answers = queue_up([second], client)
    sent = handing_on_and_coming_back(first, second, answers, client)
    # A release that hands over, perhaps behind one that does not; a wait; a release.
    assert sent.commands[-3:] == 3 * ["EVALSHA"]
    assert "SET" not in sent.commands


def test_who_was_handed_the_lock_and_hands_it_over_makes_no_attempt_when_he_is_back(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    first = callers.contender(warm(callers, server, client), **LATE)
    second = callers.contender(callers.client(server.port), **LATE)
    assert second.call("acquire")
    answers = queue_up([first], client)
    second.release()
    assert answers[0].result(PATIENCE_S)
    answers = queue_up([second], client)
    sent = handing_on_and_coming_back(first, second, answers, client)
    # The first one's release, wait and release.
    assert sent.commands == 3 * ["EVALSHA"]


def test_an_attempt_is_left_out_only_once_and_a_free_lock_taken_nevertheless(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    first = callers.contender(warm(callers, server, client), **LATE)
    second = callers.contender(callers.client(server.port), **LATE)
    assert first.call("acquire")
    answers = queue_up([second], client)
    first.release()
    assert answers[0].result(PATIENCE_S)
    with sent_by(client, "waiter") as sent:
        assert first.call("acquire", blocking=False) is False
        second.release()
        for _ in range(3):
            assert first.call("acquire")
            assert first.call("owned")
            first.release()
    pair = ["SET", "GET", *release_at(server)]
    no_attempt = ["EVALSHA", "GET", "EVALSHA"]
    assert sent.commands == [*attempt_at(server), *no_attempt, *pair, *pair]
    assert client.keys() == []


def test_who_has_little_time_makes_an_attempt(callers: Callers, server: Server, client: redis.Redis) -> None:
    first = callers.contender(warm(callers, server, client), **LATE)
    second = callers.contender(callers.client(server.port), **LATE)
    assert first.call("acquire")
    answers = queue_up([second], client)
    first.release()
    assert answers[0].result(PATIENCE_S)
    second.release()
    with sent_by(client, "waiter") as sent:
        assert first.call("acquire", blocking_timeout=0.01)
    assert sent.commands == ["SET"]
    first.release()


def release_after(contender: Contender, _: Future[Any]) -> None:
    """To be called when its acquire is done, by whoever has done it."""
    contender.ask("release")


def calls_of_scripts(admin: redis.Redis) -> int:
    calls: int = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


def test_waiters_share_a_connection_and_one_look_an_interval(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    interval_s = 0.05
    count = 500 if isinstance(callers, Tasks) else 50
    names = [f"{what}-{type(callers).__name__}" for what in ("silent", "looking")]
    silent = callers.contenders(count, warm(callers, server, client, names[0]), **LATE)
    looking = callers.contenders(50, warm(callers, server, client, names[1]), timeout=FAR_S, sleep=interval_s)
    holder.acquire()
    answers = [contender.acquire() for contender in silent]
    until_queued(client, "name", count)
    with sent_by(client, names[0]) as none:
        answers += [contender.acquire() for contender in looking]
        until_queued(client, "name", count + 50)
        began = time.monotonic()
        with sent_by(client, names[1]) as looks:
            before = calls_of_scripts(client)
            wait_until(lambda: calls_of_scripts(client) >= before + 5, "5 looks")
            took_s = time.monotonic() - began
    assert none.commands == []
    assert set(looks.commands) == {"EVALSHA"}
    assert 5 <= len(looks.commands) <= took_s / interval_s + 2
    assert [connections(client, name) for name in names] == [1, 1]
    holder.release()
    for answer, contender in zip(answers, silent + looking, strict=True):
        answer.add_done_callback(partial(release_after, contender))
    assert all(answer.result(PATIENCE_S) for answer in answers)
    wait_until(lambda: not client.exists("name"), "the last one has released")


@pytest.mark.slow
def test_who_is_back_after_a_long_wait_puts_his_look_off_for_as_long(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    interval_s = 0.4
    waiter = callers.contender(warm(callers, server, client), timeout=FAR_S, sleep=interval_s)
    newcomer = callers.contender(warm(callers, server, client, "newcomer"), timeout=FAR_S, sleep=interval_s)

    def contend(contenders: list[Contender], looks: int) -> None:
        holder.acquire()
        before = calls_of_scripts(client)
        answers = queue_up(contenders, client)
        wait_until(lambda: calls_of_scripts(client) >= before + len(contenders) + looks, f"{looks} looks")
        holder.release()
        hand_round(contenders, answers)

    contend([waiter], looks=2)
    with sent_by(client, "newcomer") as newcomers, sent_by(client, "waiter") as waiters:
        contend([waiter, newcomer], looks=1)
    # The wait and the release of each, and the newcomer's look, though he came later.
    assert [sent.commands.count("EVALSHA") for sent in (waiters, newcomers)] == [2, 3]


def test_waiting_leaves_nothing_to_the_garbage_collector(callers: Callers, server: Server, client: redis.Redis) -> None:
    name = "of no other test"  # whose garbage may be found here
    holder = Lock(client, name, **LATE)
    waiters = callers.contenders(3, warm(callers, server, client), name, **LATE)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for contenders in (waiters, waiters[:1]):
            holder.acquire()
            answers = queue_up(contenders, client)
            holder.release()
            hand_round(contenders, answers)
        gc.collect()
        left = [
            type(found) for found in gc.garbage if isinstance(found, Waiter | Waiting) and found.key == name.encode()
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []


# Order


def test_the_lock_goes_round_in_the_order_of_arrival(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    clients = [callers.client(server.port) for _ in range(3)]
    waiters = [callers.contender(clients[number % 3], **LATE) for number in range(12)]
    holder.acquire()
    answers = queue_up(waiters, client)
    holder.release()
    hand_round(waiters, answers)
    assert client.keys() == []


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


def test_a_newcomer_does_not_barge(callers: Callers, server: Server, client: redis.Redis, holder: Lock) -> None:
    waiters = callers.contenders(5, callers.client(server.port), **LATE)
    newcomer = callers.contender(callers.client(server.port), **LATE)
    holder.acquire()
    answers = queue_up(waiters, client)
    holder.release()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert newcomer.call("acquire", blocking=False) is False
        assert answer.result(PATIENCE_S) is True
        assert newcomer.call("acquire", blocking=False) is False
        waiter.release()
    assert newcomer.call("acquire", blocking=False) is True


def test_what_stands_there_while_the_lock_goes_round_is_always_a_waiters_token(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    waiters = callers.contenders(20, callers.client(server.port), **LATE)
    holder.acquire()
    answers = queue_up(waiters, client)
    values: list[Any] = [client.get("name")]
    tokens: list[Any] = [holder.local.token]

    def release(waiter: Contender, _: Future[Any]) -> None:
        tokens.append(waiter.lock.local.token)
        waiter.ask("release")

    for waiter, answer in zip(waiters, answers, strict=True):
        answer.add_done_callback(partial(release, waiter))
    holder.release()
    while not answers[-1].done():
        values.append(client.get("name"))
    wait_until(lambda: not client.exists("name"), "the last one has released")
    held = [value for value in values if value is not None]
    assert None not in values[: len(held)], "free in between"
    seen = [token for token, _ in groupby(value.removesuffix(b"+") for value in held)]
    assert seen == [token for token in tokens if token in seen]


# What stands at the key


def test_a_lock_is_marked_from_when_somebody_waits(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    waiter = callers.contender(callers.client(server.port), **LATE)
    holder.acquire()
    assert client.get("name") == holder.local.token
    answers = queue_up([waiter], client)
    assert client.get("name") == holder.local.token + b"+"
    holder.release()
    hand_round([waiter], answers)
    holder.acquire()
    assert client.get("name") == holder.local.token


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
def test_every_operation_on_a_marked_lock(
    callers: Callers, server: Server, client: redis.Redis, acl_user: MakeUser, scripts: bool
) -> None:
    if not scripts and capabilities_of(server).release is None:
        pytest.skip("without scripts, only native commands extend and release")
    user = acl_user(server, *([] if scripts else ["-eval", "-evalsha", "-script"]))
    holder = callers.contender(callers.client(server.port, **user.options()), timeout=10)
    waiter = callers.contender(callers.client(server.port), timeout=FAR_S, sleep=FAR_S if scripts else 0.02)
    assert holder.call("acquire")
    answers = queue_up([waiter], client)
    token = holder.lock.local.token
    for _ in range(2):
        assert (holder.call("locked"), holder.call("owned"), waiter.call("owned")) == (True, True, False)
        assert holder.call("extend", 10) is True
        assert 10_000 < client.pttl("name") <= 20_000
        assert holder.call("extend", 5, replace_ttl=True) is True
        assert 0 < client.pttl("name") <= 5_000
        assert holder.call("reacquire") is True
        assert 5_000 < client.pttl("name") <= 10_000
        assert client.get("name") == token + b"+"
        assert holder.lock.local.token == token
    holder.release()
    hand_round([waiter], answers)
    for verb in ("release", "extend", "reacquire"):
        with pytest.raises(LockError):
            holder.call(verb, *([1] if verb == "extend" else []))


def test_every_operation_on_a_lock_that_was_handed_over(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    first, second = callers.contenders(2, callers.client(server.port), timeout=10, sleep=FAR_S)
    holder.acquire()
    answers = queue_up([first, second], client)
    holder.release()
    assert answers[0].result(PATIENCE_S)
    assert (first.call("locked"), first.call("owned"), second.call("owned")) == (True, True, False)
    assert client.get("name") in (first.lock.local.token, first.lock.local.token + b"+")
    assert first.call("extend", 10) is True
    assert 10_000 < client.pttl("name") <= 20_000
    assert first.call("reacquire") is True
    assert 0 < client.pttl("name") <= 10_000
    hand_round([first, second], answers)
    assert not client.exists("name")


@pytest.mark.parametrize("ttl_s", [None, 3, 7.5])
def test_a_lock_handed_over_has_the_waiters_ttl(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock, ttl_s: float | None
) -> None:
    waiter = callers.contender(callers.client(server.port), timeout=ttl_s, sleep=FAR_S)
    holder.acquire()
    answers = queue_up([waiter], client)
    holder.release()
    assert answers[0].result(PATIENCE_S)
    left_ms = client.pttl("name")
    if ttl_s is None:
        assert left_ms == -1
    else:
        assert 0.7 * ttl_s * 1000 < left_ms <= ttl_s * 1000
    waiter.release()


def test_a_marked_lock_that_was_lost_is_not_owned(callers: Callers, server: Server, client: redis.Redis) -> None:
    """The value of another lock's holder, marked, is never taken for one's own."""
    holder = callers.contender(callers.client(server.port), timeout=10)
    assert holder.call("acquire")
    stolen = holder.lock.local.token[:-1] + b"x+"
    client.set("name", stolen)
    for verb, arguments in (("extend", [1]), ("reacquire", []), ("release", [])):
        with pytest.raises(LockNotOwnedError):
            holder.call(verb, *arguments)
    assert client.get("name") == stolen


def test_another_lock_object_with_the_token_hands_over(
    callers: Callers, server: Server, client: redis.Redis, holder: Lock
) -> None:
    deputy, waiter = callers.contenders(2, callers.client(server.port), **LATE)
    holder.acquire()
    answers = queue_up([waiter], client)
    deputy.lock.local.token = holder.local.token
    assert deputy.call("owned")
    assert deputy.call("extend", 1)
    assert deputy.call("reacquire")
    deputy.release()
    hand_round([waiter], answers)
    with pytest.raises(LockNotOwnedError):
        holder.release()


def test_a_holder_whose_ttl_has_ended_takes_nothing_from_the_next(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), timeout=0.1)
    waiter = callers.contender(callers.client(server.port), **LATE)
    assert holder.call("acquire")
    assert waiter.acquire().result(PATIENCE_S) is True
    for verb, arguments in (("extend", [1]), ("reacquire", []), ("release", [])):
        with pytest.raises(LockNotOwnedError):
            holder.call(verb, *arguments)
    assert waiter.call("owned")
    waiter.release()
    assert client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_who_holds_a_lock_himself_waits_for_its_end(callers: Callers, server: Server, client: redis.Redis) -> None:
    contender = callers.contender(callers.client(server.port), timeout=1.5, sleep=FAR_S)
    assert contender.call("acquire")
    first = contender.lock.local.token
    assert contender.call("acquire", blocking_timeout=0.01) is False
    assert contender.lock.local.token == first
    assert contender.call("owned")
    assert contender.call("acquire") is True
    assert contender.lock.local.token != first
    contender.release()
    assert client.keys() == []


def test_a_lock_is_handed_over_when_the_server_has_no_memory_left(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder, *waiters = callers.contenders(4, callers.client(server.port), **LATE)
    assert holder.call("acquire")
    answers = queue_up(waiters, client)
    client.config_set("maxmemory", 1)
    try:
        holder.release()
        hand_round(waiters, answers)
    finally:
        client.config_set("maxmemory", 0)
    assert client.keys() == []


# Batches


def test_a_batch_hands_over_what_others_wait_for(server: Server, client: redis.Redis, connect: Connect) -> None:
    names = [f"name-{number}" for number in range(20)]
    batch = Locker(connect(server.port)).acquire_many(names, timeout=10)
    with Threads() as threads:
        waiting_client = threads.client(server.port)
        waiters = {name: threads.contender(waiting_client, name, **LATE) for name in names[::2]}
        answers = {name: waiter.acquire() for name, waiter in waiters.items()}
        for name in waiters:
            until_queued(client, name, 1)
        assert batch.extend(10) == dict.fromkeys(names, True)
        assert all(10_000 < client.pttl(name) <= 20_000 for name in names)
        assert batch.reacquire() == dict.fromkeys(names, True)
        assert all(0 < client.pttl(name) <= 10_000 for name in names)
        missed = Locker(connect(server.port)).acquire_many(names, timeout=10)
        assert missed.acquired == []
        assert batch.release() == dict.fromkeys(names, True)
        for name, waiter in waiters.items():
            assert answers[name].result(PATIENCE_S) is True
            assert waiter.call("owned")
            waiter.release()
    assert client.keys() == []
