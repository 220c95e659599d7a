"""Runs histories, checks each, and prints what was done and found; status 1 if a rule was broken.

`python -m tests.torture --minutes 2 --seed 1 --server valkey --keep DIR`
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from redislock_fast.server import KINDS, Server
from tests.torture.checker import RULES, SAFETY, check
from tests.torture.history import History, read
from tests.torture.running import NAMES, Setting, run_history, warm_up
from tests.torture.violations import Violation

__all__ = ["Totals", "main"]

CALM_EVERY = 5
"""One of so many histories has no faults of servers and links: after a fault, waiters may be late for seconds."""


class Totals:
    """What all histories together had."""

    def __init__(self) -> None:
        self.histories = 0
        self.attempts = 0
        self.acquired = 0
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []

    def add(self, history: History, violations: list[Violation], folder: Path) -> None:
        """Count a history."""
        self.histories += 1
        self.attempts += len(history.attempts)
        self.acquired += sum(attempt.is_held for attempt in history.attempts)
        self.faults.update(fault.kind for fault in history.faults)
        seed = history.settings["seed"]
        for violation in violations:
            self.violations.append(f"{violation.rule}: {violation.text} (seed {seed}, {folder})")
            print(self.violations[-1], flush=True)

    def print(self) -> None:
        """Print the figures."""
        print(f"histories     {self.histories:10,}")
        print(f"acquires      {self.attempts:10,}")
        print(f"acquisitions  {self.acquired:10,}")
        print(f"faults        {self.faults.total():10,}")
        for kind, count in sorted(self.faults.items()):
            print(f"  {kind:20}{count:6,}")
        print(f"checks        {self.histories * len(RULES):10,}")
        print(f"violations    {len(self.violations):10,}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long to run histories (default: 2)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a history lasts (default: 5)")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; each further one has the next")
    parser.add_argument("--server", default="valkey", help=f"{', '.join(KINDS)}, the path of a server, or all: in turn")
    parser.add_argument("--topology", choices=sorted(NAMES), default="single")
    parser.add_argument("--processes", type=int, default=4, help="that use locks, besides redis-py's (default: 4)")
    parser.add_argument("--keep", type=Path, help="keep the histories here; else only those that break a rule are kept")
    parser.add_argument("--check", type=Path, nargs="+", metavar="DIR", help="only check histories that were kept")
    parser.add_argument("--no-faults", action="store_true", help="make no faults")
    parser.add_argument("--busy", action="store_true", help="leave out the rules about times")
    parser.add_argument("--stop", action="store_true", help="end with the first history that breaks a rule")
    return parser


def main() -> int:
    """Run as the module's docstring says. Returns the exit status."""
    chosen = _parser().parse_args()
    totals = Totals()
    if chosen.check:
        for folder in chosen.check:
            totals.add(history := read(folder), check(history), folder)
    else:
        _run(chosen, totals)
    totals.print()
    return 1 if totals.violations else 0


def _run(chosen: argparse.Namespace, totals: Totals) -> None:
    """Run histories until the time is over."""
    root = chosen.keep or Path(tempfile.mkdtemp(prefix="torture-"))
    kinds = KINDS if chosen.server == "all" else (chosen.server,)
    warm_up()
    ends_at = time.monotonic() + 60 * chosen.minutes
    seed = chosen.seed
    with Server("valkey") as resource:
        while time.monotonic() < ends_at and not (chosen.stop and totals.violations):
            folder = root / f"seed-{seed}"
            kind = kinds[seed % len(kinds)]
            where = (chosen.topology, kind)
            is_calm = chosen.no_faults or seed % CALM_EVERY == 0
            run_history(Setting(folder, seed, *where, chosen.seconds, chosen.processes, resource.port, is_calm))
            history = read(folder)
            violations = [one for one in check(history) if not chosen.busy or one.rule in SAFETY]
            totals.add(history, violations, folder)
            if not violations and chosen.keep is None:
                shutil.rmtree(folder)
            seed += 1


if __name__ == "__main__":
    sys.exit(main())
