"""Runs the tests of a project twice, and compares the results test by test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import redis

from redislock_fast.server import Server
from tests.compat.suites.catalogue import Suite
from tests.support.helpers import ROOT

__all__ = ["Comparison", "compare"]

_LIMIT_S = 900
_PLUGIN = Path(__file__).with_name("plugin")
_NOT_PASSED = ("failure", "error", "skipped")


@dataclass(frozen=True)
class Comparison:
    """The results of one project's tests.

    Attributes:
        before: the result of each test on redis-py's locks.
        after: the same on ours.
        locks: how many locks of ours were made.
        output: what pytest printed in the run on ours.
    """

    before: Mapping[str, str]
    after: Mapping[str, str]
    locks: int
    output: str

    def differing(self) -> list[str]:
        """The tests with another result on ours than on redis-py's, in order."""
        names = self.before.keys() | self.after.keys()
        return sorted(name for name in names if self.before.get(name) != self.after.get(name))

    def passed(self) -> int:
        """How many tests pass on redis-py's locks."""
        return sum(result == "passed" for result in self.before.values())


def compare(suite: Suite, root: Path, python: Path) -> Comparison:
    """Run the tests on redis-py's locks and on ours, on one server, which is emptied in between.

    Args:
        suite: of the project.
        root: the folder of its sources, in which the port of the server is put.
        python: the interpreter of its environment.
    """
    made = root.parent / "made"
    with Server("valkey") as server, redis.Redis(port=server.port) as admin:
        if suite.uses_6379:
            for source in root.joinpath(suite.uses_6379).rglob("*.py"):
                source.write_text(source.read_text().replace(":6379", f":{server.port}"))
        before, _ = _run(suite, root, python, server.port, is_patched=False)
        admin.flushall()
        made.unlink(missing_ok=True)
        after, output = _run(suite, root, python, server.port, is_patched=True)
    return Comparison(before, after, int(made.read_text()) if made.exists() else 0, output)


def _run(suite: Suite, root: Path, python: Path, port: int, *, is_patched: bool) -> tuple[dict[str, str], str]:
    """Run the tests once. Returns the result of each, and what pytest printed."""
    report = root.parent / "report.xml"
    report.unlink(missing_ok=True)
    plugin = ["-p", "redislock_fast_patched"] if is_patched else []
    options = [option.format(port=port) for option in suite.options]
    own = {name: value for name, value in os.environ.items() if not name.startswith("REDISLOCK_FAST_")}
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-rs", *plugin, *options, f"--junitxml={report}"],
        cwd=root,
        env={
            **own,
            **{name: value.format(port=port) for name, value in suite.variables.items()},
            "PYTHONPATH": os.pathsep.join([str(root), str(ROOT / "src"), str(_PLUGIN)]),
            "REDISLOCK_FAST_MADE": str(root.parent / "made"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return _results(report) if report.exists() else {}, done.stdout


def _results(report: Path) -> dict[str, str]:
    """The result of each test in a report in JUnit's format."""
    results = {}
    for test in ElementTree.parse(report).iter("testcase"):  # pytest has just written it
        kinds = [kind for kind in _NOT_PASSED if test.find(kind) is not None]
        results[f"{test.get('classname')}::{test.get('name')}"] = kinds[0] if kinds else "passed"
    return results
