"""`profile()`: what is counted of each lock, for which call sites, and which orders could deadlock.

Rules: real servers; threads and tasks alike, where the test has a `world`. No test depends on how long anything takes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import Lock, LockLostError
from redislock_fast.profiling import Profile
from redislock_fast.server import Server
from tests.conftest import Connect, Servers
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, in_thread, run_script, start, wait_until
from tests.support.waiting import FAR_S, LATE, Callers, until_queued
from tests.support.worlds import World

COUNTS = ("acquisitions", "failures", "losses")
NOWHERE = "(a thread or task of its own)"


def counts(report: Profile) -> dict[str, tuple[int, ...]]:
    """The acquisitions, failures and losses of each lock."""
    return {lock["name"]: tuple(lock[kind] for kind in COUNTS) for lock in report.as_dict()["locks"]}


def lock_of(report: Profile, name: str = "name") -> dict[str, Any]:
    """What the report says of this lock."""
    found: dict[str, Any] = {lock["name"]: lock for lock in report.as_dict()["locks"]}[name]
    return found


def sites(report: Profile, name: str = "name") -> dict[str, int]:
    """The call sites that have acquired the lock, and how often."""
    return {site["site"]: site["acquisitions"] for site in lock_of(report, name)["sites"]}


def cycles(report: Profile) -> list[list[str]]:
    """The names of each possible deadlock, in the order in which they are acquired."""
    return [[order["held"] for order in cycle] for cycle in report.as_dict()["deadlocks"]]


def here(lines_after: int) -> str:
    """A call site so many lines after the caller's line."""
    caller = sys._getframe(1)
    return f"{__file__}:{caller.f_lineno + lines_after} {caller.f_code.co_name}"


@pytest.fixture
def client(valkey: Server, connect: Connect) -> redis.Redis:
    return connect(valkey.port)


@pytest.fixture
def nest(world: World, client: redis.Redis) -> Callable[[str], None]:
    """Acquires locks of these one-letter names, one while the ones before are held, and releases them."""

    def nest(names: str) -> None:
        locks = [world.lock(world.client(client), name, **LATE) for name in names]
        for lock in locks:
            assert lock.acquire() is True
        for lock in reversed(locks):
            lock.release()

    return nest


# ---- counts and times ----


