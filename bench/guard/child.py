"""A child process of `python -m bench guard`, from both ends: it measures with the package of one tree.

`python -m bench.guard.child URL...` writes to standard output which package it has imported. Then it reads requests
from standard input, a name and seconds each, and writes the rate or the error; it ends with its standard input. Each
message is a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redislock_fast
from bench.contestants import AbsentError
from bench.guard.workloads import OF_INTERPRETERS, WORKLOADS
from bench.measuring import rounds
from bench.measuring.rounds import Entrant, Sample

BENCH_TREE = Path(__file__).resolve().parents[2]
"""The tree of this bench."""


class NotMeasuredError(Exception):
    """A tree lacks a workload or fails in it; the message says why."""


class Child:
    """A process that has imported the package of one tree: its standard input and output.

    It has the file and the implementation of its package, "compiled" or "python".
    """

    def __init__(self, requests: Any, replies: Any) -> None:
        self._requests, self._replies = requests, replies
        facts = self._read()
        self.file = Path(facts["file"])
        self.implementation: str = facts["implementation"]

    def sample(self, workload: str, seconds: float) -> Sample:
        """Measure a key of `WORKLOADS` or `OF_INTERPRETERS`: acquire+release pairs, or acquisitions, per second.

        Raises `NotMeasuredError` when the tree lacks it or fails in it, `AbsentError` when the process has ended.
        """
        self._requests.write(json.dumps((workload, seconds)) + "\n")
        self._requests.flush()
        reply = self._read()
        if "error" in reply:
            raise NotMeasuredError(reply["error"])
        return Sample(reply["rate"])

    def _read(self) -> dict[str, Any]:
        line = self._replies.readline()
        if not line:
            raise AbsentError("a child process has ended")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def open_child(
    tree: Path | None, urls: Sequence[str], python: str = sys.executable, **settings: str
) -> Iterator[Child]:
    """Start a child process with the package of a tree; the first server is for all workloads but Redlock.

    Without a tree, it has the package that is installed for its interpreter `python`. The settings are of its
    environment. Raises `AbsentError` when the package cannot be imported from the tree.
    """
    command = [python, "-m", "bench.guard.child", *urls]
    pipe = subprocess.PIPE
    environ = {**environment(tree), **settings}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ, cwd=BENCH_TREE) as process:
        child = Child(process.stdin, process.stdout)
        if tree is not None and not child.file.is_relative_to(tree.resolve()):
            raise AbsentError(f"{tree} has no package: {child.file} was imported")
        yield child


def environment(tree: Path | None) -> dict[str, str]:
    """The environment of a process with the package of a tree, if one is given, and this bench."""
    of_tree = [] if tree is None else [str(tree.resolve() / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join((*of_tree, str(BENCH_TREE)))}


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its children
    urls = sys.argv[1:]
    _write(file=redislock_fast.__file__, implementation=redislock_fast.implementation)
    entrants: dict[str, Entrant] = {}
    with rounds.open_scene(urls[0]) as scene:
        for line in sys.stdin:
            name, seconds = json.loads(line)
            try:
                if name not in entrants:
                    make = OF_INTERPRETERS.get(name) or WORKLOADS[name].entrant
                    entrants[name] = make(scene, urls)
                sample = rounds.sample(entrants[name], seconds)
            except Exception as error:  # the tree lacks the workload, or fails in it
                _write(error=str(error) or repr(error))
            else:
                _write(rate=sample.pairs_per_s)


def _write(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
