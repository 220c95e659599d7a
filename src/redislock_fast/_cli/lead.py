"""`redislock lead`: runs a command while this process leads, in an election. See `docs/reference/cli.md`."""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from redislock_fast import Lock, LockLostError
from redislock_fast._cli.child import Child
from redislock_fast._cli.connecting import add_connection, client_of
from redislock_fast._cli.exits import CommandError, Exit, say
from redislock_fast._cli.guard import Guard
from redislock_fast._cli.holding import acquired, add_command, add_ttl, environment_of, finish, prepare, words_of
from redislock_fast._cli.signals import Interrupted, Signals
from redislock_fast._election.record import Outage, encoded, read_leader, record_leader
from redislock_fast._transport.greeting import introduce_as
from redislock_fast._transport.threads.driver import drive, transport_of
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._cli.connecting import Client
    from redislock_fast._cli.parsing import CommandParser

__all__ = ["add_to"]

_TTL_S = 15.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

_ENDS = {int(signal.SIGTERM), int(signal.SIGINT)}


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    parser: CommandParser = commands.add_parser(
        "lead",
        help="run a program while this process leads, in an election",
        description="Campaign in an election, and run a program while this process leads. The program is ended if the"
        " term is lost, and begins again when this process leads again.",
    )
    prepare(parser, "lead")
    parser.add_argument(
        "--value", type=value, metavar="TEXT", help="what others may know of this leader, such as its address"
    )
    parser.add_argument(
        "--restart",
        choices=["always", "on-failure", "never"],
        default="on-failure",
        help="when to run the program again that has ended by itself (default: %(default)s)",
    )
    add_ttl(parser, _TTL_S)
    parser.add_argument("-v", "--verbose", action="store_true", help="say when it leads, and what is run")
    add_connection(parser)
    add_command(parser, "the election")
    parser.set_defaults(command=_lead)


def value(text: str) -> bytes:
    """Read a leader's value. Argparse quotes the name of this function for one that is too long or is no text."""
    return encoded(text)


def _lead(arguments: argparse.Namespace) -> int:
    words = words_of(arguments)
    client = client_of(arguments)
    introduce_as(f"redislock:{PurePath(words[0]).name}")
    transport = transport_of(client)
    # A server that goes away later is waited for; one that is not there now is an error, as the URL may be wrong.
    drive(transport, read_leader(transport.encoding.key_of(arguments.name), with_process=False))
    signals, outage, pause_s = Signals(), Outage(arguments.name), 0.0
    try:
        while True:
            term = None
            with outage.survived():
                term = _Term.campaign(client, arguments, signals)
            if term is None:
                _pause(signals, _FIRST_PAUSE_S)
                continue
            began = clock()
            code = term.run(words)
            if code is not None and not _begins_anew(code, arguments.restart, term.guard.passed_on):
                return code
            if code is not None:
                pause_s = _next_pause_s(pause_s, clock() - began)
                say(f"the command has ended with {code}: in {pause_s:g} s, this process campaigns again to run it")
                _pause(signals, pause_s)
    except Interrupted as interrupt:
        return 128 + interrupt.number


def _begins_anew(code: int, restart: str, passed_on: set[int]) -> bool:
    """Whether a command is run again that has ended with this code.

    Not if it was told to end, or has died of a signal that it was given.
    """
    if passed_on & _ENDS or code - 128 in passed_on:
        return False
    return restart == "always" or (restart == "on-failure" and code != Exit.OK)


def _next_pause_s(last_s: float, ran_s: float) -> float:
    """The pause after a run of the command that took so long: it doubles, unless the command runs for longer than that.

    Args:
        last_s: the pause before that run; 0 before the first.
        ran_s: for how long the command has run.
    """
    if not last_s or ran_s > _LONGEST_PAUSE_S:
        return _FIRST_PAUSE_S
    return min(2 * last_s, _LONGEST_PAUSE_S)


def _pause(signals: Signals, seconds: float) -> None:
    """Wait so long, while others may lead.

    Raises:
        Interrupted: a signal has ended the wait.
    """
    with signals.interrupting():
        time.sleep(seconds)


class _Term:
    """One term, from the election to the end of the command: `campaign` makes it.

    Attributes:
        guard: ends the command where the term is lost.
    """

    def __init__(self, lock: Lock, guard: Guard, arguments: argparse.Namespace, what: str) -> None:
        self.guard = guard
        self._lock = lock
        self._arguments = arguments
        self._what = what

    @classmethod
    def campaign(cls, client: Client, arguments: argparse.Namespace, signals: Signals) -> _Term | None:
        """Campaign until this process leads. None where the term was lost before it had begun.

        Raises:
            Interrupted: a signal has ended the wait. The process does not lead.
            redis.exceptions.RedisError: the server's error, or it is away. The process does not lead.
        """
        election: str = arguments.name
        what = f"the term of the election {election!r}"
        guard = Guard(what, signals, arguments.ttl_s, kills=True)
        lock = Lock(
            client,
            election,
            timeout=arguments.ttl_s,
            thread_local=False,
            auto_renew=True,
            on_lost=guard.note_loss,
            fencing=True,
        )
        try:
            acquired(lock, what, signals)
            drive(transport_of(client), record_leader(lock, arguments.value or b""))
        except LockLostError:
            return None
        except RedisError:
            if lock.valid:
                finish(lock, what, lock.release)
            raise
        return cls(lock, guard, arguments, what)

    def run(self, words: list[str]) -> int | None:
        """Run the command, and hand over. Returns its exit code; None where it was ended, since the term was lost.

        Raises:
            CommandError: it cannot be run, or was told to end by a signal, too.
        """
        lock, guard = self._lock, self.guard
        if self._arguments.verbose:
            say(f"leads the election {lock.name!r}, term {lock.fence}, running {words[0]!r}")
        try:
            child = Child(words, environment_of(lock.name, term=lock.fence))
        except CommandError:
            finish(lock, self._what, lock.release)
            raise
        code = guard.run(lock, child)
        guard.end_others(lock, child)
        child.forget()
        if guard.loss is None:
            finish(lock, self._what, lock.release)
        if not guard.has_ended_it:
            return code
        cause = "could not be renewed in time" if guard.loss is None else f"was lost ({guard.loss})"
        text = f"the command was ended, since {self._what} {cause}"
        if guard.passed_on & _ENDS:
            raise CommandError(text, Exit.LOST)
        say(text)
        return None
