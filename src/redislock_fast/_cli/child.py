"""The command that `redislock run` runs: a process group of its own, which ends when this process does.

A second small process, the watcher, waits for the end of this one, whichever way it comes, and kills the group then.
Linux could kill the command by itself (`PR_SET_PDEATHSIG`), but not the processes that the command has started.
The watcher learns of the group just after the command has begun; a SIGKILL of this process between the two is missed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

from redislock_fast._cli.exits import CommandError, Exit

__all__ = ["Child"]

_WATCHER = 'read -r group && { read -r end; kill -KILL "-$group"; }'
"""Reads the group from this process, and then the end of the pipe, which this process alone holds open."""


class Child:
    """A running command.

    It has a session of its own, too, so a terminal's signals reach it through this process alone.

    Args:
        words: the command and its arguments. No shell reads them.
        environment: its environment.

    Raises:
        CommandError: it was not found or is not executable, or there is no `/bin/sh`.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"cannot run /bin/sh, which watches over the command: {error.strerror}") from None
        try:
            self._process = subprocess.Popen(words, env=environment, start_new_session=True)
        except OSError as error:
            self.forget()
            code = Exit.NOT_FOUND if isinstance(error, FileNotFoundError) else Exit.NOT_EXECUTABLE
            raise CommandError(f"cannot run {words[0]!r}: {error.strerror}", code) from None
        assert self._watcher.stdin is not None
        self._watcher.stdin.write(b"%d\n" % self._process.pid)
        self._watcher.stdin.flush()

    def send(self, number: int) -> None:
        """Send a signal to the whole group, unless it is gone or belongs to another user."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def poll(self) -> int | None:
        """The command's exit code, as a shell gives it: 128 + n after a signal n. None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def has_left_others(self) -> bool:
        """Whether processes of the group have outlived the command."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def forget(self) -> None:
        """Leave what is left of the group alone from now on."""
        self._watcher.kill()
        self._watcher.communicate()
