"""The programs of a system, their processes and folders; all end with their contexts."""

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
_POLL_S = 0.02


def program(name: str, package: str, beside: str = "") -> Path:
    """Find the newest program of a name.

    Args:
        name: of the program.
        package: the Debian package of the program.
        beside: a pattern, below /, of folders that are searched before the PATH.

    Raises:
        AbsentError: when it is not installed.
    """
    if beside and (found := sorted(Path("/").glob(f"{beside}/{name}"), key=_version)):
        return found[-1]
    if on_path := shutil.which(name):
        return Path(on_path)
    raise AbsentError(f"no program {name!r}: install Debian's package {package} (`make alternatives` does)")


@contextmanager
def folder(owner: str | None = None) -> Iterator[Path]:
    """Make a folder for data, in the file system of `TMPDIR`.

    Args:
        owner: the user that owns it, if not the user of this process.

    Yields:
        The folder; it is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as made:
        if owner:
            shutil.chown(made, owner)
        yield Path(made)


class Daemon:
    """A server process, which ends with its context.

    Args:
        command: the program and its arguments.
        log: the file for its output.
        user: that runs it, if not the user of this process.
    """

    def __init__(self, command: Sequence[str], log: Path, user: str | None = None) -> None:
        self._command = command
        self._log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, user=user)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Wait until the server is ready.

        Args:
            is_ready: whether it is.

        Raises:
            RuntimeError: when the process ends, or is not ready in time; the message has the end of its log.
        """
        give_up = time.monotonic() + _START_TIMEOUT_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{self._command[0]} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        """Return the process."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Interrupt the process, and wait for its end."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _version(path: Path) -> list[int]:
    return [int(part) for part in path.parts if part.isdigit()]
