"""Processes full of threads and tasks on a few locks, half of them with `linger`, with cancels, haste and `kill -9`.

A file that all processes map says for each lock which caller is inside, and until when its lease is valid. So an
overlap is noticed whatever the library believes. Each program is bounded in time and in the number of its acquires.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, TimeoutError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import queue_of

SECONDS = 8.0
KILLED_EVERY_S = 2.5
PROGRAMS = 4
THREADS = 16
TASKS = 50
MOST_PAIRS = 4000
"""Of each thread or task."""

NAMES = [f"name:{number}" for number in range(4)]
TTL_S = 1.0
LINGER_S = 0.05
HASTE_S = 0.004
HOLD_S = 0.0005

_ENTRY = struct.Struct("qd")  # the caller that is inside, and until when
_COUNTS = struct.Struct("qqq")  # overlaps, entries, and callers so far
_SIZE = _ENTRY.size * len(NAMES) + _COUNTS.size


class Board:
    """Says for each lock which caller is inside. All programs map the same file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")  # `close` closes it
        self._map = mmap.mmap(self._file.fileno(), _SIZE)
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        self._file.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._mutex:  # a lock of the file is the whole process's
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # which ends with the process
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _count(self, *add: int) -> tuple[int, int, int]:
        at = _SIZE - _COUNTS.size
        overlaps, entries, callers = map(sum, zip(_COUNTS.unpack_from(self._map, at), add, strict=True))
        _COUNTS.pack_into(self._map, at, overlaps, entries, callers)
        return overlaps, entries, callers

    def counts(self) -> tuple[int, int]:
        """Overlaps and entries."""
        with self._alone():
            return self._count(0, 0, 0)[:2]

    def enter(self, name: str, lock: Any) -> int:
        """A caller with this held lock is inside from now on, as long as its lease is valid. Returns its number."""
        at = NAMES.index(name) * _ENTRY.size
        with self._alone():
            now = time.monotonic()
            until = now + lock.remaining()
            before, valid_until = _ENTRY.unpack_from(self._map, at)
            *_, caller = self._count(int(before != 0 and now < min(valid_until, until)), 1, 1)
            if now < until:
                _ENTRY.pack_into(self._map, at, caller, until)
            return caller

    def leave(self, name: str, caller: int) -> None:
        """The caller is about to release."""
        at = NAMES.index(name) * _ENTRY.size
        with self._alone():
            inside, until = _ENTRY.unpack_from(self._map, at)
            if inside == caller:
                _ENTRY.pack_into(self._map, at, 0, until)


AnyLock = TypeVar("AnyLock")


def _settings(chance: random.Random) -> dict[str, Any]:
    """Of one acquire: half of the locks linger, few have options."""
    settings: dict[str, Any] = {"timeout": TTL_S, "sleep": 0.2}
    if chance.random() < 0.5:
        settings["linger"] = LINGER_S
    if chance.random() < 0.1:
        settings["auto_renew"] = True
    if chance.random() < 0.1:
        settings["reentrant"] = True
    return settings


def _choose(
    chance: random.Random, name: str, shared: dict[str, AnyLock], own: dict[str, AnyLock], make: Callable[..., AnyLock]
) -> AnyLock:
    """A lock object that all share, the last one that the caller has made for the name, or a new one."""
    kind = chance.random()
    if kind < 0.2:
        return shared[name]
    if kind >= 0.6 or name not in own:
        own[name] = make(name, **_settings(chance))
    return own[name]


