"""`python -m bench throughput --mode linger`: what the option `linger` gains and costs, each figure beside its goal.

Pairs per second of a process, near the server and 1 ms away, are measured as in the other modes. Workers that want one
key, in one process or many, are measured as by `python -m bench contention`. All is measured in interleaved rounds, and
each ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis

import redislock_fast
from bench.contention import figures
from bench.contention.goals import Goal
from bench.contention.tables import three_digits
from bench.contention.window import open_window
from bench.contention.workload import Workload
from bench.contestants import (
    HALF_LINGERING,
    LEASE_S,
    LINGER_S,
    LOCAL,
    OURS,
    OURS_LINGERING,
    REDIS_PY,
    AbsentError,
    CheckFailedError,
    Options,
    libraries,
)
from bench.measuring import report, rounds, servers
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import ANEW, REUSED, Entrant, Scene
from bench.workloads import kept_elsewhere, new_names, single, tasks, threads

NAME = "linger"
ABOUT = "locks with linger beside redis-py's and plain ones, with the goals (5 rounds of contention, whatever --rounds)"
ROUNDS = 6
SECONDS = 0.25

_CONTENTION_ROUNDS = 5
_CONTENTION_SECONDS = 2.0
_RTT_MS = 1.0
_THREADS = 16
_TASKS = 100
_PAIRS_PER_YIELD = 10  # a task whose locks are in memory never waits
_AWAY = f", {_RTT_MS:g} ms away"

_TERMS = Options()
_PAIR = (OURS, OURS_LINGERING)
_ONE_KEY = (
    (Workload(1, tasks=1000, hold_ms=0, think_ms=0), (*_PAIR, LOCAL)),
    (Workload(1, threads=_THREADS, hold_ms=0, think_ms=0), _PAIR),
    *((Workload(processes), (*_PAIR, HALF_LINGERING)) for processes in (8, 32)),
)

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Aim:
    """A figure of the table: that of one row, or its ratio to that of another.

    Attributes:
        workload: of both rows.
        figure: the key in the rows.
        sign: as in `Goal`.
        bound: as in `Goal`; nan where there is none.
        base: the contestant of the other row; None: the figure itself is meant.
        contestant: of the row.
        base_workload: of the other row, where it is another one.
    """

    workload: str
    figure: str
    sign: str
    bound: float
    base: str | None
    contestant: str = OURS_LINGERING
    base_workload: str | None = None


def _aims() -> Iterator[_Aim]:
    tasks_on_key, threads_on_key, *processes = (workload.label for workload, _ in _ONE_KEY)
    yield _Aim(REUSED, "median", ">=", 120, REDIS_PY)
    yield _Aim(ANEW, "median", ">=", 40, REDIS_PY)
    yield _Aim(f"{_THREADS} threads", "median", ">=", 80, REDIS_PY)
    yield _Aim(f"{_TASKS} tasks, asyncio", "median", ">=", 2, OURS)
    yield _Aim(tasks_on_key, "acquisitions_per_s", ">=", 8, OURS)
    yield _Aim(tasks_on_key, "acquisitions_per_s", ">=", math.nan, OURS, LOCAL)
    yield _Aim(threads_on_key, "acquisitions_per_s", ">=", 3, OURS)
    yield _Aim(new_names.NAME, "median", ">=", 1.6, OURS)
    yield _Aim(new_names.NAME + _AWAY, "median", ">=", 1.8, OURS)
    yield _Aim(REUSED + _AWAY, "median", ">=", 300, OURS)
    for workload in processes:
        for contestant, most, fairness in ((OURS_LINGERING, 1.2, 0.99), (HALF_LINGERING, math.nan, math.nan)):
            yield _Aim(workload, "gap_p50_ms", "<=", most, OURS, contestant)
            yield _Aim(workload, "wait_p99_ms", "<=", most, OURS, contestant)
            yield _Aim(workload, "jain", ">=", fairness, None, contestant)
    for away, most in (("", 5.0), (_AWAY, math.nan)):
        kept, free = kept_elsewhere.KEPT + away, kept_elsewhere.FREE + away
        yield _Aim(kept, "latency_p50_ms", "<=", most, OURS, OURS, free)


AIMS = tuple(_aims())
"""All figures of the table."""


def goals_of(rows: Sequence[Row]) -> list[tuple[Goal, float | None, float | None]]:
    """The figures with their goals, and what each is the ratio of.

    Args:
        rows: of all workloads.
    """
    found = {(row["contestant"], row["workload"]): row for row in rows}

    def value(contestant: str, workload: str, figure: str) -> float | None:
        row = found.get((contestant, workload))
        known: float | None = None if row is None else row[figure]
        return known

    goals = []
    for aim in AIMS:
        own = value(aim.contestant, aim.workload, aim.figure)
        base = None if aim.base is None else value(aim.base, aim.base_workload or aim.workload, aim.figure)
        ratio = own if aim.base is None else own / base if own is not None and base else None
        about = f"{aim.contestant}, {aim.workload}: {aim.figure}" + (f" : {aim.base}" if aim.base else "")
        goals.append((Goal(about, ratio, aim.sign, aim.bound), own, base))
    return goals


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
    count, seconds = options.rounds or ROUNDS, options.seconds or SECONDS
    servers.allow_open_files()
    absent: list[str] = []
    try:
        with servers.open_server(options.server) as server:
            rows = [*_uncontended(server.url, count, seconds, absent), *_contended(server.url)]
            title = f"{server.name}; {count} rounds of {seconds} s, {_CONTENTION_ROUNDS} of contention; "
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (FileNotFoundError, ValueError, redis.ConnectionError) as error:
        return servers.refuse(options.server, error)
    _print(f"{title}linger={LINGER_S}; {OURS} is {redislock_fast.implementation}", rows)
    for reason in absent:
        print(reason)
    violations = sum(row.get("violations", 0) for row in rows)
    if violations:
        report.say(f"CHECK FAILED: two holders at a time, {violations} times")
    if options.json:
        facts = {"command": "throughput", "mode": NAME, "server": server.name, **report.environment()}
        facts |= {"redislock_fast.implementation": redislock_fast.implementation, "not_measured": absent}
        terms = {"rounds": count, "seconds": seconds, "lease_s": LEASE_S, "linger_s": LINGER_S}
        report.save_json(options.json, {**facts, **terms, "violations": violations, "results": rows})
    return 1 if violations else 0


def _uncontended(url: str, count: int, seconds: float, absent: list[str]) -> list[Row]:
    """Measure the pairs per second of one process, and how long an acquire takes where the key lingers elsewhere."""
    with rounds.open_scene(url, max(_THREADS, _TASKS)) as scene:
        entrants = list(_near(scene))
        try:
            away = scene.closing.enter_context(delayed_url(url, _RTT_MS))
        except AbsentError as reason:
            absent.append(f"no server 1 ms away: {reason}")
        else:
            entrants += _away(replace(scene, url=away, prefix=f"{scene.prefix}:away"))
        rounds.race(entrants, count, seconds)
    return [rounds.summary(entrant, entrants) for entrant in entrants]


def _near(scene: Scene) -> Iterator[Entrant]:
    redis_py, plain, lingering = map(libraries.find, (REDIS_PY, *_PAIR))
    of_one = zip(single.entrants_of(redis_py, scene), single.entrants_of(lingering, scene), strict=True)
    for together in of_one:
        yield from together
    for contestant in (redis_py, lingering):
        yield from threads.entrants_of(contestant, scene, (_THREADS,))
    for contestant in (plain, lingering):
        yield from tasks.entrants_of(contestant, scene, "asyncio", (_TASKS,), _PAIRS_PER_YIELD)
    for contestant in (plain, lingering):
        yield from new_names.entrants_of(contestant, scene)
    yield from kept_elsewhere.entrants_of(plain, scene)


def _away(scene: Scene) -> Iterator[Entrant]:
    contestants = [libraries.find(name) for name in _PAIR]
    entrants = [entrant for one in contestants for entrant in new_names.entrants_of(one, scene)]
    entrants += [entrant for one in contestants for entrant in _reused(one, scene)]
    for entrant in (*entrants, *kept_elsewhere.entrants_of(contestants[0], scene)):
        entrant.workload += _AWAY
        yield entrant


def _reused(contestant: Any, scene: Scene) -> list[Entrant]:
    return [entrant for entrant in single.entrants_of(contestant, scene) if entrant.workload == REUSED]


def _contended(url: str) -> list[Row]:
    """Measure workers that want one key."""
    races = [(workload, [libraries.find(name, _TERMS) for name in names]) for workload, names in _ONE_KEY]
    rows: list[Row] = []
    with (
        redis.Redis.from_url(url) as witness,
        report.progress(_CONTENTION_ROUNDS * sum(len(field) for _, field in races)) as step,
    ):
        for workload, field in races:
            found: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in field}
            for number in range(_CONTENTION_ROUNDS):
                for contestant in field:
                    step(f"{workload.label}, round {number + 1} of {_CONTENTION_ROUNDS}")
                    try:
                        window = open_window(url, witness, contestant, _TERMS, workload, _CONTENTION_SECONDS)
                    except CheckFailedError as error:
                        raise CheckFailedError(f"{contestant.name}, {workload.label}: {error}") from error
                    found[contestant.name].append(figures.figures(window))
            rows += [{"contestant": n, "workload": workload.label, **figures.summary(f)} for n, f in found.items()]
    return rows


def _print(title: str, rows: Sequence[Row]) -> None:
    cells = [
        (
            goal.about,
            "-" if math.isnan(goal.bound) else goal.verdict,
            _shown(goal.figure),
            "-" if math.isnan(goal.bound) else f"{goal.sign} {three_digits(goal.bound)}",
            _shown(own),
            _shown(base),
        )
        for goal, own, base in goals_of(rows)
    ]
    report.table(title, ("figure", "", "is", "goal", "of", ":"), cells, words=2)


def _shown(figure: float | None) -> str:
    return "-" if figure is None else three_digits(figure)
