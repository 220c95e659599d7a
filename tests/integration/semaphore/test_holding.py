"""Permits that are held, or that nobody releases: renewal, losses, interrupts, cancels, ends of threads and processes.

Rules: what passes by time passes by the server's clock, or by `BRIEF_S`; nothing else does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError, ResponseError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import LockLostError, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import eventually
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, once, wait_until
from tests.support.holding import BRIEF_S, KEPT_S, LONG_S, Losses, until_passed
from tests.support.permits import QUEUE, ends_of, held, new_tokens, queue_up, run_acquire, take
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")


def renewed(admin: redis.Redis) -> None:
    """Return once the only permit was renewed."""
    (end,) = ends_of(admin).values()
    wait_until(lambda: list(ends_of(admin).values()) > [end], "it is renewed")


# ---- renewal ----


def test_permits_are_renewed_by_default(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), timeout=KEPT_S)
    permit = semaphore.acquire()
    renewed(client)
    assert client.pttl("name") > 1000 * KEPT_S / 2
    assert permit.remaining() <= KEPT_S
    permit.release()
    assert client.keys() == []


@pytest.mark.slow
def test_a_renewed_permit_outlives_its_ttl(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=KEPT_S)
    with semaphore as permit:
        until_passed(client, LONG_S)
        assert (permit.valid, permit.lost, held(client)) == (True, False, 1)
        assert semaphore.acquire(blocking=False) is None
    assert client.exists("name", QUEUE) == 0


@pytest.mark.slow
def test_each_permit_of_one_object_is_renewed(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 20, timeout=KEPT_S)
    semaphore.acquire().release()
    permits = [semaphore.acquire() for _ in range(20)]
    for permit in permits[::2]:
        permit.release()
    until_passed(valkey_client, LONG_S)
    assert [permit.valid for permit in permits] == [False, True] * 10
    assert held(valkey_client) == 10
    for permit in permits[1::2]:
        permit.release()


@pytest.mark.slow
def test_a_permit_that_was_waited_for_is_renewed(world: World, server: Server, client: redis.Redis) -> None:
    holder = world.semaphore(world.connect(server.port), 1, **LATE).acquire()
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=KEPT_S, sleep=FAR_S)
    (answer,) = queue_up(world, [semaphore], client)
    holder.release()
    permit = take(answer)
    until_passed(client, LONG_S)
    assert (permit.valid, held(client)) == (True, 1)
    permit.release()


def test_without_renewal_a_permit_ends(world: World, server: Server, client: redis.Redis, losses: Losses) -> None:
    semaphore = world.semaphore(
        world.connect(server.port), timeout=BRIEF_S, auto_renew=False, on_lost=world.callback(losses)
    )
    permit = semaphore.acquire()
    assert losses.until() == [LossReason.EXPIRED]
    wait_until(lambda: client.keys() == [], "it has ended")
    assert (permit.valid, permit.lost, permit.remaining()) == (False, True, 0.0)
    with pytest.raises(LockLostError, match="permit of the semaphore 'name'"):
        permit.release()


def test_a_permit_is_renewed_until_max_hold(
    world: World, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    semaphore = world.semaphore(
        world.connect(valkey.port), timeout=BRIEF_S, max_hold=2 * BRIEF_S, on_lost=world.callback(losses)
    )
    permit = semaphore.acquire()
    assert losses.until() == [LossReason.EXPIRED]
    with pytest.raises(LockLostError):
        permit.release()


# ---- losses ----


@pytest.mark.parametrize("how", ["permit deleted", "key deleted", "flushed", "another's"])
def test_a_lost_permit_is_told_once_with_its_reason(
    world: World, server: Server, client: redis.Redis, losses: Losses, how: str
) -> None:
    told = []
    losses._then = lambda permit: told.append((permit.name, permit.lost, permit.valid))
    semaphore = world.semaphore(world.connect(server.port), timeout=KEPT_S, on_lost=world.callback(losses))
    (other,) = new_tokens(1)
    permit = semaphore.acquire()
    run_acquire(client, other)
    if how == "permit deleted":
        client.zrem("name", *(token for token in ends_of(client) if token != other))
    elif how == "key deleted":
        client.delete("name")
    elif how == "flushed":
        client.flushall()
    else:
        client.set("name", "another's")
    reason = LossReason.DELETED
    assert losses.until() == [reason]
    wait_until(lambda: told == [("name", True, False)], "it was told of the permit")
    for call in (permit.ensure_held, permit.detach, permit.release):
        with pytest.raises(LockLostError, match="permit of the semaphore 'name'") as caught:
            call()
        assert caught.value.reason is reason
    with pytest.raises(LockError, match="was released"):
        permit.release()
    assert losses.reasons == [reason]
    assert list(client.zrange("name", 0, -1) if how == "permit deleted" else []) == (
        [other] if how == "permit deleted" else []
    )
    client.delete("name")
    semaphore.acquire(blocking=False).release()


def test_a_loss_that_the_release_finds_out_is_raised(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), **LATE)
    permit = semaphore.acquire()
    client.delete("name")
    with pytest.raises(LockLostError, match="permit of the semaphore 'name'") as caught:
        permit.release()
    assert caught.value.reason is LossReason.DELETED
    plain = world.semaphore(world.connect(server.port), auto_renew=False, **LATE).acquire()
    client.delete("name")
    with pytest.raises(LockNotOwnedError, match="permit"):
        plain.release()


def test_a_loss_without_a_callback_is_logged(
    world: World, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    permit = world.semaphore(world.connect(valkey.port), timeout=KEPT_S).acquire()
    valkey_client.delete("name")
    text = "The permit of the semaphore 'name' was lost: deleted."
    wait_until(lambda: text in caplog.messages, "the renewal finds it out")
    with pytest.raises(LockLostError):
        permit.release()


def test_a_server_that_is_gone_loses_the_permit(world: World, valkey: Server, connect: Connect, losses: Losses) -> None:
    with Proxy(valkey.port) as proxy:
        client = world.client(connect(proxy.port, retry=once()))
        semaphore = world.semaphore(client, timeout=BRIEF_S, on_lost=world.callback(losses))
        permit = semaphore.acquire()
        proxy.refuse()
        proxy.cut()
        assert losses.until() == [LossReason.SERVER_GONE]
        assert (permit.lost, permit.valid) == (True, False)
        with pytest.raises(LockLostError) as caught:
            permit.release()
        assert caught.value.reason is LossReason.SERVER_GONE


def test_a_release_that_has_failed_can_be_repeated(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect
) -> None:
    with Proxy(valkey.port) as proxy:
        semaphore = world.semaphore(world.client(connect(proxy.port, retry=once())), **LATE)
        permit = semaphore.acquire()
        proxy.refuse()
        proxy.cut()
        for release in (permit.release, semaphore.release):
            with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
                release()
        proxy.accept()
        wait_until(lambda: _released(permit), "the server is back")
        assert valkey_client.keys() == []


def _released(permit: Any) -> bool:
    try:
        permit.release()
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


def test_an_error_at_the_end_of_a_block_that_has_raised_is_logged(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(valkey.port) as proxy:
        semaphore = world.semaphore(world.client(connect(proxy.port, retry=once())), **LATE)
        permit = semaphore.acquire()
        proxy.refuse()
        proxy.cut()
        with pytest.raises(ZeroDivisionError), permit:
            raise ZeroDivisionError
        texts = [text for text in caplog.messages if "permit" in text]
        assert [text.partition(": ")[0] for text in texts] == ["A permit of 'name' could not be released"]
        proxy.accept()
        wait_until(lambda: valkey_client.keys() == [], "it is released in the background")
        with pytest.raises(LockError, match="was released"):
            permit.release()


# ---- cancels ----


@pytest.mark.parametrize("world", ["asyncio"], indirect=True)
def test_a_timeout_around_acquire_gives_up(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    client = world.connect(valkey.port)

    async def scenario() -> None:
        semaphore = redislock_fast.asyncio.Semaphore(client, "name", 1, **LATE)
        async with semaphore:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(semaphore.acquire(), 0.05)
            await eventually(lambda: valkey_client.zcard(QUEUE) == 0, "it has left the queue")
        await eventually(lambda: valkey_client.keys() == [], "nothing is left")
        shielded = await asyncio.shield(semaphore.acquire())
        assert shielded is not None
        permits = await asyncio.gather(*(semaphore.acquire(blocking=False) for _ in range(3)))
        assert permits == [None] * 3
        await shielded.release()

    waited(scenario())


@pytest.mark.parametrize("world", ["asyncio"], indirect=True)
def test_the_task_of_a_lost_permit_is_cancelled(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    client = world.connect(valkey.port)

    async def scenario() -> None:
        semaphore = redislock_fast.asyncio.Semaphore(client, "name", 2, timeout=KEPT_S, cancel_on_lost=True)
        entered = asyncio.Event()

        async def work() -> Any:
            try:
                async with semaphore:
                    entered.set()
                    await asyncio.sleep(FAR_S)
            except asyncio.CancelledError as error:
                return error.args[0]

        task = asyncio.ensure_future(work())
        await entered.wait()
        valkey_client.delete("name")
        lost = await asyncio.wait_for(task, PATIENCE_S)
        assert (type(lost), "permit of the semaphore 'name'" in str(lost)) == (LockLostError, True)

    waited(scenario())


def test_scripts_that_fail_are_raised_with_the_name(
    world: World, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    valkey_client.set("name", "text")
    semaphore = world.semaphore(world.connect(valkey.port), **LATE)
    with caplog.at_level(logging.WARNING), pytest.raises(ResponseError, match="WRONGTYPE") as caught:
        semaphore.acquire()
    assert getattr(caught.value, "__notes__", ["of the semaphore 'name'"]) == ["of the semaphore 'name'"]
    with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
        semaphore.status()
    assert getattr(caught.value, "__notes__", ["of the semaphore 'name'"]) == ["of the semaphore 'name'"]


# Permits that nobody releases: a thread or task has ended, a process was forked or killed


DROPPED = "permit of the semaphore 'name' was dropped without a release"


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """The ResourceWarnings of the test, once it has collected what it has dropped."""
    gc.collect()
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResourceWarning)
        before = warnings.showwarning
        warnings.showwarning = lambda message, *_, **__: texts.append(str(message))
        try:
            yield texts
        finally:
            warnings.showwarning = before


@pytest.mark.parametrize("auto_renew", [True, False])
def test_the_permit_of_a_thread_or_task_that_has_ended_is_released(
    world: World, valkey: Server, valkey_client: redis.Redis, warned: list[str], auto_renew: bool
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 1, auto_renew=auto_renew, **LATE)

    def work() -> None:
        semaphore.acquire()
        assert held(valkey_client) == 1

    running = world.start(work)
    running.result(PATIENCE_S)
    del running
    wait_until(lambda: gc.collect() >= 0 and valkey_client.keys() == [], "it is released")
    assert warned == [DROPPED]
    assert semaphore.acquire(blocking=False).release() is None


def test_a_dropped_permit_is_handed_over(
    world: World, valkey: Server, valkey_client: redis.Redis, warned: list[str]
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 1, **LATE)
    holder = world.semaphore(world.connect(valkey.port), 1, **LATE)
    holder.acquire()
    (answer,) = queue_up(world, [semaphore], valkey_client)
    del holder
    gc.collect()
    take(answer).release()
    assert (warned, valkey_client.keys()) == ([DROPPED], [])


def test_a_permit_that_the_caller_keeps_is_not_dropped(
    world: World, valkey: Server, valkey_client: redis.Redis, warned: list[str]
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 1, **LATE)
    permit = world.beside(semaphore.acquire)
    gc.collect()
    assert (permit.valid, held(valkey_client)) == (True, 1)
    permit.release()
    assert (warned, valkey_client.keys()) == ([], [])


def test_the_permit_of_an_open_block_is_not_dropped_with_its_thread_or_task(
    world: World, valkey: Server, valkey_client: redis.Redis, warned: list[str]
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 1, **LATE)
    world.beside(semaphore.__enter__)
    gc.collect()
    assert held(valkey_client) == 1
    semaphore.__exit__(None, None, None)
    assert (warned, valkey_client.keys()) == ([], [])


def test_permits_that_were_released_or_lost_are_dropped_silently(
    world: World, valkey: Server, valkey_client: redis.Redis, warned: list[str]
) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 1, **LATE)
    semaphore.acquire().release()
    handle = semaphore.acquire().detach()
    del semaphore
    gc.collect()
    assert (warned, held(valkey_client)) == ([], 1)
    assert handle.name == "name"


# ---- forks ----


@IN_THREADS
def test_a_forked_child_holds_nothing_of_its_parents(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect, in_fork: InFork
) -> None:
    semaphore = world.semaphore(connect(valkey.port), 2, **LATE)
    permit = semaphore.acquire()

    def child() -> str:
        seen = [f"{permit.valid} {permit.remaining()} {permit.lost}"]
        for release in (permit.release, semaphore.release, permit.ensure_held):
            try:
                release()
                seen.append("released")
            except LockError as error:
                seen.append(type(error).__name__)
        with semaphore as own:
            seen.append(f"{own.valid} {semaphore.acquire(blocking=False)}")
        return ", ".join(seen)

    with semaphore:
        outcome = in_fork(lambda: "\n".join([_left(semaphore), child_in_block(semaphore)]))
        assert outcome == "LockError\nLockError"
        assert held(valkey_client) == 2
    assert in_fork(child) == "False 0.0 False, LockError, LockError, LockError, True None"
    assert (permit.valid, held(valkey_client)) == (True, 1)
    permit.release()
    assert valkey_client.keys() == []


def _left(semaphore: Any) -> str:
    """What leaving a block of the parent's raises."""
    try:
        semaphore.__exit__(None, None, None)
    except LockError:
        return "LockError"
    return "left"


