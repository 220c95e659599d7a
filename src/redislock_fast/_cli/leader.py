"""`redislock leader`: shows who leads, in an election."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redislock_fast import Election, Leader
from redislock_fast._cli.connecting import add_query, client_of
from redislock_fast._cli.exits import Exit
from redislock_fast._cli.printing import print_json, seconds_text, text_of

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    parser = add_query(commands, "leader", "show which process leads, in an election", _show, "the election")
    parser.add_argument("--watch", action="store_true", help="print each new leader, until Ctrl-C")


def _show(arguments: argparse.Namespace) -> int:
    name = os.fsencode(arguments.name)
    election = Election(client_of(arguments), name)
    leader = election.leader()
    if arguments.watch:
        with contextlib.suppress(KeyboardInterrupt):
            for new in election.observe():
                if arguments.json:
                    _print_json(name, new)
                else:
                    print(_line(new), flush=True)
        return Exit.OK
    if arguments.json:
        _print_json(name, leader)
    else:
        print("\n".join(_lines(text_of(name), leader)))
    return Exit.FAILED if leader is None else Exit.OK


def _print_json(name: bytes, leader: Leader | None) -> None:
    told = dict.fromkeys(("term", "value", "process", "since_s")) if leader is None else asdict(leader)
    print_json({"name": text_of(name), **told})


def _line(leader: Leader) -> str:
    return f"term {leader.term}  {_process(leader)}  value {_value(leader)}"


def _process(leader: Leader) -> str:
    process = leader.process
    return "?" if process is None else f"{process.host}:{process.pid}, {process.program}"


def _value(leader: Leader) -> str:
    return "none" if leader.value is None else text_of(leader.value.encode())


def _lines(name: str, leader: Leader | None) -> Iterator[str]:
    yield f"election  {name}"
    if leader is None:
        yield "leader    none"
        return
    yield f"leader    {_process(leader)}"
    yield f"value     {_value(leader)}"
    yield f"term      {leader.term}"
    yield f"since     {seconds_text(leader.since_s, '?')}"
