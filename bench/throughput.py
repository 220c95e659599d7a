"""`python -m bench throughput`: uncontended acquire+release pairs per second of a process.

Each mode is a race of some workloads: one thread, with the C floor and the other libraries; many threads, tasks or
names at a time, with redis-py, the package and the limit of the server; and the main rows of all of these.
`--mode linger` is `bench.lingering`, `--topology cluster` is `bench.cluster`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
import redis.asyncio

from bench import cluster, contestants, lingering
from bench.contestants import BARE_SOCKETS, OURS, REDIS_PY, AbsentError, Contestant, libraries
from bench.measuring import arguments, columns, report, rounds, servers
from bench.measuring.costs import bytes_per_lock
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import ANEW, Entrant, Scene
from bench.workloads import batches, callers, single, yardsticks
from bench.workloads.yardsticks import FLOOR, SERVER_LIMIT

HELP = "uncontended acquire+release pairs per second: one thread, many threads, tasks, names"


@dataclass(frozen=True)
class _Workload:
    """Rows that are measured one after the other."""

    entrants_of: Callable[[Contestant, Scene], list[Entrant]]  # makes the rows of a contestant
    # what makes the rows beside those of the contestants, by name
    yardsticks: Mapping[str, Callable[[Scene], list[Entrant]]] = field(default_factory=dict)
    limit: str | None = None  # the contestant or yardstick that is the upper limit of the others


@dataclass(frozen=True)
class _Mode:
    """A choice of `--mode`: what it is about, its workloads, the columns of its table, and defaults of options."""

    about: str
    workloads: tuple[_Workload, ...]
    columns: Sequence[report.Column]
    contestants: tuple[str, ...] = (REDIS_PY, OURS, BARE_SOCKETS)  # those that take part
    rounds: int = 10
    seconds: float = 0.5

    @property
    def names(self) -> tuple[str, ...]:
        """All contestants and yardsticks."""
        return (*self.contestants, *(name for workload in self.workloads for name in workload.yardsticks))


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(f"{count:,}" for count in counts)


_FLOORS = {name: partial(yardsticks.floor, name) for name in yardsticks.FLOORS}
_SERVER = {SERVER_LIMIT: yardsticks.server_limit}
_TASKS, _UVLOOP = (partial(callers.of_tasks, loop=loop) for loop in ("asyncio", "uvloop"))
_BOTH = (REDIS_PY, OURS)

_MODES = {
    "single": _Mode(
        "one lock in one thread",
        (_Workload(single.entrants_of, _FLOORS, FLOOR),),
        columns.SINGLE,
        (*_BOTH, *contestants.PEERS),
        rounds=24,
        seconds=0.12,
    ),
    "threads": _Mode(
        f"{_listed(callers.THREADS)} threads on one client", (_Workload(callers.of_threads),), columns.MANY
    ),
    "asyncio": _Mode(f"{_listed(callers.TASKS)} tasks on one client", (_Workload(_TASKS),), columns.MANY),
    "uvloop": _Mode("the same on uvloop", (_Workload(_UVLOOP),), columns.MANY),
    "batch": _Mode(
        f"batches of {_listed(batches.COUNTS)} names",
        (_Workload(batches.entrants_of, _SERVER, SERVER_LIMIT),),
        columns.BATCH,
        _BOTH,
    ),
    "main": _Mode(
        "the main rows of all these",
        (
            _Workload(single.entrants_of, {FLOOR: _FLOORS[FLOOR]}, FLOOR),
            _Workload(partial(callers.of_threads, counts=(16,))),
            _Workload(partial(_TASKS, counts=(100,))),
            _Workload(partial(_UVLOOP, counts=(100,))),
            _Workload(partial(batches.entrants_of, counts=(1000,)), _SERVER, SERVER_LIMIT),
        ),
        columns.MAIN,
        _BOTH,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    modes = [f"{name}: {mode.about}" for name, mode in _MODES.items()] + [f"{lingering.NAME}: {lingering.ABOUT}"]
    arguments.add_server(parser)
    arguments.add_rtt(parser)
    parser.add_argument(
        "--mode", choices=(*_MODES, lingering.NAME), default="single", help=f"{'; '.join(modes)} (default: %(default)s)"
    )
    about = f"cluster: {cluster.ABOUT}, whatever the mode (default: %(default)s)"
    parser.add_argument("--topology", choices=("single", "cluster"), default="single", help=about)
    parser.add_argument("--rounds", type=arguments.positive(int), help=f"default: {_defaults('rounds')}")
    about = f"for each contestant and round (default: {_defaults('seconds')})"
    parser.add_argument("--seconds", type=arguments.positive(float), help=about)
    names = dict.fromkeys(name for mode in _MODES.values() for name in mode.names)
    arguments.add_names(parser, "--only", names, default=())
    arguments.add_wide(parser)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    mode = _MODES[options.mode]
    count, seconds = options.rounds or mode.rounds, options.seconds or mode.seconds
    with (
        servers.open_server(options.server) as server,
        delayed_url(server.url, options.rtt) as url,
        rounds.open_scene(url) as scene,
    ):
        entrants, absent = _enter(scene, mode, options.only or mode.names)
        rounds.race(entrants, count, seconds)
        named = dict.fromkeys(entrant.contestant for entrant in entrants)
        present = [libraries.find(name) for name in named if name in mode.contestants]
        memory = {contestant.name: _lock_bytes(contestant, scene) for contestant in present}
    rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    title = report.title(server.name, count, seconds, options.rtt)
    report.print_rows(title, mode.columns, rows, absent, options.wide)
    for kind in ("sync", "asyncio"):
        sizes = [f"{name} {of_kind[kind]:,.0f}" for name, of_kind in memory.items() if kind in of_kind]
        print(f"bytes for each {kind} lock object: {', '.join(sizes)}")
    versions = {contestant.name: contestant.version for contestant in present}
    facts = {"versions": versions, "not_measured": absent, "bytes_for_each_lock": memory}
    return {"title": title, **facts, "results": rows}


def _enter(scene: Scene, mode: _Mode, wanted: Sequence[str]) -> tuple[list[Entrant], dict[str, str]]:
    """The rows of the contestants and yardsticks, and the reason for each name that is left out."""
    absent = dict.fromkeys((name for name in wanted if name not in mode.names), "not in this mode")
    entrants: list[Entrant] = []
    for workload in mode.workloads:
        together: list[Entrant] = []
        for name in wanted:
            try:
                if name in mode.contestants:
                    together += workload.entrants_of(libraries.find(name), scene)
                elif name in workload.yardsticks:
                    together += workload.yardsticks[name](scene)
            except AbsentError as reason:
                absent[name] = str(reason)
        for entrant in together:
            entrant.limit = workload.limit
        # Rows whose ratios are taken are measured one after the other.
        entrants += sorted(together, key=lambda entrant: (entrant.workload == ANEW, entrant.count))
    return entrants, absent


def _lock_bytes(contestant: Contestant, scene: Scene) -> dict[str, float]:
    """The bytes of a lock object, by the kind of lock."""
    client = redis.Redis.from_url(scene.url)
    sizes = {"sync": bytes_per_lock(partial(contestant.make, client))}
    if contestant.make_async:
        sizes["asyncio"] = bytes_per_lock(partial(contestant.make_async, redis.asyncio.Redis.from_url(scene.url)))
    return sizes


def _defaults(setting: str) -> str:
    usual = getattr(_Mode, setting)
    others = {name: getattr(mode, setting) for name, mode in _MODES.items() if getattr(mode, setting) != usual}
    return ", ".join((f"{usual}", *(f"{other} in mode {name}" for name, other in others.items())))
