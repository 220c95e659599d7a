"""The workload of a window: the workers, the locks, and how long a worker holds and thinks.

It is plain data, which is sent to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """The workload of a row."""

    processes: int = 8  # their number, each with a client of its own
    threads: int = 1  # workers of each process; 1 when there are tasks
    tasks: int = 0  # workers of each process in an event loop; 0 for threads
    keys: int = 1  # the number of locks; a worker always wants the same one, as many one as another
    hold_ms: float = 1.0  # how long a worker sleeps with the lock, in ms
    think_ms: float = 1.0  # how long a worker sleeps between a release and the next acquire, in ms

    @property
    def crew(self) -> int:
        """The number of workers of a process."""
        return self.tasks or self.threads

    @property
    def workers(self) -> int:
        """The number of workers of all processes."""
        return self.processes * self.crew

    @property
    def who(self) -> str:
        """The workers in words, for example "8 processes"."""
        if self.crew == 1:
            return _counted(self.processes, "process", "es")
        each = _counted(self.crew, "task" if self.tasks else "thread", "s")
        return each if self.processes == 1 else f"{self.processes:,} x {each}"

    @property
    def label(self) -> str:
        """The name of the workload in tables."""
        keys = "" if self.keys == 1 else f", {self.keys} keys"
        return f"{self.who}{keys}, {self.hold_ms:g}/{self.think_ms:g}"


def _counted(count: int, noun: str, plural: str) -> str:
    return f"{count:,} {noun}{plural * (count > 1)}"
