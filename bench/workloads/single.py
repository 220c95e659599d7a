"""The workload of one lock in one thread. The lock is reused, or made anew for each pair."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from bench import contestants
from bench.contestants import CheckFailedError, Contestant, expect, is_left
from bench.measuring.rounds import ANEW, REUSED, Entrant, Sample, Scene

_PAIRS_PER_LOOK = 10  # pairs between two readings of the clock


def entrants_of(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the rows of a contestant, one for each way to use a lock."""
    client, rival_client = redis.Redis.from_url(scene.url), redis.Redis.from_url(scene.url)
    name = scene.prefix
    make: Callable[..., Any] = partial(contestant.make, client)
    lock = make(name)
    # A key that was wanted while it lingered is not kept for some time: its check has a name of its own.
    checked = f"{name}:0" if contestant.linger_s else name
    rival = contestant.make(rival_client, checked)

    def check(holder: Callable[[], Any]) -> None:
        is_there = is_left(lambda: scene.witness.exists(contestant.key_of(name)), contestant.linger_s)
        expect(not is_there, "the key was left behind")
        contestants.check(contestant.key_of(checked), holder(), rival, scene.witness, contestant.linger_s)

    anew = partial(make, checked)
    reused = (
        partial(pairs_of, lock.acquire, lock.release),
        partial(check, anew if contestant.linger_s else lambda: lock),
    )
    made_anew = partial(_pairs_anew, partial(make, name)), partial(check, anew)
    return [
        Entrant(contestant.name, workload, *calls, witnesses=[scene.witness])
        for workload, calls in ((REUSED, reused), (ANEW, made_anew))
    ]


def pairs_of(acquire: Callable[[], bool], release: Callable[[], object], seconds: float) -> Sample:
    """Acquire and release a lock again and again. Raises `CheckFailedError` when it is not acquired."""
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            if not acquire():
                raise CheckFailedError("a free lock was not acquired")
            release()
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return Sample(pairs / (now - began), pairs=pairs)


def _pairs_anew(make: Callable[[], Any], seconds: float) -> Sample:
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            with make():
                pass
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return Sample(pairs / (now - began), pairs=pairs)
