"""`redislock show`: who holds a lock or a semaphore, and who waits for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from redislock_fast._cli.connecting import add_query, client_of
from redislock_fast._cli.exits import Exit
from redislock_fast._cli.looking import PermitReport, look_at
from redislock_fast._cli.printing import holder_text, print_json, seconds_text, state_text, text_of
from redislock_fast.inspection import LockReport, Participant

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    about = "show who holds a lock or a semaphore, and who waits for it"
    add_query(commands, "show", about, _show, "the lock or the semaphore")


def _show(arguments: argparse.Namespace) -> int:
    name = os.fsencode(arguments.name)
    report = look_at(client_of(arguments), name)
    is_lock = isinstance(report, LockReport)
    held = report.held if isinstance(report, LockReport) else len(report.holders)
    if arguments.json:
        told = asdict(report) if isinstance(report, LockReport) else _object(report)
        print_json({"name": text_of(name), "kind": "lock" if is_lock else "semaphore", "held": held, **told})
    else:
        shown = text_of(name)
        lines = _lines(shown, report) if isinstance(report, LockReport) else _lines_of_permits(shown, report)
        print("\n".join(lines))
    return Exit.OK if held else Exit.FAILED


def _object(report: PermitReport) -> dict[str, Any]:
    holders = [{**asdict(holder), "ttl_s": left_s} for holder, left_s in report.holders]
    return {**asdict(report), "holders": holders}


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
    yield from _queue(report.waiting, report.waiters)


def _lines_of_permits(name: str, report: PermitReport) -> Iterator[str]:
    yield f"semaphore  {name}"
    yield f"limit      {'as each caller says' if report.limit is None else report.limit}"
    yield f"held       {len(report.holders)}"
    for number, (holder, left_s) in enumerate(report.holders, 1):
        yield f"{number:>9}  {_described(holder)}, ends in {left_s:.1f} s, token id {holder.token_id}"
    yield from _queue(report.waiting, report.waiters)


def _queue(waiting: int | None, waiters: Sequence[Participant]) -> Iterator[str]:
    yield f"waiting    {'?' if waiting is None else waiting}"
    for place, waiter in enumerate(waiters, 1):
        yield f"{place:>9}  {_described(waiter)}, for {seconds_text(waiter.waited_s, '?')}"


def _described(participant: Participant) -> str:
    """The process, whether it is there, and how it is connected."""
    process = participant.process
    known = "" if process is None else f", {process.program}, connected from {process.address}"
    return f"{holder_text(participant)} ({state_text(participant)}){known}"
