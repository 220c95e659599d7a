"""A breach of a rule, and how rules tell of one. No I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from tests.torture.history import Attempt, place_of

__all__ = ["Violation", "breach", "by_name"]


@dataclass(frozen=True)
class Violation:
    """A breach of a rule.

    Attributes:
        rule: which.
        since: from when on a fault would explain it.
        until: until when.
        text: what was wrong.
        name: the lock.
        processes: the processes that it happened to. A fault that concerns none of them does not explain it.
        by: the ways of acquiring that are concerned.
    """

    rule: str
    since: int
    until: int
    text: str
    name: str = ""
    processes: frozenset[str] = frozenset()
    by: frozenset[str] = field(default=frozenset(), compare=False)


def breach(rule: str, since: int, until: int, text: str, *attempts: Attempt) -> Violation:
    processes = frozenset(place_of(attempt.process) for attempt in attempts)
    return Violation(rule, since, until, text, attempts[0].name, processes, frozenset(one.by for one in attempts))


def by_name(attempts: Iterable[Attempt]) -> Iterator[list[Attempt]]:
    """The attempts at each lock, in the order in which they were called."""
    names: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=attrgetter("asked")):
        names[attempt.name].append(attempt)
    yield from names.values()
