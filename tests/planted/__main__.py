"""Plants each fault in a copy of the tree and runs its test there: `python -m tests.planted [--only NAME]`.

Prints a table of the faults, with the test that has found each. Ends with status 1 if a fault was not found or does not
apply, or if a test of the list fails without any fault. The tests run on the implementation in Python, except where the
fault is in a module of the compiled core: that module is built anew, in a few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.planted import FAULTS
from tests.planted.fault import ROOT, Fault

_AT_A_TIME = 2
_LONGEST_TEST_S = 20
_LONGEST_RUN_S = 600
_COPIED = ("src", "tests", "docs")
_FILES = ("pyproject.toml", "setup.py", "README.md")
_BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
_FAILED = re.compile(r"^FAILED (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The result of the tests in one tree.

    Attributes:
        found_by: the first test that has failed; empty where none has.
        error: why the tests could not be run; empty where they were.
        took_s: how long they took, in seconds.
    """

    found_by: str
    error: str
    took_s: float


def copy_tree(source: Path, target: Path) -> None:
    """Copy what the tests and a build of the core need. Files keep their times, so that only a changed one is built."""
    for folder in _COPIED:
        shutil.copytree(source / folder, target / folder)
    for file in _FILES:
        shutil.copy2(source / file, target)


def run_tests(tree: Path, tests: Sequence[str], is_compiled: bool = False) -> Outcome:
    """Run tests of a tree until one of them fails. No process that they have started outlives them.

    Args:
        tree: a copy of the tree.
        tests: their node ids.
        is_compiled: whether they run on the compiled core, which is built before where it is older than its sources.
    """
    options = ["-q", "-x", "-rf", "-p", "no:cacheprovider", f"--timeout={_LONGEST_TEST_S}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "REDISLOCK_FAST_IMPLEMENTATION": "compiled" if is_compiled else "python",
    }
    began = time.monotonic()
    if is_compiled:
        built = subprocess.run(_BUILD, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if built.returncode:
            return Outcome("", built.stdout + built.stderr, time.monotonic() - began)
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryFile("w+") as output:  # no pipe: a process that a fault leaves would keep it open
        run = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            run.wait(_LONGEST_RUN_S)
        except subprocess.TimeoutExpired:
            return Outcome("", "the tests do not end", time.monotonic() - began)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            status = run.wait()
        took_s = time.monotonic() - began
        output.seek(0)
        text = output.read()
    failed = _FAILED.search(text)
    if failed is not None:
        return Outcome(failed[1], "", took_s)
    return Outcome("", text if status else "", took_s)


def outcome_of(fault: Fault, unchanged: Path) -> Outcome:
    """Run the fault's test in a copy of the unchanged tree that has the fault."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copy_tree(unchanged, tree)
        try:
            fault.plant(tree)
        except ValueError as error:
            return Outcome("", str(error), 0.0)
        return run_tests(tree, [fault.test], fault.is_compiled)


def hunt(faults: Sequence[Fault]) -> bool:
    """Plant the faults one by one, and print a line for each. Returns whether all were found."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(_AT_A_TIME) as pool:
        unchanged = Path(folder)
        copy_tree(ROOT, unchanged)
        for is_compiled in {fault.is_compiled for fault in faults}:
            tests = {fault.test for fault in faults if fault.is_compiled is is_compiled}
            sound = run_tests(unchanged, sorted(tests), is_compiled)
            if sound.found_by or sound.error:
                print(f"without a fault: {sound.found_by or sound.error}")
                return False
        not_found = 0
        for fault, outcome in zip(faults, pool.map(lambda fault: outcome_of(fault, unchanged), faults), strict=True):
            not_found += not outcome.found_by
            verdict = outcome.found_by or outcome.error or "NOT FOUND"
            print(f"{outcome.took_s:5.1f} s  {fault.name}: {verdict}", flush=True)
    print(f"{len(faults) - not_found} of {len(faults)} found")
    return not not_found


def main() -> int:
    """Run as the module's docstring says. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="only the faults whose name contains this")
    part = parser.parse_args().only or ""
    faults = [fault for fault in FAULTS if part in fault.name]
    if not faults:
        parser.error(f"no fault has {part!r} in its name")
    return 0 if hunt(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
