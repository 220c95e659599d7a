"""`python -m bench alternatives`: locks of other systems.

Each thread acquires and releases a lock of its own. Each round measures all alternatives in turn.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import redislock_fast
from bench.alternatives.locks import Alternative, check
from bench.alternatives.systems import SYSTEMS, VALKEY
from bench.contestants import OURS, AbsentError, CheckFailedError
from bench.measuring import arguments, report, rounds, servers
from bench.measuring.rounds import Entrant, Sample
from bench.measuring.tables import Column, print_rows
from bench.workloads.threads import take_turns

HELP = "an uncontended acquire and release on Redis, beside Redlock, PostgreSQL and etcd"

_COLUMNS = (
    Column("system", str, ("title",)),
    Column("acquired is kept in", str, ("kept",)),
    Column("pairs/s", "{:,.0f}".format, ("median",)),
    Column("min - max", "{:,.0f} - {:,.0f}".format, ("min", "max")),
    Column(f":\n{OURS}", "{:.3f}".format, ("ratio_to_limit",)),
    Column("p50 ms\nan op", "{:.2f}".format, ("latency_p50_ms",)),
    Column("p99 ms\nan op", "{:.2f}".format, ("latency_p99_ms",)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--threads",
        type=arguments.counts,
        default=[1, 16],
        metavar="N,...",
        help="one table each (default: 1,16); servers that write to disk write once for many",
    )
    parser.add_argument("--rounds", type=arguments.positive(int), default=10, help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=arguments.positive(float),
        default=0.5,
        help="for each alternative and round (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        type=arguments.some_of(tuple(SYSTEMS)),
        default=list(SYSTEMS),
        metavar="NAME,...",
        help=f"{', '.join(SYSTEMS)}; {VALKEY} always takes part",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the tables."""
    servers.allow_open_files()
    absent: dict[str, str] = {}
    try:
        with ExitStack() as opened:
            field = _open(dict.fromkeys((VALKEY, *options.only)), opened, absent)
            versions = list(dict.fromkeys(alternative.server for alternative in field if alternative.server))
            tables = {count: _rows(field, count, options) for count in options.threads}
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        report.say(f"cannot run: {error}")
        return 2
    where = f"{options.rounds} rounds of {options.seconds:g} s"
    for count, rows in tables.items():
        title = f"{_threads(count)}; {where}; {OURS} is {redislock_fast.implementation}"
        print_rows(title, _COLUMNS, rows, {})
    print(f"on {', '.join(versions)}")
    for name, reason in absent.items():
        print(f"{name}: {reason}")
    if options.json:
        result = {
            "command": "alternatives",
            **report.environment(),
            "redislock_fast.implementation": redislock_fast.implementation,
            "servers": versions,
            "not_measured": absent,
            "rounds": options.rounds,
            "seconds": options.seconds,
            "results": [row for rows in tables.values() for row in rows],
        }
        report.save_json(options.json, result)
    return 0


def _open(names: Iterable[str], opened: ExitStack, absent: dict[str, str]) -> list[Alternative]:
    """Open the systems; a system that is not available gets its reason in `absent`."""
    field: list[Alternative] = []
    for name in names:
        try:
            field += opened.enter_context(SYSTEMS[name]())
        except AbsentError as reason:
            absent[name] = str(reason)
    return field


def _rows(field: Sequence[Alternative], count: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    entrants = [_entrant(alternative, field[0], count) for alternative in field]
    rounds.race(entrants, options.rounds, options.seconds)
    return [
        {**rounds.summary(entrant, entrants), "kept": alternative.kept}
        for alternative, entrant in zip(field, entrants, strict=True)
    ]


def _entrant(alternative: Alternative, base: Alternative, count: int) -> Entrant:
    prefix = f"bench:{secrets.token_hex(4)}"
    make = alternative.new_client()
    locks = [make(f"{prefix}:{index}") for index in range(count)]
    rival = alternative.new_client()(f"{prefix}:0")

    def measure(seconds: float) -> Sample:
        os.sync()  # no alternative pays for the writes of another
        turns = take_turns(locks, seconds)
        return Sample(turns.pairs_per_s, turns.latencies_s)

    return Entrant(
        alternative.name,
        alternative.name,
        _threads(count),
        measure,
        lambda: check(locks[0], rival),
        count,
        limit=base.name,  # all are compared with it
    )


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
