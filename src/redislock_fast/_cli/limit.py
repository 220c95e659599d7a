"""`redislock limit`: shows, sets and removes the limit of a semaphore that counts for all of its callers."""

from __future__ import annotations

import argparse
import os
from typing import Any

from redislock_fast import Semaphore
from redislock_fast._cli.connecting import add_query, client_of
from redislock_fast._cli.exits import CommandError, Exit
from redislock_fast._cli.printing import print_json, text_of
from redislock_fast._cli.scanning import positive_int
from redislock_fast._protocol.keys import permit_keys
from redislock_fast._protocol.operation import Refused
from redislock_fast._protocol.permits import operators_limit

__all__ = ["add_to"]

_NONE = "none"


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    about = "show or set how many may hold a semaphore, whatever limit its callers have"
    parser = add_query(commands, "limit", about, _run, "the semaphore")
    parser.add_argument(
        "limit",
        metavar="N",
        nargs="?",
        type=_limit,
        help=f"the limit from now on; '{_NONE}': as many as each caller says. Without it, the limit is shown",
    )


def _limit(text: str) -> int | str:
    return text if text == _NONE else positive_int(text)


def _run(arguments: argparse.Namespace) -> int:
    name = os.fsencode(arguments.name)
    client: Any = client_of(arguments)
    if arguments.limit is None:
        try:
            limit = operators_limit(name, client.get(permit_keys(name)[2]))
        except Refused as error:
            raise CommandError(str(error)) from None
    else:
        limit = None if arguments.limit == _NONE else arguments.limit
        Semaphore(client, name, 1).resize(limit)
    if arguments.json:
        print_json({"name": text_of(name), "limit": limit})
    else:
        print(_NONE if limit is None else limit)
    return Exit.OK
