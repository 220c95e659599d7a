"""Batches that take all of their locks or none: what is undone, in which order they wait, what becomes of their leases.

Rules: as in test_batch: real servers, for threads and for tasks.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.batch.conftest import MakeLocker
from tests.support.helpers import PATIENCE_S, pause, start, wait_until
from tests.support.waiting import FAR_S, queue_of, until_queued
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")


def take_and_release(locker: Any, names: list[str]) -> Any:
    return take_all(locker, names).release()


def take_all(locker: Any, names: list[str], timeout: float | None = 60, wait_s: float | None = 60) -> Any:
    """All of them, once they are free."""
    return locker.acquire_many(names, timeout, wait_s, sleep=0.005, all_or_nothing=True)


# None


def test_all_is_what_it_says(locker: Any, client: redis.Redis) -> None:
    batch = locker.acquire_many(["b", "c", "a"], 10, all_or_nothing=True)
    assert (["b", "c", "a"], []) == (batch.acquired, batch.missed)
    assert all(5_000 < client.pttl(name) <= 10_000 for name in "abc")
    assert [("b", True), ("c", True), ("a", True)] == list(batch.release().items())
    assert 0 == client.dbsize()


def test_one_that_is_missed_undoes_the_rest(locker: Any, client: redis.Redis) -> None:
    client.mset({"b": "other", "d": "other"})
    batch = locker.acquire_many(["d", "c", "b", "a"], 10, all_or_nothing=True)
    # At once, not in the background: another may rely on it.
    assert {b"b", b"d"} == set(client.keys())
    assert ([], ["d", "c", "b", "a"]) == (batch.acquired, batch.missed)
    assert {} == batch.release() == batch.extend(1) == batch.reacquire()


def test_entering_what_missed_raises(make_locker: MakeLocker, server: Server, client: redis.Redis) -> None:
    client.set("b", "other")
    locker = make_locker(server.port)
    entered = False
    with pytest.raises(LockError) as caught, locker.acquire_many(["a", "b"], 10, all_or_nothing=True):
        entered = True
    assert ("b", False) == (caught.value.lock_name, entered)
    assert [b"b"] == client.keys()
    with locker.acquire_many(["a", "c"], 10, all_or_nothing=True) as batch:
        assert ["a", "c"] == batch.acquired


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("wait_s", [-1, 0, 0.02, 0.2])
def test_the_deadline_ends_the_wait_with_nothing(locker: Any, client: redis.Redis, wait_s: float) -> None:
    client.set("b", "other")
    batch = take_all(locker, ["c", "b", "a"], 10, wait_s)
    assert ([], ["c", "b", "a"]) == (batch.acquired, batch.missed)
    assert [b"b"] == client.keys()


def test_a_thousand_names_and_one_taken(locker: Any, client: redis.Redis) -> None:
    names = [f"name:{number}" for number in range(3000)]
    client.set(names[2500], "other")
    batch = locker.acquire_many(names, 60, all_or_nothing=True)
    assert ([], names) == (batch.acquired, batch.missed)
    assert 1 == client.dbsize()
    client.delete(names[2500])
    batch = locker.acquire_many(names, 60, all_or_nothing=True)
    assert names == batch.acquired
    assert dict.fromkeys(names, True) == batch.release()


# Waiting


def test_while_it_waits_it_holds_only_what_comes_before(world: World, locker: Any, client: redis.Redis) -> None:
    client.mset({"c": "other", "e": "other"})
    waiting = world.start(lambda: take_all(locker, ["f", "e", "d", "c", "b", "a"]))
    wait_until(lambda: {b"a", b"b", b"c", b"e"} == set(client.keys("?")), "it holds what precedes c")
    client.delete("c")
    wait_until(lambda: {b"a", b"b", b"c", b"d", b"e"} == set(client.keys("?")), "it holds what precedes e")
    assert not waiting.done()
    client.delete("e")
    batch = waiting.result(PATIENCE_S)
    assert ["f", "e", "d", "c", "b", "a"] == batch.acquired
    assert dict.fromkeys("fedcba", True) == batch.release()
    assert 0 == client.dbsize()


def test_it_has_its_turn_in_the_queue_of_the_lock_that_it_waits_for(
    world: World, locker: Any, client: redis.Redis, server: Server
) -> None:
    holder, last = (world.lock(world.connect(server.port), "b", sleep=FAR_S, thread_local=False) for _ in range(2))
    assert holder.acquire()
    batch = world.start(lambda: take_all(locker, ["a", "b", "c"], None, None))
    until_queued(client, "b", 1)
    answer = world.start(last.acquire)
    until_queued(client, "b", 2)
    holder.release()
    taken = batch.result(PATIENCE_S)
    assert (["a", "b", "c"], False) == (taken.acquired, answer.done())
    taken.release()
    assert answer.result(PATIENCE_S) is True
    last.release()
    assert 0 == client.dbsize()


@pytest.mark.slow
def test_it_keeps_its_place_while_the_leases_before_it_are_prolonged(
    world: World, locker: Any, client: redis.Redis, server: Server
) -> None:
    holder, last = (world.lock(world.connect(server.port), "b", sleep=FAR_S, thread_local=False) for _ in range(2))
    assert holder.acquire()
    batch = world.start(lambda: take_all(locker, ["a", "b"], 2, None))
    until_queued(client, "b", 1)
    answer = world.start(last.acquire)
    until_queued(client, "b", 2)
    places = client.zrange(queue_of("b"), 0, -1)
    client.set("time", "passes", px=2500)
    wait_until(lambda: not client.exists("time"), "more than a lease has passed")
    assert (places, 1) == (client.zrange(queue_of("b"), 0, -1), client.exists("a"))
    holder.release()
    taken = batch.result(PATIENCE_S)
    assert (["a", "b"], False) == (taken.acquired, answer.done())
    taken.release()
    assert answer.result(PATIENCE_S) is True
    last.release()
    assert 0 == client.dbsize()


def test_the_order_is_that_of_the_keys_whatever_their_names(world: World, locker: Any, client: redis.Redis) -> None:
    client.set(b"\xff", "other")
    waiting = world.start(lambda: take_all(locker, [b"\xff", "é", b"z"]))  # type: ignore[list-item]
    wait_until(lambda: client.exists("é", "z") == 2, "é, which is c3 a9, comes before ff")
    client.delete(b"\xff")
    assert dict.fromkeys([b"\xff", "é", b"z"], True) == waiting.result(PATIENCE_S).release()


@pytest.mark.slow
def test_leases_are_prolonged_while_it_waits(make_locker: MakeLocker, valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    client.set("c", "other", px=1500)
    batch = take_all(make_locker(valkey.port), ["a", "b", "c", "d"], 1, None)  # waits for one and a half leases
    assert ["a", "b", "c", "d"] == batch.acquired
    assert all(client.pttl(name) > 300 for name in "abcd")
    assert dict.fromkeys("abcd", True) == batch.release()


def test_what_is_lost_while_it_waits_is_taken_again(world: World, locker: Any, client: redis.Redis) -> None:
    client.set("c", "other")
    waiting = world.start(lambda: take_all(locker, ["a", "b", "c"], 0.4))
    wait_until(lambda: client.exists("a", "b") == 2, "it holds what precedes c")
    client.set("a", "thief")
    wait_until(lambda: not client.exists("b"), "it has seen that a is lost, and waits for it")
    client.delete("c")
    client.delete("a")
    assert dict.fromkeys("abc", True) == waiting.result(PATIENCE_S).release()
    assert 0 == client.dbsize()


def test_two_batches_that_want_the_same_in_other_orders_both_finish(
    world: World, locker: Any, client: redis.Redis
) -> None:
    orders = [["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]]
    for _ in range(5):
        tasks = [world.start(partial(take_and_release, locker, names)) for names in orders]
        assert [dict.fromkeys(names, True) for names in orders] == [task.result(PATIENCE_S) for task in tasks]
    assert 0 == client.dbsize()


class Holders:
    """Which locks are entered, as far as this process sees."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._inside: set[str | bytes] = set()
        self.trespasses: list[str | bytes] = []

    def enter(self, names: list[str] | list[str | bytes]) -> None:
        """Note the locks that are entered already."""
        with self._mutex:
            self.trespasses += [name for name in names if name in self._inside]
            self._inside.update(names)

    def leave(self, names: list[str] | list[str | bytes]) -> None:
        """Note that the locks are left."""
        with self._mutex:
            self._inside.difference_update(names)


