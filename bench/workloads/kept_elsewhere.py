"""A workload of `python -m bench throughput --mode linger`: a lock is acquired that lingers in another process.

The other process has used some locks, and idles. This process acquires them while they linger there, one after the
other, and as many that are free, with pauses in which the other process idles again. Each name is used once: a lock
that was wanted while it lingered is not kept again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import redis

from bench.contestants import LINGER_S, OURS_LINGERING, CheckFailedError, Contestant, libraries
from bench.measuring.rounds import Entrant, Sample, Scene

FREE = "a free lock"
KEPT = "lingers elsewhere"

_PAUSE_S = 0.005
_AT_ONCE = int(LINGER_S / 2 / _PAUSE_S)  # that many are acquired while they linger
_ANSWERING_S = 10.0  # at most, on a busy machine

_processes = multiprocessing.get_context("forkserver")


def entrants_of(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the rows of a contestant that acquires the locks: free ones, and those that linger elsewhere."""
    crew = _Crew(contestant, scene)
    return [
        Entrant(contestant.name, contestant.name, workload, partial(crew.measure, keeps), crew.check)
        for workload, keeps in ((FREE, False), (KEPT, True))
    ]


class _Crew:
    """A client that acquires, and the other process, which starts with the first check."""

    def __init__(self, contestant: Contestant, scene: Scene) -> None:
        self._scene = scene
        self._make = partial(contestant.make, redis.Redis.from_url(scene.url))
        self._prefix = f"{scene.prefix}:kept"
        self._numbers = itertools.count()
        self._connection: Connection | None = None

    def measure(self, keeps: bool, seconds: float) -> Sample:
        """Acquire and release locks for some seconds.

        Args:
            keeps: whether they linger in the other process before.
            seconds: for how long.
        """
        acquires_s: list[float] = []
        began_all = time.perf_counter()
        while time.perf_counter() < began_all + seconds or not acquires_s:
            names = self._names(_AT_ONCE)
            self._use(names if keeps else self._names(0))
            for name in names:
                lock = self._make(name)
                time.sleep(_PAUSE_S)
                began = time.perf_counter()
                if not lock.acquire():
                    raise CheckFailedError("a lock that nobody holds was not acquired")
                acquires_s.append(time.perf_counter() - began)
                lock.release()
        return Sample(len(acquires_s) / (time.perf_counter() - began_all), latencies_s=acquires_s)

    def check(self) -> None:
        """Check that a lock lingers in the other process, can be acquired here, and excludes that process then.

        Raises:
            CheckFailedError: at the first violation.
        """
        witness = self._scene.witness
        (name,) = names = self._names(1)
        if self._use(names) != [True]:
            raise CheckFailedError("the other process could not acquire a free lock")
        value = witness.get(name)
        if value is None:
            raise CheckFailedError("the lock does not linger in the other process")
        lock = self._make(name)
        if not lock.acquire():
            raise CheckFailedError("a lock that lingers elsewhere was not acquired")
        if witness.get(name) in (None, value):
            raise CheckFailedError("acquired, but the key is still the other process's")
        if self._use(names) != [False]:
            raise CheckFailedError("two holders at a time")
        lock.release()
        if witness.exists(name):
            raise CheckFailedError("released, but the key is still there")

    def _names(self, count: int) -> list[str]:
        return [f"{self._prefix}:{number}" for number in itertools.islice(self._numbers, count)]

    def _use(self, names: Sequence[str]) -> list[bool]:
        """Have the other process acquire and release locks. Returns which it could acquire."""
        connection = self._connection or self._start()
        connection.send(names)
        if not connection.poll(_ANSWERING_S):
            raise CheckFailedError("the other process does not answer")
        said: list[bool] = connection.recv()
        return said

    def _start(self) -> Connection:
        """Start the other process, which ends with the scene."""
        ours, its = _processes.Pipe()
        process = _processes.Process(target=_keep, args=(its, self._scene.url), daemon=True)
        process.start()
        its.close()
        self._scene.closing.callback(process.join)
        self._scene.closing.callback(ours.close)
        self._connection = ours
        return ours


def _keep(connection: Connection, url: str) -> None:
    """Acquire and release the locks that are named, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends its processes itself
    make = partial(libraries.find(OURS_LINGERING).make, redis.Redis.from_url(url))
    try:
        while True:
            used = []
            for name in connection.recv():
                lock = make(name)
                used.append(lock.acquire(blocking=False))
                if used[-1]:
                    lock.release()
            connection.send(used)
    except EOFError:
        os._exit(0)
