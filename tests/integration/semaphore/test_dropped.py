"""Permits that nobody releases: a thread or task has ended, a process was forked or killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.permits import QUEUE, ends_of, held, queue_up, take
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

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
