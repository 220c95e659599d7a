"""`python -m tests.compat.suites`: run other projects' tests of their locks on redis-py's locks and on ours.

The exit status is 1 if a test has another result on ours and is not listed in the catalogue, 2 if a project could not
be run.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.compat.suites.catalogue import SUITES, Suite
from tests.compat.suites.environment import NotPreparedError, prepare
from tests.compat.suites.running import Comparison, compare

_ROW = "{:16} {:>6} {:>6} {:>8} {:>6} {:>7}  {}"


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """A folder for environments; removed at the end unless it is to be kept for the next run."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _print_row(suite: Suite, comparison: Comparison) -> None:
    before, after = comparison.before, comparison.after
    differing = comparison.differing()
    listed = len(suite.differ.keys() & differing)
    unexpected = [name for name in differing if name not in suite.differ]
    verdict = "differs" if unexpected else "same"
    print(_ROW.format(suite.name, len(before), comparison.passed(), len(after), comparison.locks, listed, verdict))
    for name in unexpected:
        print(f"    {name}: {before.get(name, 'not run')} on redis-py's, {after.get(name, 'not run')} on ours")
    sys.stdout.flush()


def _check(suite: Suite, folder: Path, *, shows_output: bool) -> int:
    """Run one project. Returns the exit status."""
    try:
        root, python = prepare(suite, folder)
    except NotPreparedError as error:
        print(f"{suite.name}: not prepared\n{error}")
        return 2
    comparison = compare(suite, root, python)
    _print_row(suite, comparison)
    if shows_output:
        print(comparison.output)
    if not comparison.passed() or not comparison.locks:
        print(f"    no test passes on redis-py's locks, or none makes a lock:\n{comparison.output[-2000:]}")
        return 2
    return int(not suite.differ.keys() >= set(comparison.differing()))


def main() -> int:
    """Run the projects that the command line names, or all. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat.suites", description=__doc__)
    parser.add_argument("--only", default="", help="projects whose names contain this")
    parser.add_argument("--keep", type=Path, help="keep the environments in this folder, and use those that are there")
    parser.add_argument("--output", action="store_true", help="print what pytest prints in the runs on our locks")
    options = parser.parse_args()
    status = 0
    print(_ROW.format("project", "tests", "pass", "on ours", "locks", "listed", "result"))
    with _folder(options.keep) as folder:
        for suite in SUITES:
            if options.only in suite.name:
                own = folder / suite.name.replace(" ", "-")
                shutil.rmtree(own / "sources", ignore_errors=True)
                status = max(status, _check(suite, own, shows_output=options.output))
    return status


if __name__ == "__main__":
    sys.exit(main())
