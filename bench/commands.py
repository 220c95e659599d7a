"""The commands of `python -m bench`.

Each command is a module, listed in `COMMANDS`, with `HELP`, `add_arguments` and `run`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Protocol

from bench import latency, production, redlock, scripts, throughput
from bench.alternatives import command as alternatives
from bench.contention import command as contention
from bench.guard import command as guard
from bench.measuring.busy import warn_if_busy
from bench.renewal import command as renewal


class Command(Protocol):
    """The module of a command."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options of the command."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command, and return the exit status."""


COMMANDS: Mapping[str, Command] = {
    "throughput": throughput,
    "latency": latency,
    "production": production,
    "contention": contention,
    "alternatives": alternatives,
    "renewal": renewal,
    "redlock": redlock,
    "scripts": scripts,
    "guard": guard,
}


def main() -> int:
    """Run the command that the command line names.

    Returns:
        The exit status: 0, 1 where a check failed, 2 where the command could not be run.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Locks, measured.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    options = parser.parse_args()
    warn_if_busy()
    return COMMANDS[options.command].run(options)
