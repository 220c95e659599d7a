"""The parser of a command line: what argparse's does, with an exit code of the command's own and no secret quoted."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from redislock_fast._cli.exits import Exit

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Parses one command.

    Attributes:
        usage_code: what the program exits with where the words make no sense.
        complain: called with the words and what they were parsed to. Returns what is wrong with them together, or None.
    """

    usage_code: int = Exit.USAGE
    complain: Callable[[list[str], argparse.Namespace], str | None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse unknown options here: the parser above would exit with its own code."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        complaint = self.complain(list(args), parsed) if self.complain is not None else None
        if complaint is not None:
            self.error(complaint)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with the usage and a message that quotes no credentials of a URL."""
        self.print_usage(sys.stderr)
        self.exit(self.usage_code, f"{self.prog}: error: {re.sub(r'//.*@', '//...@', message)}\n")
