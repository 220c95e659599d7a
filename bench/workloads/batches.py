"""The workload of `python -m bench throughput --mode batch`: many names at a time.

Every batch is acquired and released as a whole. Each name counts as a pair. A batch of which not every lock was
acquired and released is an error.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import redis

from bench.contestants import LEASE_S, SERVER_LIMIT, AbsentError, AnyBatch, CheckFailedError, Contestant
from bench.measuring.costs import Meter
from bench.measuring.rounds import Entrant, Sample, Scene

COUNTS = (10, 100, 1000)
"""The sizes of batches; each is a row."""


def entrants_of(contestant: Contestant, scene: Scene, counts: Sequence[int] = COUNTS) -> list[Entrant]:
    """Make the rows of a contestant, one for each size of batch.

    Raises:
        AbsentError: when the contestant has no batches.
    """

    def entrant(count: int) -> Entrant:
        crew = _Crew(contestant, scene, count)
        workload = f"batch of {count:,}"
        return Entrant(contestant.name, contestant.name, workload, crew.measure, crew.check, count, limit=SERVER_LIMIT)

    return [entrant(count) for count in counts]


class _Crew:
    """A batch on a client of its own, and a rival on another client."""

    def __init__(self, contestant: Contestant, scene: Scene, count: int) -> None:
        if contestant.make_batch is None:
            raise AbsentError("no batches")
        self._names = [f"{scene.prefix}:{index}" for index in range(count)]
        self._client_name = f"{scene.prefix}:{contestant.name}:{count}"
        client = redis.Redis.from_url(scene.url, client_name=self._client_name)
        self._batch: AnyBatch = contestant.make_batch(client)
        self._rival: AnyBatch = contestant.make_batch(redis.Redis.from_url(scene.url))
        self._witness = scene.witness

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the batch for some seconds."""
        names, count = self._names, len(self._names)
        acquire, release = self._batch.acquire, self._batch.release
        meter = Meter(self._witness)
        latencies_s = array("d")
        batches = 0
        meter.start()
        began_all = now = time.perf_counter()
        while now < began_all + seconds:
            began = now
            if acquire(names) != count:
                raise CheckFailedError("not all of the free locks were acquired")
            acquired = time.perf_counter()
            if release() != count:
                raise CheckFailedError("not all of the held locks were released")
            now = time.perf_counter()
            latencies_s.append(acquired - began)
            latencies_s.append(now - acquired)
            batches += 1
        pairs = batches * count
        client_cpu_us, server_cpu_us = meter.read(pairs)
        return Sample(pairs / (now - began_all), latencies_s, self._connections(), client_cpu_us, server_cpu_us)

    def check(self) -> None:
        """Check on an independent connection that the batch holds all its names, and none after the release.

        Raises:
            CheckFailedError: at the first violation.
        """

        def expect(right: object, complaint: str) -> None:
            if not right:
                raise CheckFailedError(complaint)

        names, count, witness = self._names, len(self._names), self._witness
        expect(not witness.exists(*names), "keys were left behind")
        expect(self._batch.acquire(names) == count, "not all of the free locks could be acquired")
        values = witness.mget(names)
        expect(None not in values, "acquired, but keys are missing")
        for name in (names[0], names[-1]):
            ttl_ms = witness.pttl(name)
            expect(0 < ttl_ms <= LEASE_S * 1000, f"held for {ttl_ms} ms instead of {LEASE_S} s")
        expect(self._rival.acquire(names) == 0, "two holders at a time")
        expect(witness.mget(names) == values, "a failed acquire changed the holder's keys")
        expect(self._batch.release() == count, "not all of the held locks could be released")
        expect(not witness.exists(*names), "released, but keys are still there")
        expect(self._rival.acquire(names) == count, "released locks could not be acquired by another")
        expect(self._rival.release() == count, "another could not release its locks")
        expect(not witness.exists(*names), "released by another, but keys are still there")

    def _connections(self) -> int:
        return sum(client["name"] == self._client_name for client in self._witness.client_list())
