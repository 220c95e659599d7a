"""`python -m bench guard --before TREE`: the package of this source tree beside that of another one.

In each round, a child process of either tree measures the workload, one after the other on the same server; the order
alternates from round to round. There are several children of each tree, which take turns, so that the accidents of one
process (its addresses, its hash seed) do not count as a difference of the trees. A figure is the median of the ratios
of the rounds. No ratio makes the command fail.

`--instructions`: valgrind's callgrind counts the instructions of a process that does nothing else, once with few pairs,
once with more. The difference is that of the pairs alone. A wait, a system call's work and a cache miss count nothing:
two trees with equal counts may differ in speed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.contestants import AbsentError
from bench.guard import counted
from bench.guard.child import BENCH_TREE, Child, NotMeasuredError, environment, open_child
from bench.guard.workloads import WORKLOADS
from bench.measuring import arguments, report, servers
from bench.measuring.report import Column

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

_FEW, _MANY = 2 * counted.TASKS, 12 * counted.TASKS
_COUNT = re.compile(r"Collected : (\d+)")

_COUNTED_COLUMNS = (
    Column("instructions of a pair", str, ("about",)),
    Column("before", "{:,.0f}".format, ("before",)),
    Column("after", "{:,.0f}".format, ("after",)),
    Column("after :\nbefore", "{:.3f}".format, ("ratio",)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    about = "a checkout of the package, with its core built"
    parser.add_argument("--before", type=_tree, required=True, metavar="TREE", help=about)
    defaults = "; ".join(f"{name} {workload.rounds}" for name, workload in WORKLOADS.items())
    parser.add_argument("--rounds", type=arguments.positive(int), help=f"of each figure (default: {defaults})")
    about = ", ".join(f"{name}: {workload.about}" for name, workload in WORKLOADS.items())
    arguments.add_names(parser, "--only", dict.fromkeys((*WORKLOADS, *counted.WORKLOADS)), about)
    of_counts = ", ".join(f"{name}: {about}" for name, (about, _) in counted.WORKLOADS.items())
    about = f"count the instructions of a pair instead, by valgrind; --only: {of_counts}"
    parser.add_argument("--instructions", action="store_true", help=about)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    if options.instructions and shutil.which("valgrind") is None:
        raise AbsentError("--instructions needs valgrind (Debian's package of that name)")
    workloads = counted.WORKLOADS if options.instructions else WORKLOADS
    names = [name for name in options.only if name in workloads]
    with ExitStack() as closing:
        count = 1 if options.instructions else _SERVERS
        opened = [closing.enter_context(servers.open_server("embedded")) for _ in range(count)]
        urls = [server.url for server in opened]
        if options.instructions:
            columns: tuple[Column, ...] = _COUNTED_COLUMNS
            rows, not_measured = _rows(names, 2 * len(names), partial(_counted, options.before, urls[0]))
        else:
            columns = _COLUMNS
            pairs = [
                tuple(closing.enter_context(open_child(tree, urls)) for tree in (options.before, BENCH_TREE))
                for _ in range(min(_PAIRS, options.rounds or _PAIRS))
            ]
            rounds = {name: options.rounds or WORKLOADS[name].rounds for name in names}
            rows, not_measured = _rows(names, sum(rounds.values()), partial(_compared, pairs, rounds))
            print(f"before, after: {', '.join(child.implementation for child in pairs[0])}")
    print(f"before: {options.before}; after: {BENCH_TREE}")
    report.print_rows(opened[0].name, columns, rows, not_measured, words=1)
    return {"server": opened[0].name, "not_measured": not_measured, "results": rows}


def _tree(text: str) -> Path:
    """A checkout of the package."""
    tree = Path(text)
    if not (tree / "src" / "redislock_fast").is_dir():
        raise argparse.ArgumentTypeError(f"no checkout of the package: {text}")
    return tree


def _rows(
    names: Sequence[str], steps: int, row_of: Callable[[str, Callable[[], None]], dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of the table, and the reason for each figure that was not measured.

    `row_of` measures a figure by its name, and calls what it is given before each step.
    """
    rows: list[dict[str, Any]] = []
    not_measured: dict[str, str] = {}
    with report.progress(steps) as step:
        for name in names:
            try:
                rows.append(row_of(name, partial(step, name)))
            except NotMeasuredError as reason:
                not_measured[name] = str(reason)
    return rows, not_measured


def _round(pairs: Sequence[tuple[Child, ...]], name: str, number: int) -> tuple[float, float]:
    """The rates before and after, of one round."""
    workload = WORKLOADS[name]
    pair = pairs[number % len(pairs)]
    order = (0, 1) if number % 2 else (1, 0)
    rates = [0.0, 0.0]
    for index in order:
        try:
            if workload.warms_up and number < len(pairs):
                pair[index].sample(name, _WARM_UP_S)
            rates[index] = pair[index].sample(name, workload.seconds).pairs_per_s
        except NotMeasuredError as error:
            raise NotMeasuredError(f"{('before', 'after')[index]}: {error}") from error
    return rates[0], rates[1]


def _compared(
    pairs: Sequence[tuple[Child, ...]], rounds: Mapping[str, int], name: str, step: Callable[[], None]
) -> dict[str, Any]:
    """The row of a figure, for the table and the JSON file."""
    rates = []
    for number in range(rounds[name]):
        step()
        rates.append(_round(pairs, name, number))
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
        # Of the median, as of a box plot's notch.
        "uncertainty": 1.57 * (three_quarters - quarter) / math.sqrt(len(ratios)),
        "quarter": quarter,
        "three_quarters": three_quarters,
        "ratios": ratios,
    }


def _counted(before: Path, url: str, name: str, step: Callable[[], None]) -> dict[str, Any]:
    """The row of the instructions of a pair."""
    counts: list[float] = []
    for tree in (before, BENCH_TREE):
        step()
        few, many = (_count(tree, url, name, pairs) for pairs in (_FEW, _MANY))
        counts.append((many - few) / (_MANY - _FEW))
    figures = {"before": counts[0], "after": counts[1], "ratio": counts[1] / counts[0]}
    return {"figure": name, "about": counted.WORKLOADS[name][0], **figures}


def _count(tree: Path, url: str, name: str, pairs: int) -> int:
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}"]
    command += [sys.executable, "-m", "bench.guard.counted", url, name, str(pairs)]
    settings = {**environment(tree), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=settings, cwd=BENCH_TREE, capture_output=True, text=True, check=False)
    found = _COUNT.search(done.stderr)
    if done.returncode or found is None:
        raise NotMeasuredError(next(reversed(done.stderr.splitlines()), "valgrind said nothing"))
    return int(found[1])
