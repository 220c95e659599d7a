"""`python -m bench latency`: locks on a server that is not on this machine, beside redis-py's.

Each caller, a thread or a task, has a lock of its own, and all callers of a contestant share one client. The server
is behind `delay.c`, which delays every byte by half a round trip in each direction. The second part of each round
acquires the same free locks with a `blocking_timeout` of one and a half round trips, and counts how many of the
acquires succeed.

The witness is not delayed. Percentiles are taken of one round, figures are medians of the rounds, and ratios are taken
within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis

import redislock_fast
from bench import contestants
from bench.contestants import OURS, REDIS_PY, AbsentError, CheckFailedError, libraries
from bench.measuring import arguments, report, rounds, servers
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import Entrant, Sample, Scene
from bench.measuring.tables import LATENCY_COLUMNS, print_rows
from bench.workloads import tasks, threads

HELP = "locks on a server that is a round trip away: pairs per second, and how long an acquire takes"

_CONTESTANTS = (REDIS_PY, OURS)
_COUNTS = (1, 2, 8, 64)
_TRIES = 3  # acquires with a time limit, per caller and round
_LIMIT_ROUND_TRIPS = 1.5
_LEAST_ROUND_TRIPS = 10  # the shortest round


def _of_tasks(contestant: contestants.Contestant, scene: Scene, count: int) -> tasks.Crew:
    crew = tasks.Crew(contestant, scene, asyncio.new_event_loop(), count)
    scene.closing.callback(crew.close)
    return crew


_KINDS: dict[str, Callable[[contestants.Contestant, Scene, int], threads.Crew | tasks.Crew]] = {
    "threads": threads.Crew,
    "tasks": _of_tasks,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    number = arguments.positive(int)
    arguments.add_server(parser)
    parser.add_argument(
        "--rtt", type=arguments.lengths, default=[1.0], metavar="MS,...", help="round trips, in ms (default: 1)"
    )
    parser.add_argument(
        "--callers",
        type=arguments.counts,
        default=list(_COUNTS),
        metavar="N,...",
        help=f"how many at a time (default: {','.join(map(str, _COUNTS))})",
    )
    parser.add_argument(
        "--kinds",
        type=arguments.some_of(tuple(_KINDS)),
        default=list(_KINDS),
        metavar="KIND,...",
        help=", ".join(_KINDS),
    )
    parser.add_argument("--rounds", type=number, default=5, help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=arguments.positive(float),
        default=0.25,
        help=f"for each row and round, at least {_LEAST_ROUND_TRIPS} round trips (default: %(default)s)",
    )
    arguments.add_wide(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table for each round trip."""
    servers.allow_open_files()
    try:
        with (
            servers.open_server(options.server) as server,
            rounds.open_scene(server.url, max(options.callers)) as scene,
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
    rows: list[dict[str, Any]] = []
    for rtt_ms in options.rtt:
        seconds = max(options.seconds, _LEAST_ROUND_TRIPS * rtt_ms / 1000)
        with delayed_url(scene.url, rtt_ms) as url:
            cells = [
                _Cell(name, kind, count, replace(scene, url=url), rtt_ms)
                for kind in options.kinds
                for count in options.callers
                for name in _CONTESTANTS
            ]
            entrants = [cell.entrant for cell in cells]
            rounds.race(entrants, options.rounds, seconds)
        of_rtt = [cell.summary(cells) for cell in cells]
        about = f"{server.name}, {rtt_ms:g} ms away; {options.rounds} rounds of {seconds:g} s"
        print_rows(f"{about}; {OURS} is {redislock_fast.implementation}", LATENCY_COLUMNS, of_rtt, {}, options.wide)
        rows += of_rtt
    return {
        "command": "latency",
        "server": server.name,
        **report.environment(),
        "redislock_fast.implementation": redislock_fast.implementation,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "results": rows,
    }


@dataclass
class _Cell:
    """A row of the table.

    Attributes:
        contestant: its name.
        kind: a key of `_KINDS`.
        count: of callers.
        scene: of the measurement; its URL is delayed.
        rtt_ms: the round trip, in ms.
    """

    contestant: str
    kind: str
    count: int
    scene: Scene
    rtt_ms: float

    def __post_init__(self) -> None:
        self._crew = _KINDS[self.kind](libraries.find(self.contestant), self.scene, self.count)
        self._taken: list[int] = []
        workload = f"{self.count} {self.kind if self.count > 1 else self.kind[:-1]}"
        self.entrant = Entrant(self.contestant, self.contestant, workload, self._measure, self._crew.check, self.count)

    def _measure(self, seconds: float) -> Sample:
        sample = self._crew.measure(seconds)
        self._taken.append(self._crew.acquire_within(_LIMIT_ROUND_TRIPS * self.rtt_ms / 1000, _TRIES))
        return sample

    def summary(self, cells: Sequence[_Cell]) -> dict[str, Any]:
        """The figures of the row, as they are saved.

        Args:
            cells: all of the race, for the ratios to the row of redis-py in the same workload.
        """
        workload = self.entrant.workload
        base = next(cell for cell in cells if (cell.contestant, cell.entrant.workload) == (REDIS_PY, workload))
        counted = self._taken[1:]  # without the warm-up
        figures: dict[str, Any] = {}
        for percent in (50, 99):
            own_ms, other_ms = self._acquires_ms(percent), base._acquires_ms(percent)
            figures[f"acquires_p{percent}_ms"] = own_ms
            figures[f"acquire_p{percent}_ms"] = statistics.median(own_ms)
            ratios = [own / other for own, other in zip(own_ms, other_ms, strict=True)]
            figures[f"acquire_p{percent}_to_redis_py"] = statistics.median(ratios)
        return {
            **rounds.summary(self.entrant, [cell.entrant for cell in cells]),
            "kind": self.kind,
            "rtt_ms": self.rtt_ms,
            **figures,
            "taken_in_time": sum(counted),
            "tries_in_time": len(counted) * self.count * _TRIES,
        }

    def _acquires_ms(self, percent: int) -> list[float]:
        """The nearest-rank percentile of the acquires of each round."""
        of_rounds = [sorted(sample.acquires_s) for sample in self.entrant.samples]
        return [1000 * of_round[math.ceil(len(of_round) * percent / 100) - 1] for of_round in of_rounds]