@pytest.mark.usefixtures("world")
def test_acquisitions_and_failures_are_counted_by_name(world: World, client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        lock, other = (world.lock(world.client(client), name, **LATE) for name in ("name", b"name"))
        for _ in range(3):
            with lock:
                assert other.acquire(blocking=False) is False
    assert counts(report) == {"name": (3, 3, 0)}
    found = lock_of(report)
    assert 0 < found["held_max_s"] < found["held_s"]
    assert 0 < found["waited_p99_s"] <= found["waited_max_s"] < found["waited_s"]


@pytest.mark.usefixtures("world")
def test_a_loss_is_counted(world: World, client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        lock = world.lock(world.client(client), on_lost=world.callback(lambda *_: None), **LATE)
        lock.acquire()
        client.delete("name")
        with pytest.raises(redislock_fast.LockLostError):
            lock.release()
    assert counts(report) == {"name": (1, 0, 1)}


@pytest.mark.usefixtures("world")
def test_a_wait_counts_for_the_site_of_the_holder(world: World, client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        holder, waiter = (world.lock(world.client(client), **LATE) for _ in range(2))
        holder.acquire()
        waiting = world.start(waiter.acquire)
        until_queued(client, "name", 1)
        holder.release()
        assert waiting.result() is True
    found = lock_of(report)
    blocked_s = sum(site["blocked_s"] for site in found["sites"])
    assert 0 < blocked_s <= found["waited_max_s"]
    assert found["sites"][0]["held_s"] == found["held_s"] > 0
    assert found["sites"][0]["blocked_s"] == blocked_s


def test_permits_are_profiled(callers: Callers, valkey: Server, client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        semaphore = callers.package.Semaphore(callers.client(valkey.port), "name", 2, timeout=FAR_S)
        first, second = (callers.run(semaphore.acquire) for _ in range(2))
        assert callers.run(lambda: semaphore.acquire(blocking=False)) is None
        waiting = callers.begin(semaphore.acquire)
        until_queued(client, "name", 1)
        callers.run(first.release)
        for permit in (second, waiting.result(PATIENCE_S)):
            callers.run(permit.release)
        lost = callers.run(semaphore.acquire)
        client.delete("name")
        with pytest.raises(LockLostError):
            callers.run(lost.release)
    assert counts(report) == {"name": (4, 1, 1)}
    (site,) = lock_of(report)["sites"]
    assert site["acquisitions"] == 4
    assert site["blocked_s"] > 0
    assert lock_of(report)["held_max_s"] < lock_of(report)["held_s"] == site["held_s"]


@pytest.mark.usefixtures("world")
def test_redlocks_are_profiled(world: World, servers: Servers) -> None:
    ports = [servers.get("valkey", number).port for number in range(3)]
    for port in ports:
        with redis.Redis(port=port) as client:
            client.flushall()
    clients = [world.connect(port) for port in ports]
    with redislock_fast.profile() as report, world.redlock(clients, timeout=60):
        pass
    assert counts(report) == {"name": (1, 0, 0)}


@pytest.mark.usefixtures("world")
def test_batches_are_not_profiled(world: World, client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        world.locker(world.client(client)).acquire_many(["b", "a"], timeout=60).release()
    assert counts(report) == {}


# ---- call sites ----


def test_the_site_is_the_callers_in_a_thread(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        lock = Lock(client, "name", **LATE)
        entered = here(1)
        with lock:
            pass
        acquired = here(1)
        lock.acquire()
        lock.release()
    assert sites(report) == {entered: 1, acquired: 1}


def test_the_site_of_a_wait_is_the_callers_in_a_thread(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        held, lock = Lock(client, "name", **LATE), Lock(client, "name", **LATE)
        acquired = here(1)
        held.acquire()
        waited: list[str] = []

        def work() -> None:
            waited.append(here(1))
            lock.acquire()
            lock.release()

        waiting = start(work)
        until_queued(client, "name", 1)
        held.release()
        waiting.result()
    assert sites(report) == {acquired: 1, waited[0]: 1}


def test_the_site_is_the_callers_in_a_task(valkey: Server) -> None:
    async def helped(lock: redislock_fast.asyncio.Lock) -> str:
        acquired = here(1)
        await lock.acquire()
        return acquired

    async def main() -> dict[str, int]:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            lock = redislock_fast.asyncio.Lock(client, "name", **LATE)
            entered = here(1)
            async with lock:
                pass
            acquired = await helped(lock)
            await lock.release()
            return {entered: 1, acquired: 1}

    with redislock_fast.profile() as report:
        expected = asyncio.run(main())
    assert sites(report) == expected


def test_the_site_of_a_wait_is_the_callers_in_a_task(valkey: Server, client: redis.Redis) -> None:
    waited: list[str] = []

    async def wait(lock: redislock_fast.asyncio.Lock) -> None:
        waited.append(here(1))
        async with lock:
            pass

    async def main() -> str:
        async with redis.asyncio.Redis(port=valkey.port) as tasks_client:
            held, lock = (redislock_fast.asyncio.Lock(tasks_client, "name", **LATE) for _ in range(2))
            acquired = here(1)
            await held.acquire()
            waiting = asyncio.create_task(wait(lock))
            await asyncio.to_thread(until_queued, client, "name", 1)
            await held.release()
            await waiting
            return acquired

    with redislock_fast.profile() as report:
        acquired = asyncio.run(main())
    assert sites(report) == {acquired: 1, waited[0]: 1}


def test_a_thread_that_does_nothing_but_acquire_has_no_site(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        lock = Lock(client, "name", thread_local=False, **LATE)
        acquiring = threading.Thread(target=lock.acquire)
        acquiring.start()
        acquiring.join()
        lock.release()
    assert sites(report) == {NOWHERE: 1}


def test_a_task_that_does_nothing_but_acquire_has_no_site(valkey: Server) -> None:
    async def main() -> None:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            lock = redislock_fast.asyncio.Lock(client, "name", **LATE)
            await asyncio.gather(lock.acquire())
            await lock.release()

    with redislock_fast.profile() as report:
        asyncio.run(main())
    assert sites(report) == {NOWHERE: 1}
    assert lock_of(report)["sites"][0]["held_s"] > 0


# ---- orders ----


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        (["ab", "ba"], [["a", "b"]]),
        (["ab", "bc", "ca"], [["a", "b", "c"]]),
        (["abc", "cb", "de", "ed"], [["b", "c"], ["d", "e"]]),
        (["ab", "bc", "ac", "abc"], []),
    ],
    ids=["two", "three", "two of two", "none"],
)
def test_orders_that_could_deadlock_are_found_though_they_have_not(
    nest: Callable[[str], None], world: World, nested: list[str], expected: list[list[str]]
) -> None:
    with redislock_fast.profile() as report:
        for names in nested:
            world.beside(partial(nest, names))
    assert cycles(report) == expected


def test_an_order_has_both_sites(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        a, b = Lock(client, "a", **LATE), Lock(client, "b", **LATE)
        first = [here(1), here(1)]
        with a, b:
            pass
        second = [here(1), here(1)]
        with b, a:
            pass
    assert report.as_dict()["deadlocks"] == [
        [
            {"held": "a", "held_site": first[0], "acquired": "b", "acquired_site": first[1], "count": 1},
            {"held": "b", "held_site": second[0], "acquired": "a", "acquired_site": second[1], "count": 1},
        ]
    ]


@pytest.mark.usefixtures("world")
def test_a_deadlock_is_found_while_it_lasts(world: World, client: redis.Redis) -> None:
    held: list[Any] = []

    def wait(first: Any, second: Any) -> None:
        first.acquire()
        held.append(first)
        wait_until(lambda: len(held) == 2, "both hold a lock")
        second.acquire()
        second.release()

    with redislock_fast.profile() as report:
        a, b = ([world.lock(world.client(client), name, thread_local=False, **LATE) for _ in range(2)] for name in "ab")
        waiting = [world.start(partial(wait, a[0], b[1])), world.start(partial(wait, b[0], a[1]))]
        for name in "ab":
            until_queued(client, name, 1)
        found = cycles(report)
        for lock in held:
            lock.release()
        for each in waiting:
            each.result()
    assert [sorted(cycle) for cycle in found] == [["a", "b"]]


@pytest.mark.usefixtures("world")
def test_an_acquire_that_fails_without_waiting_has_no_order(
    world: World, client: redis.Redis, nest: Callable[[str], None]
) -> None:
    with redislock_fast.profile() as report:
        taken = world.lock(world.client(client), "b", thread_local=False, **LATE)
        world.beside(taken.acquire)
        with world.lock(world.client(client), "a", **LATE):
            assert world.lock(world.client(client), "b", **LATE).acquire(blocking=False) is False
        taken.release()
        nest("ba")
    assert cycles(report) == []


def test_permits_of_one_semaphore_have_no_order(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        semaphores = [redislock_fast.Semaphore(client, "a", 3), redislock_fast.Semaphore(client, "a", 3)]
        for one, other in (semaphores, reversed(semaphores)):
            with one, other, one:
                pass
    assert (counts(report), report.as_dict()["deadlocks"]) == ({"a": (6, 0, 0)}, [])


@pytest.mark.parametrize("released", [0, 1], ids=["first", "last"])
def test_a_permit_beside_another_one_has_an_order_while_it_is_held(client: redis.Redis, released: int) -> None:
    with redislock_fast.profile() as report:
        semaphore, lock = redislock_fast.Semaphore(client, "a", 3), Lock(client, "b", **LATE)
        permits: list[Any] = [semaphore.acquire() for _ in range(2)]
        with lock, semaphore:
            pass
        permits.pop(released).release()
        held = report.as_dict()["deadlocks"]
        in_thread(permits.pop().release)
        with lock:
            pass
    assert [order["count"] for order in held[0]] == [1, 1]
    assert [order["count"] for order in report.as_dict()["deadlocks"][0]] == [1, 1]  # none by the last block


@pytest.mark.usefixtures("world")
def test_what_was_detached_is_held_no_more(world: World, client: redis.Redis, nest: Callable[[str], None]) -> None:
    with redislock_fast.profile() as report:
        detached = world.lock(world.client(client), "a", **LATE)
        detached.acquire()
        detached.detach()
        nest("b")
        client.delete("a")
        nest("ba")
    assert cycles(report) == []


@pytest.mark.usefixtures("world")
def test_what_another_caller_has_released_is_held_no_more(
    world: World, client: redis.Redis, nest: Callable[[str], None]
) -> None:
    with redislock_fast.profile() as report:
        shared = world.lock(world.client(client), "a", thread_local=False, **LATE)
        shared.acquire()
        world.beside(shared.release)
        nest("b")
        nest("ba")
    assert cycles(report) == []
    assert sum(site["held_s"] for site in lock_of(report, "a")["sites"]) == lock_of(report, "a")["held_s"]


@pytest.mark.usefixtures("world")
def test_what_was_lost_to_another_caller_is_held_no_more(
    world: World, client: redis.Redis, nest: Callable[[str], None]
) -> None:
    with redislock_fast.profile() as report:
        lost = world.lock(world.client(client), "a", **LATE)
        lost.acquire()
        client.delete("a")
        world.beside(lambda: nest("a"))
        nest("b")
        nest("ba")
    assert cycles(report) == []


def test_what_a_thread_held_ends_with_it(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        for names in ("ab", "ba"):
            for name in names:
                lock = Lock(client, name, thread_local=False, **LATE)
                in_thread(lock.acquire)
                lock.release()
    assert cycles(report) == []


# ---- the profile itself ----


def test_locks_that_were_made_before_are_not_profiled(client: redis.Redis) -> None:
    lock = Lock(client, "name", **LATE)
    with redislock_fast.profile() as report, lock:
        pass
    assert counts(report) == {}


def test_nothing_counts_after_the_end(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        lock = Lock(client, "name", **LATE)
        lock.acquire()
    lasted_s = report.as_dict()["seconds"]
    lock.release()
    with lock:
        assert lock.acquire(blocking=False) is False
    assert counts(report) == {"name": (1, 0, 0)}
    assert lock_of(report)["held_s"] == 0
    assert report.as_dict()["seconds"] == lasted_s


def test_nested_profiles_count_for_themselves(client: redis.Redis) -> None:
    with redislock_fast.profile() as outer:
        with Lock(client, "outside", **LATE):
            pass
        with redislock_fast.profile() as inner, Lock(client, "inside", **LATE):
            pass
    assert counts(outer) == {"outside": (1, 0, 0), "inside": (1, 0, 0)}
    assert counts(inner) == {"inside": (1, 0, 0)}


def test_a_run_that_is_skipped_is_no_failure(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        run = redislock_fast.once(client, "nightly", timeout=60, at_least=60)(lambda: "done")
        assert [run(), run()] == ["done", None]
    assert counts(report) == {"nightly": (1, 0, 0)}


def test_a_profile_begins_once() -> None:
    report = redislock_fast.profile()
    with report, pytest.raises(RuntimeError, match="has begun already"):
        report.__enter__()
    with pytest.raises(RuntimeError, match="has begun already"):
        report.__enter__()


def test_a_forked_child_begins_anew(in_fork: InFork, client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        lock = Lock(client, "parent", **LATE)
        lock.acquire()

        def child() -> str:
            with Lock(client, "child", **LATE):
                return json.dumps(report.as_dict())

        answer = json.loads(in_fork(child))
        lock.release()
    assert [(found["name"], found["acquisitions"]) for found in answer["locks"]] == [("child", 1)]
    assert answer["pid"] != report.as_dict()["pid"]
    assert counts(report) == {"parent": (1, 0, 0)}


# ---- what it looks like ----


def test_json_has_all_that_the_dict_has(client: redis.Redis) -> None:
    with redislock_fast.profile() as report, Lock(client, "name", **LATE), Lock(client, "b", **LATE):
        pass
    found = json.loads(report.to_json())
    assert found == report.as_dict()
    assert list(found) == ["pid", "seconds", "locks", "deadlocks"]
    times = ["waited_s", "waited_p99_s", "waited_max_s", "held_s", "held_max_s"]
    assert list(found["locks"][0]) == ["name", *COUNTS, *times, "sites"]
    assert list(found["locks"][0]["sites"][0]) == ["site", "acquisitions", "held_s", "blocked_s"]


def test_the_table_names_locks_sites_and_orders(client: redis.Redis) -> None:
    with redislock_fast.profile() as report:
        for names in ("ab", "ba"):
            with Lock(client, names[0], **LATE), Lock(client, names[1], **LATE):
                pass
    table = str(report)
    assert table == report.table()
    assert "2 locks, 4 acquisitions, 0 failures, 0 losses" in table.splitlines()[0]
    assert "could deadlock: a -> b -> a" in table.splitlines()
    assert f"{__name__.replace('.', '/')}.py:" in table
    assert len(report.table(top=1).splitlines()) < len(table.splitlines())


def test_a_report_of_nothing_is_one_line() -> None:
    with redislock_fast.profile() as report:
        pass
    assert str(report).splitlines() == [str(report)]
    assert str(report).endswith("0 locks, 0 acquisitions, 0 failures, 0 losses")


def test_a_name_cannot_move_the_terminals_cursor(client: redis.Redis) -> None:
    with redislock_fast.profile() as report, Lock(client, b"\x1b[2J\xff", **LATE):
        pass
    assert "\x1b" not in str(report)
    assert "\\x1b[2J" in str(report)


# REDISLOCK_PROFILE: a profile of a whole process, written when it ends


PROGRAM = """
import sys, redis
from redislock_fast import Lock
for name in ("a", "b"):
    with Lock(redis.Redis(port=int(sys.argv[1])), name, timeout=60):
        pass
"""
FORKING = (
    PROGRAM
    + """
import os
if os.fork() == 0:
    with Lock(redis.Redis(port=int(sys.argv[1])), "child", timeout=60):
        pass
else:
    os.wait()
"""
)
IS_IMPORTED = "import sys, redislock_fast; print('redislock_fast.profiling' in sys.modules)"


def test_the_table_of_a_process_goes_to_stderr(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDISLOCK_PROFILE", "1")
    ended = run_script(PROGRAM, valkey.port)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "2 locks, 2 acquisitions" in ended.stderr.splitlines()[0]
    assert "<string>:5 <module>" in ended.stderr


def test_the_report_of_each_process_goes_to_a_file(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REDISLOCK_PROFILE", str(tmp_path / "locks-{pid}.json"))
    ended = run_script(FORKING, valkey.port)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    reports = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(reports) == {f"locks-{report['pid']}.json" for report in reports.values()}
    names = sorted(sorted(lock["name"] for lock in report["locks"]) for report in reports.values())
    assert names == [["a", "b"], ["child"]]


@pytest.mark.parametrize("wanted", [None, "", "0"])
def test_without_a_wish_the_profiler_is_not_imported(wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDISLOCK_PROFILE", raising=False)
    if wanted is not None:
        monkeypatch.setenv("REDISLOCK_PROFILE", wanted)
    ended = run_script(IS_IMPORTED)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


def test_a_nonsensical_wish_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDISLOCK_PROFILE", "true")
    ended = run_script(IS_IMPORTED)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: REDISLOCK_PROFILE is 'true': it may be '1', '0' or a path that ends with '.json'"
    )
