"""Measures contestants against one another, in interleaved rounds.

Each round measures all contestants in turn (A B C A B C ...), so that the noise of the machine affects all of them.
Ratios are taken within a round, and their median is the figure. A warm-up round is not counted. Each contestant is
checked in each round, outside the timed part.
"""

from __future__ import annotations

import gc
import math
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import redis

from bench.contestants import REDIS_PY, CheckFailedError, delete_keys
from bench.measuring import report
from bench.measuring.costs import Meter, connections_of

REUSED = "lock reused"
ANEW = "made anew"
TWO_ROUND_TRIPS = "two round trips"


@dataclass(frozen=True)
class Scene:
    """The server of a race, and the resources that end with the race."""

    url: str  # of the server
    prefix: str  # a name that is used for nothing else on the server; the names of all locks have it
    witness: redis.Redis  # a plain client that no contestant uses
    closing: ExitStack  # closes other resources after the race


@dataclass(frozen=True)
class Sample:
    """One measurement; a figure that the workload does not measure is None, or empty."""

    pairs_per_s: float  # of all threads, tasks or names together
    latencies_s: Sequence[float] = ()  # of every operation: an acquire or a release, of one lock or of a batch
    acquires_s: Sequence[float] = ()  # of every acquire, when acquires are measured apart
    pairs_s: Sequence[float] = ()  # of every pair, from the start of the acquire to the end of the release
    pairs: int = 0  # how many there were
    connections: int | None = None  # of the contestant to the server
    client_cpu_us: float | None = None  # CPU time of this process per pair, in microseconds
    server_cpu_us: float | None = None  # CPU time of the server per pair, in microseconds


@dataclass
class Entrant:
    """A row of the table: one contestant in one workload."""

    contestant: str  # its name in `--only` and in the JSON file
    workload: str  # its name; the ratio to redis-py is taken in the same workload
    measure: Callable[[float], Sample]  # measures for a number of seconds
    check: Callable[[], None] = lambda: None  # raises `CheckFailedError` when the lock is not a correct one
    count: int = 1  # of threads, tasks or names at a time
    limit: str | None = None  # the contestant that shows the upper limit: in the same workload, or in its only one
    title: str | None = None  # the contestant's name in the table, where it is another
    witnesses: Sequence[
        redis.Redis
    ] = ()  # plain clients of the servers whose CPU time counts; none: no CPU time counts
    client_name: str | None = None  # of the connections to the first of these servers that are counted
    samples: list[Sample] = field(default_factory=list)  # one per counted round

    @property
    def rates(self) -> list[float]:
        """Pairs per second, one figure per counted round."""
        return [sample.pairs_per_s for sample in self.samples]


@contextmanager
def open_scene(url: str) -> Iterator[Scene]:
    """Open a scene, and delete the keys of its locks at the end."""
    prefix = f"bench:{secrets.token_hex(4)}"
    with redis.Redis.from_url(url) as witness, ExitStack() as closing:
        closing.callback(delete_keys, witness, prefix)
        yield Scene(url, prefix, witness, closing)


def race(entrants: Sequence[Entrant], rounds: int, seconds: float) -> None:
    """Run a warm-up and the counted rounds, and add the samples to every entrant."""
    with report.progress(len(entrants) * (rounds + 1)) as step:
        for counted_round in range(rounds + 1):
            stage = f"round {counted_round} of {rounds}" if counted_round else "warm-up"
            for entrant in entrants:
                step(stage)
                sampled = sample(entrant, seconds)
                if counted_round:
                    entrant.samples.append(sampled)


def sample(entrant: Entrant, seconds: float) -> Sample:
    """Measure once, between two checks; any error that the contestant raises is a `CheckFailedError`."""
    try:
        entrant.check()
        gc.collect()  # the garbage of one contestant costs no other
        sampled = _with_costs(entrant, seconds) if entrant.witnesses else entrant.measure(seconds)
        entrant.check()
    except Exception as error:
        reason = str(error) if isinstance(error, CheckFailedError) else repr(error)
        raise CheckFailedError(f"{entrant.title or entrant.contestant}, {entrant.workload}: {reason}") from error
    return sampled


