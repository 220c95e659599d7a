"""The workload of `python -m bench throughput --mode single`: one lock in one thread.

The lock is reused, or made anew for each pair.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from bench import contestants
from bench.contestants import AnyLock, CheckFailedError, Contestant
from bench.measuring.rounds import ANEW, REUSED, Entrant, Sample, Scene

_PAIRS_PER_LOOK = 10  # pairs between two readings of the clock


def entrants_of(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the rows of a contestant, one for each way to use a lock."""
    client, rival_client = redis.Redis.from_url(scene.url), redis.Redis.from_url(scene.url)
    name = scene.prefix
    reused = contestant.make(client, name)
    # A key that was wanted while it lingered is not kept for some time: its check has a name of its own.
    checked = f"{name}:0" if contestant.linger_s else name
    rival = contestant.make(rival_client, checked)

    def anew() -> AnyLock:
        return contestant.make(client, name)

    def check(holder: Callable[[], AnyLock]) -> None:
        if contestants.is_left(lambda: scene.witness.exists(contestant.key_of(name)), contestant.linger_s):
            raise CheckFailedError("the key was left behind")
        holding = contestant.make(client, checked) if contestant.linger_s else holder()
        contestants.check(contestant.key_of(checked), holding, rival, scene.witness, contestant.linger_s)

    def entrant(workload: str, measure: Callable[[float], Sample], holder: Callable[[], AnyLock]) -> Entrant:
        return Entrant(
            contestant.name, contestant.name, workload, measure, lambda: check(holder), limit=contestants.FLOOR
        )

    return [
        entrant(REUSED, lambda seconds: pairs_reused(reused.acquire, reused.release, seconds), lambda: reused),
        entrant(ANEW, lambda seconds: _pairs_anew(anew, seconds), anew),
    ]


def pairs_reused(acquire: Callable[[], bool], release: Callable[[], object], seconds: float) -> Sample:
    """Acquire and release one lock again and again.

    Args:
        acquire: of the lock.
        release: of the lock.
        seconds: for how long.

    Raises:
        CheckFailedError: when the lock is not acquired.
    """
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            if not acquire():
                raise CheckFailedError("a free lock was not acquired")
            release()
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return Sample(pairs / (now - began))


def _pairs_anew(make: Callable[[], AnyLock], seconds: float) -> Sample:
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            with make():
                pass
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return Sample(pairs / (now - began))
