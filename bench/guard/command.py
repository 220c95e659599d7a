"""`python -m bench guard --before TREE`: the package of this source tree beside that of another one.

In each round, a child process of either tree measures the workload, one after the other on the same server; the order
alternates from round to round. There are several children of each tree, which take turns, so that the accidents of one
process (its addresses, its hash seed) do not count as a difference of the trees. A figure is the median of the ratios
of the rounds. No ratio makes the command fail.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.contestants import AbsentError
from bench.guard import counted, instructions
from bench.guard.tree import BENCH_TREE, Child, NotMeasuredError, open_child
from bench.guard.workloads import WORKLOADS
from bench.measuring import arguments, report, servers
from bench.measuring.tables import Column
from redislock_fast.server import Server

HELP = "this source tree beside another one: ratios of pairs per second"

_PAIRS = 3  # of children
_SERVERS = 5  # of Redlock; the first one is for all the others
_WARM_UP_S = 0.1

_COLUMNS = (
    Column("figure", str, ("about",)),
    Column("before\n1/s", "{:,.0f}".format, ("before_per_s",)),
    Column("after\n1/s", "{:,.0f}".format, ("after_per_s",)),
    Column("after :\nbefore", "{:.3f}".format, ("ratio",)),
    Column("+-", "{:.3f}".format, ("uncertainty",)),
    Column("middle half", "{:.3f} - {:.3f}".format, ("quarter", "three_quarters")),
    Column("rounds", str, ("rounds",)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--before", type=_tree, required=True, metavar="TREE", help="a checkout of the package, with its core built"
    )
    defaults = "; ".join(f"{name} {workload.rounds}" for name, workload in WORKLOADS.items())
    parser.add_argument("--rounds", type=arguments.positive(int), help=f"of each figure (default: {defaults})")
    parser.add_argument(
        "--only",
        type=arguments.some_of(tuple(dict.fromkeys((*WORKLOADS, *counted.WORKLOADS)))),
        metavar="NAME,...",
        help=", ".join(f"{name}: {workload.about}" for name, workload in WORKLOADS.items()),
    )
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count the instructions of a pair instead, by valgrind; --only: "
        + ", ".join(f"{name}: {about}" for name, (about, _) in counted.WORKLOADS.items()),
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
    workloads = counted.WORKLOADS if options.instructions else WORKLOADS
    options.only = [name for name in options.only or workloads if name in workloads]
    if options.instructions:
        return _count_instructions(options)
    servers.allow_open_files()
    try:
        with ExitStack() as closing:
            urls = [closing.enter_context(Server()).url for _ in range(_SERVERS)]
            name = servers.stated_name(urls[0])
            pairs = [
                (
                    closing.enter_context(open_child(options.before, urls)),
                    closing.enter_context(open_child(BENCH_TREE, urls)),
                )
                for _ in range(min(_PAIRS, options.rounds or _PAIRS))
            ]
            rows, not_measured = _rows(pairs, options)
            before, after = (child.implementation for child in pairs[0])
    except (FileNotFoundError, AbsentError) as error:
        report.say(f"cannot run: {error}")
        return 2
    print(f"before: {options.before} ({before}); after: {BENCH_TREE} ({after})")
    _print(name, _COLUMNS, rows, not_measured)
    if options.json:
        facts = {"command": "guard", "server": name, **report.environment(), "before": before, "after": after}
        report.save_json(options.json, {**facts, "not_measured": not_measured, "results": rows})
    return 0


def _count_instructions(options: argparse.Namespace) -> int:
    """Count, and print the table."""
    try:
        with Server() as server:
            name = servers.stated_name(server.url)
            rows, not_measured = instructions.rows_of(options.before, server.url, options.only)
    except (FileNotFoundError, AbsentError) as error:
        report.say(f"cannot run: {error}")
        return 2
    print(f"before: {options.before}; after: {BENCH_TREE}")
    _print(name, instructions.COLUMNS, rows, not_measured)
    if options.json:
        facts = {"command": "guard", "server": name, **report.environment()}
        report.save_json(options.json, {**facts, "not_measured": not_measured, "instructions": rows})
    return 0


def _print(name: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]], not_measured: dict[str, str]) -> None:
    cells = [[column.of(row) for column in columns] for row in rows]
    report.table(name, [column.heading for column in columns], cells, words=1)
    for figure, reason in not_measured.items():
        print(f"{figure}: {reason}")


def _tree(text: str) -> Path:
    """A checkout of the package."""
    tree = Path(text)
    if not (tree / "src" / "redislock_fast").is_dir():
        raise argparse.ArgumentTypeError(f"no checkout of the package: {text}")
    return tree


def _rows(
    pairs: Sequence[tuple[Child, Child]], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of the table, and the reason for each figure that was not measured."""
    rounds = {name: options.rounds or WORKLOADS[name].rounds for name in options.only}
    rows: list[dict[str, Any]] = []
    not_measured: dict[str, str] = {}
    with report.progress(sum(rounds.values())) as step:
        for name, count in rounds.items():
            try:
                rates = []
                for number in range(count):
                    step(name)
                    rates.append(_round(pairs, name, number))
            except NotMeasuredError as reason:
                not_measured[name] = str(reason)
            else:
                rows.append(_row(name, rates))
    return rows, not_measured


def _round(pairs: Sequence[tuple[Child, Child]], name: str, number: int) -> tuple[float, float]:
    """The rates before and after, of one round."""
    workload = WORKLOADS[name]
    pair = pairs[number % len(pairs)]
    order = (0, 1) if number % 2 else (1, 0)
    rates = [0.0, 0.0]
    for index in order:
        try:
            if workload.warms_up and number < len(pairs):
                pair[index].rate(name, _WARM_UP_S)
            rates[index] = pair[index].rate(name, workload.seconds)
        except NotMeasuredError as error:
            raise NotMeasuredError(f"{('before', 'after')[index]}: {error}") from error
    return rates[0], rates[1]


def _row(name: str, rates: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The row of a figure, for the table and the JSON file."""
    ratios = [after / before for before, after in rates]
    quarter, ratio, three_quarters = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return {
        "figure": name,
        "about": WORKLOADS[name].about,
        "rounds": len(rates),
        "before_per_s": statistics.median(before for before, _ in rates),
        "after_per_s": statistics.median(after for _, after in rates),
        "ratio": ratio,
        "uncertainty": 1.57
        * (three_quarters - quarter)
        / math.sqrt(len(ratios)),  # of the median, as of a box plot's notch
        "quarter": quarter,
        "three_quarters": three_quarters,
        "ratios": ratios,
    }
