"""A workload of `python -m bench throughput --mode linger`: one thread, and a new name for each pair.

Locks that linger are given back many at a time, some time after their release. So the clock starts after a while, when
as many are given back as are taken.
"""

from __future__ import annotations

import itertools
import time

import redis

from bench import contestants
from bench.contestants import LINGER_S, AnyLock, CheckFailedError, Contestant
from bench.measuring.rounds import Entrant, Sample, Scene

NAME = "a new name each time"

_FILL_S = 2 * LINGER_S  # before the clock starts
_PAIRS_PER_LOOK = 10  # pairs between two readings of the clock


def entrants_of(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the row of a contestant."""
    crew = _Crew(contestant, scene)
    return [Entrant(contestant.name, contestant.name, NAME, crew.measure, crew.check)]


class _Crew:
    """A thread, and a rival on another client."""

    def __init__(self, contestant: Contestant, scene: Scene) -> None:
        self._contestant = contestant
        self._client, self._rival_client = redis.Redis.from_url(scene.url), redis.Redis.from_url(scene.url)
        self._witness = scene.witness
        self._prefix = f"{scene.prefix}:{contestant.name}"
        self._numbers = itertools.count()

    def measure(self, seconds: float) -> Sample:
        """Acquire and release locks for some seconds."""
        self._pairs_per_s(_FILL_S)
        return Sample(self._pairs_per_s(seconds))

    def check(self) -> None:
        """Check that no key is left, and that the lock of another new name excludes others.

        Raises:
            CheckFailedError: at the first violation.
        """
        keys = self._contestant.key_of(f"{self._prefix}:*")
        if contestants.is_left(lambda: self._witness.keys(keys), self._contestant.linger_s):
            raise CheckFailedError("released, but keys are still there")
        name = f"{self._prefix}:{next(self._numbers)}"
        contestants.check(
            self._contestant.key_of(name),
            self._contestant.make(self._client, name),
            self._contestant.make(self._rival_client, name),
            self._witness,
            self._contestant.linger_s,
        )

    def _pairs_per_s(self, seconds: float) -> float:
        make, client, prefix, numbers = self._contestant.make, self._client, self._prefix, self._numbers
        lock: AnyLock
        pairs = 0
        began = now = time.perf_counter()
        while now < began + seconds:
            for number in itertools.islice(numbers, _PAIRS_PER_LOOK):
                lock = make(client, f"{prefix}:{number}")
                if not lock.acquire():
                    raise CheckFailedError("a free lock was not acquired")
                lock.release()
            pairs += _PAIRS_PER_LOOK
            now = time.perf_counter()
        return pairs / (now - began)
