"""The figures of `python -m bench guard`: the workloads of other commands, for the package alone.

Only public names of the package are used here and below: a child runs this with the package of an older tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import redis

from bench.contention import figures, window
from bench.contention.workload import Workload as Contention
from bench.contestants import LEASE_S, OURS, CheckFailedError, Options, libraries
from bench.measuring.rounds import ANEW, REUSED, Entrant, Sample, Scene
from bench.workloads import batches, single, tasks, threads

LOCKS = 1000
"""How many locks a workload has at most."""


@dataclass(frozen=True)
class Site:
    """The surroundings of a child's measurement.

    Attributes:
        scene: on the one server that all workloads but Redlock use.
        urls: of the servers of Redlock.
    """

    scene: Scene
    urls: Sequence[str]


@dataclass(frozen=True)
class Workload:
    """A row of the table.

    Attributes:
        about: its title.
        entrant: makes what a child measures.
        rounds: how many, unless the user says otherwise.
        seconds: how long each tree is measured in a round.
        warms_up: whether the first measurement of a child does not count.
    """

    about: str
    entrant: Callable[[Site], Entrant]
    rounds: int = 60
    seconds: float = 0.06
    warms_up: bool = True


def _single(workload: str, site: Site) -> Entrant:
    rows = single.entrants_of(libraries.find(OURS), site.scene)
    return next(row for row in rows if row.workload == workload)


def _threads(count: int, site: Site) -> Entrant:
    return threads.entrants_of(libraries.find(OURS), site.scene, (count,))[0]


def _tasks(count: int, site: Site) -> Entrant:
    return tasks.entrants_of(libraries.find(OURS), site.scene, "asyncio", (count,))[0]


def _batch(count: int, site: Site) -> Entrant:
    return batches.entrants_of(libraries.find(OURS), site.scene, (count,))[0]


def _contention(processes: int, site: Site) -> Entrant:
    contestant, scene = libraries.find(OURS), site.scene
    workload = Contention(processes, hold_ms=0, think_ms=0)

    def measure(seconds: float) -> Sample:
        done = figures.figures(window.open_window(scene.url, scene.witness, contestant, Options(), workload, seconds))
        if done["violations"]:
            raise CheckFailedError(f"two holders at a time, {done['violations']} times")
        return Sample(done["acquisitions_per_s"])

    return Entrant(OURS, OURS, workload.label, measure, lambda: None, processes)


def _redlock(site: Site) -> Entrant:
    from bench import redlock  # noqa: PLC0415 - it needs the package's Redlock, which an old tree may lack
    from redislock_fast import Redlock  # noqa: PLC0415

    clients = [redis.Redis.from_url(url) for url in site.urls]
    return redlock.entrant(OURS, Redlock(clients, site.scene.prefix, timeout=LEASE_S))


WORKLOADS: Mapping[str, Workload] = {
    "reused": Workload("1 thread, lock reused", partial(_single, REUSED)),
    "anew": Workload("1 thread, lock made anew", partial(_single, ANEW)),
    "threads": Workload("16 threads", partial(_threads, 16)),
    "task": Workload("1 task", partial(_tasks, 1)),
    "tasks": Workload("100 tasks", partial(_tasks, 100)),
    "batch": Workload(f"batch of {LOCKS:,}", partial(_batch, LOCKS)),
    "contention-8": Workload("8 processes, one key", partial(_contention, 8), 10, 1.0, warms_up=False),
    "contention-32": Workload("32 processes, one key", partial(_contention, 32), 10, 1.0, warms_up=False),
    "redlock": Workload("Redlock over 5 servers", _redlock),
}
"""By the name that `--only` has for it."""
