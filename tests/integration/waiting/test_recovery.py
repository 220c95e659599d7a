"""A waiter gets the lock in the end: dead and frozen processes and servers, lost messages, keys that vanish.

Rules: faults are real: killed and frozen processes and servers, cut connections, lost messages, deleted keys. Where
something must be told, a waiter looks at `FAR_S`, so that a test hangs where it is not; where it must be found by
looking, every few milliseconds.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import LockNotOwnedError
from redis.retry import Retry

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import async_many
from tests.support.helpers import PATIENCE_S, many, start, wait_until
from tests.support.proxy import Proxy
from tests.support.times import clock
from tests.support.waiting import (
    FAR_S,
    HEARD_S,
    LATE,
    Contender,
    Guard,
    Peer,
    Tasks,
    Threads,
    awake_s,
    connections,
    gets_and_frees,
    queue_of,
    queue_up,
    queued,
    until_queued,
)

Callers = Threads | Tasks

LOOK_S = 0.02
"""An interval after which a waiter finds out what nobody tells."""

LOOKS: dict[str, Any] = {"timeout": FAR_S, "sleep": LOOK_S}
"""Settings of a waiter that finds out by its health check."""


def patient(callers_kind: str) -> Any:
    """A client's retry policy that outlasts a server's restart."""
    return many() if callers_kind == "threads" else async_many()


# Processes


def acquire_behind(peer: Peer, waiter: Contender, client: redis.Redis) -> Future[Any]:
    """The waiter's acquire, once it is in the queue behind the peer's."""
    peer.ask("acquire")
    until_queued(client, "name", 1)
    answer = waiter.acquire()
    until_queued(client, "name", 2)
    return answer


@pytest.mark.slow
def test_killed_holders_lock_moves_on_when_its_ttl_ends(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    with Peer(callers_kind, server.port, timeout=1.0) as holder:
        waiter = callers.contender(callers.client(server.port), **LATE)
        waiter.call("locked")  # connects: the lease is short
        assert holder.call("acquire")
        answer = waiter.acquire()
        until_queued(client, "name", 1)
        holder.kill()
    gets_and_frees(waiter, answer, client)


def test_waiter_killed_in_the_queue_is_passed_over(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder, waiter = callers.contenders(2, callers.client(server.port), **LATE)
    assert holder.call("acquire")
    with Peer(callers_kind, server.port, **LATE) as first:
        answer = acquire_behind(first, waiter, client)
        first.kill()
        wait_until(lambda: not connections(client, first.client_name), "the server notices")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert queued(client, "name") == 0
    waiter.release()
    assert client.keys() == []


@pytest.mark.slow
def test_waiter_killed_after_its_grant_keeps_the_lock_for_its_ttl_at_most(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder, waiter = callers.contenders(2, callers.client(server.port), **LOOKS)
    assert holder.call("acquire")
    with Peer(callers_kind, server.port, timeout=1.0, sleep=FAR_S) as first:
        answer = acquire_behind(first, waiter, client)
        first.freeze()
        holder.release()
        assert 0 < client.pttl("name") <= 1000
        first.kill()
    gets_and_frees(waiter, answer, client)


def test_waiter_frozen_for_a_moment_gets_the_lock(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    with Peer(callers_kind, server.port, **LATE) as waiter:
        for is_frozen_at_the_grant in (False, True):
            assert holder.call("acquire")
            waiter.ask("acquire")
            until_queued(client, "name", 1)
            waiter.freeze()
            if not is_frozen_at_the_grant:
                waiter.thaw()
            holder.release()
            waiter.thaw()
            assert waiter.answer() is True
            assert waiter.call("owned")
            waiter.call("release")
            assert client.keys() == []


@pytest.mark.slow
def test_waiter_frozen_for_long_is_passed_over_and_comes_back(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder, waiter = callers.contenders(2, callers.client(server.port), **LOOKS)
    assert holder.call("acquire")
    with Peer(callers_kind, server.port, timeout=FAR_S, sleep=0.01) as sleeper:
        sleeper.ask("acquire")
        until_queued(client, "name", 1)
        sleeper.freeze()
        wait_until(lambda: max(awake_s(client, "name").values()) < 0, "it counts as asleep")
        places = client.zrange(queue_of("name"), 0, -1)
        answer = waiter.acquire()
        wait_until(lambda: client.zrange(queue_of("name"), 0, 0) != places, "the waiter looks, and stands first")
        assert not answer.done()
        holder.release()
        assert answer.result(PATIENCE_S) is True
        sleeper.thaw()
        until_queued(client, "name", 1)
        waiter.release()
        assert sleeper.answer() is True
        sleeper.call("release")
    assert client.keys() == []


@pytest.mark.slow
def test_waiter_that_slept_through_its_lease_does_not_hold(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder, waiter = callers.contenders(2, callers.client(server.port), **LOOKS)
    assert holder.call("acquire")
    with Peer(callers_kind, server.port, timeout=1.0, sleep=FAR_S) as sleeper:
        answer = acquire_behind(sleeper, waiter, client)
        sleeper.freeze()
        holder.release()  # hands over to the sleeper
        assert answer.result(PATIENCE_S) is True
        sleeper.thaw()
        until_queued(client, "name", 1)  # it has found out
        assert waiter.call("owned")
        waiter.release()
        assert sleeper.answer() is True
        assert sleeper.call("owned")
        sleeper.call("release")
    assert client.keys() == []


# Connections and messages


def kill_connections(client: redis.Redis, client_name: str) -> None:
    """Have the server close a client's connections."""
    for entry in client.client_list():
        if entry["name"] == client_name:
            client.client_kill_filter(_id=entry["id"])


