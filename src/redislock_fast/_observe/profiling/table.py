"""A profile as plain text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table_of(report: dict[str, Any], top: int) -> str:
    """The text of a profile, which `Recorder.as_dict` has returned, with so many rows in each part at most."""
    locks = report["locks"]
    counts = [sum(lock[kind] for lock in locks) for kind in ("acquisitions", "failures", "losses")]
    parts = [
        "redislock_fast profile of process {}, {:.1f} s: {} locks, {} acquisitions, {} failures, {} losses".format(
            report["pid"], report["seconds"], len(locks), *counts
        )
    ]
    if locks:
        parts += [_by_time_waited(locks[:top]), _by_time_held(locks, top), _by_site(locks, top)]
    parts += [_deadlock(cycle) for cycle in report["deadlocks"][:top]]
    return "\n\n".join(parts)


def _by_time_waited(locks: list[dict[str, Any]]) -> str:
    header = ("waited s", "p99 s", "max s", "acquired", "failed", "lost", "lock, by time waited")
    times = ("waited_s", "waited_p99_s", "waited_max_s")
    counts = ("acquisitions", "failures", "losses")
    return _columns(
        header,
        [(*_seconds(lock, *times), *(str(lock[kind]) for kind in counts), _shown(lock["name"])) for lock in locks],
    )


def _by_time_held(locks: list[dict[str, Any]], top: int) -> str:
    longest = sorted(locks, key=lambda lock: -lock["held_s"])[:top]
    rows = [
        (*_seconds(lock, "held_s", "held_max_s"), str(lock["acquisitions"]), _shown(lock["name"])) for lock in longest
    ]
    return _columns(("held s", "max s", "acquired", "lock, by time held"), rows)


def _by_site(locks: list[dict[str, Any]], top: int) -> str:
    sites = [(lock["name"], site) for lock in locks for site in lock["sites"]]
    sites.sort(key=lambda item: (-item[1]["blocked_s"], -item[1]["held_s"]))
    rows = [
        (*_seconds(site, "blocked_s", "held_s"), str(site["acquisitions"]), f"{_shown(name)}, {_short(site['site'])}")
        for name, site in sites[:top]
    ]
    return _columns(("blocked s", "held s", "acquired", "holder, by time for which others waited meanwhile"), rows)


def _deadlock(cycle: list[dict[str, Any]]) -> str:
    names = [order["held"] for order in cycle]
    lines = ["could deadlock: " + " -> ".join(map(_shown, [*names, names[0]]))]
    for order in cycle:
        held, acquired = (f"{_shown(order[end])} ({_short(order[end + '_site'])})" for end in ("held", "acquired"))
        lines.append(f"    {held}, then {acquired}: {order['count']}x")
    return "\n".join(lines)


def _columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows in columns, all to the right but the last."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines
    )


def _seconds(values: dict[str, Any], *names: str) -> list[str]:
    return [f"{values[name]:.3f}" for name in names]


def _shown(name: str) -> str:
    """A name that cannot move the terminal's cursor."""
    return name if name.isprintable() else repr(name)


def _short(site: str) -> str:
    """A call site, by its path from the working directory where it is inside of that."""
    return site.removeprefix(f"{Path.cwd()}{os.sep}")
