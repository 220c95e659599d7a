"""`python -m bench semaphore`: semaphores beside our locks, and beside what else a user would pick.

Each row is one figure with its goal: the semaphore's own, or its ratio to the lock's in the same round. All are medians
of the rounds, in each of which the contestants are measured in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import redis
import redis.asyncio

from bench.contention.figures import figures, holds_of, waits_s
from bench.contention.window import measure_windows, open_idle, open_window
from bench.contention.workload import Workload
from bench.contestants import LEASE_S, OURS, AbsentError, expect, libraries, semaphores
from bench.contestants.semaphores import LIMIT, LOCKS_IN_TURN, RIVALS, SEMAPHORE
from bench.measuring import arguments, report, servers
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import Entrant, Scene, open_scene, percentile, race
from bench.production import open_places
from bench.workloads.callers import Crew
from redislock_fast._protocol.keys import queue_keys

HELP = "semaphores beside locks, redis-semaphore, a BLPOP list, locks tried in turn: each figure with its goal"

_CALLERS = {"1 thread": 1, "16 threads": 16, "100 tasks": 100}
_AWAY, _CLUSTER, _TLS = _PLACES = ("1 ms away", "cluster", "TLS")
_AWAY_MS = 1
_ELSEWHERE = 16  # threads
_SLOTS = {LOCKS_IN_TURN: 20}
_MANY_SLOTS = 1000
_AT_A_TIME = 100
_STARTING_S = 60.0
_IDLE_LEASE_S = 60  # longer than the measurement
_KILLED_LEASE_S = 1


class Row(NamedTuple):
    """A figure with its goal."""

    figure: str
    sign: str  # ">=" or "<="
    bound: float
    is_ratio: bool = False  # whether the bound is that of the ratio to the lock's figure

    def cells(self, found: dict[str, list[float]]) -> list[str]:
        """The cells of the table, from the figures of the rounds by contestant."""
        own, its = found[SEMAPHORE], found[OURS]
        is_ = statistics.median(map(float.__truediv__, own, its) if self.is_ratio else own)
        verdict = "" if (is_ >= self.bound if self.sign == ">=" else is_ <= self.bound) else ", no"
        medians = (statistics.median(found[name]) if name in found else None for name in (SEMAPHORE, OURS, *RIVALS))
        return [self.figure, f"{is_:.3g}", f"{self.sign} {self.bound:g}{verdict}", *map(report.three_digits, medians)]


PARTS: dict[str, tuple[Row, ...]] = {
    "free": tuple(Row(f"pairs/s, {of}", ">=", goal, True) for of, goal in zip(_CALLERS, (0.6, 0.7, 0.6), strict=True)),
    "elsewhere": tuple(Row(f"pairs/s, {place}", ">=", 0.6, True) for place in _PLACES),
    "wanted": (
        Row("used capacity", ">=", 0.93),
        Row("wait p99 : mean", "<=", 1.5),
        Row("Jain", ">=", 0.99),
        Row("gap p50 ms", "<=", 1.3, True),
    ),
    "server": (Row("acquire, server us", "<=", 3), Row("release, server us", "<=", 3)),
    "killed": (Row("dead's end, grant ms", "<=", 20),),
    "idle": (Row("1,000 wait, CPU ms/s", "<=", 1, True),),
}
"""The rows: uncontended callers; 16 threads whose server is away, is a cluster, or is reached over TLS; processes that
want the permits of one semaphore; the CPU time of the server alone; a holder that was killed while another waits; tasks
that wait."""

_Note = Callable[[str, str, float], None]
"""Notes a figure of a round and its contestant."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_server(parser)
    arguments.add_rounds(parser, 5, 1.0)
    arguments.add_names(parser, "--parts", PARTS)
    about = f"of `wanted`, for {LIMIT} permits (default: %(default)s)"
    parser.add_argument("--processes", type=arguments.positive(int), default=32, help=about)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def note(row: str, contestant: str, figure: float) -> None:
        found[row][contestant].append(figure)

    absent: dict[str, str] = {"pottery": "has no semaphore"}
    rivals = [rival.name for rival in libraries.find_all(RIVALS, absent)]
    measures = (_free, _elsewhere, _wanted, _server, _killed, _idle)
    with servers.open_server(options.server) as server, open_scene(server.url) as scene:
        for part, measure in zip(PARTS, measures, strict=True):
            if part in options.parts:
                measure(scene, options, rivals, note)
    asked_for = [row for part in PARTS if part in options.parts for row in PARTS[part]]
    absent.update({row.figure: "cannot be measured here" for row in asked_for if row.figure not in found})
    rows = [row.cells(found[row.figure]) for row in asked_for if row.figure in found]
    heads = ["", "is", "goal", "sema-\nphore", "lock", "redis-\nsem.", "BLPOP\nlist", "tried\nlocks"]
    report.table(report.title(server.name, options.rounds, options.seconds), heads, rows, words=1)
    print(f"Goals of pairs, gap and CPU are for semaphore : lock. Gaps: {LIMIT} permits, or locks.")
    for name, reason in absent.items():
        print(f"{name}: {reason}")
    return {"violations": sum(found["violations"][SEMAPHORE]), "not_measured": absent, "figures": found}


