"""Two workloads of `--mode linger`: a new name for each pair, and a key that lingers elsewhere.

Locks that linger are given back many at a time, some time after their release. So with new names the clock starts after
a while, when as many are given back as are taken.

Elsewhere is another process, which has used some locks, and idles. This process acquires them while they linger there,
one after the other, and as many that are free, with pauses in which the other process idles again. Each name is used
once: a lock that was wanted while it lingered is not kept again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Any

import redis

from bench import contestants
from bench.contestants import LINGER_S, OURS_LINGERING, Contestant, expect, is_left, libraries
from bench.measuring.rounds import Entrant, Sample, Scene
from bench.workloads.single import pairs_of

NEW_NAME = "a new name each time"
FREE = "a free lock"
KEPT = "lingers elsewhere"

_FILL_S = 2 * LINGER_S  # before the clock starts
_PAUSE_S = 0.005
_AT_ONCE = int(LINGER_S / 2 / _PAUSE_S)  # that many are acquired while they linger
_ANSWERING_S = 10.0  # at most, on a busy machine

_processes = multiprocessing.get_context("forkserver")


def new_names(contestant: Contestant, scene: Scene) -> Entrant:
    """Make the row of a contestant in one thread, with a new name for each pair."""
    client, rival_client = redis.Redis.from_url(scene.url), redis.Redis.from_url(scene.url)
    key_of, linger_s, witness = contestant.key_of, contestant.linger_s, scene.witness
    prefix = f"{scene.prefix}:{contestant.name}"
    names = (f"{prefix}:{number}" for number in itertools.count())

    def measure(seconds: float) -> Sample:
        locks = (contestant.make(client, name) for name in names)
        held = next(locks)

        def acquire() -> Any:
            nonlocal held
            held = next(locks)
            return held.acquire()

        def release() -> None:
            held.release()

        pairs_of(acquire, release, _FILL_S)
        return pairs_of(acquire, release, seconds)

    def check() -> None:
        expect(not is_left(lambda: witness.keys(key_of(f"{prefix}:*")), linger_s), "released, but keys are still there")
        name = next(names)
        holder, rival = contestant.make(client, name), contestant.make(rival_client, name)
        contestants.check(key_of(name), holder, rival, witness, linger_s)

    return Entrant(contestant.name, NEW_NAME, measure, check)


def elsewhere(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the rows of a contestant that acquires the locks: free ones, and those that linger elsewhere."""
    crew = _Crew(contestant, scene)
    return [
        Entrant(contestant.name, workload, partial(crew.measure, keeps), crew.check)
        for workload, keeps in ((FREE, False), (KEPT, True))
    ]


class _Crew:
    """A client that acquires, and the other process, which starts with the first check and ends with the scene."""

    def __init__(self, contestant: Contestant, scene: Scene) -> None:
        self._scene = scene
        self._make = partial(contestant.make, redis.Redis.from_url(scene.url))
        self._names = (f"{scene.prefix}:kept:{number}" for number in itertools.count())
        other = ProcessPoolExecutor(1, _processes, signal.signal, (signal.SIGINT, signal.SIG_IGN))  # the bench ends it
        self._elsewhere = scene.closing.enter_context(other)

    def measure(self, keeps: bool, seconds: float) -> Sample:
        """Acquire and release locks for some seconds, which linger in the other process before, if it keeps them."""
        acquires_s: list[float] = []
        began_all = time.perf_counter()
        while time.perf_counter() < began_all + seconds or not acquires_s:
            names = list(itertools.islice(self._names, _AT_ONCE))
            self._use(names if keeps else [])
            for name in names:
                lock = self._make(name)
                time.sleep(_PAUSE_S)
                began = time.perf_counter()
                expect(lock.acquire(), "a lock that nobody holds was not acquired")
                acquires_s.append(time.perf_counter() - began)
                lock.release()
        return Sample(len(acquires_s) / (time.perf_counter() - began_all), latencies_s=acquires_s)

    def check(self) -> None:
        """Check that a lock lingers in the other process, can be acquired here, and excludes that process then."""
        witness = self._scene.witness
        name = next(self._names)
        expect(self._use([name]) == [True], "the other process could not acquire a free lock")
        value = witness.get(name)
        expect(value is not None, "the lock does not linger in the other process")
        lock = self._make(name)
        expect(lock.acquire(), "a lock that lingers elsewhere was not acquired")
        expect(witness.get(name) not in (None, value), "acquired, but the key is still the other process's")
        expect(self._use([name]) == [False], "two holders at a time")
        lock.release()
        expect(not witness.exists(name), "released, but the key is still there")

    def _use(self, names: Sequence[str]) -> list[bool]:
        """Have the other process acquire and release locks. Returns which it could acquire."""
        return self._elsewhere.submit(_use, self._scene.url, names).result(_ANSWERING_S)


_client_of = cache(redis.Redis.from_url)


def _use(url: str, names: Sequence[str]) -> list[bool]:
    make = partial(libraries.find(OURS_LINGERING).make, _client_of(url))
    used = []
    for lock in map(make, names):
        used.append(lock.acquire(blocking=False))
        if used[-1]:
            lock.release()
    return used