@pytest.mark.parametrize("is_back", [True, False], ids=["released later", "released at once"])
def test_connection_killed_in_the_queue(callers: Callers, server: Server, client: redis.Redis, is_back: bool) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    waiter = callers.contender(callers.client(server.port, client_name="waiter"), **LATE)
    for _ in range(5):
        assert holder.call("acquire")
        answer = waiter.acquire()
        until_queued(client, "name", 1)
        heard = awake_s(client, "name").keys()
        kill_connections(client, "waiter")
        if is_back:
            wait_until(lambda: awake_s(client, "name").keys() - heard, "it listens on a new connection")  # noqa: B023
        holder.release()
        gets_and_frees(waiter, answer, client)


def test_connection_killed_with_many_in_the_queue(callers: Callers, server: Server, client: redis.Redis) -> None:
    guard = Guard()
    holder = callers.contender(callers.client(server.port), **LATE)
    waiters = callers.contenders(20, callers.client(server.port, client_name="waiters"), **LATE)
    assert holder.call("acquire")
    answers = [waiter.use(guard) for waiter in waiters]
    until_queued(client, "name", 20)
    kill_connections(client, "waiters")
    holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 20
    assert (guard.entries, guard.overlaps) == (20, 0)
    assert client.keys() == []


def test_connection_cut_with_the_grant_on_its_way(
    callers: Callers, proxy: Proxy, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    waiter = callers.contender(callers.client(proxy.port), **LATE)
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    proxy.hold()
    holder.release()
    assert queued(client, "name") == 0
    assert not answer.done()
    proxy.cut()
    proxy.resume()
    gets_and_frees(waiter, answer, client)


@pytest.mark.slow
@pytest.mark.parametrize("is_granted", [False, True], ids=["waits", "granted"])
def test_time_that_is_up_where_the_request_to_leave_is_lost(
    callers: Callers, proxy: Proxy, server: Server, client: redis.Redis, is_granted: bool
) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    assert holder.call("acquire")
    waiter = callers.contender(callers.client(proxy.port), **LATE)
    (answer,) = queue_up([waiter], client, blocking_timeout=HEARD_S)
    proxy.wait_for_quiet()  # it has heard that another owner has the lock
    proxy.lose_messages()
    proxy.stall()
    if is_granted:
        holder.release()
    assert answer.result(PATIENCE_S) is False
    proxy.cut()
    wait_until(lambda: queued(client, "name") == 0, "the place in the queue is given up")
    if not is_granted:
        holder.release()
    wait_until(lambda: not client.keys(), "nothing is left")


def test_lost_grant_is_found_by_looking(callers: Callers, proxy: Proxy, server: Server, client: redis.Redis) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    waiter = callers.contender(callers.client(proxy.port), **LOOKS)
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    proxy.lose_messages()
    holder.release()
    gets_and_frees(waiter, answer, client)
    assert proxy.lost == 1


def test_where_all_grants_are_lost_everybody_gets_the_lock_by_looking(
    callers: Callers, proxy: Proxy, server: Server, client: redis.Redis
) -> None:
    guard = Guard()
    holder = callers.contender(callers.client(server.port), **LATE)
    waiters = callers.contenders(8, callers.client(proxy.port), **LOOKS)
    assert holder.call("acquire")
    answers = [waiter.use(guard) for waiter in waiters]
    until_queued(client, "name", 8)
    proxy.lose_messages()
    holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 8
    assert (guard.entries, guard.overlaps, proxy.lost) == (8, 0, 8)
    assert client.keys() == []


# Keys


@pytest.mark.parametrize("deleted", ["lock", "queue"])
def test_keys_deleted_by_an_operator(callers: Callers, server: Server, client: redis.Redis, deleted: str) -> None:
    guard = Guard()
    holder = callers.contender(callers.client(server.port), **LATE)
    assert holder.call("acquire")
    answers = [waiter.use(guard) for waiter in callers.contenders(5, callers.client(server.port), **LOOKS)]
    until_queued(client, "name", 5)
    keys = {b"name"} if deleted == "lock" else set(client.keys()) - {b"name"}
    client.delete(*keys)
    if deleted == "queue":
        holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    if deleted == "lock":
        with pytest.raises(LockNotOwnedError):
            holder.release()
    assert client.keys() == []


@pytest.mark.slow
def test_lock_deleted_by_an_operator_is_free_for_others_when_the_old_lease_ends(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), timeout=1.0)
    waiter = callers.contender(callers.client(server.port), **LATE)
    waiter.call("locked")  # connects: the lease is short
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    client.delete("name")
    assert answer.result(PATIENCE_S) is True
    with pytest.raises(LockNotOwnedError):
        holder.release()
    assert waiter.call("owned")