def _free(scene: Scene, options: argparse.Namespace, rivals: Sequence[str], note: _Note) -> None:
    for callers, count in _CALLERS.items():
        in_tasks = "task" in callers
        client_class: Any = redis.asyncio.Redis if in_tasks else redis.Redis
        with ExitStack() as closing:
            entrants = []
            for name in (SEMAPHORE, OURS, *([] if in_tasks else rivals)):
                client = client_class.from_url(scene.url, max_connections=2 * count)
                entrants.append(_entrant(scene, name, callers, client, count, closing))
            _race(entrants, options, note)


def _elsewhere(scene: Scene, options: argparse.Namespace, _: Sequence[str], note: _Note) -> None:
    entrants = []
    with ExitStack() as closing:
        settings = dict(closing.enter_context(open_places()))
        try:
            settings["away"] = {"url": closing.enter_context(delayed_url(scene.url, _AWAY_MS))}
        except AbsentError as error:
            report.say(f"no delayed server: {error}")
        for place, key in ((_AWAY, "away"), (_CLUSTER, "cluster"), (_TLS, "tls")):
            kind: Any = redis.RedisCluster if place == _CLUSTER else redis.Redis
            make_client = kind.from_url if place == _AWAY else kind
            for name in (SEMAPHORE, OURS) if key in settings else ():
                client = make_client(**settings[key], max_connections=2 * _ELSEWHERE)
                entrants.append(_entrant(scene, name, place, client, _ELSEWHERE, closing))
        _race(entrants, options, note)


def _entrant(scene: Scene, name: str, workload: str, client: Any, count: int, closing: ExitStack) -> Entrant:
    """Make the row of so many callers: of one semaphore object, or of a lock, or a rival's, each."""
    contestant = libraries.find(OURS) if name == OURS else semaphores.find(name, limit=_SLOTS.get(name, _MANY_SLOTS))
    in_tasks = "task" in workload
    make = contestant.maker(in_tasks)
    shared = f"{scene.prefix}:{name}:{workload}"
    names = [f"{shared}:{number}" if name == OURS else shared for number in range(count)]
    locks = [make(client, shared)] * count if name == SEMAPHORE else [make(client, each) for each in names]
    crew = Crew(client, locks, closing, asyncio.new_event_loop if in_tasks else None)
    return Entrant(name, workload, crew.measure)


def _race(entrants: Sequence[Entrant], options: argparse.Namespace, note: _Note) -> None:
    race(entrants, options.rounds, options.seconds)
    for entrant in entrants:
        for rate in entrant.rates:
            note(f"pairs/s, {entrant.workload}", entrant.contestant, rate)


def _wanted(scene: Scene, options: argparse.Namespace, rivals: Sequence[str], note: _Note) -> None:
    workload = Workload(options.processes, hold_ms=5, think_ms=0)
    races = [
        (workload, [libraries.find(name) for name in (SEMAPHORE, *rivals)]),
        (replace(workload, keys=LIMIT), [libraries.find(OURS)]),
    ]
    for _ in range(options.rounds):
        measured = measure_windows(open_window, scene.url, scene.witness, LEASE_S, races, 1, options.seconds)
        for _, windows in measured:
            for contestant, (window,) in windows.items():
                span, by_key = window.measured, holds_of(window.records)
                of_window = figures(window, contestant.limit)
                waits = waits_s(window)
                held_s = sum(
                    max(0.0, min(hold.released_s, span.end_s) - max(hold.acquired_s, span.begin_s))
                    for holds in by_key.values()
                    for hold in holds
                )
                note("used capacity", contestant.name, held_s / LIMIT / span.seconds)
                note("wait p99 : mean", contestant.name, (percentile(waits, 0.99) or 0.0) / statistics.mean(waits))
                note("Jain", contestant.name, of_window["jain"])
                note("gap p50 ms", contestant.name, of_window["gap_p50_ms"])
                note("violations", contestant.name, of_window["violations"])


