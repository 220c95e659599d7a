"""The signals of `redislock run`, which belong to the command that it runs.

Python calls a signal's handler in the main thread. It notes the signal, and the wakeup pipe ends the wait for it.
While the lock is waited for there is no command yet, so a signal ends that wait instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["STOPS", "Interrupted", "Signals", "stop"]


def _numbers(*names: str) -> frozenset[int]:
    """The numbers of those of these signals that the platform has."""
    return frozenset(int(getattr(signal, f"SIG{name}")) for name in names if hasattr(signal, f"SIG{name}"))


STOPS = _numbers("TSTP", "TTIN", "TTOU")
"""The signals by which a terminal stops a job."""

_PASSIVE = _numbers("CONT", "WINCH", "URG", "INFO")  # these end no process
_OWN = _numbers("KILL", "STOP", "CHLD", "PIPE", "SEGV", "BUS", "FPE", "ILL", "TRAP", "SYS")
"""The signals that cannot be caught, and those that the system sends for what this process does itself."""


class Interrupted(BaseException):
    """A signal has ended the wait for the lock. No `Exception`, so that nothing takes it for an error.

    Args:
        number: the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop() -> None:
    """Stop this process until it is continued, as the terminal stops a job."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Signals:
    """Catches every signal that can be caught and that was not ignored when the program started.

    It is made by the main thread, once, and catches them until the program ends.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._interrupts = False
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in signal.valid_signals() - _OWN:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        # Also where it was ignored: the system would forget the command's exit code.
        signal.signal(signal.SIGCHLD, _do_nothing)

    def _note(self, number: int, _: FrameType | None) -> None:
        if not self._interrupts:
            self._received.append(number)
        elif number in STOPS:
            stop()
        elif number not in _PASSIVE:
            self._interrupts = False  # a second signal must not interrupt what the first one makes necessary
            raise Interrupted(number)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A context that a signal ends with `Interrupted`, also one that came before it; see `_PASSIVE`."""
        self._interrupts = True
        try:
            for number in self._received:
                self._note(number, None)
            self._received.clear()
            yield
        finally:
            self._interrupts = False

    def wait(self, limit_s: float) -> list[int]:
        """Wait for a signal, for a child's end, for `wake`, or for so many seconds. Returns the signals in order."""
        if not self._received:
            select.select([self._read_end], [], [], limit_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 4096):
                pass
        received, self._received = self._received, []
        return received

    def wake(self) -> None:
        """End `wait`. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # a full buffer wakes, too
            os.write(self._write_end, b"\0")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Let the wakeup pipe tell of a signal, and do no more."""
