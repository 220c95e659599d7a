"""`python -m bench throughput --mode linger`: what the option `linger` gains and costs, each figure beside its goal.

Pairs per second of a process, near the server and 1 ms away, are measured as in the other modes. Workers that want one
key, in one process or many, are measured as by `python -m bench contention`. All is measured in interleaved rounds, and
each ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import redis

from bench.contention import figures
from bench.contention.goals import TASKS, THREADS, Goal, print_goals
from bench.contention.window import measure_windows, open_window
from bench.contention.workload import Workload
from bench.contestants import HALF_LINGERING, LEASE_S, LINGER_S, OURS, OURS_LINGERING, REDIS_PY, AbsentError, libraries
from bench.measuring import report, rounds, servers
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import ANEW, REUSED, Entrant, Scene
from bench.workloads import callers, lingering_keys, single
from bench.workloads.lingering_keys import FREE, KEPT, NEW_NAME

NAME = "linger"
ABOUT = "locks with linger beside redis-py's and plain ones, with the goals (5 rounds of contention, whatever --rounds)"

_ROUNDS, _SECONDS = 6, 0.25
_CONTENTION_ROUNDS, _CONTENTION_SECONDS = 5, 2.0
_RTT_MS = 1.0
_THREADS = 16
_TASKS = 100
_AWAY = f", {_RTT_MS:g} ms away"

_PAIR = (OURS, OURS_LINGERING)
_ONE_KEY = (
    (TASKS, _PAIR),
    (THREADS, _PAIR),
    *((Workload(processes), (*_PAIR, HALF_LINGERING)) for processes in (8, 32)),
)

Row = Mapping[str, Any]


def _goals() -> Iterator[Goal]:
    goal = partial(Goal, contestant=OURS_LINGERING)
    tasks_on_key, threads_on_key, *processes = (workload.label for workload, _ in _ONE_KEY)
    yield goal(REUSED, "median", ">=", 120, REDIS_PY)
    yield goal(ANEW, "median", ">=", 40, REDIS_PY)
    yield goal(f"{_THREADS} threads", "median", ">=", 80, REDIS_PY)
    yield goal(f"{_TASKS} tasks, asyncio", "median", ">=", 2, OURS)
    yield goal(tasks_on_key, "acquisitions_per_s", ">=", 8, OURS)
    yield goal(threads_on_key, "acquisitions_per_s", ">=", 3, OURS)
    yield goal(NEW_NAME, "median", ">=", 1.6, OURS)
    yield goal(NEW_NAME + _AWAY, "median", ">=", 1.8, OURS)
    yield goal(REUSED + _AWAY, "median", ">=", 300, OURS)
    for workload in processes:
        for contestant, most, fairness in ((OURS_LINGERING, 1.2, 0.99), (HALF_LINGERING, math.nan, math.nan)):
            yield Goal(workload, "gap_p50_ms", "<=", most, OURS, contestant)
            yield Goal(workload, "wait_p99_ms", "<=", most, OURS, contestant)
            yield Goal(workload, "jain", ">=", fairness, None, contestant)
    for away, most in (("", 5.0), (_AWAY, math.nan)):
        yield Goal(KEPT + away, "latency_p50_ms", "<=", most, OURS, OURS, FREE + away)


GOALS = tuple(_goals())
"""All figures of the table."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    count, seconds = options.rounds or _ROUNDS, options.seconds or _SECONDS
    with servers.open_server(options.server) as server:
        rows = [*_uncontended(server.url, count, seconds), *_contended(server.url)]
    title = report.title(f"{server.name}, linger={LINGER_S}", count, seconds)
    title += f"; {_CONTENTION_ROUNDS} rounds of contention"
    print_goals(title, GOALS, rows)
    violations = sum(row.get("violations", 0) for row in rows)
    return {"title": title, "violations": violations, "results": rows}


def _uncontended(url: str, count: int, seconds: float) -> list[Row]:
    """Measure the pairs per second of one process, and how long an acquire takes where the key lingers elsewhere."""
    with rounds.open_scene(url) as scene:
        entrants = near(scene)
        try:
            away = scene.closing.enter_context(delayed_url(url, _RTT_MS))
        except AbsentError as reason:
            report.say(f"no delayed server: {reason}")
        else:
            entrants += _away(replace(scene, url=away, prefix=f"{scene.prefix}:away"))
        rounds.race(entrants, count, seconds)
    return [rounds.summary(entrant, entrants) for entrant in entrants]


def near(scene: Scene) -> list[Entrant]:
    """The uncontended rows near the server; those whose ratio is taken are measured one after the other."""
    redis_py, plain, lingering = map(libraries.find, (REDIS_PY, *_PAIR))
    pairs = zip(single.entrants_of(redis_py, scene), single.entrants_of(lingering, scene), strict=True)
    entrants = [entrant for pair in pairs for entrant in pair]
    for contestant in (redis_py, lingering):
        entrants += callers.of_threads(contestant, scene, (_THREADS,))
    for contestant in (plain, lingering):
        entrants += callers.of_tasks(contestant, scene, "asyncio", (_TASKS,))
    entrants += [lingering_keys.new_names(contestant, scene) for contestant in (plain, lingering)]
    return entrants + lingering_keys.elsewhere(plain, scene)


def _away(scene: Scene) -> list[Entrant]:
    pair = [libraries.find(name) for name in _PAIR]
    entrants = [lingering_keys.new_names(contestant, scene) for contestant in pair]
    entrants += [single.entrants_of(contestant, scene)[0] for contestant in pair]
    entrants += lingering_keys.elsewhere(pair[0], scene)
    for entrant in entrants:
        entrant.workload += _AWAY
    return entrants


def _contended(url: str) -> list[Row]:
    """Measure workers that want one key."""
    races = [(workload, [libraries.find(name) for name in names]) for workload, names in _ONE_KEY]
    rows: list[Row] = []
    with redis.Redis.from_url(url) as witness:
        found = measure_windows(open_window, url, witness, LEASE_S, races, _CONTENTION_ROUNDS, _CONTENTION_SECONDS)
        for workload, windows in found:
            for contestant, of_rounds in windows.items():
                summed_up = figures.summary([figures.figures(window) for window in of_rounds])
                rows.append({"contestant": contestant.name, "workload": workload.label, **summed_up})
    return rows