def test_flushed_database_forgets_nobody(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), **LOOKS)
    waiters = callers.contenders(5, callers.client(server.port), **LOOKS)
    with Peer(callers_kind, server.port, **LOOKS) as peer:
        assert holder.call("acquire")
        peer.ask("acquire")
        answers = [waiter.acquire() for waiter in waiters]
        until_queued(client, "name", 6)
        client.flushall()
        for held in range(1, 7):  # each until the database is flushed again
            wait_until(lambda: sum(answer.done() for answer in answers) + peer.has_answered == held, "the next holds")  # noqa: B023
            client.flushall()
        assert peer.answer() is True
        assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 5
        with pytest.raises(LockNotOwnedError):
            holder.release()
    assert client.keys() == []


def test_flushed_database_again_and_again(callers: Callers, server: Server, client: redis.Redis) -> None:
    guard = Guard()
    settings = {**LOOKS, "raise_on_release_error": False}
    contenders = callers.contenders(8, callers.client(server.port), **settings)
    answers = [contender.use(guard, hold_s=0.005) for contender in contenders]
    while not all(answer.done() for answer in answers):
        client.flushall()
    for answer in answers:
        error = answer.exception()
        assert error is None or isinstance(error, LockNotOwnedError)
    assert guard.entries == 8


def test_flushed_scripts_at_any_time(callers: Callers, server: Server, client: redis.Redis) -> None:
    guard = Guard()
    finished = threading.Event()

    def flush() -> None:
        while not finished.is_set():
            client.script_flush()

    flusher = start(flush)
    try:
        for _ in range(5):
            contenders = callers.contenders(6, callers.client(server.port), **LATE)
            answers = [contender.use(guard, hold_s=0.001) for contender in contenders]
            assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 6
    finally:
        finished.set()
    flusher.result(PATIENCE_S)
    assert (guard.entries, guard.overlaps) == (30, 0)
    assert client.keys() == []


# Leases


