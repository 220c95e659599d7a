"""`python -m bench guard --before TREE --instructions`: how many instructions a pair takes, in either tree.

Valgrind's callgrind counts them in a process that does nothing else: once with few pairs, once with more. The
difference is that of the pairs alone. It repeats to 0.5 % whatever else the machine does, so a change of 1 % is seen in
minutes, where rounds of pairs per second need hours. A wait, a system call's work and a cache miss count nothing: two
trees with equal counts may differ in speed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.contestants import AbsentError
from bench.guard.counted import TASKS, WORKLOADS
from bench.guard.tree import BENCH_TREE, NotMeasuredError
from bench.measuring import report
from bench.measuring.tables import Column

FEW, MANY = 2 * TASKS, 12 * TASKS
_COUNT = re.compile(r"Collected : (\d+)")

COLUMNS = (
    Column("instructions of a pair", str, ("about",)),
    Column("before", "{:,.0f}".format, ("before",)),
    Column("after", "{:,.0f}".format, ("after",)),
    Column("after :\nbefore", "{:.3f}".format, ("ratio",)),
)


def rows_of(before: Path, url: str, names: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Count the instructions of each workload in both trees.

    Args:
        before: the other tree.
        url: of the server.
        names: keys of `WORKLOADS`.

    Returns:
        The rows of the table, and the reason for each workload that was not measured.

    Raises:
        AbsentError: without valgrind.
    """
    if shutil.which("valgrind") is None:
        raise AbsentError("--instructions needs valgrind (Debian's package of that name)")
    rows: list[dict[str, Any]] = []
    not_measured: dict[str, str] = {}
    with report.progress(2 * len(names)) as step:
        for name in names:
            counts: list[float] = []
            try:
                for tree in (before, BENCH_TREE):
                    step(name)
                    counts.append(_of_pair(tree, url, name))
            except NotMeasuredError as reason:
                not_measured[name] = str(reason)
            else:
                about, _ = WORKLOADS[name]
                figures = {"before": counts[0], "after": counts[1], "ratio": counts[1] / counts[0]}
                rows.append({"figure": name, "about": about, **figures})
    return rows, not_measured


def _of_pair(tree: Path, url: str, name: str) -> float:
    source = tree.resolve() / "src"
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{BENCH_TREE}", "PYTHONHASHSEED": "0"}
    few, many = (_count(environment, url, name, pairs) for pairs in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def _count(environment: Mapping[str, str], url: str, name: str, pairs: int) -> int:
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={os.devnull}"]
    command += [sys.executable, "-m", "bench.guard.counted", url, name, str(pairs)]
    done = subprocess.run(command, env=environment, cwd=BENCH_TREE, capture_output=True, text=True, check=False)
    counted = _COUNT.search(done.stderr)
    if done.returncode or counted is None:
        raise NotMeasuredError(next(reversed(done.stderr.splitlines()), "valgrind said nothing"))
    return int(counted[1])
