"""`python -m bench throughput`: uncontended acquire+release pairs per second of a process.

Each mode is a race of some workloads: one thread, with the C floor and the other libraries; many threads, tasks or
names at a time, with redis-py, the package and the limit of the server; locks with options beside plain ones; and the
main rows of all of these. `--mode linger` is `bench.lingering`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import redis
import redis.asyncio

import redislock_fast
from bench import contestants, lingering, topology
from bench.contestants import OURS, REDIS_PY, SERVER_LIMIT, AbsentError, CheckFailedError, Contestant, libraries
from bench.measuring import arguments, report, rounds, servers
from bench.measuring.costs import bytes_per_lock
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import ANEW, Entrant, Scene
from bench.measuring.tables import (
    BATCH_COLUMNS,
    CROWD_COLUMNS,
    MAIN_COLUMNS,
    MANY_COLUMNS,
    SINGLE_COLUMNS,
    TERM_COLUMNS,
    Column,
    print_rows,
)
from bench.workloads import batches, floor, server_limit, single, tasks, threads, wake_ups, with_options
from bench.workloads.import_cost import import_costs_ms

HELP = "uncontended acquire+release pairs per second: one thread, many threads, tasks, names"

_IMPORTS = 15
_MOST_LOCKS = max(*threads.COUNTS, *threads.CROWDS, *tasks.COUNTS, *batches.COUNTS)
_BOTH = (REDIS_PY, OURS)
_Yardsticks = Mapping[str, Callable[[Scene], list[Entrant]]]
_FLOORS: _Yardsticks = {name: partial(floor.entrants_of, name) for name in floor.NAMES}
_SERVER: _Yardsticks = {SERVER_LIMIT: server_limit.entrants_of}


@dataclass(frozen=True)
class _Workload:
    """Rows that are measured one after the other.

    Attributes:
        entrants_of: makes the rows of a contestant.
        yardsticks: what makes the rows beside those of the contestants, by name.
    """

    entrants_of: Callable[[Contestant, Scene], list[Entrant]]
    yardsticks: _Yardsticks = field(default_factory=dict)


@dataclass(frozen=True)
class _Mode:
    """A choice of `--mode`.

    Attributes:
        about: its description in the help.
        workloads: that are measured.
        columns: of the table.
        peers: contestants beside the usual ones.
        usual: contestants of every mode but one: redis-py and the package.
        rounds: the default of `--rounds`.
        seconds: the default of `--seconds`.
    """

    about: str
    workloads: tuple[_Workload, ...]
    columns: Sequence[Column]
    peers: tuple[str, ...] = ()
    usual: tuple[str, ...] = _BOTH
    rounds: int = 10
    seconds: float = 0.5

    @property
    def names(self) -> tuple[str, ...]:
        """All contestants and yardsticks."""
        return (*self.usual, *self.yardsticks, *self.peers)

    @property
    def yardsticks(self) -> tuple[str, ...]:
        """Those of all workloads."""
        return tuple(name for workload in self.workloads for name in workload.yardsticks)


_MODES = {
    "single": _Mode(
        "one lock in one thread",
        (_Workload(single.entrants_of, _FLOORS),),
        SINGLE_COLUMNS,
        contestants.PEERS,
        rounds=24,
        seconds=0.12,
    ),
    "threads": _Mode(
        f"{', '.join(map(str, threads.COUNTS))} threads on one client",
        (_Workload(threads.entrants_of, {wake_ups.NAME: wake_ups.entrants_of}),),
        MANY_COLUMNS,
        (contestants.BARE_SOCKETS,),
    ),
    "crowd": _Mode(
        f"{' and '.join(f'{count:,}' for count in threads.CROWDS)} threads on one client, and how long a pair takes",
        (
            _Workload(
                partial(threads.entrants_of, counts=threads.CROWDS),
                {wake_ups.NAME: partial(wake_ups.entrants_of, counts=threads.CROWDS)},
            ),
        ),
        CROWD_COLUMNS,
        rounds=5,
        seconds=2.0,
    ),
    "asyncio": _Mode(
        f"{', '.join(map(str, tasks.COUNTS))} tasks on one client",
        (_Workload(partial(tasks.entrants_of, loop="asyncio")),),
        MANY_COLUMNS,
        (contestants.BARE_SOCKETS,),
    ),
    "uvloop": _Mode(
        "the same on uvloop",
        (_Workload(partial(tasks.entrants_of, loop="uvloop")),),
        MANY_COLUMNS,
        (contestants.BARE_SOCKETS,),
    ),
    "batch": _Mode(
        f"batches of {', '.join(map(str, batches.COUNTS))} names",
        (_Workload(batches.entrants_of, _SERVER),),
        BATCH_COLUMNS,
        (contestants.BARE_SOCKETS,),
    ),
    "options": _Mode(
        "locks with an option beside plain ones: one thread; 16 threads and 100 tasks",
        (_Workload(with_options.entrants_of),),
        TERM_COLUMNS,
        contestants.WITH_OPTION,
        usual=(OURS,),
        rounds=16,
        seconds=0.25,
    ),
    "main": _Mode(
        "the main rows of all these",
        (
            _Workload(single.entrants_of, {contestants.FLOOR: _FLOORS[contestants.FLOOR]}),
            _Workload(partial(threads.entrants_of, counts=(16,))),
            _Workload(partial(tasks.entrants_of, loop="asyncio", counts=(100,))),
            _Workload(partial(tasks.entrants_of, loop="uvloop", counts=(100,))),
            _Workload(partial(batches.entrants_of, counts=(1000,)), _SERVER),
        ),
        MAIN_COLUMNS,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    names = tuple(dict.fromkeys(name for mode in _MODES.values() for name in mode.names))
    arguments.add_server(parser)
    arguments.add_rtt(parser)
    parser.add_argument(
        "--mode",
        choices=(*_MODES, lingering.NAME),
        default="single",
        help="; ".join(f"{name}: {mode.about}" for name, mode in _MODES.items())
        + f"; {lingering.NAME}: {lingering.ABOUT} (default: %(default)s)",
    )
    parser.add_argument(
        "--topology",
        choices=("single", "cluster"),
        default="single",
        help=f"cluster: batches of {topology.NAMES:,} names over {', '.join(map(str, topology.PRIMARIES))} primaries, "
        "whatever the mode (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=arguments.positive(int), help=f"default: {_defaults('rounds')}")
    parser.add_argument(
        "--seconds",
        type=arguments.positive(float),
        help=f"for each contestant and round (default: {_defaults('seconds')})",
    )
    parser.add_argument("--only", type=arguments.some_of(names), metavar="NAME,...", help=", ".join(names))
    arguments.add_wide(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
    if options.topology == "cluster":
        return topology.run(options)
    if options.mode == lingering.NAME:
        return lingering.run(options)
    mode = _MODES[options.mode]
    options.rounds = options.rounds or mode.rounds
    options.seconds = options.seconds or mode.seconds
    options.only = options.only or list(mode.names)
    servers.allow_open_files()
    try:
        with (
            servers.open_server(options.server) as server,
            delayed_url(server.url, options.rtt) as url,
            rounds.open_scene(url, _MOST_LOCKS) as scene,
        ):
            result = _run_on(server, scene, options)
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (AbsentError, FileNotFoundError, ValueError, redis.ConnectionError) as error:
        return servers.refuse(options.server, error)
    if options.json:
        report.save_json(options.json, result)
    return 0


def _run_on(server: servers.RunningServer, scene: Scene, options: argparse.Namespace) -> dict[str, Any]:
    mode = _MODES[options.mode]
    present, entrants, absent = _enter(scene, mode, options.only)
    rounds.race(entrants, options.rounds, options.seconds)
    rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    away = f", {options.rtt:g} ms away" if options.rtt else ""
    about = f"{server.name}{away}; {options.rounds} rounds of {options.seconds} s"
    title = f"{about}; {OURS} is {redislock_fast.implementation}"
    print_rows(title, mode.columns, rows, absent, options.wide)
    memory = {contestant.name: _lock_bytes(contestant, scene) for contestant in present}
    for kind in ("sync", "asyncio"):
        sizes = [f"{name} {of_kind[kind]:,.0f}" for name, of_kind in memory.items() if kind in of_kind]
        print(f"bytes for each {kind} lock object: {', '.join(sizes)}")
    costs_ms = import_costs_ms(_IMPORTS)
    cost_ms = statistics.median(costs_ms)
    print(f"import redislock_fast over import redis: {cost_ms:+.1f} ms (median of {_IMPORTS} fresh interpreters)")
    return {
        "command": "throughput",
        "mode": options.mode,
        "server": server.name,
        "rtt_ms": options.rtt,
        **report.environment(),
        "redislock_fast.implementation": redislock_fast.implementation,
        "versions": {contestant.name: contestant.version for contestant in present},
        "not_measured": absent,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "lease_s": contestants.LEASE_S,
        "results": rows,
        "bytes_for_each_lock": memory,
        "import_cost_ms": cost_ms,
        "import_costs_ms": costs_ms,
    }


def _enter(scene: Scene, mode: _Mode, wanted: list[str]) -> tuple[list[Contestant], list[Entrant], dict[str, str]]:
    """The contestants, their rows, and the reason for each name that is left out."""
    absent: dict[str, str] = {}
    present: list[Contestant] = []
    for name in wanted:
        if name not in mode.names:
            absent[name] = "not in this mode"
        elif name not in mode.yardsticks:
            with _noted(absent, name):
                present.append(libraries.find(name))
    entrants: list[Entrant] = []
    for workload in mode.workloads:
        together: list[Entrant] = []
        for contestant in present:
            with _noted(absent, contestant.name):
                together += workload.entrants_of(contestant, scene)
        for name, rows_of in workload.yardsticks.items():
            if name in wanted:
                with _noted(absent, name):
                    together += rows_of(scene)
        # Rows whose ratios are taken are measured one after the other.
        entrants += sorted(together, key=lambda entrant: (entrant.workload == ANEW, entrant.count))
    return present, entrants, absent


@contextmanager
def _noted(absent: dict[str, str], name: str) -> Iterator[None]:
    """Leave out a name that is not available, and note the reason."""
    try:
        yield
    except AbsentError as reason:
        absent[name] = str(reason)


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