def test_lease_that_ends_with_many_in_the_queue(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    guard = Guard()
    holder = callers.contender(callers.client(server.port), timeout=0.1)
    assert holder.call("acquire")
    with Peer(callers_kind, server.port, **LATE) as peer:
        answers = [waiter.use(guard) for waiter in callers.contenders(5, callers.client(server.port), **LATE)]
        peer.ask("acquire")
        assert peer.answer() is True
        peer.call("release")
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    assert client.keys() == []


@pytest.mark.parametrize("holders_timeout", [FAR_S, None])
@pytest.mark.parametrize(("timeout", "pttl_ms"), [(20, range(15_000, 20_001)), (None, [-1])], ids=["ttl", "no ttl"])
def test_lock_that_is_handed_over_has_the_ttl_of_its_new_holder(
    callers: Callers,
    server: Server,
    client: redis.Redis,
    holders_timeout: float | None,
    timeout: float | None,
    pttl_ms: Any,
) -> None:
    holder = callers.contender(callers.client(server.port), timeout=holders_timeout)
    waiter = callers.contender(callers.client(server.port), timeout=timeout, sleep=FAR_S)
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert client.pttl("name") in pttl_ms
    waiter.release()
    assert client.keys() == []


def test_lock_that_was_waited_for_longer_than_its_ttl_is_fresh(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    ttl_ms = 600
    holder = callers.contender(callers.client(server.port), **LATE)
    waiter = callers.contender(callers.client(server.port), timeout=ttl_ms / 1000, sleep=FAR_S)
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    wait_until(lambda: client.pttl("name") < 1000 * FAR_S - ttl_ms, "it has waited for so long")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    believed_until = waiter.lock._held().expires_at(waiter.lock.local.token.removesuffix(b"+"))
    left_ms, now = client.pttl("name"), clock()
    # The lease is renewed, counts from before the server has done that, and is good for a release.
    assert left_ms > 0.75 * ttl_ms
    assert 0.75 * ttl_ms < 1000 * (believed_until - now) <= left_ms + 1
    waiter.release()
    assert client.keys() == []


# The server restarts, is paused, or stays away


@pytest.mark.parametrize("blocking_timeout", [None, FAR_S])
def test_server_restarted_with_waiters(
    callers_kind: str, callers: Callers, mortal_server: Server, connect: Connect, blocking_timeout: float | None
) -> None:
    guard = Guard()
    client = connect(mortal_server.port, retry=Retry(ConstantBackoff(0.02), 400))
    settings = {**LATE, "blocking_timeout": blocking_timeout}
    holder = callers.contender(callers.client(mortal_server.port, retry=patient(callers_kind)), **LATE)
    waiters = callers.contenders(5, callers.client(mortal_server.port, retry=patient(callers_kind)), **settings)
    assert holder.call("acquire")
    answers = [waiter.use(guard) for waiter in waiters]
    until_queued(client, "name", 5)
    mortal_server.kill()
    mortal_server.start()
    assert [answer.result(2 * PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    with pytest.raises(LockNotOwnedError):
        holder.release()
    assert client.keys() == []


def test_server_that_stays_away_raises_connection_error(
    callers_kind: str, callers: Callers, mortal_server: Server, connect: Connect
) -> None:
    once = (Retry if callers_kind == "threads" else AsyncRetry)(NoBackoff(), 0)
    holder, *waiters = callers.contenders(4, callers.client(mortal_server.port, retry=once), **LATE)
    assert holder.call("acquire")
    answers = [waiter.acquire() for waiter in waiters]
    until_queued(connect(mortal_server.port), "name", 3)
    mortal_server.kill()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert isinstance(answer.exception(PATIENCE_S), redis.ConnectionError)
        assert waiter.lock.local.token is None
    mortal_server.start()
    assert waiters[0].call("acquire")


def test_connection_that_another_finds_broken_while_somebody_waits(
    callers_kind: str, callers: Callers, server: Server, client: redis.Redis
) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    with Proxy(server.port) as proxy:
        ours = callers.client(proxy.port, retry=patient(callers_kind))
        waiter, other = callers.contenders(2, ours, **LATE)
        assert holder.call("acquire")
        answer = waiter.acquire()
        until_queued(client, "name", 1)
        proxy.hold()
        proxy.requests.clear()
        asked = other.ask("locked")
        wait_until(lambda: proxy.requests["GET"], "its request is under way")
        proxy.refuse()
        proxy.cut()
        proxy.resume()
        proxy.accept()
        assert asked.result(PATIENCE_S) is True
        until_queued(client, "name", 1)
        holder.release()
        assert answer.result(PATIENCE_S) is True
        waiter.release()
    assert client.keys() == []


def test_acquire_that_has_less_time_than_another_needs_to_connect(callers: Callers, server: Server) -> None:
    with Proxy(server.port) as proxy:
        patient, other = callers.contenders(2, callers.client(proxy.port), **LATE)
        proxy.hold()
        answer = patient.ask("locked")
        wait_until(lambda: proxy.requests, "it connects")
        with pytest.raises(redis.TimeoutError):
            other.call("acquire", blocking_timeout=0.05)
        proxy.resume()
        assert answer.result(PATIENCE_S) is False


@pytest.mark.parametrize("mode", ["ALL", "WRITE"])
def test_paused_server(callers: Callers, mortal_server: Server, connect: Connect, mode: str) -> None:
    guard = Guard()
    client = connect(mortal_server.port)
    contenders = callers.contenders(8, callers.client(mortal_server.port), **LOOKS)
    answers = [contender.use(guard, hold_s=0.01) for contender in contenders]
    wait_until(lambda: guard.entries, "somebody holds")
    client.client_pause(150, all=mode == "ALL")
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 8
    assert (guard.entries, guard.overlaps) == (8, 0)
    assert client.keys() == []


@pytest.mark.slow
def test_server_paused_for_longer_than_a_lease(callers: Callers, mortal_server: Server, connect: Connect) -> None:
    client = connect(mortal_server.port)
    holder = callers.contender(callers.client(mortal_server.port), timeout=1.0)
    waiter = callers.contender(callers.client(mortal_server.port), **LATE)
    waiter.call("locked")  # connects: the lease is short
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(client, "name", 1)
    client.client_pause(1500, all=False)
    assert answer.result(PATIENCE_S) is True
    assert waiter.call("owned")
    with pytest.raises(LockNotOwnedError):
        holder.release()
    waiter.release()
    assert client.keys() == []
