"""How contestants are measured against one another: in rounds, each in turn.

Rules: rounds interleave the contestants (A B C A B C ...), so that the machine's noise hits all
alike; ratios are taken within a round and only then reduced to their median; one warm-up is not
counted; each contestant is checked in each round, outside the timed part.
"""

from __future__ import annotations

import gc
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import redis

from bench import report
from bench.contestants import REDIS_PY, CheckFailedError

REUSED = "lock reused"
ANEW = "made anew"
TWO_ROUND_TRIPS = "two round trips"


@dataclass(frozen=True)
class Scene:
    """Where a race takes place.

    Attributes:
        url: the server's.
        prefix: a name that nobody else on the server uses, for locks, and for what others begin with it.
        witness: a plain client that no contestant uses.
        folder: for files; it goes when the race is over.
        closing: what is to be closed then.
    """

    url: str
    prefix: str
    witness: redis.Redis
    folder: Path
    closing: ExitStack


@dataclass(frozen=True)
class Sample:
    """One measurement; what is not measured in a workload is None, or empty.

    Attributes:
        pairs_per_s: of all threads, tasks or names together.
        latencies_s: of every single operation: an acquire or a release, of one lock or of a batch.
        acquires_s: of every acquire, where these are told apart.
        connections: how many the contestant has to the server.
        client_cpu_us: microseconds of this process's CPU time per pair.
        server_cpu_us: the same of the server's.
    """

    pairs_per_s: float
    latencies_s: Sequence[float] = ()
    connections: int | None = None
    client_cpu_us: float | None = None
    server_cpu_us: float | None = None
    acquires_s: Sequence[float] = ()


@dataclass
class Entrant:
    """A row of the table: one contestant in one workload.

    Attributes:
        contestant: its name in `--only` and in the JSON file.
        title: its name in the table.
        workload: what is done; the ratio to redis-py is taken in the same.
        measure: measures for so many seconds.
        check: raises `CheckFailedError` unless its lock is one.
        count: how many threads, tasks or names there are at a time.
        limit: the contestant that shows how much there is to be reached at all.
        samples: one per counted round.
    """

    contestant: str
    title: str
    workload: str
    measure: Callable[[float], Sample]
    check: Callable[[], None]
    count: int = 1
    limit: str | None = None
    samples: list[Sample] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Pairs per second, one figure per counted round."""
        return [sample.pairs_per_s for sample in self.samples]


@contextmanager
def open_scene(url: str, locks: int) -> Iterator[Scene]:
    """Names that nobody uses on the server, and no keys of them left behind.

    Args:
        url: the server's.
        locks: how many numbered names there are at most, behind the prefix and a colon.
    """
    prefix = f"bench:{secrets.token_hex(4)}"
    with (
        redis.Redis.from_url(url) as witness,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        ExitStack() as closing,
    ):
        closing.callback(
            witness.delete,
            *(begin + prefix for begin in ("", "lock:", "lock-signal:", "redlock:")),
            *(f"{prefix}:{index}" for index in range(locks)),
        )
        yield Scene(url, prefix, witness, Path(folder), closing)


def race(entrants: list[Entrant], rounds: int, seconds: float) -> None:
    """Run a warm-up and the counted rounds, and give every entrant its samples.

    Raises:
        CheckFailedError: at the first failure of a contestant.
    """
    with report.progress(len(entrants) * (rounds + 1)) as step:
        for counted_round in range(rounds + 1):
            stage = f"round {counted_round} of {rounds}" if counted_round else "warm-up"
            for entrant in entrants:
                step(stage)
                sampled = sample(entrant, seconds)
                if counted_round:
                    entrant.samples.append(sampled)


def sample(entrant: Entrant, seconds: float) -> Sample:
    """Measure once, between two checks.

    Args:
        entrant: the row.
        seconds: for how long.

    Raises:
        CheckFailedError: for any error that the contestant raises.
    """
    try:
        entrant.check()
        gc.collect()  # the garbage of one contestant costs no other
        sampled = entrant.measure(seconds)
        entrant.check()
    except Exception as error:
        reason = str(error) if isinstance(error, CheckFailedError) else repr(error)
        raise CheckFailedError(f"{entrant.title}, {entrant.workload}: {reason}") from error
    return sampled


def summary(entrant: Entrant, entrants: list[Entrant]) -> dict[str, Any]:
    """What there is to say about every row, as it is saved; None for what is not measured.

    Args:
        entrant: whose row it is.
        entrants: all of the race, for the ratios.
    """
    workload = REUSED if entrant.workload == TWO_ROUND_TRIPS else entrant.workload
    redis_py = next((e for e in entrants if (e.contestant, e.workload) == (REDIS_PY, workload)), None)
    limit = next((e for e in entrants if e.contestant == entrant.limit), None)
    to_redis_py = _ratios(entrant, redis_py)
    to_limit = _ratios(entrant, limit)
    samples = entrant.samples
    latencies_s = list(chain.from_iterable(sample.latencies_s for sample in samples))
    percentiles_s = statistics.quantiles(latencies_s, n=100) if latencies_s else None
    return {
        "contestant": entrant.contestant,
        "title": entrant.title,
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
        "latency_p50_ms": percentiles_s and 1000 * percentiles_s[49],
        "latency_p99_ms": percentiles_s and 1000 * percentiles_s[98],
        "client_cpu_us": _median([sample.client_cpu_us for sample in samples]),
        "server_cpu_us": _median([sample.server_cpu_us for sample in samples]),
        "connections": max((sample.connections for sample in samples if sample.connections is not None), default=None),
    }


def _ratios(entrant: Entrant, base: Entrant | None) -> list[float] | None:
    if base is None:
        return None
    return [rate / other for rate, other in zip(entrant.rates, base.rates, strict=True)]


def _median(figures: Sequence[float | None] | None) -> float | None:
    known = [figure for figure in figures or () if figure is not None]
    return statistics.median(known) if known else None
