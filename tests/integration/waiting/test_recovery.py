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
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import LockNotOwnedError

from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.proxy import Proxy
from tests.support.scenes import Scene
from tests.support.times import clock
from tests.support.waiting import (
    FAR_S,
    HEARD_S,
    LATE,
    Contender,
    Guard,
    Peer,
    awake_s,
    connections,
    gets_and_frees,
    queue_of,
)

LOOK_S = 0.02
"""An interval after which a waiter finds out what nobody tells."""

LOOKS: dict[str, Any] = {"timeout": FAR_S, "sleep": LOOK_S}
"""Settings of a waiter that finds out by its health check."""


def patient(scene: Scene) -> Any:
    """A client that outlasts a server's restart."""
    return scene.connect(retry=scene.callers.retry(ConstantBackoff(0.05), 400))


# Processes


def acquire_behind(peer: Peer, waiter: Contender, scene: Scene) -> Future[Any]:
    """The waiter's acquire, once it is in the queue behind the peer's."""
    peer.ask("acquire")
    scene.until_queued(1)
    return scene.wait(waiter)


@pytest.mark.slow
def test_killed_holders_lock_moves_on_when_its_ttl_ends(scene: Scene) -> None:
    with Peer(scene.callers.kind, scene.server.port, timeout=1.0) as holder:
        waiter = scene.contender()
        waiter.call("locked")  # connects: the lease is short
        assert holder.call("acquire")
        answer = scene.wait(waiter)
        holder.kill()
    gets_and_frees(waiter, answer, scene.client)


