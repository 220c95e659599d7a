"""The output of the commands: tables, words for the state of a lock, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from redislock_fast._protocol.report import Participant

__all__ = ["holder_text", "permits_text", "print_json", "seconds_text", "state_text", "table", "text_of"]


def print_json(value: Any) -> None:
    """Print one object in one line, at once: a reader may wait for it."""
    print(json.dumps(value), flush=True)


def text_of(name: bytes) -> str:
    """A lock's name in characters that a terminal prints; others are escaped as in Python."""
    text = name.decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def holder_text(participant: Participant) -> str:
    """Which process it is, as far as that is known."""
    process = participant.process
    if process is not None:
        return f"{process.host}:{process.pid}"
    return participant.identifier or participant.kind


def permits_text(held: int | None, limit: int | None) -> str:
    """How many permits of a semaphore are held, and of how many, where that is known."""
    return f"{'?' if held is None else held}{'' if limit is None else f' of {limit}'} permits"


def state_text(participant: Participant | None) -> str:
    """Whether its process is there; empty for several."""
    if participant is None:
        return ""
    return {True: "alive", False: "stale", None: "?"}[participant.alive]


def seconds_text(seconds: float | None, without: str) -> str:
    """A time; `without` where there is none."""
    return without if seconds is None else f"{seconds:.1f} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their headings, in columns."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
