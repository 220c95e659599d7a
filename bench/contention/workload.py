"""What is done in a window: by how many workers, on which locks, and how long they hold and think.

Rules: plain data, which goes to other processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

_PICKS = 512  # how many keys are picked for a worker in advance, to be gone through again and again

HOT = "hot"
_WEIGHT_OF_KEY: Mapping[str, Callable[[int], float]] = {
    HOT: lambda rank: float(rank == 1),
    "uniform": lambda _: 1.0,
    "zipf": lambda rank: 1 / rank,
}
DISTRIBUTIONS = tuple(_WEIGHT_OF_KEY)
"""How the workers spread over the keys: all want one; all are alike; the n-th is wanted 1/n times as often."""


@dataclass(frozen=True)
class Workload:
    """One row of the table, but for the contestant.

    Attributes:
        processes: how many there are, each with a client of its own.
        threads: workers of each process; 1 where there are tasks.
        tasks: the same in an event loop; 0 for threads.
        keys: how many locks there are.
        distribution: one of `DISTRIBUTIONS`.
        hold_ms: how long a worker keeps the lock, sleeping; 0 for not at all.
        think_ms: how long it sleeps before it wants it again; 0 for not at all.
    """

    processes: int = 8
    threads: int = 1
    tasks: int = 0
    keys: int = 1
    distribution: str = HOT
    hold_ms: float = 1.0
    think_ms: float = 1.0

    @property
    def crew(self) -> int:
        """The workers of one process."""
        return self.tasks or self.threads

    @property
    def workers(self) -> int:
        """The workers of all processes."""
        return self.processes * self.crew

    @property
    def who(self) -> str:
        """The workers, in words."""
        if self.crew == 1:
            return _counted(self.processes, "process", "es")
        each = _counted(self.crew, "task" if self.tasks else "thread", "s")
        return each if self.processes == 1 else f"{self.processes:,} x {each}"

    @property
    def label(self) -> str:
        """What the table calls it."""
        keys = "" if self.distribution == HOT else f", {self.distribution} {self.keys:,}"
        return f"{self.who}{keys}, {self.hold_ms:g}/{self.think_ms:g}"

    def picks(self, worker: int) -> list[int]:
        """Which keys a worker wants, one after the other: the same whoever the contestant is."""
        weights = list(accumulate(map(_WEIGHT_OF_KEY[self.distribution], range(1, self.keys + 1))))
        return random.Random(worker).choices(range(self.keys), cum_weights=weights, k=_PICKS)


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count:,} {noun}{plural * (count > 1)}"