def _with_costs(entrant: Entrant, seconds: float) -> Sample:
    meter = Meter(entrant.witnesses)
    sampled = entrant.measure(seconds)
    client_us, server_us = (1e6 * spent_s / sampled.pairs for spent_s in meter.read())
    connections = connections_of(entrant.witnesses[0], entrant.client_name) if entrant.client_name else None
    return replace(sampled, client_cpu_us=client_us, server_cpu_us=server_us, connections=connections)


def summary(entrant: Entrant, entrants: Sequence[Entrant]) -> dict[str, Any]:
    """The figures of a row, as they are saved, with the ratios to other rows of the race; None where not measured."""
    workload = REUSED if entrant.workload == TWO_ROUND_TRIPS else entrant.workload
    redis_py = next((e for e in entrants if (e.contestant, e.workload) == (REDIS_PY, workload)), None)
    limits = [e for e in entrants if e.contestant == entrant.limit]
    limit = next((e for e in limits if e.workload == entrant.workload), limits[0] if limits else None)
    to_redis_py = _ratios(entrant.rates, redis_py.rates if redis_py else None)
    to_limit = _ratios(entrant.rates, limit.rates if limit else None)
    fewest = min((e for e in entrants if e.contestant == entrant.contestant), key=lambda e: e.count)
    samples = entrant.samples
    latencies_s = sorted(chain.from_iterable(sample.latencies_s for sample in samples))
    longest = [max(sample.pairs_s) / statistics.median(sample.pairs_s) for sample in samples if sample.pairs_s]
    figures: dict[str, Any] = {
        "contestant": entrant.contestant,
        "title": entrant.title or entrant.contestant,
        "workload": entrant.workload,
        "count": entrant.count,
        "pairs_per_s": entrant.rates,
        "median": statistics.median(entrant.rates),
        "min": min(entrant.rates),
        "max": max(entrant.rates),
        "ratios_to_redis_py": to_redis_py,
        "ratio_to_redis_py": _median(to_redis_py),
        "limit": limit and limit.contestant,
        "ratios_to_limit": to_limit,
        "ratio_to_limit": _median(to_limit),
        "ratio_to_fewest": _median(_ratios(entrant.rates, fewest.rates)),
        "longest_to_median": max(longest, default=None),
        "latency_p50_ms": in_ms(percentile(latencies_s, 0.5)),
        "latency_p99_ms": in_ms(percentile(latencies_s, 0.99)),
        "client_cpu_us": _median([sample.client_cpu_us for sample in samples]),
        "server_cpu_us": _median([sample.server_cpu_us for sample in samples]),
        "connections": max((sample.connections for sample in samples if sample.connections is not None), default=None),
    }
    for name, share in (("acquire_p50", 0.5), ("acquire_p99", 0.99)):
        own_s, base_s = (
            [percentile(sorted(sample.acquires_s), share) or 0.0 for sample in of.samples if sample.acquires_s]
            for of in (entrant, redis_py or entrant)
        )
        figures[f"{name}_ms"] = in_ms(_median(own_s))
        figures[f"{name}_to_redis_py"] = _median(_ratios(own_s, base_s if redis_py else None))
    return figures


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of ordered values: the smallest that the share, from 0 to 1, does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def in_ms(seconds: float | None) -> float | None:
    """Seconds in milliseconds."""
    return None if seconds is None else 1000 * seconds


def _ratios(figures: Sequence[float], base: Sequence[float] | None) -> list[float] | None:
    if base is None or len(base) != len(figures):
        return None
    return [figure / other for figure, other in zip(figures, base, strict=True)]


def _median(figures: Sequence[float | None] | None) -> float | None:
    known = [figure for figure in figures or () if figure is not None]
    return statistics.median(known) if known else None
