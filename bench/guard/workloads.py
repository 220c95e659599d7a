"""The figures of `python -m bench guard`: the workloads of other commands, for the package alone.

Only public names of the package are used here and below: a child runs this with the package of an older tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import redis

from bench.contention import figures, window
from bench.contention.workload import Workload as Contention
from bench.contestants import LEASE_S, OURS, OURS_LINGERING, REDIS_PY, CheckFailedError, libraries
from bench.measuring.rounds import Entrant, Sample, Scene
from bench.workloads import batches, callers, single

_NAMES = 1000


Make = Callable[[Scene, Sequence[str]], Entrant]
"""Makes what a child measures in a scene; the URLs are those of the servers of Redlock."""


@dataclass(frozen=True)
class Workload:
    """A row of the table."""

    about: str  # its title
    entrant: Make
    rounds: int = 60  # how many, unless the user says otherwise
    seconds: float = 0.06  # how long each tree is measured in a round
    warms_up: bool = True  # whether the first measurement of a child does not count


def _contention(processes: int) -> Workload:
    def entrant(scene: Scene, _: Sequence[str]) -> Entrant:
        contestant = libraries.find(OURS)
        workload = Contention(processes, hold_ms=0, think_ms=0)

        def measure(seconds: float) -> Sample:
            opened = window.open_window(scene.url, scene.witness, contestant, LEASE_S, workload, seconds)
            found = figures.figures(opened)
            if found["violations"]:
                raise CheckFailedError(f"two holders at a time, {found['violations']} times")
            return Sample(found["acquisitions_per_s"])

        return Entrant(OURS, workload.label, measure, count=processes)

    return Workload(f"{processes} processes, one key", entrant, 10, 1.0, warms_up=False)


def _redlock(scene: Scene, urls: Sequence[str]) -> Entrant:
    from bench import redlock  # noqa: PLC0415 - it needs the package's Redlock, which an old tree may lack
    from redislock_fast import Redlock  # noqa: PLC0415

    clients = [redis.Redis.from_url(url) for url in urls]
    return redlock.entrant(OURS, Redlock(clients, scene.prefix, timeout=LEASE_S))


def _of(entrants_of: Callable[..., list[Entrant]], *choice: object, at: int = 0, contestant: str = OURS) -> Make:
    """One of the rows that a workload makes for a contestant."""
    return lambda scene, _: entrants_of(libraries.find(contestant), scene, *choice)[at]


WORKLOADS: Mapping[str, Workload] = {
    "reused": Workload("1 thread, lock reused", _of(single.entrants_of)),
    "anew": Workload("1 thread, lock made anew", _of(single.entrants_of, at=1)),
    "threads": Workload("16 threads", _of(callers.of_threads, (16,))),
    "task": Workload("1 task", _of(callers.of_tasks, "asyncio", (1,))),
    "tasks": Workload("100 tasks", _of(callers.of_tasks, "asyncio", (100,))),
    "batch": Workload(f"batch of {_NAMES:,}", _of(batches.entrants_of, (_NAMES,))),
    "contention-8": _contention(8),
    "contention-32": _contention(32),
    "redlock": Workload("Redlock over 5 servers", _redlock),
}
"""By the name that `--only` has for it."""

OF_INTERPRETERS: Mapping[str, Make] = {
    "16 threads": _of(callers.of_threads, (16,)),
    "100 threads": _of(callers.of_threads, (100,)),
    "16 threads of redis-py": _of(callers.of_threads, (16,), contestant=REDIS_PY),
    "linger, 1 thread": _of(callers.of_threads, (1,), contestant=OURS_LINGERING),
    "linger, 2 threads": _of(callers.of_threads, (2,), contestant=OURS_LINGERING),
}
"""What a child measures for `python -m bench production`, by its name there."""