class Program:
    """One process: threads and tasks that acquire and release until the time is over.

    Args:
        port: the server's.
        board: says who is inside.
        seed: of its choices.
    """

    def __init__(self, port: int, board: Board, seed: int) -> None:
        self._port = port
        self._board = board
        self._seed = seed
        self._ends_at = time.monotonic() + SECONDS
        self.served: Counter[str] = Counter()

    def _choices(self, number: int) -> Iterator[tuple[random.Random, str]]:
        chance = random.Random(f"{self._seed} {number}")
        for _ in range(MOST_PAIRS):
            if time.monotonic() > self._ends_at:
                return
            yield chance, chance.choice(NAMES)

    # ---- threads ----

    def _work(self, number: int, client: redis.Redis, shared: dict[str, redislock_fast.Lock]) -> None:
        own: dict[str, redislock_fast.Lock] = {}
        for chance, name in self._choices(number):
            lock = _choose(chance, name, shared, own, partial(redislock_fast.Lock, client))
            haste = chance.random()
            limit_s = HASTE_S * chance.random() if haste < 0.2 else None
            acquired = False
            with contextlib.suppress(TimeoutError):  # redis-py's: no connection in so short a time
                acquired = lock.acquire(blocking=haste < 0.95, blocking_timeout=limit_s)
            if acquired:
                caller = self._board.enter(name, lock)
                time.sleep(HOLD_S * chance.random())
                self._board.leave(name, caller)
                with contextlib.suppress(LockError):  # this process was held up for so long
                    lock.release()
                self.served["threads"] += 1

    # ---- tasks ----

    async def _use(self, chance: random.Random, name: str, lock: redislock_fast.asyncio.Lock) -> None:
        haste = chance.random()
        limit_s = HASTE_S * chance.random() if haste < 0.2 else None
        acquired = False
        with contextlib.suppress(TimeoutError):
            acquired = await lock.acquire(blocking=haste < 0.95, blocking_timeout=limit_s)
        if acquired:
            caller = self._board.enter(name, lock)
            try:
                await asyncio.sleep(HOLD_S * chance.random())
            finally:
                self._board.leave(name, caller)
                with contextlib.suppress(LockError):
                    await lock.release()
            self.served["tasks"] += 1

    async def _task(self, number: int, client: Any, shared: dict[str, redislock_fast.asyncio.Lock]) -> None:
        own: dict[str, redislock_fast.asyncio.Lock] = {}
        for chance, name in self._choices(number):
            lock = _choose(chance, name, shared, own, partial(redislock_fast.asyncio.Lock, client))
            using = asyncio.create_task(self._use(chance, name, lock))
            if chance.random() < 0.1:
                await asyncio.sleep(HASTE_S * chance.random())
                using.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await using

    async def _tasks(self) -> None:
        client = redis.asyncio.Redis(port=self._port)
        settings: dict[str, Any] = {"timeout": TTL_S, "sleep": 0.2, "linger": LINGER_S, "thread_local": False}
        shared = {name: redislock_fast.asyncio.Lock(client, name, **settings) for name in NAMES}
        await asyncio.gather(*(self._task(THREADS + number, client, shared) for number in range(TASKS)))
        await client.aclose()

    def run(self) -> None:
        """Work until the time is over, and print how often locks were held."""
        client = redis.Redis(port=self._port)
        settings: dict[str, Any] = {"timeout": TTL_S, "sleep": 0.2, "linger": LINGER_S, "thread_local": False}
        shared = {name: redislock_fast.Lock(client, name, **settings) for name in NAMES}
        threads = [
            threading.Thread(target=self._work, args=(number, client, shared), daemon=True) for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        asyncio.run(asyncio.wait_for(self._tasks(), SECONDS + PATIENCE_S))
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a thread is not served"
        print(dict(self.served))


def _start(port: int, path: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.slow.test_linger_stress", str(port), str(path)]
    root = Path(__file__).parents[2]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, str(seed)], cwd=root, **pipes)


def _finished(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        printed, errors = program.communicate(timeout=SECONDS + 3 * PATIENCE_S)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGABRT)  # its fault handler prints where it hangs
        printed, errors = program.communicate()
    return program.returncode, printed, errors


@pytest.mark.parametrize("seed", [int(os.environ.get("STRESS_SEED", "1"))])
def test_processes_that_linger_wait_and_die_never_hold_a_lock_at_once_and_leave_nothing(
    valkey: Server, connect: Connect, tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(_SIZE))
    board = Board(path)
    admin = connect(valkey.port)
    before = {row["id"] for row in admin.client_list()}  # earlier tests of this process may have left some
    heard_before = set(admin.pubsub_channels())
    seeds = itertools.count(1000 * seed)
    programs = [_start(valkey.port, path, next(seeds)) for _ in range(PROGRAMS)]
    killed = []
    begun = time.monotonic()
    while time.monotonic() < begun + SECONDS - KILLED_EVERY_S:
        time.sleep(KILLED_EVERY_S)
        killed.append(programs.pop(0))
        killed[-1].kill()
        programs.append(_start(valkey.port, path, next(seeds)))
    ends = [_finished(program) for program in programs]
    for program in killed:
        program.communicate()
    assert [(code, errors) for code, _, errors in ends] == [(0, "")] * PROGRAMS
    overlaps, entries = board.counts()
    board.close()
    assert overlaps == 0
    assert entries > 100 * PROGRAMS
    wait_until(lambda: admin.exists(*NAMES, *map(queue_of, NAMES)) == 0, "nothing is left")
    wait_until(lambda: set(admin.pubsub_channels()) <= heard_before, "no process listens")
    wait_until(lambda: {row["id"] for row in admin.client_list()} <= before, "no process is connected")


if __name__ == "__main__":
    redislock_fast.log_waits(None)  # on a busy machine, one of 66 callers may wait for long
    Program(int(sys.argv[1]), Board(Path(sys.argv[2])), int(sys.argv[3])).run()