child_in_block = _left


@IN_THREADS
def test_a_child_that_ends_releases_nothing(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect, in_fork: InFork
) -> None:
    semaphore = world.semaphore(connect(valkey.port), 2, **LATE)
    permits = [semaphore.acquire()]

    def child() -> str:
        permits.clear()
        gc.collect()
        return str(len(ends_of(connect(valkey.port))))

    assert in_fork(child) == "1"
    assert held(valkey_client) == 1
    permits[0].release()


# ---- processes ----

HOLDER = """
import sys, time, redis
from redislock_fast import Semaphore
semaphore = Semaphore(redis.Redis(port=int(sys.argv[1])), "name", 2, timeout=float(sys.argv[2]))
permits = [semaphore.acquire(), semaphore.acquire()]
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_permits_of_a_killed_process_are_granted_when_they_end(
    world: World, server: Server, client: redis.Redis
) -> None:
    timeout_s = 1.0
    semaphore = world.semaphore(world.connect(server.port), 2, **LATE)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-c", HOLDER, str(server.port), str(timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        answers = queue_up(world, [semaphore] * 2, client)
        process.send_signal(signal.SIGKILL)
    old = ends_of(client)
    permits = list(map(take, answers))
    ends = sorted(end - 1000 * FAR_S for token, end in ends_of(client).items() if token not in old)
    assert [granted_at >= end for granted_at, end in zip(ends, sorted(old.values()), strict=True)] == [True, True]
    assert client.zcard(QUEUE) == 0
    for permit in permits:
        permit.release()
    assert client.keys() == []


@pytest.mark.slow
@IN_THREADS
def test_permits_that_are_held_at_the_end_of_a_process_end_by_their_ttl(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    program = HOLDER.replace("time.sleep(60)", "")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-W", "error", "-c", program, str(valkey.port), "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("held\n", "", 0)
    wait_until(lambda: valkey_client.keys() == [], "they have ended")
