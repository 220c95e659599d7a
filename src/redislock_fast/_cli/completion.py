"""`redislock completion`: a script by which a shell completes commands and options."""

from __future__ import annotations

import argparse
import importlib.util
from functools import partial
from typing import Any

from redislock_fast._cli.exits import CommandError, Exit

__all__ = ["add_to"]


def add_to(commands: Any, whole: argparse.ArgumentParser) -> None:
    """Add the command to the parsers of commands. `whole` is the parser of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion", help="print a script by which your shell completes commands and options"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    parser.set_defaults(command=partial(_print, whole))


def _print(whole: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("shtab") is None:
        raise CommandError("completion needs shtab: pip install redislock_fast[cli]")
    print(importlib.import_module("shtab").complete(whole, arguments.shell))
    return Exit.OK
