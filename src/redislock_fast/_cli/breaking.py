"""`redislock break`: takes a lock, or a permit of a semaphore, from one certain holder."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from redislock_fast._cli.connecting import add_query, client_of
from redislock_fast._cli.exits import CommandError, Exit
from redislock_fast._cli.looking import look_at
from redislock_fast._cli.printing import holder_text, print_json, text_of
from redislock_fast._procedures.breaking import Broken, break_lock
from redislock_fast._transport.threads.driver import drive, transport_of
from redislock_fast.inspection import LockReport

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    about = "take a lock or a permit from one certain holder, and hand it over to the first waiter"
    parser = add_query(commands, "break", about, _break, "the lock or the semaphore")
    parser.usage = "redislock break [OPTIONS] NAME --token-id ID"
    parser.add_argument("--token-id", metavar="ID", help="the token id of the holder, as `ls` and `show` print it")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _break(arguments: argparse.Namespace) -> int:
    name = os.fsencode(arguments.name)
    shown = text_of(name)
    if arguments.token_id is None:
        place = f"`redislock show {shlex.quote(shown)}` prints the holder's"
        raise CommandError(f"--token-id says which holder is to lose the lock: {place}", Exit.USAGE)
    client, token_id = client_of(arguments), arguments.token_id.lower()
    report = look_at(client, name)
    if isinstance(report, LockReport):
        what, found = f"lock {shown!r}", [report.holder]
    else:
        what, found = f"a permit of {shown!r}", [holder for holder, _ in report.holders]
    holder = next((one for one in found if one is not None and one.token_id == token_id), None)
    if holder is None:
        raise CommandError(f"{what} is not held with token id {token_id!r}", Exit.FAILED)
    if not arguments.yes and not _confirmed(f"Break {what} held by {holder_text(holder)}? [y/N] "):
        return Exit.FAILED
    transport = transport_of(client)
    broken: Broken | None = drive(transport, break_lock(transport.encoding.key_of(name), token_id))
    if broken is None:
        raise CommandError(f"{what} is not held with token id {token_id!r} any more", Exit.FAILED)
    if arguments.json:
        outcome = {"handed_over": broken.handed_over, "remains_s": broken.remains_s}
        print_json({"name": shown, "token_id": token_id, **outcome})
    else:
        print(f"broke {what}: " + ("the first waiter has it" if broken.handed_over else "it is free"))
        if broken.remains_s:
            print(f"its process has not answered: it may still take the lock in memory for {broken.remains_s:.1f} s")
    return Exit.OK


def _confirmed(question: str) -> bool:
    """Whether the user says yes.

    Raises:
        CommandError: there is nobody to ask.
    """
    if not sys.stdin.isatty():
        raise CommandError("there is no terminal to ask: --yes breaks the lock without asking", Exit.USAGE)
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
