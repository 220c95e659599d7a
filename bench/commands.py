"""The commands of `python -m bench`.

Each command is a module with `HELP`, `add_arguments` and `run`. `run` measures, prints its
tables and returns the figures. Where `violations` among them is not 0, two workers held one lock at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from bench import cluster, election, latency, lingering, production, redlock, renewal, scripts, semaphore, throughput
from bench.contention import command as contention
from bench.contestants import AbsentError, CheckFailedError
from bench.guard import command as guard
from bench.measuring import report, servers

_ALL = (throughput, latency, production, contention, renewal, redlock, scripts, semaphore, election, guard)
COMMANDS: Mapping[str, ModuleType] = {module.__name__.split(".")[1]: module for module in _ALL}

SHORT = ("throughput --mode main", "latency --rtt 1 --callers 8 --kinds threads", "contention --preset short")
"""What `python -m bench` runs when it names no command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the command line names, or those of `SHORT`; `arguments` are in its place.

    Returns the exit status: 0, 1 where a check failed, 2 where the command could not be run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=f"Locks, measured. Without a command: {'; '.join(SHORT)}."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.HELP)
        command.add_arguments(of_command)
        of_command.add_argument("--json", type=report.new_file, metavar="FILE", help="save every figure here")
    options = parser.parse_args(arguments)
    report.warn_if_busy()
    servers.allow_open_files()
    if options.command is not None:
        return _run(options)
    return max(_run(parser.parse_args(short.split())) for short in SHORT)


def _run(options: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], dict[str, Any]] = COMMANDS[options.command].run
    if run is throughput.run and options.topology == "cluster":
        run = cluster.run
    elif run is throughput.run and options.mode == lingering.NAME:
        run = lingering.run
    try:
        figures = run(options)
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (AbsentError, FileNotFoundError) as error:
        report.say(f"cannot run: {error}")
        return 2
    if options.json:
        facts = {"command": options.command, **report.environment(options), **figures}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    if violations := figures.get("violations"):
        report.say(f"CHECK FAILED: two holders at a time, {violations} times")
        return 1
    return 0
