"""What a window leaves behind, and the turns that the workers had in it.

Rules: plain data, all times in seconds by one clock.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_FIELDS = 4  # of a record


@dataclass(frozen=True)
class Span:
    """A part of a window, by `time.monotonic`."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end_s - self.begin_s

    def __contains__(self, when_s: float) -> bool:
        return self.begin_s <= when_s < self.end_s


@dataclass(frozen=True)
class Window:
    """What came of it.

    Attributes:
        measured: the part that is measured.
        watched: the part in which commands were counted.
        records: those of all workers, as `bench.contention.worker.Report` has them, the warm-up's included.
        commands: what clients sent in the watched part, by the command; None where the server does not tell.
        client_cpu_s: of all processes, in the measured part.
        server_cpu_s: the server's, in the measured part.
        connections: how many the processes had.
    """

    measured: Span
    watched: Span
    records: list[array[float]]
    commands: Counter[str] | None
    client_cpu_s: float
    server_cpu_s: float
    connections: int


class Hold(NamedTuple):
    """One turn of a worker: when it had the lock, since when it had waited, which worker, which lock.

    Who was still waiting at the end acquired and released at infinity.
    """

    acquired_s: float
    released_s: float
    asked_s: float
    worker: int
    key: int


def holds_of(records: Sequence[array[float]]) -> dict[int, list[Hold]]:
    """All turns by the lock, in the order of their beginnings."""
    by_key: dict[int, list[Hold]] = {}
    for worker, flat in enumerate(records):
        for at in range(0, len(flat), _FIELDS):
            key, asked_s, acquired_s, released_s = (*flat[at : at + _FIELDS], math.inf, math.inf)[:_FIELDS]
            by_key.setdefault(int(key), []).append(Hold(acquired_s, released_s, asked_s, worker, int(key)))
    for holds in by_key.values():
        holds.sort()
    return by_key
