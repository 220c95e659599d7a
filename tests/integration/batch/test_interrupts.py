"""Batches of locks that are interrupted, by Ctrl-C or by an error that a signal handler raises; and their cleanup.

Rules: as in test_faults; an interrupt before a given line is raised by a trace function.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.batch.test_faults import MANY, nothing_left
from tests.integration.lock.test_interrupts import LoopWorld, ThreadWorld, World
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.holding import until_passed
from tests.support.interrupts import each_line, interrupt_kind, interrupt_when, interrupted_at, skip_what_a_loop_takes
from tests.support.proxy import Proxy
from tests.support.transports import acquire_round, clean_up, clean_up_now, is_idle, stop_cleanup
from tests.support.waiting import FAR_S

__all__ = ["interrupt_kind"]

untraced = pytest.mark.skipif(sys.gettrace() is not None, reason="another tracer is set")


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_interrupted_acquire_leaves_nothing(
    spare_server: Callable[..., Server], connect: Connect, all_or_nothing: bool
) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        client = connect(proxy.port, socket_timeout=60)
        locker = redislock_fast.Locker(client)
        locker.acquire_many(["warm-up"]).release()
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("SET", 1001))
        with pytest.raises(KeyboardInterrupt):
            locker.acquire_many(MANY, all_or_nothing=all_or_nothing)
        server.signal(signal.SIGCONT)
        nothing_left(client)
        assert locker.acquire_many(MANY).missed == []


def test_interrupted_wait_leaves_nothing(valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    admin.set("b", "other")
    locker = redislock_fast.Locker(connect(valkey.port))
    interrupt_when(lambda: wait_until(lambda: admin.exists("a", "c") == 2, "the waiter holds what is free"))
    with pytest.raises(KeyboardInterrupt):
        locker.acquire_many(["a", "b", "c"], None, None, sleep=60)
    nothing_left(admin, b"b")


def test_interrupted_release_goes_on(spare_server: Callable[..., Server], connect: Connect) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        batch = redislock_fast.Locker(connect(proxy.port, socket_timeout=60)).acquire_many(MANY, 60)
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("DELIFEQ", 1000))
        with pytest.raises(KeyboardInterrupt):
            batch.release()
        server.signal(signal.SIGCONT)
        nothing_left(connect(server.port))


def test_interrupted_release_that_is_repeated_is_a_success(
    spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        batch = redislock_fast.Locker(connect(proxy.port, socket_timeout=60)).acquire_many(MANY, 60)
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("DELIFEQ", 1000))
        with pytest.raises(KeyboardInterrupt):
            batch.release()
        server.signal(signal.SIGCONT)
        assert dict.fromkeys(MANY, True) == batch.release()


@pytest.mark.slow
def test_interrupted_release_of_a_renewed_batch_is_no_loss(
    spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    admin, losses, ttl_s = connect(server.port), [], 3.0
    with Proxy(server.port) as proxy:
        locker = redislock_fast.Locker(connect(proxy.port, socket_timeout=60))
        batch = locker.acquire_many(MANY, ttl_s, auto_renew=True, on_lost=lambda *loss: losses.append(loss))
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("DELIFEQ", 1000))
        with pytest.raises(KeyboardInterrupt):
            batch.release()
        server.signal(signal.SIGCONT)
        nothing_left(admin)
        until_passed(admin, ttl_s)
    assert losses == []


@untraced
@pytest.mark.usefixtures("interrupt_kind")
@pytest.mark.parametrize(
    "settings", [{}, {"all_or_nothing": True}, {"auto_renew": True}], ids=["what is free", "all or nothing", "renewed"]
)
def test_acquire_interrupted_at_any_line_leaves_nothing(
    valkey: Server, connect: Connect, settings: dict[str, Any]
) -> None:
    client, admin = connect(valkey.port), connect(valkey.port)
    locker = redislock_fast.Locker(client)
    locker.acquire_many(["warm-up"]).release()
    leaks: list[str] = []
    number = 0
    held: list[redislock_fast.Batch] = []

    def acquire() -> None:
        held.append(locker.acquire_many(list("abc"), 60, None, sleep=0.005, **settings))

    while True:
        number += 1
        admin.set("b", "other", px=3)
        place = interrupted_at(number, acquire)
        if not place:
            break
        wait_until(lambda: is_idle(client), "what is known of is undone")
        left = [name for name in "abc" if admin.get(name) not in (None, b"other")]
        if left or " raises " in place:
            leaks.append(f"{place}: {left}")
        admin.flushall()
    held.pop().release()
    assert number > 50
    assert (leaks, held) == ([], [])


@untraced
@pytest.mark.usefixtures("interrupt_kind")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("kind", [ThreadWorld, LoopWorld], ids=["threads", "tasks"])
def test_release_interrupted_at_any_line_goes_on(valkey: Server, connect: Connect, kind: type[World]) -> None:
    if kind is LoopWorld:
        skip_what_a_loop_takes()
    admin = connect(valkey.port)
    with contextlib.closing(kind([valkey])) as world:
        locker = world.locker()
        for strike in each_line(20):
            batch = world.do(lambda: locker.acquire_many(list("abc"), 60))
            place = strike(lambda: world.do(batch.release), "asyncio/locker.py")  # noqa: B023
            world.until(lambda: admin.dbsize() == 0, f"it is released, {place}")
            again = world.do(batch.release)
            assert (dict.fromkeys(again, True), " raises " in place) == (again, False)


# Cleanup


def test_what_an_earlier_round_left_to_undo_spares_what_a_later_round_took(
    valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(valkey.port)
    stop_cleanup(monkeypatch)
    clean_up(client, [(b"a", b"token"), (b"b", b"other")])  # of a first round, whose reply was lost and which missed a
    acquire_round(client, [b"a"], b"token")
    assert clean_up_now(client)
    with redis.Redis(port=valkey.port) as admin:
        assert b"token" == admin.get("a")


def test_an_undoer_that_comes_second_finds_nothing_and_sends_nothing(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port, socket_timeout=None)
    redislock_fast.Locker(client).acquire_many(["a"])
    clean_up_now(client)  # as one of two threads does, when the other has undone everything meanwhile
    assert {"b": True} == start(redislock_fast.Locker(client).acquire_many(["b"]).release).result(PATIENCE_S)


def test_what_a_batch_left_is_deleted_without_scripts_and_handed_over_where_others_wait(
    valkey: Server, connect: Connect
) -> None:
    client, admin = connect(valkey.port), connect(valkey.port)
    batch = redislock_fast.Locker(client).acquire_many([str(number) for number in range(2000)])
    waiter = redislock_fast.Lock(admin, "1234", sleep=FAR_S, thread_local=False)
    answer = start(waiter.acquire)
    wait_until(lambda: admin.strlen("1234") > admin.strlen("0"), "it is in the queue")
    admin.config_resetstat()
    token: Any = admin.get("0")
    clean_up(client, [(str(name).encode(), token) for name in batch.acquired])
    assert answer.result(PATIENCE_S) is True
    wait_until(lambda: [b"1234"] == admin.keys("[0-9]*"), "all others are deleted")
    calls = admin.info("commandstats")
    assert calls["cmdstat_delifeq"]["calls"] == 2000
    assert calls["cmdstat_evalsha"]["calls"] < 10
    waiter.release()
