"""The result of a window, and the turns of the workers in it: plain data, all times in seconds on one clock."""

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
        """The length of the span, in seconds."""
        return self.end_s - self.begin_s

    def __contains__(self, when_s: float) -> bool:
        return self.begin_s <= when_s < self.end_s


@dataclass(frozen=True)
class Window:
    """The result of a window.

    Attributes:
        measured: the measured part.
        watched: the part in which commands were counted.
        records: of all workers, as in `bench.contention.worker.Report`, with those of the warm-up.
        commands: how often clients sent each command in the watched part; None when the server refuses to tell.
        client_cpu_s: CPU time of all processes in the measured part.
        server_cpu_s: CPU time of the server in the measured part.
        connections: of the processes to the server.
    """

    measured: Span
    watched: Span
    records: list[array[float]]
    commands: Counter[str] | None
    client_cpu_s: float
    server_cpu_s: float
    connections: int


class Hold(NamedTuple):
    """One turn of a worker: from when to when it held which lock, and since when it had waited.

    A worker that was still waiting at the end has infinity for the times of the acquire and the release.
    """

    acquired_s: float
    released_s: float
    asked_s: float
    worker: int
    key: int


def holds_of(records: Sequence[array[float]]) -> dict[int, list[Hold]]:
    """All turns, by lock, in the order in which they began."""
    by_key: dict[int, list[Hold]] = {}
    for worker, flat in enumerate(records):
        for at in range(0, len(flat), _FIELDS):
            key, asked_s, acquired_s, released_s = (*flat[at : at + _FIELDS], math.inf, math.inf)[:_FIELDS]
            by_key.setdefault(int(key), []).append(Hold(acquired_s, released_s, asked_s, worker, int(key)))
    for holds in by_key.values():
        holds.sort()
    return by_key