def test_waiter_killed_in_the_queue_is_passed_over(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    with Peer(scene.callers.kind, scene.server.port, **LATE) as first:
        answer = acquire_behind(first, waiter, scene)
        first.kill()
        wait_until(lambda: not connections(scene.client, first.client_name), "the server notices")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert scene.queued() == 0
    waiter.release()
    assert scene.client.keys() == []


@pytest.mark.slow
def test_waiter_killed_after_its_grant_keeps_the_lock_for_its_ttl_at_most(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1, **LOOKS)
    with Peer(scene.callers.kind, scene.server.port, timeout=1.0, sleep=FAR_S) as first:
        answer = acquire_behind(first, waiter, scene)
        first.freeze()
        holder.release()
        assert 0 < scene.client.pttl("name") <= 1000
        first.kill()
    gets_and_frees(waiter, answer, scene.client)


def test_waiter_frozen_for_a_moment_gets_the_lock(scene: Scene) -> None:
    holder = scene.contender()
    with Peer(scene.callers.kind, scene.server.port, **LATE) as waiter:
        for is_frozen_at_the_grant in (False, True):
            assert holder.call("acquire")
            waiter.ask("acquire")
            scene.until_queued(1)
            waiter.freeze()
            if not is_frozen_at_the_grant:
                waiter.thaw()
            holder.release()
            waiter.thaw()
            assert waiter.answer() is True
            assert waiter.call("owned")
            waiter.call("release")
            assert scene.client.keys() == []


@pytest.mark.slow
def test_waiter_frozen_for_long_is_passed_over_and_comes_back(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1, **LOOKS)
    with Peer(scene.callers.kind, scene.server.port, timeout=FAR_S, sleep=0.01) as sleeper:
        sleeper.ask("acquire")
        scene.until_queued(1)
        sleeper.freeze()
        wait_until(lambda: max(awake_s(scene.client, "name").values()) < 0, "it counts as asleep")
        places = scene.client.zrange(queue_of("name"), 0, -1)
        answer = waiter.acquire()
        wait_until(lambda: scene.client.zrange(queue_of("name"), 0, 0) != places, "the waiter looks, and stands first")
        assert not answer.done()
        holder.release()
        assert answer.result(PATIENCE_S) is True
        sleeper.thaw()
        scene.until_queued(1)
        waiter.release()
        assert sleeper.answer() is True
        sleeper.call("release")
    assert scene.client.keys() == []


@pytest.mark.slow
def test_waiter_that_slept_through_its_lease_does_not_hold(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1, **LOOKS)
    with Peer(scene.callers.kind, scene.server.port, timeout=1.0, sleep=FAR_S) as sleeper:
        answer = acquire_behind(sleeper, waiter, scene)
        sleeper.freeze()
        holder.release()  # hands over to the sleeper
        assert answer.result(PATIENCE_S) is True
        sleeper.thaw()
        scene.until_queued(1)  # it has found out
        assert waiter.call("owned")
        waiter.release()
        assert sleeper.answer() is True
        assert sleeper.call("owned")
        sleeper.call("release")
    assert scene.client.keys() == []


# Connections and messages


def kill_connections(client: redis.Redis, client_name: str) -> None:
    """Have the server close a client's connections."""
    for entry in client.client_list():
        if entry["name"] == client_name:
            client.client_kill_filter(_id=entry["id"])


@pytest.mark.parametrize("is_back", [True, False], ids=["released later", "released at once"])
def test_connection_killed_in_the_queue(scene: Scene, is_back: bool) -> None:
    holder = scene.contender()
    waiter = scene.contender(scene.connect(client_name="waiter"))
    for _ in range(5):
        assert holder.call("acquire")
        answer = scene.wait(waiter)
        heard = awake_s(scene.client, "name").keys()
        kill_connections(scene.client, "waiter")
        if is_back:
            wait_until(lambda: awake_s(scene.client, "name").keys() - heard, "it listens on a new connection")  # noqa: B023
        holder.release()
        gets_and_frees(waiter, answer, scene.client)


def test_connection_killed_with_many_in_the_queue(scene: Scene) -> None:
    guard = Guard()
    holder = scene.holder()
    waiters = scene.contenders(20, scene.connect(client_name="waiters"))
    answers = [waiter.use(guard) for waiter in waiters]
    scene.until_queued(20)
    kill_connections(scene.client, "waiters")
    holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 20
    assert (guard.entries, guard.overlaps) == (20, 0)
    assert scene.client.keys() == []


def test_connection_cut_with_the_grant_on_its_way(scene: Scene, proxy: Proxy) -> None:
    holder = scene.holder()
    waiter = scene.contender(scene.connect(proxy.port))
    answer = scene.wait(waiter)
    proxy.hold()
    holder.release()
    assert scene.queued() == 0
    assert not answer.done()
    proxy.cut()
    proxy.resume()
    gets_and_frees(waiter, answer, scene.client)


@pytest.mark.slow
@pytest.mark.parametrize("is_granted", [False, True], ids=["waits", "granted"])
def test_time_that_is_up_where_the_request_to_leave_is_lost(scene: Scene, proxy: Proxy, is_granted: bool) -> None:
    holder = scene.holder()
    waiter = scene.contender(scene.connect(proxy.port))
    answer = scene.wait(waiter, blocking_timeout=HEARD_S)
    proxy.wait_for_quiet()  # it has heard that another owner has the lock
    proxy.lose_messages()
    proxy.stall()
    if is_granted:
        holder.release()
    assert answer.result(PATIENCE_S) is False
    proxy.cut()
    wait_until(lambda: scene.queued() == 0, "the place in the queue is given up")
    if not is_granted:
        holder.release()
    wait_until(lambda: not scene.client.keys(), "nothing is left")


def test_lost_grant_is_found_by_looking(scene: Scene, proxy: Proxy) -> None:
    holder = scene.holder()
    waiter = scene.contender(scene.connect(proxy.port), **LOOKS)
    answer = scene.wait(waiter)
    proxy.lose_messages()
    holder.release()
    gets_and_frees(waiter, answer, scene.client)
    assert proxy.lost == 1


def test_where_all_grants_are_lost_everybody_gets_the_lock_by_looking(scene: Scene, proxy: Proxy) -> None:
    guard = Guard()
    holder = scene.holder()
    waiters = scene.contenders(8, scene.connect(proxy.port), **LOOKS)
    answers = [waiter.use(guard) for waiter in waiters]
    scene.until_queued(8)
    proxy.lose_messages()
    holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 8
    assert (guard.entries, guard.overlaps, proxy.lost) == (8, 0, 8)
    assert scene.client.keys() == []


# Keys


@pytest.mark.parametrize("deleted", ["lock", "queue"])
def test_keys_deleted_by_an_operator(scene: Scene, deleted: str) -> None:
    guard = Guard()
    holder = scene.holder()
    answers = [waiter.use(guard) for waiter in scene.contenders(5, **LOOKS)]
    scene.until_queued(5)
    keys = {b"name"} if deleted == "lock" else set(scene.client.keys()) - {b"name"}
    scene.client.delete(*keys)
    if deleted == "queue":
        holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    if deleted == "lock":
        with pytest.raises(LockNotOwnedError):
            holder.release()
    assert scene.client.keys() == []


@pytest.mark.slow
def test_lock_deleted_by_an_operator_is_free_for_others_when_the_old_lease_ends(scene: Scene) -> None:
    holder = scene.contender(timeout=1.0)
    waiter = scene.contender()
    waiter.call("locked")  # connects: the lease is short
    assert holder.call("acquire")
    answer = scene.wait(waiter)
    scene.client.delete("name")
    assert answer.result(PATIENCE_S) is True
    with pytest.raises(LockNotOwnedError):
        holder.release()
    assert waiter.call("owned")


def test_flushed_database_forgets_nobody(scene: Scene) -> None:
    holder = scene.contender(**LOOKS)
    waiters = scene.contenders(5, **LOOKS)
    with Peer(scene.callers.kind, scene.server.port, **LOOKS) as peer:
        assert holder.call("acquire")
        peer.ask("acquire")
        answers = [waiter.acquire() for waiter in waiters]
        scene.until_queued(6)
        scene.client.flushall()
        for held in range(1, 7):  # each until the database is flushed again
            wait_until(lambda: sum(answer.done() for answer in answers) + peer.has_answered == held, "the next holds")  # noqa: B023
            scene.client.flushall()
        assert peer.answer() is True
        assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 5
        with pytest.raises(LockNotOwnedError):
            holder.release()
    assert scene.client.keys() == []


def test_flushed_database_again_and_again(scene: Scene) -> None:
    guard = Guard()
    settings = {**LOOKS, "raise_on_release_error": False}
    contenders = scene.contenders(8, **settings)
    answers = [contender.use(guard, hold_s=0.005) for contender in contenders]
    while not all(answer.done() for answer in answers):
        scene.client.flushall()
    for answer in answers:
        error = answer.exception()
        assert error is None or isinstance(error, LockNotOwnedError)
    assert guard.entries == 8


def test_flushed_scripts_at_any_time(scene: Scene) -> None:
    guard = Guard()
    finished = threading.Event()

    def flush() -> None:
        while not finished.is_set():
            scene.client.script_flush()

    flusher = start(flush)
    try:
        for _ in range(5):
            contenders = scene.contenders(6)
            answers = [contender.use(guard, hold_s=0.001) for contender in contenders]
            assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 6
    finally:
        finished.set()
    flusher.result(PATIENCE_S)
    assert (guard.entries, guard.overlaps) == (30, 0)
    assert scene.client.keys() == []


# Leases


def test_lease_that_ends_with_many_in_the_queue(scene: Scene) -> None:
    guard = Guard()
    _holder = scene.holder(timeout=0.1)
    with Peer(scene.callers.kind, scene.server.port, **LATE) as peer:
        answers = [waiter.use(guard) for waiter in scene.contenders(5)]
        peer.ask("acquire")
        assert peer.answer() is True
        peer.call("release")
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    assert scene.client.keys() == []


def test_lock_that_was_waited_for_longer_than_its_ttl_is_fresh(scene: Scene) -> None:
    ttl_ms = 600
    holder = scene.holder()
    waiter = scene.contender(timeout=ttl_ms / 1000, sleep=FAR_S)
    answer = scene.wait(waiter)
    wait_until(lambda: scene.client.pttl("name") < 1000 * FAR_S - ttl_ms, "it has waited for so long")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    believed_until = waiter.lock._held().expires_at(waiter.lock.local.token.removesuffix(b"+"))
    left_ms, now = scene.client.pttl("name"), clock()
    # The lease is renewed, counts from before the server has done that, and is good for a release.
    assert left_ms > 0.75 * ttl_ms
    assert 0.75 * ttl_ms < 1000 * (believed_until - now) <= left_ms + 1
    waiter.release()
    assert scene.client.keys() == []


# The server restarts, is paused, or stays away


@pytest.mark.parametrize("blocking_timeout", [None, FAR_S])
def test_server_restarted_with_waiters(mortal_scene: Scene, blocking_timeout: float | None) -> None:
    guard = Guard()
    holder = mortal_scene.holder(patient(mortal_scene))
    ours = patient(mortal_scene)
    waiters = mortal_scene.contenders(5, ours, **LATE, blocking_timeout=blocking_timeout)
    answers = [waiter.use(guard) for waiter in waiters]
    mortal_scene.until_queued(5)
    mortal_scene.server.kill()
    mortal_scene.server.start()
    assert [answer.result(2 * PATIENCE_S) for answer in answers] == [True] * 5
    assert (guard.entries, guard.overlaps) == (5, 0)
    with pytest.raises(LockNotOwnedError):
        holder.release()
    assert mortal_scene.client.keys() == []


def test_server_that_stays_away_raises_connection_error(mortal_scene: Scene) -> None:
    once = mortal_scene.callers.retry(NoBackoff(), 0)
    _, *waiters = mortal_scene.holder_and(3, mortal_scene.connect(retry=once))
    answers = [waiter.acquire() for waiter in waiters]
    mortal_scene.until_queued(3)
    mortal_scene.server.kill()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert isinstance(answer.exception(PATIENCE_S), redis.ConnectionError)
        assert waiter.lock.local.token is None
    mortal_scene.server.start()
    assert waiters[0].call("acquire")


def test_connection_that_another_finds_broken_while_somebody_waits(scene: Scene) -> None:
    holder = scene.contender()
    with Proxy(scene.server.port) as proxy:
        ours = scene.connect(proxy.port, retry=scene.callers.retry(ConstantBackoff(0.05), 400))
        waiter, other = scene.contenders(2, ours)
        assert holder.call("acquire")
        answer = scene.wait(waiter)
        proxy.hold()
        proxy.requests.clear()
        asked = other.ask("locked")
        wait_until(lambda: proxy.requests["GET"], "its request is under way")
        proxy.refuse()
        proxy.cut()
        proxy.resume()
        proxy.accept()
        assert asked.result(PATIENCE_S) is True
        scene.until_queued(1)
        holder.release()
        assert answer.result(PATIENCE_S) is True
        waiter.release()
    assert scene.client.keys() == []


def test_acquire_that_has_less_time_than_another_needs_to_connect(scene: Scene) -> None:
    with Proxy(scene.server.port) as proxy:
        patient, other = scene.contenders(2, scene.connect(proxy.port))
        proxy.hold()
        answer = patient.ask("locked")
        wait_until(lambda: proxy.requests, "it connects")
        with pytest.raises(redis.TimeoutError):
            other.call("acquire", blocking_timeout=0.05)
        proxy.resume()
        assert answer.result(PATIENCE_S) is False


@pytest.mark.parametrize("mode", ["ALL", "WRITE"])
def test_paused_server(mortal_scene: Scene, mode: str) -> None:
    guard = Guard()
    contenders = mortal_scene.contenders(8, **LOOKS)
    answers = [contender.use(guard, hold_s=0.01) for contender in contenders]
    wait_until(lambda: guard.entries, "somebody holds")
    mortal_scene.client.client_pause(150, all=mode == "ALL")
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * 8
    assert (guard.entries, guard.overlaps) == (8, 0)
    assert mortal_scene.client.keys() == []


@pytest.mark.slow
def test_server_paused_for_longer_than_a_lease(mortal_scene: Scene) -> None:
    waiter = mortal_scene.contender()
    waiter.call("locked")  # connects: the lease is short
    holder = mortal_scene.holder(timeout=1.0)
    answer = mortal_scene.wait(waiter)
    mortal_scene.client.client_pause(1500, all=False)
    assert answer.result(PATIENCE_S) is True
    assert waiter.call("owned")
    with pytest.raises(LockNotOwnedError):
        holder.release()
    waiter.release()
    assert mortal_scene.client.keys() == []
