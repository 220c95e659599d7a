"""Candidates of elections, which run beside a test, and a watch over who leads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.waiting import FAR_S, Callers

__all__ = ["Candidate", "Told", "leaders_at_once"]

Told: TypeAlias = "tuple[str, int]"
"""What a candidate was told, and in which term."""

_LOOK_S = 0.001


@contextmanager
def leaders_at_once(first: Candidate, second: Candidate) -> Iterator[list[tuple[int, int]]]:
    """Look again and again, within the block, whether both lead at once. Yields the terms in which they did, in pairs.

    A pair is certain: the first one has led before the second one was seen to lead, and after that, in one term.
    """
    pairs: list[tuple[int, int]] = []
    finished = threading.Event()

    def look() -> None:
        while not finished.wait(_LOOK_S):
            terms = first.terms[-1:]
            if first.election.is_leader and second.election.is_leader and all(term.valid for term in terms):
                pairs.extend((term.number, second.terms[-1].number) for term in terms)

    looking = start(look)
    try:
        yield pairs
    finally:
        finished.set()
        looking.result(PATIENCE_S)


class Candidate:
    """An election object that runs beside the test, and what becomes of it.

    Attributes:
        election: the object.
        running: its `run`, once that was begun.
        terms: that have begun, in order.
        told: what `on_started` and `on_stopped` were called with, in order; that of several candidates may be one list.
        left_s: how long each term still lasted, at most, when it was told to stop.
    """

    def __init__(self, callers: Callers, client: Any, told: list[Told] | None = None, **settings: Any) -> None:
        self.told: list[Told] = [] if told is None else told
        self.terms: list[Any] = []
        self.left_s: list[float] = []
        self.running: Future[Any]
        self._callers = callers
        settings = {"timeout": FAR_S, "sleep": 0.05, **settings}
        self.election = callers.package.Election(
            client,
            "beat",
            on_started=lambda term: self.told.append(("started", term.number)),
            on_stopped=lambda term: self.told.append(("stopped", term.number)),
            **settings,
        )

    def run(self, lead: Callable[[Any], object] | None = None) -> Candidate:
        """Begin to campaign and to lead, until a term is to stop."""
        self.running = self._callers.begin(lambda: self.election.run(self._lead if lead is None else lead))
        return self

    def _lead(self, term: Any) -> object:
        assert term.valid
        term.ensure_held()
        self.terms.append(term)
        if self._callers.kind == "tasks":
            return self._lead_task(term)
        term.stopping.wait()
        self.left_s.append(term.remaining())
        return None

    async def _lead_task(self, term: Any) -> None:
        await term.stopping.wait()
        self.left_s.append(term.remaining())

    def until_leads(self, count: int = 1) -> None:
        """Return once it leads and has had so many terms."""
        wait_until(lambda: len(self.terms) == count and self.election.is_leader, "it leads")

    def until_ended(self, count: int = 1) -> None:
        """Return once so many of its terms have ended."""
        wait_until(lambda: len(self.told) >= 2 * count, "its term ends")

    def call(self, verb: str) -> Any:
        """Call a method in a thread or task."""
        return self._callers.run(getattr(self.election, verb))
