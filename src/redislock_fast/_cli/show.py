"""`redislock show`: who holds a lock, and who waits for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redislock_fast._cli.connecting import add_connection, client_of
from redislock_fast._cli.exits import Exit
from redislock_fast._cli.parsing import CommandParser
from redislock_fast._cli.printing import add_json, holder_text, print_json, seconds_text, state_text, text_of
from redislock_fast.inspection import LockReport, Participant, holders

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    parser: CommandParser = commands.add_parser("show", help="show who holds a lock, and who waits for it")
    add_connection(parser)
    parser.add_argument("name", metavar="NAME", help="the lock")
    add_json(parser)
    parser.set_defaults(command=_show)


def _show(arguments: argparse.Namespace) -> int:
    name = os.fsencode(arguments.name)
    report = holders(client_of(arguments), name)
    if arguments.json:
        print_json({"name": text_of(name), "held": report.held, **asdict(report)})
    else:
        print("\n".join(_lines(text_of(name), report)))
    return Exit.OK if report.held else Exit.FAILED


def _lines(name: str, report: LockReport) -> Iterator[str]:
    yield f"lock       {name}"
    if report.holder is None:
        yield "holder     none: it is free"
    else:
        yield f"holder     {_described(report.holder)}"
        yield f"token id   {report.holder.token_id or 'none: the key is no lock'}"
        yield f"ttl        {seconds_text(report.ttl_s, 'no end')}"
        yield f"fence      {'none' if report.fence is None else report.fence}"
    yield f"contended  {'yes' if report.contended else 'no'}"
    yield f"waiting    {'?' if report.waiting is None else report.waiting}"
    for place, waiter in enumerate(report.waiters, 1):
        yield f"{place:>9}  {_described(waiter)}, for {seconds_text(waiter.waited_s, '?')}"


def _described(participant: Participant) -> str:
    """The process, whether it is there, and how it is connected."""
    process = participant.process
    known = "" if process is None else f", {process.program}, connected from {process.address}"
    return f"{holder_text(participant)} ({state_text(participant)}){known}"
