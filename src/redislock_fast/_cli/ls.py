"""`redislock ls`: the locks and the semaphores that are held."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redislock_fast._cli.connecting import add_query, client_of, servers_of
from redislock_fast._cli.exits import Exit, say
from redislock_fast._cli.printing import holder_text, permits_text, print_json, seconds_text, state_text, table, text_of
from redislock_fast._cli.scanning import Row, Scan, add_budget

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    add_budget(add_query(commands, "ls", "list the locks and the semaphores that are held", _list))


def _list(arguments: argparse.Namespace) -> int:
    scan = Scan(servers_of(client_of(arguments)), arguments.pattern)
    rows = _distinct(scan, arguments.budget)
    if arguments.json:
        for row in rows:
            print_json({**asdict(row), "name": text_of(row.name)})
    else:
        _print(sorted(rows, key=lambda row: row.name), scan)
    if not scan.is_complete:
        say(f"stopped after {arguments.budget} keys: --budget allows more, PATTERN needs fewer")
    scan.warn()
    return Exit.OK


def _distinct(scan: Scan, budget: int) -> Iterator[Row]:
    seen: set[bytes] = set()
    for _, rows in scan.rows(budget):
        for row in rows:
            if row.name not in seen:
                seen.add(row.name)
                yield row


def _print(rows: list[Row], scan: Scan) -> None:
    if rows:
        print(table(("NAME", "HOLDER", "STATE", "TTL", "WAITING", "TOKEN ID"), [_words(row) for row in rows]))
    elif scan.is_complete:
        say("no locks")


def _words(row: Row) -> tuple[str, ...]:
    return (
        text_of(row.name),
        permits_text(row.held, row.limit) if row.holder is None else holder_text(row.holder),
        state_text(row.holder),
        seconds_text(row.ttl_s, "no end"),
        "?" if row.waiting is None else str(row.waiting),
        (row.holder and row.holder.token_id) or "",
    )
