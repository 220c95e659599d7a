"""Where a system runs for a moment: its programs, their processes and folders.

Rules: a process ends with its context, and its folder goes.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from bench.contestants import AbsentError

if TYPE_CHECKING:
    from typing_extensions import Self

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_LOOK_S = 0.02


def program(name: str, package: str, beside: str = "") -> Path:
    """The newest program of that name.

    Args:
        name: as on the command line.
        package: Debian's, which brings it.
        beside: a pattern below / of folders that are not on the PATH and may have it.

    Raises:
        AbsentError: where it is not installed.
    """
    if beside and (found := sorted(Path("/").glob(f"{beside}/{name}"), key=_version)):
        return found[-1]
    if on_path := shutil.which(name):
        return Path(on_path)
    raise AbsentError(f"no program {name!r}: install Debian's package {package} (`make alternatives` does)")


@contextmanager
def folder(owner: str | None = None) -> Iterator[Path]:
    """A folder for data, in the file system that `TMPDIR` names.

    Args:
        owner: a user to whom it is given.

    Yields:
        The folder; it goes with the context.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as made:
        if owner:
            shutil.chown(made, owner)
        yield Path(made)


class Daemon:
    """A process that serves until it is asked to end.

    Args:
        command: the program and its arguments.
        log: where it writes to.
        user: as whom it runs, if not as this process.
    """

    def __init__(self, command: Sequence[str], log: Path, user: str | None = None) -> None:
        self._command = command
        self._log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, user=user)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until it serves.

        Args:
            is_ready: whether it does.

        Raises:
            RuntimeError: when it ends or is not ready in time; the message holds its log.
        """
        give_up = time.monotonic() + _START_TIMEOUT_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{self._command[0]} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(_LOOK_S)

    def __enter__(self) -> Self:
        """The process."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ask it to end, and wait for that."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _version(path: Path) -> list[int]:
    return [int(part) for part in path.parts if part.isdigit()]
