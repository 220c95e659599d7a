"""A source tree of the package, and a child process that measures with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.contestants import AbsentError

BENCH_TREE = Path(__file__).resolve().parents[2]
"""The tree of this bench."""


class NotMeasuredError(Exception):
    """A tree lacks a workload or fails in it; the message says why."""


class Child:
    """A process that has imported the package of one tree.

    Args:
        requests: its standard input.
        replies: its standard output.

    Attributes:
        implementation: of the package, "compiled" or "python".
    """

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests = requests
        self._replies = replies
        facts = self._hear()
        self.file = Path(facts["file"])
        self.implementation: str = facts["implementation"]

    def rate(self, workload: str, seconds: float) -> float:
        """Measure a workload.

        Args:
            workload: a key of `bench.guard.workloads.WORKLOADS`.
            seconds: for how long.

        Returns:
            Acquire+release pairs, or acquisitions, per second.

        Raises:
            NotMeasuredError: when the tree lacks the workload or fails in it.
            AbsentError: when the process has ended.
        """
        self._requests.write(json.dumps((workload, seconds)) + "\n")
        self._requests.flush()
        reply = self._hear()
        if "error" in reply:
            raise NotMeasuredError(reply["error"])
        rate: float = reply["rate"]
        return rate

    def _hear(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise AbsentError("a child process has ended")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def open_child(tree: Path, urls: Sequence[str]) -> Iterator[Child]:
    """Start a child process.

    Args:
        tree: its package is imported, from `src`.
        urls: of the servers; the first one is for all workloads but Redlock.

    Yields:
        The child; it ends with the context.

    Raises:
        AbsentError: when the package cannot be imported from the tree.
    """
    source = tree.resolve() / "src"
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{BENCH_TREE}"}
    command = [sys.executable, "-m", "bench.guard.child", *urls]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=BENCH_TREE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:
            child = Child(process.stdin, process.stdout)
            if not child.file.is_relative_to(source):
                raise AbsentError(f"{source} has no package: {child.file} was imported")
            yield child
