"""The workload of many names at a time.

Every batch is acquired and released as a whole. Each name counts as a pair. A batch of which not every lock was
acquired and released is an error.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from bench.contestants import LEASE_S, AbsentError, Contestant, expect
from bench.measuring.rounds import Entrant, Sample, Scene

COUNTS = (10, 100, 1000)
"""The sizes of batches; each is a row."""


def entrants_of(contestant: Contestant, scene: Scene, counts: Sequence[int] = COUNTS) -> list[Entrant]:
    """Make the rows of a contestant, one for each size of batch; raises `AbsentError` when it has no batches."""
    return [_entrant(contestant, scene, count) for count in counts]


def _entrant(contestant: Contestant, scene: Scene, count: int) -> Entrant:
    if contestant.make_batch is None:
        raise AbsentError("no batches")
    names = [f"{scene.prefix}:{index}" for index in range(count)]
    client_name = f"{scene.prefix}:{contestant.name}:{count}"
    witness = scene.witness
    crew = Crew(
        contestant.make_batch(redis.Redis.from_url(scene.url, client_name=client_name)),
        contestant.make_batch(redis.Redis.from_url(scene.url)),
        names,
        lambda: witness.exists(*names),
        witness.pttl,
    )
    workload = f"batch of {count:,}"
    costs: dict[str, Any] = {"witnesses": [witness], "client_name": client_name}
    return Entrant(contestant.name, workload, crew.measure, crew.check, count, **costs)


@dataclass(frozen=True)
class Crew:
    """A batch, and a rival on another client."""

    batch: Any  # it is measured
    rival: Any  # it wants the same names in a check
    names: Sequence[str]  # of the locks
    keys: Callable[[], int]  # says how many of the locks there are on the server
    ttl_ms: Callable[[str], int]  # says how long the lock of a name will stay there

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the batch for some seconds."""
        names, count = self.names, len(self.names)
        acquire, release = self.batch.acquire, self.batch.release
        latencies_s = array("d")
        began_all = now = time.perf_counter()
        while now < began_all + seconds:
            began = now
            expect(acquire(names) == count, "not all of the free locks were acquired")
            acquired = time.perf_counter()
            expect(release() == count, "not all of the held locks were released")
            now = time.perf_counter()
            latencies_s.extend((acquired - began, now - acquired))
        pairs = len(latencies_s) // 2 * count
        return Sample(pairs / (now - began_all), latencies_s, pairs=pairs)

    def check(self) -> None:
        """Check on an independent connection that the batch holds all its names, and none after the release."""
        names, count = self.names, len(self.names)
        expect(self.keys() == 0, "keys were left behind")
        expect(self.batch.acquire(names) == count, "not all of the free locks could be acquired")
        expect(self.keys() == count, "acquired, but keys are missing")
        for name in (names[0], names[-1]):
            ttl_ms = self.ttl_ms(name)
            expect(0 < ttl_ms <= LEASE_S * 1000, f"held for {ttl_ms} ms instead of {LEASE_S} s")
        expect(self.rival.acquire(names) == 0, "two holders at a time")
        # With the tokens of the batch: the rival has changed none.
        expect(self.batch.release() == count, "not all of the held locks could be released")
        expect(self.keys() == 0, "released, but keys are still there")
        expect(self.rival.acquire(names) == count, "released locks could not be acquired by another")
        expect(self.rival.release() == count, "another could not release its locks")
        expect(self.keys() == 0, "released by another, but keys are still there")
