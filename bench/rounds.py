"""How contestants are measured against one another: in rounds, each in turn.

Rules: rounds interleave the contestants (A B C A B C ...), so that the machine's noise hits all
alike; ratios are taken within a round and only then reduced to their median; one warm-up is not
counted; each contestant is checked in each round, outside the timed part. Must not know: how a
contestant works, or what is printed.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import report
from bench.contestants import REDIS_PY, CheckFailedError

REUSED = "lock reused"
ANEW = "made anew"
TWO_ROUND_TRIPS = "two round trips"


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        pairs_per_s: of all threads together.
        latencies_s: of every single pair, where they are taken.
        connections: how many the contestant has to the server, where they are counted.
    """

    pairs_per_s: float
    latencies_s: Sequence[float] = ()
    connections: int | None = None


@dataclass
class Entrant:
    """A row of the table: one contestant in one workload.

    Attributes:
        contestant: its name in `--only` and in the JSON file.
        title: its name in the table.
        workload: what each thread does.
        measure: measures for so many seconds.
        check: raises `CheckFailedError` unless its lock is one.
        threads: how many do it at a time.
        samples: one per counted round.
    """

    contestant: str
    title: str
    workload: str
    measure: Callable[[float], Sample]
    check: Callable[[], None]
    threads: int = 1
    samples: list[Sample] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Pairs per second, one figure per counted round."""
        return [sample.pairs_per_s for sample in self.samples]


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
                sample = _sample(entrant, seconds)
                if counted_round:
                    entrant.samples.append(sample)


def _sample(entrant: Entrant, seconds: float) -> Sample:
    """One measurement between two checks; whatever a contestant raises is its failure."""
    try:
        entrant.check()
        gc.collect()  # nobody pays for another's garbage
        sample = entrant.measure(seconds)
        entrant.check()
    except Exception as error:
        reason = str(error) if isinstance(error, CheckFailedError) else repr(error)
        raise CheckFailedError(f"{entrant.title}, {entrant.workload}: {reason}") from error
    return sample


def summary(entrant: Entrant, entrants: list[Entrant]) -> dict[str, Any]:
    """What there is to say about every row, as it is saved.

    Args:
        entrant: whose row it is.
        entrants: all of the race, for the ratios.
    """

    def find(name: str, workload: str) -> Entrant | None:
        wanted = (name, workload, entrant.threads)
        return next((e for e in entrants if (e.contestant, e.workload, e.threads) == wanted), None)

    workload = REUSED if entrant.workload == TWO_ROUND_TRIPS else entrant.workload
    to_redis_py = _ratios(entrant, find(REDIS_PY, workload))
    to_floor = _ratios(entrant, find("floor", TWO_ROUND_TRIPS))
    return {
        "contestant": entrant.contestant,
        "title": entrant.title,
        "workload": entrant.workload,
        "threads": entrant.threads,
        "pairs_per_s": entrant.rates,
        "median": statistics.median(entrant.rates),
        "min": min(entrant.rates),
        "max": max(entrant.rates),
        "ratios_to_redis_py": to_redis_py,
        "ratio_to_redis_py": to_redis_py and statistics.median(to_redis_py),
        "ratios_to_floor": to_floor,
        "ratio_to_floor": to_floor and statistics.median(to_floor),
    }


def _ratios(entrant: Entrant, base: Entrant | None) -> list[float] | None:
    if base is None:
        return None
    return [rate / other for rate, other in zip(entrant.rates, base.rates, strict=True)]
