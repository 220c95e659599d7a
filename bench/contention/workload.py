"""The workload of a window: the workers, the locks, and how long a worker holds and thinks.

It is plain data, which is sent to other processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

_PICKS = 512  # keys that are picked for a worker in advance, and used in a cycle

HOT = "hot"
_WEIGHT_OF_KEY: Mapping[str, Callable[[int], float]] = {
    HOT: lambda rank: float(rank == 1),
    "uniform": lambda _: 1.0,
    "zipf": lambda rank: 1 / rank,
}
OWN = "own"
DISTRIBUTIONS = (*_WEIGHT_OF_KEY, OWN)
"""How the workers choose keys: all one key; all keys equally often; the n-th key 1/n times as often as the first; each
always the same, as many one as another."""


@dataclass(frozen=True)
class Workload:
    """The workload of a row."""

    processes: int = 8  # their number, each with a client of its own
    threads: int = 1  # workers of each process; 1 when there are tasks
    tasks: int = 0  # workers of each process in an event loop; 0 for threads
    keys: int = 1  # the number of locks
    distribution: str = HOT  # one of `DISTRIBUTIONS`
    hold_ms: float = 1.0  # how long a worker sleeps with the lock, in ms
    think_ms: float = 1.0  # how long a worker sleeps between a release and the next acquire, in ms

    @property
    def crew(self) -> int:
        """The number of workers of a process."""
        return self.tasks or self.threads

    @property
    def workers(self) -> int:
        """The number of workers of all processes."""
        return self.processes * self.crew

    @property
    def who(self) -> str:
        """The workers in words, for example "8 processes"."""
        if self.crew == 1:
            return _counted(self.processes, "process", "es")
        each = _counted(self.crew, "task" if self.tasks else "thread", "s")
        return each if self.processes == 1 else f"{self.processes:,} x {each}"

    @property
    def label(self) -> str:
        """The name of the workload in tables."""
        keys = "" if self.distribution == HOT else f", {self.distribution} {self.keys:,}"
        return f"{self.who}{keys}, {self.hold_ms:g}/{self.think_ms:g}"

    def picks(self, worker: int) -> list[int]:
        """The keys of a worker, one after the other; the same for every contestant."""
        if self.distribution == OWN:
            return [worker % self.keys]
        weights = list(accumulate(map(_WEIGHT_OF_KEY[self.distribution], range(1, self.keys + 1))))
        return random.Random(worker).choices(range(self.keys), cum_weights=weights, k=_PICKS)


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count:,} {noun}{plural * (count > 1)}"