@pytest.mark.parametrize("shared", [True, False], ids=["one client", "a client each"])
def test_callers_with_overlapping_batches_exclude_each_other_and_all_finish(
    world: World, make_locker: MakeLocker, server: Server, shared: bool
) -> None:
    holders = Holders()
    one = make_locker(server.port)

    def work(seed: int) -> int:
        rng = random.Random(seed)
        locker = one if shared else make_locker(server.port)
        for _ in range(8):
            names = rng.sample("abcdefgh", rng.randint(1, 5))
            with take_all(locker, names, rng.choice((None, 60)), None):
                holders.enter(names)
                pause(0)
                holders.leave(names)
        return seed

    workers = [world.start(partial(work, seed)) for seed in range(8)]
    assert list(range(8)) == [worker.result(30) for worker in workers]
    assert [] == holders.trespasses


_WORKER = """
import random, sys
import redis, redislock_fast

port, seed = int(sys.argv[1]), int(sys.argv[2])
client, rng = redis.Redis(port=port), random.Random(seed)
locker = redislock_fast.Locker(client)
trespasses = []
for _ in range(15):
    names = rng.sample("abcdefgh", rng.randint(1, 5))
    with locker.acquire_many(names, 60, None, sleep=0.005, all_or_nothing=True):
        for name in names:
            if client.getset("inside:" + name, seed) not in (None, b""):
                trespasses.append(name)
        for name in names:
            client.set("inside:" + name, "")
print(trespasses)
"""


@pytest.mark.slow
@IN_THREADS
def test_processes_with_overlapping_batches_exclude_each_other_and_all_finish(valkey: Server) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(valkey.port), str(seed)], stdout=subprocess.PIPE, text=True
        )
        for seed in range(4)
    ]
    try:
        assert [[]] * 4 == [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


@IN_THREADS
@pytest.mark.usefixtures("unhurried")
def test_single_locks_and_batches_of_both_kinds_exclude_each_other(server: Server, connect: Connect) -> None:
    holders = Holders()
    client = connect(server.port)

    def singly() -> None:
        for number in range(30):
            name = "ab"[number % 2]
            with redislock_fast.Lock(client, name, timeout=60, sleep=0.001):
                holders.enter([name])
                holders.leave([name])

    def together(all_or_nothing: bool) -> None:
        locker = redislock_fast.Locker(client)
        for _ in range(30):
            with locker.acquire_many(["b", "a"], 60, 0.01, sleep=0.002, all_or_nothing=False) as batch:
                holders.enter(batch.acquired)
                holders.leave(batch.acquired)
            if all_or_nothing:
                with take_all(locker, ["b", "a"], 60, None):
                    holders.enter(["a", "b"])
                    holders.leave(["a", "b"])

    works: list[Callable[[], None]] = [singly, singly, lambda: together(False), lambda: together(True)]
    for worker in [start(work) for work in works]:
        worker.result(30)
    assert [] == holders.trespasses
