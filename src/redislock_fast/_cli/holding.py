"""The parts that `run` and `lead` share: the command line, the wait for the lock, and the end of the holding."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import threading
from collections.abc import Callable
from functools import partial

from redislock_fast import Lock, Permit
from redislock_fast._cli.exits import CommandError, Exit, say
from redislock_fast._cli.parsing import CommandParser
from redislock_fast._cli.signals import Interrupted, Signals
from redislock_fast._util.times import positive_ms

__all__ = [
    "acquired",
    "add_command",
    "add_ttl",
    "environment_of",
    "exit_code",
    "finish",
    "name",
    "prepare",
    "seconds",
    "time_kept",
    "ttl",
    "words_of",
]

_RELEASE_LIMIT_S = 3.0


def prepare(parser: CommandParser, command: str) -> None:
    """Have the parser read the command line of a command that runs a program."""
    parser.usage = f"redislock {command} [OPTIONS] NAME -- COMMAND [ARGUMENTS]"
    parser.usage_code = Exit.OWN_FAULT
    parser.complain = partial(_forgotten_name, command)
    parser.set_defaults(usage=parser.usage)


def add_command(parser: CommandParser, what: str) -> None:
    """Add the name of what is held, in these words, and the program with its arguments."""
    parser.add_argument("name", metavar="NAME", type=name, help=what)
    parser.add_argument("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program and its arguments")


def add_ttl(parser: CommandParser, default_s: float) -> None:
    """Add the option for the ttl of what is held."""
    parser.add_argument(
        "-t",
        dest="ttl_s",
        type=ttl,
        default=default_s,
        metavar="SECONDS",
        help="how long others wait after this process or its machine has died (default: %(default)g)",
    )


def seconds(text: str) -> float:
    """Read a time. Argparse quotes the name of this function for text that is no number."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return number


def ttl(text: str) -> float:
    """Read a ttl, as `seconds` does."""
    number = float(text)
    positive_ms(number, "ttl")
    return number


def time_kept(text: str) -> float:
    """Read for how long the lock is kept at least: 0, or a ttl; as `seconds` does."""
    return ttl(text) if seconds(text) else 0.0


def exit_code(text: str) -> int:
    """Read an exit code, as `seconds` does."""
    code = int(text)
    if not 0 <= code <= 255:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 255")
    return code


def name(text: str) -> str:
    """Read a lock's name, as `seconds` does."""
    text.encode()  # a ValueError where the bytes of the command line are no text
    return text


def _forgotten_name(command: str, given: list[str], parsed: argparse.Namespace) -> str | None:
    """The complaint about a `--` with the command alone: argparse takes the first word after it for the name."""
    after = given[given.index("--") + 1 :] if "--" in given else []
    if len(after) <= len(parsed.words) or parsed.words[:1] == ["--"]:
        return None
    return f"NAME is missing: the name of the lock stands before the --, as in: {command} NAME -- {shlex.join(after)}"


def words_of(arguments: argparse.Namespace) -> list[str]:
    """The program and its arguments.

    Raises:
        CommandError: there are none, they stand at the wrong place, or this system can run none.
    """
    words: list[str] = arguments.words
    if words[:1] == ["--"]:
        words = words[1:]
    elif words and words[0].startswith("-"):
        raise CommandError(f"options stand before the name of the lock: {words[0]}")
    if not words:
        raise CommandError(f"a command is missing: {arguments.usage}")
    if os.name != "posix":
        raise CommandError("it needs process groups and signals, which this system lacks")
    return words


def environment_of(lock_name: str, **numbers: int | None) -> dict[str, str]:
    """The command's environment: the lock's name, and the numbers that are known. Those of a command around are not."""
    environment = {**os.environ, "REDISLOCK_NAME": lock_name}
    for variable in ("REDISLOCK_FENCE", "REDISLOCK_TERM"):
        environment.pop(variable, None)
    known = {f"REDISLOCK_{what.upper()}": str(number) for what, number in numbers.items() if number is not None}
    return environment | known


def acquired(lock: Lock, what: str, signals: Signals) -> bool:
    """Acquire the lock.

    Raises:
        Interrupted: a signal has ended the wait. The lock is not held.
    """
    try:
        with signals.interrupting():
            return lock.acquire()
    except Interrupted:
        if lock.valid:  # the signal came when it had been acquired
            finish(lock, what, lock.release)
        raise


def finish(
    lock: Lock | Permit, what: str, work: Callable[[], object], failed: str = "was not released, and ends by its ttl"
) -> None:
    """Do the work that ends the holding. Trouble is reported in these words, and never delays the exit for long."""
    trouble: list[object] = ["no reply in time"]

    def do() -> None:
        try:
            work()
            trouble.clear()
        except Exception as error:
            trouble[:] = [error]

    limit_s = min(lock.remaining(), _RELEASE_LIMIT_S)
    worker = threading.Thread(target=do, daemon=True)
    worker.start()
    worker.join(limit_s)
    if trouble:
        say(f"{what} {failed}: {trouble[0]}")
