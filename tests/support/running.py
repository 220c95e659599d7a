"""Processes of `redislock`, and commands for them to run. Nothing here asserts what they should do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.support.helpers import PATIENCE_S

REDISLOCK = [sys.executable, "-m", "redislock_fast"]

ECHO = ["sh", "-c", "echo begun; exec cat"]
"""Says that it runs, then repeats what it is told; it ends when its input does."""

GRANDCHILD = ["sh", "-c", "sh -c 'echo begun; exec sleep 60'; :"]
"""A shell that waits for a process of its own."""

ALONE = """if True:
    import fcntl, signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file = open(sys.argv[1], "a")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("begun", flush=True)
    sys.stdin.read()
"""
"""Ends with its input or by KILL alone, and cannot begin while another one of its kind lives."""


class Run:
    """A process of `redislock`. The end of its output says that every process that it has started is over.

    Args:
        port: the server's.
        arguments: the rest of the command line.
        command: of `redislock`.
        wrapper: a command that runs it.
        environment: added to that of the tests.
    """

    def __init__(
        self,
        port: int,
        *arguments: str,
        command: str = "run",
        wrapper: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        url = {"REDISLOCK_URL": f"redis://127.0.0.1:{port}"}
        self.process = subprocess.Popen(
            [*wrapper, *REDISLOCK, command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **url, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    def line(self) -> str:
        """The next line of its output; "" at the end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def trouble(self) -> str:
        """The next line of its errors; "" at the end."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def say(self, line: str) -> None:
        """Give the command a line of input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """End the command's input. Returns the exit code, and what is left of its output and errors."""
        output, errors = self.process.communicate(timeout=2 * PATIENCE_S)
        return self.process.returncode, output, errors

    def clear(self) -> None:
        """Kill what still runs."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


class Runs:
    """Starts processes of `redislock`: `runs(port, "-n", "name", "--", "true")`."""

    def __init__(self) -> None:
        self._started: list[Run] = []

    def __call__(
        self,
        port: int,
        *arguments: str,
        command: str = "run",
        wrapper: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Run:
        self._started.append(Run(port, *arguments, command=command, wrapper=wrapper, environment=environment))
        return self._started[-1]

    def clear(self) -> None:
        """Kill what still runs."""
        for run in self._started:
            run.clear()


@pytest.fixture
def runs() -> Iterator[Runs]:
    """Starts processes of `redislock`, which do not outlive the test."""
    started = Runs()
    yield started
    started.clear()