def _server(scene: Scene, options: argparse.Namespace, _: Sequence[str], note: _Note) -> None:
    def spent_us() -> tuple[float, int]:
        """The time and the number of the requests that acquire and release, so far."""
        stats: Any = scene.witness.info("commandstats")
        sent = [stats[f"cmdstat_{name}"] for name in ("evalsha", "set", "delifeq") if f"cmdstat_{name}" in stats]
        return sum(of["usec"] for of in sent), sum(of["calls"] for of in sent)

    with redis.Redis.from_url(scene.url) as client:
        semaphore = semaphores.find(SEMAPHORE, limit=_MANY_SLOTS).make(client, f"{scene.prefix}:server")
        locks = [libraries.find(OURS).make(client, f"{scene.prefix}:server:{number}") for number in range(_AT_A_TIME)]
        for number in range(options.rounds + 1):
            for name, held in ((SEMAPHORE, [semaphore] * _AT_A_TIME), (OURS, locks)):
                for call in ("acquire", "release"):
                    before_us, before = spent_us()
                    for lock in held:
                        getattr(lock, call)()
                    after_us, after = spent_us()
                    if number:  # the first round warms up
                        note(f"{call}, server us", name, (after_us - before_us) / (after - before))


def _killed(scene: Scene, options: argparse.Namespace, _: Sequence[str], note: _Note) -> None:
    spawn = multiprocessing.get_context("spawn")
    for number in range(options.rounds):
        for contestant in map(libraries.find, (SEMAPHORE, OURS)):
            name = f"{scene.prefix}:killed:{number}:{contestant.name}"
            holds = spawn.Event()
            holder = spawn.Process(target=_hold, args=(scene.url, contestant.name, name, holds), daemon=True)
            with redis.Redis.from_url(scene.url) as client, ThreadPoolExecutor(1) as thread:
                waiter, *others = (contestant.make(client, name) for _ in range(contestant.limit))
                expect(all(other.acquire() for other in others), "a free permit was not acquired")
                holder.start()
                expect(holds.wait(_STARTING_S), "a process has not started in time")
                granted_s = thread.submit(lambda lock: lock.acquire() and time.time(), waiter)
                while not scene.witness.zcard(queue_keys(name.encode())[0]):
                    time.sleep(0.001)
                holder.kill()
                if contestant.name == OURS:
                    end_s = time.time() + scene.witness.pttl(name) / 1000
                else:
                    first: Any = scene.witness.zrange(name, 0, 0, withscores=True)
                    end_s = first[0][1] / 1000
                note("dead's end, grant ms", contestant.name, 1000 * (granted_s.result() - end_s))
                thread.submit(waiter.release).result()
                for other in others:
                    other.release()


def _hold(url: str, contestant: str, name: str, holds: Any) -> None:
    """Hold a lock or a permit until this process is killed."""
    libraries.find(contestant, _KILLED_LEASE_S).make(redis.Redis.from_url(url), name).acquire()
    holds.set()
    time.sleep(_IDLE_LEASE_S)


def _idle(scene: Scene, options: argparse.Namespace, _: Sequence[str], note: _Note) -> None:
    races = [(Workload(1, tasks=1000), list(map(libraries.find, (SEMAPHORE, OURS), [_IDLE_LEASE_S] * 2)))]
    found = measure_windows(open_idle, scene.url, scene.witness, _IDLE_LEASE_S, races, options.rounds, options.seconds)
    for _workload, windows in found:
        for contestant, of_rounds in windows.items():
            for window in of_rounds:
                note("1,000 wait, CPU ms/s", contestant.name, 1000 * window.client_cpu_s / window.measured.seconds)
