"""The record of a history: what each caller asked of its locks, what it was told, and which faults were made when.

Each process appends events to a file of its own, one JSON object a line, so that a process that is killed loses none.
`read` puts the events of all files together. Times are nanoseconds of one clock, which all processes of the machine
share.

Outcomes are noted as Jepsen does: "ok", "fail" (certainly not), "info" (not known). An acquire that was not answered is
"info", and only "ok" is a hold.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.support.times import clock

__all__ = ["SECOND", "Attempt", "Fault", "History", "Log", "Span", "Stall", "Write", "limit_of", "place_of", "read"]

SECOND = 1_000_000_000

FAIL = "fail"
INFO = "info"
OK = "ok"
NOT_OWNED = "not owned"


def now_ns() -> int:
    """The time by the clock of leases, in nanoseconds."""
    return int(clock() * SECOND)


def place_of(process: str) -> str:
    """The name of the first process in the place of this one: the successors of p1 are p1.1 and so on."""
    return process.partition(".")[0]


def limit_of(name: str) -> int:
    """How many may hold: of a semaphore, the number at the end of its name; one of a lock."""
    group, _, number = name.partition(":")
    return int(number) if group == "permits" else 1


class Log:
    """Writes the events of one process to a file. Any thread may note one.

    Args:
        folder: of the history.
        process: the process's name.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.process = process
        self._file = os.open(folder / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, at: int | None = None, **fields: Any) -> int:
        """Append an event. Returns its time: now, where none is given."""
        at = now_ns() if at is None else at
        line = json.dumps({"what": what, "at": at, "process": self.process, **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")
        return at

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass
class Attempt:
    """An acquire of one lock, and all that followed from it.

    Attributes:
        id: its name in the history.
        process: which process made it.
        name: of the lock.
        by: the way of acquiring, such as "push", "linger", "batch" or "redis-py".
        asked: when the acquire was called.
        waits: whether it waits for the lock.
        limit_s: its `blocking_timeout` in seconds, where the acquire promises to keep it.
        label: names the token that the caller brought; empty for a token of the library's.
        is_watched: whether a loss must be told.
        answered: when the acquire returned or raised; None: never.
        outcome: of the acquire.
        reason: the error's class, or why the outcome is not known.
        fence: its fencing number.
        until: until when the lock was certainly held, as far as the holder was ever told.
        invalid: when the holder first saw that it does not hold the lock any more.
        lost: when the holder was told of a loss.
        releasing: when the release was called.
        released: when that returned or raised.
        release: its outcome, or "not owned".
    """

    id: str
    process: str
    name: str
    asked: int
    by: str = "push"
    waits: bool = True
    limit_s: float | None = None
    label: str = ""
    is_watched: bool = False
    answered: int | None = None
    outcome: str = INFO
    reason: str = ""
    fence: int | None = None
    until: int = 0
    invalid: int | None = None
    lost: int | None = None
    releasing: int | None = None
    released: int | None = None
    release: str = ""

    @property
    def is_held(self) -> bool:
        """Whether the lock was certainly acquired."""
        return self.outcome == OK

    @property
    def ends(self) -> int:
        """Until when its holder might rely on it."""
        ends = [at for at in (self.until, self.releasing, self.lost) if at is not None]
        return min(ends)


@dataclass(frozen=True)
class Fault:
    """Something that was done to servers, processes or links.

    Attributes:
        kind: its class, as in the checker's table.
        since: when it began.
        until: when it was over.
        names: the locks that it concerns; empty: all.
        processes: the processes that it concerns, and the successors of those; empty: all.
        delay_s: by how much it delays each round trip, in seconds.
    """

    kind: str
    since: int
    until: int
    names: frozenset[str] = frozenset()
    processes: frozenset[str] = frozenset()
    delay_s: float = 0.0


@dataclass(frozen=True)
class Span:
    """A time in which an observer saw a lock's key absent, or with the same token, again and again."""

    name: str
    since: int
    until: int


@dataclass(frozen=True)
class Stall:
    """A time in which a thread that only ticks had no turn: the machine's, or one of a process."""

    since: int
    until: int
    process: str = ""


@dataclass(frozen=True)
class Write:
    """A holder's update of what a fenced lock protects: it read a number and wrote the next one."""

    name: str
    process: str
    at: int
    fence: int
    read: int
    is_accepted: bool


@dataclass
class History:
    """What `read` found.

    Attributes:
        settings: seed, topology and kind of server, and how long it lasted.
        left: what was still there when all had released, or a client was closed: (rule, time, text).
        free: when keys were absent.
        kept: when they had the same token.
        errors: what should not have happened in a process: (process, time, text).
        ended: the processes that came to their end.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    free: list[Span] = field(default_factory=list)
    kept: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    left: list[tuple[str, int, str]] = field(default_factory=list)
    errors: list[tuple[str, int, str]] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def stalled(self, since: int, until: int, *processes: str) -> int:
        """How long the machine and these processes stood still in this time, in nanoseconds."""
        found = [self._stalls_of[process] for process in ("", *processes) if process in self._stalls_of]
        return sum(stalls.before(until) - stalls.before(since) for stalls in found) if since < until else 0

    @cached_property
    def _stalls_of(self) -> dict[str, _Stalls]:
        of: defaultdict[str, list[Stall]] = defaultdict(list)
        for stall in self.stalls:
            of[stall.process].append(stall)
        return {process: _Stalls(stalls) for process, stalls in of.items()}


class _Stalls:
    """Tells how much of some stalls lies before a time, by sums that are made once."""

    def __init__(self, stalls: list[Stall]) -> None:
        self._since = sorted(stall.since for stall in stalls)
        self._until = sorted(stall.until for stall in stalls)
        self._sums = [list(accumulate(times, initial=0)) for times in (self._since, self._until)]

    def before(self, at: int) -> int:
        """The stalled time before this one: what went by since the beginnings, less what went by since the ends."""
        begun, ended = bisect_left(self._since, at), bisect_left(self._until, at)
        return (begun * at - self._sums[0][begun]) - (ended * at - self._sums[1][ended])


_ASKED = ("process", "name", "by", "waits", "limit_s", "label", "is_watched")


class _Reader:
    """Puts events together. Those of one attempt may stand in the files of two processes."""

    def __init__(self) -> None:
        self.history = History()
        self._attempts: dict[str, Attempt] = {}

    def read(self, events: list[dict[str, Any]]) -> History:
        """The history of all events."""
        for event in sorted(events, key=lambda event: int(event["at"])):
            if event["what"] in ("answered", "seen", "lost", "releasing", "released"):
                self._follow(self._attempts[event["id"]], event)
            else:
                self._add(event)
        self.history.attempts = list(self._attempts.values())
        return self.history

    def _add(self, event: dict[str, Any]) -> None:
        what, at, history = event["what"], event["at"], self.history
        if what == "asked":
            given = {name: event[name] for name in _ASKED if name in event}
            self._attempts[event["id"]] = Attempt(event["id"], asked=at, **given)
        elif what == "fault":
            names = frozenset(event.get("names", ()))
            processes = frozenset(map(place_of, event.get("processes", ())))
            history.faults.append(Fault(event["kind"], at, event["until"], names, processes, event.get("delay_s", 0.0)))
        elif what == "free":
            history.free.append(Span(event["name"], at, event["until"]))
        elif what == "kept":
            history.kept.append(Span(event["name"], at, event["until"]))
        elif what == "stall":
            history.stalls.append(Stall(at, event["until"], event.get("of", "")))
        elif what == "write":
            values = (event["fence"], event["read"], event["accepted"])
            history.writes.append(Write(event["name"], event["process"], at, *values))
        elif what == "left":
            history.left.append((event.get("rule", "left"), at, event["text"]))
        elif what == "error":
            history.errors.append((event["process"], at, event["text"]))
        elif what == "ended":
            history.ended.add(event["process"])
        elif what == "settings":
            history.settings = {name: value for name, value in event.items() if name not in ("what", "at", "process")}

    @staticmethod
    def _follow(attempt: Attempt, event: dict[str, Any]) -> None:
        what, at = event["what"], event["at"]
        attempt.until = max(attempt.until, event.get("until", 0))
        if what == "answered":
            attempt.answered, attempt.outcome, attempt.reason = at, event["outcome"], event.get("reason", "")
            attempt.fence = event.get("fence")
        elif what == "seen" and event["until"] == 0 and attempt.invalid is None:
            attempt.invalid = at
        elif what == "lost":
            attempt.lost = at
            if attempt.released is None:  # the loss of a lock that was dropped is told afterwards
                attempt.reason = event["reason"]
        elif what == "releasing":
            attempt.releasing = at
        elif what == "released":
            attempt.released, attempt.release = at, event["outcome"]
            attempt.reason = event.get("reason", attempt.reason)


def read(folder: Path) -> History:
    """Read the files of a history. A process that was killed may have left half a line, which does not count."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        whole, _, _ = path.read_text().rpartition("\n")
        events += [json.loads(line) for line in whole.splitlines()]
    return _Reader().read(events)
