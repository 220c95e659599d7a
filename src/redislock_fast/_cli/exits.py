"""The exit codes of `redislock`, and the error that ends a command with one of them."""

from __future__ import annotations

import contextlib
import sys
from enum import IntEnum

__all__ = ["CommandError", "Exit", "say"]


class Exit(IntEnum):
    """The exit codes of `redislock`. Codes from 64 on are those of `sysexits.h`, from 125 on those of `timeout(1)`."""

    OK = 0
    FAILED = 1
    """The command says no: the lock is not there, or somebody declined."""
    USAGE = 2
    NO_SERVER = 69
    NOT_ACQUIRED = 75
    LOST = 76
    OWN_FAULT = 125
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    INTERRUPTED = 130


class CommandError(Exception):
    """Ends a command with a message in one line.

    Args:
        message: what is wrong. It never has a secret in it.
        code: what the program exits with.
    """

    def __init__(self, message: str, code: int = Exit.OWN_FAULT) -> None:
        super().__init__(message)
        self.code = code


def say(message: str) -> None:
    """Write a line to stderr, if that is open: a message must not cost the exit code."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"redislock: {message}\n")
