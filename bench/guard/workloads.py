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


@dataclass(frozen=True)
class Site:
    """The surroundings of a child's measurement: the server of all workloads but Redlock, and those of Redlock."""

    scene: Scene
    urls: Sequence[str]


@dataclass(frozen=True)
class Workload:
    """A row of the table."""

    about: str  # its title
    entrant: Callable[[Site], Entrant]  # makes what a child measures
    rounds: int = 60  # how many, unless the user says otherwise
    seconds: float = 0.06  # how long each tree is measured in a round
    warms_up: bool = True  # whether the first measurement of a child does not count


def _contention(processes: int) -> Workload:
    def entrant(site: Site) -> Entrant:
        contestant, scene = libraries.find(OURS), site.scene
        workload = Contention(processes, hold_ms=0, think_ms=0)

        def measure(seconds: float) -> Sample:
            opened = window.open_window(scene.url, scene.witness, contestant, LEASE_S, workload, seconds)
            found = figures.figures(opened)
            if found["violations"]:
                raise CheckFailedError(f"two holders at a time, {found['violations']} times")
            return Sample(found["acquisitions_per_s"])

        return Entrant(OURS, workload.label, measure, count=processes)

    return Workload(f"{processes} processes, one key", entrant, 10, 1.0, warms_up=False)


def _redlock(site: Site) -> Entrant:
    from bench import redlock  # noqa: PLC0415 - it needs the package's Redlock, which an old tree may lack
    from redislock_fast import Redlock  # noqa: PLC0415

    clients = [redis.Redis.from_url(url) for url in site.urls]
    return redlock.entrant(OURS, Redlock(clients, site.scene.prefix, timeout=LEASE_S))


def _of(
    entrants_of: Callable[..., list[Entrant]], *choice: object, at: int = 0, contestant: str = OURS
) -> Callable[[Site], Entrant]:
    """One of the rows that a workload makes for a contestant."""
    return lambda site: entrants_of(libraries.find(contestant), site.scene, *choice)[at]


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

OF_INTERPRETERS: Mapping[str, Callable[[Site], Entrant]] = {
    "16 threads": _of(callers.of_threads, (16,)),
    "100 threads": _of(callers.of_threads, (100,)),
    "16 threads of redis-py": _of(callers.of_threads, (16,), contestant=REDIS_PY),
    "linger, 1 thread": _of(callers.of_threads, (1,), contestant=OURS_LINGERING),
    "linger, 2 threads": _of(callers.of_threads, (2,), contestant=OURS_LINGERING),
}
"""What a child measures for `python -m bench production`, by its name there."""
