"""`redislock`: reads the arguments, runs the command, and turns errors into one line and an exit code.

Each command is a module with a function `add_to(commands)`, which makes its parser, and sets as `command` the function
that runs it: it takes the arguments and returns the exit code.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

from redis.exceptions import AskError, AuthenticationError, InvalidResponse, RedisClusterException, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.sentinel import MasterNotFoundError

from redislock_fast._cli import breaking, completion, doctor, lead, leader, limit, ls, run, show, top
from redislock_fast._cli.exits import CommandError, Exit, say
from redislock_fast._cli.parsing import CommandParser
from redislock_fast._version import __version__

__all__ = ["main"]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="redislock",
        description="Locks and semaphores on Redis and Valkey: run a program under one, see who holds what.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.add_to(commands)
    ls.add_to(commands)
    show.add_to(commands)
    top.add_to(commands)
    breaking.add_to(commands)
    limit.add_to(commands)
    lead.add_to(commands)
    leader.add_to(commands)
    doctor.add_to(commands)
    completion.add_to(commands, parser)
    return parser


def _prepare_streams() -> None:
    """Have a stream where the caller has closed one, an input of any bytes, and an output of any characters.

    Python has None for one that is closed. The programs that are run get none.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the encoding may lack characters of a name


def _settle_streams() -> None:
    """Drop what the output and errors do not take: else the end of Python fails at it, and its exit code is 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        words: its words, without the program; None: those of this process.

    Returns:
        The exit code.
    """
    _prepare_streams()
    try:
        return _run(words)
    finally:
        _settle_streams()


def _run(words: Sequence[str] | None) -> int:
    """Run the command, and tell its error. Returns the exit code."""
    arguments = _parser().parse_args(words)
    try:
        code = int(arguments.command(arguments))
        sys.stdout.flush()
    except CommandError as error:
        message, code = str(error), error.code
    except AuthenticationError:
        message, code = "the server does not accept this user and password", Exit.NO_SERVER
    except MasterNotFoundError:  # its text has many lines
        message, code = "no server: no sentinel names a primary for this service", Exit.NO_SERVER
    except (RedisConnectionError, RedisTimeoutError, RedisClusterException, InvalidResponse) as error:
        message, code = f"no server: {error}", Exit.NO_SERVER
    except AskError:  # and MovedError, whose text is a slot and an address
        message = "this server is a node of a cluster, and another one has the key: use a URL with redis+cluster://"
        code = Exit.OWN_FAULT
    except RedisError as error:
        message, code = str(error), Exit.OWN_FAULT
    except BrokenPipeError:  # whoever read the output has enough
        return Exit.OK
    except OSError as error:  # by the output: redis-py's errors of the network are no OSErrors
        message, code = str(error), Exit.OWN_FAULT
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Exception:  # a bug of ours: Python's own code for it, 1, would be an answer
        traceback.print_exc()
        return Exit.OWN_FAULT
    else:
        return code
    say(message)
    return code
