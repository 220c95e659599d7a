"""Plants faults of `tests.planted` one by one, and shows which rule torture finds each to break, and how fast.

`python -m tests.torture.planted` plants those that torture is known to find (`FOUND`); `--only NAME` those of all
faults with this in their names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.planted import FAULTS
from tests.planted.__main__ import copy_tree
from tests.planted.fault import ROOT, Fault

__all__ = ["FOUND", "main"]

FOUND: dict[str, str] = {
    "acquire sets a key that another holds": "valkey",
    "hand-over does not compare the token": "valkey",
    "two holders get the same fence": "valkey",
    "fenced acquire takes a lock that another holds": "valkey",
    "queue is served last come, first served": "valkey",
    "contended flag is set on a value that another library made": "valkey",
    "local caller takes a key that does not outlive its lease": "valkey",
    "release that is sent again forgets that the first may have been executed": "valkey",
    "lock is handed over to a waiter whose connection is gone": "valkey",
    "waiter that gives up keeps a lock that was granted meanwhile": "valkey",
    "silent connection is used again": "valkey",
    "health check is never due": "valkey",
    "release deletes a lock that has another token": "redis-6.2",
    "forked child releases the lock of its parent": "valkey",
    "dropped lock is not released": "valkey",
    "cancelled task leaves its key": "valkey",
}
"""The faults that torture finds, and a kind of server on which it does."""

_BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")


def hunt(fault: Fault, kind: str, minutes: float, seed: int) -> str:
    """Run torture in a copy of the tree that has the fault.

    Returns:
        What it found first; empty if nothing.
    """
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copy_tree(ROOT, tree)
        fault.plant(tree)
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "REDISLOCK_FAST_IMPLEMENTATION": "compiled"}
        if fault.is_compiled:
            subprocess.run(_BUILD, cwd=tree, env=environment, check=True)
        chosen = ["--minutes", str(minutes), "--seed", str(seed), "--server", kind, "--keep", str(tree / "histories")]
        run = subprocess.run(
            [sys.executable, "-m", "tests.torture", "--stop", "--seconds", "4", *chosen],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode not in (0, 1):
        raise RuntimeError(f"torture itself has failed, with status {run.returncode}: {run.stderr[-2000:]}")
    lines = run.stdout.splitlines()
    return lines[0] if run.returncode else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the module's docstring says. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture.planted", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="the faults whose name contains this")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to hunt for each (default: 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--server", default="valkey", help="with --only (default: valkey)")
    chosen = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if (chosen.only in fault.name if chosen.only else fault.name in FOUND)]
    not_found = 0
    for fault in faults:
        began = time.monotonic()
        kind = chosen.server if chosen.only else FOUND[fault.name]
        found = hunt(fault, kind, chosen.minutes, chosen.seed)
        not_found += not found
        print(f"{time.monotonic() - began:5.0f} s  {fault.name}: {found or 'NOT FOUND'}", flush=True)
    print(f"{len(faults) - not_found} of {len(faults)} found")
    return 1 if not_found else 0


if __name__ == "__main__":
    sys.exit(main())
