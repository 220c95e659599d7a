"""`python -m bench latency`: locks on a server that is not on this machine, beside redis-py's.

Each caller, a thread or a task, has a lock of its own, and all callers of a contestant share one client. The server
is behind `delay.c`, which delays every byte by half a round trip in each direction.

The witness is not delayed. Percentiles are taken of one round, figures are medians of the rounds, and ratios are taken
within a round.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from bench.contestants import OURS, REDIS_PY, libraries
from bench.measuring import arguments, columns, report, rounds, servers
from bench.measuring.delay import delayed_url
from bench.measuring.rounds import Entrant
from bench.workloads import callers

HELP = "locks on a server that is a round trip away: pairs per second, and how long an acquire takes"

_KINDS: Mapping[str, Any] = {"threads": None, "tasks": asyncio.new_event_loop}
_COUNTS = (1, 2, 8, 64)
_LEAST_ROUND_TRIPS = 10  # the shortest round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_server(parser)
    parser.add_argument(
        "--rtt", type=arguments.several(float), default=[1.0], metavar="MS,...", help="round trips, in ms (default: 1)"
    )
    about = f"how many at a time (default: {','.join(map(str, _COUNTS))})"
    parser.add_argument("--callers", type=arguments.several(int), default=list(_COUNTS), metavar="N,...", help=about)
    arguments.add_names(parser, "--kinds", _KINDS)
    arguments.add_rounds(parser, 5, 0.25, of="row")
    arguments.add_wide(parser)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a table for each round trip, and return the figures."""
    rows: list[dict[str, Any]] = []
    with servers.open_server(options.server) as server, rounds.open_scene(server.url) as scene:
        for rtt_ms in options.rtt:
            seconds = max(options.seconds, _LEAST_ROUND_TRIPS * rtt_ms / 1000)
            with delayed_url(scene.url, rtt_ms) as url:
                delayed = replace(scene, url=url)
                entrants: list[Entrant] = []
                for kind, count, name in product(options.kinds, options.callers, (REDIS_PY, OURS)):
                    workload = f"{count} {kind if count > 1 else kind[:-1]}"
                    entrants.append(callers.row(libraries.find(name), delayed, count, workload, _KINDS[kind]))
                rounds.race(entrants, options.rounds, seconds)
            of_rtt = [{**rounds.summary(entrant, entrants), "rtt_ms": rtt_ms} for entrant in entrants]
            title = report.title(server.name, options.rounds, seconds, rtt_ms)
            report.print_rows(title, columns.LATENCY, of_rtt, is_wide=options.wide)
            rows += of_rtt
    return {"server": server.name, "results": rows}
