"""The workloads that are measured: those of the options, or those of a preset."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.contention.workload import HOT, Workload
from bench.contestants import (
    BARE,
    BARE_SOCKETS,
    HALF_LINGERING,
    OURS,
    OURS_LINGERING,
    OURS_POLLING,
    PEERS,
    PYTHON_REDIS_LOCK,
    REDIS_PY,
)

_USUAL = (REDIS_PY, OURS, OURS_POLLING, *PEERS, *BARE)
NAMES = (*_USUAL, OURS_LINGERING, HALF_LINGERING)
"""All contestants of this command; the last two only where `--only` names them."""

_PROCESSES = (2, 8, 32, 64)
_IDLE_S = 10.0


@dataclass(frozen=True)
class Race:
    """A workload and its contestants."""

    workload: Workload
    names: Sequence[str] = _USUAL


@dataclass(frozen=True)
class Plan:
    """The races to run, and the defaults of `--rounds` and `--seconds`."""

    about: str
    races: tuple[Race, ...]
    rounds: int = 3
    seconds: float = 3.0


_BOTH = (REDIS_PY, OURS)
_GOALS = Plan(
    "the figures with a goal, each beside its bound",
    (
        *(Race(Workload(processes), (*_BOTH, PYTHON_REDIS_LOCK, *BARE)) for processes in (8, 32, 64)),
        Race(Workload(1, threads=16, hold_ms=0, think_ms=0), (*_BOTH, *BARE)),
        Race(Workload(1, tasks=1000, hold_ms=0, think_ms=0), (*_BOTH, BARE_SOCKETS)),
    ),
)
PRESETS: Mapping[str, Plan] = {
    "goals": _GOALS,
    "short": Plan("8 processes, redis-py and the package, in about 20 s", (Race(Workload(8), _BOTH),), seconds=2.0),
}


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the options choose."""
    names = options.only or _USUAL
    if options.preset:
        plan = PRESETS[options.preset]
        races = (Race(race.workload, [name for name in race.names if name in names]) for race in plan.races)
        return replace(plan, races=tuple(races))
    if options.idle:
        waiters = Workload(1, 1, options.idle) if options.tasks else Workload(1, options.idle)
        return Plan("idle", (Race(waiters, names),), rounds=1, seconds=_IDLE_S)
    keys = 1 if options.distribution == HOT else options.keys
    processes = options.processes or ((1,) if options.threads or options.tasks else _PROCESSES)
    workloads = [
        Workload(
            count, options.threads or 1, options.tasks or 0, keys, options.distribution, options.hold, options.think
        )
        for count in processes
    ]
    return Plan("as the options say", tuple(Race(workload, names) for workload in workloads))
