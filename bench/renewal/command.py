"""`python -m bench renewal`: the cost of holding locks, and the effect of a stalled interpreter on held locks.

There are three tables: many locks that are renewed; each option of a lock in an uncontended pair; the GIL held for
parts of a ttl, and longer.
"""

from __future__ import annotations

import argparse
from typing import Any

import redis

import redislock_fast
from bench.contention.goals import Goal
from bench.contestants import OURS, AbsentError, CheckFailedError
from bench.measuring import arguments, report, rounds, servers
from bench.measuring.rounds import Entrant, Scene
from bench.measuring.tables import print_rows
from bench.renewal import keeping, stalls, terms
from bench.renewal.holders import HOLDERS

HELP = "the cost of holding: many renewed locks, each option, and a stalled interpreter"

_TABLES = ("keeping", "terms", "stalls")
_MOST_CPU_PERCENT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_server(parser)
    number, seconds = arguments.positive(int), arguments.positive(float)
    parser.add_argument("--locks", type=number, default=10_000, help="that are renewed (default: %(default)s)")
    parser.add_argument("--ttl", type=seconds, default=10, help="theirs, in seconds (default: %(default)s)")
    parser.add_argument("--seconds", type=seconds, default=10, help="counted (default: %(default)s)")
    parser.add_argument("--rounds", type=number, default=12, help="of the options, 0.25 s each (default: %(default)s)")
    parser.add_argument("--stalls", type=number, default=6, help="of each length (default: %(default)s)")
    parser.add_argument("--stall-ttl", type=seconds, default=1, help="the ttl then (default: %(default)s)")
    parser.add_argument("--only", type=arguments.some_of(_TABLES), default=list(_TABLES), metavar="TABLE,...")
    arguments.add_wide(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the tables."""
    try:
        with (
            servers.open_server(options.server) as server,
            rounds.open_scene(server.url, options.locks) as scene,
        ):
            result = _run_on(server, scene, options)
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (FileNotFoundError, ValueError, redis.ConnectionError) as error:
        return servers.refuse(options.server, error)
    if options.json:
        report.save_json(options.json, result)
    return 0


def _run_on(server: servers.RunningServer, scene: Scene, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "command": "renewal",
        "server": server.name,
        **report.environment(),
        "redislock_fast.implementation": redislock_fast.implementation,
    }
    of_table = {"keeping": _keeping, "terms": _terms, "stalls": _stalls}
    for table in options.only:
        result[table] = of_table[table](server, scene, options)
    return result


def _keeping(server: servers.RunningServer, scene: Scene, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with report.progress(len(HOLDERS)) as step:
        for (contestant, kind), holder in HOLDERS.items():
            step(f"{contestant}, {kind}")
            figures = keeping.measure(holder, scene, options.locks, options.ttl, options.seconds)
            rows.append({"contestant": contestant, "kind": kind, **figures})
    title = f"{server.name}; {options.locks:,} locks with a ttl of {options.ttl:g} s; {options.seconds:g} s"
    print_rows(title, keeping.COLUMNS, rows, {})
    for row in rows:
        if row["contestant"] == OURS:
            about = f"{row['kind']}: CPU of the client, % of a core"
            goal = Goal(about, row["client_cpu_percent"], "<", _MOST_CPU_PERCENT)
            print(f"{goal.about}: {goal.figure:.1f} {goal.sign} {goal.bound:g}: {goal.verdict}")
            if row["lost"]:
                raise CheckFailedError(f"{OURS}, {row['kind']}: {row['lost']} of {options.locks} locks were lost")
    return rows


def _terms(server: servers.RunningServer, scene: Scene, options: argparse.Namespace) -> list[dict[str, Any]]:
    entrants: list[Entrant] = []
    absent: dict[str, str] = {}
    for name in terms.NAMES:
        try:
            entrants.append(terms.entrant(name, scene))
        except AbsentError as reason:
            absent[name] = str(reason)
    rounds.race(entrants, options.rounds, terms.ROUND_S)
    rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    title = f"{server.name}; one lock in one thread; {options.rounds} rounds of {terms.ROUND_S} s"
    print_rows(title, terms.COLUMNS, rows, absent, options.wide)
    return rows


def _stalls(server: servers.RunningServer, scene: Scene, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with report.progress(len(stalls.KINDS) * len(stalls.SHARES)) as step:
        for kind in stalls.KINDS:
            for share in stalls.SHARES:
                step(f"{kind}, {share} ttl")
                rows.append(stalls.measure(kind, scene, share, options.stall_ttl, options.stalls))
    print_rows(f"{server.name}; a renewed lock with a ttl of {options.stall_ttl:g} s", stalls.COLUMNS, rows, {})
    return rows
