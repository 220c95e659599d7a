"""The candidates and observers of the simulation of elections: they use `asyncio.Election` itself."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError

from redislock_fast.asyncio.election import Election, Term
from tests.simulation.holders import token_of
from tests.simulation.process import Trouble
from tests.simulation.waiters import KEY

if TYPE_CHECKING:
    from tests.simulation.elections import Simulation
    from tests.simulation.holding import Site

_WAYS = ("waits", "waits", "waits", "returns", "fails", "goes on", "goes on")


class WorkFailed(Exception):
    """The error of a leader's work."""


class Stand:
    """One term, as its candidate and the simulation know it.

    Attributes:
        token: of its lock.
        granted_us: when the server gave that, by the server's clock.
        works: whether its work goes on.
        is_undisturbed: whether its process has not been stopped, cut off or put ahead in time meanwhile.
        begins_late: whether much of its lease had passed when it started.
    """

    def __init__(self, candidate: Candidate, term: Term, granted_us: int) -> None:
        self.candidate = candidate
        self.term = term
        self.number = term.number
        self.token = token_of(term._lock)
        self.who = f"{candidate.name}, term {term.number},"
        self.granted_us = granted_us
        self.works = True
        self.is_undisturbed = True
        self.begins_late = False


class Candidate:
    """Campaigns and leads, again and again, until it is stopped.

    Attributes:
        election: its object.
        stand: the term for which `on_started` was called, and `on_stopped` was not.
        looks_anew: how often it has begun to look for leaders.
    """

    def __init__(self, simulation: Simulation, site: Site, number: int) -> None:
        self.simulation = simulation
        self.site = site
        self.process = site.process
        self.name = f"{site.process.name} candidate {number}"
        self.stand: Stand | None = None
        self.is_stopped = False
        self._by_block = simulation.rng.random() < 0.2
        self.last_seen = 0
        self.looks_anew = 0
        client: Any = site.transport
        watches = simulation.rng.random() < 0.3
        self.election: Election = site.loop.run(
            lambda: Election(
                client,
                KEY,
                simulation.ttl_ms / 1000,
                self.name,
                sleep=simulation.interval_s,
                on_started=self._start,
                on_stopped=self._stop,
                on_new_leader=self._note_leader if watches else None,
            )
        )
        self.task = site.loop.create_task(self._live())

    # ---- what happens to it ----

    def resign(self) -> None:
        """Resign, if it leads."""
        if not self.process.dead:
            self.simulation.world.tell(self.name, "is to resign")
            self.site.loop.run(self.election.resign)

    def stop(self) -> None:
        """Campaign no more."""
        self.is_stopped = True
        self.site.loop.run(self.election.stop)

    def cancel(self) -> None:
        """Cancel what it does now."""
        self.simulation.world.tell(self.name, "is cancelled")
        if self.stand is not None:
            self.stand.is_undisturbed = False
        self.site.loop.run(self.task.cancel)

    # ---- what it does ----

    async def _live(self) -> None:
        simulation, rng = self.simulation, self.simulation.rng
        while not self.is_stopped:
            try:
                await asyncio.sleep(0.01 * rng.random())
                self.last_seen = 0
                if self._by_block:
                    async with self.election.term() as term:
                        await self._lead(term)
                else:
                    self.looks_anew += self.election._on_new_leader is not None
                    await self.election.run(self._lead)
            except (Trouble, LockError, WorkFailed, asyncio.CancelledError) as error:
                simulation.world.tell(self.name, "goes on after", type(error).__name__, str(error))

    async def _lead(self, term: Term) -> None:
        simulation, rng = self.simulation, self.simulation.rng
        ttl_s = simulation.ttl_ms / 1000
        way = rng.choice(_WAYS)
        simulation.world.tell(self.name, "works; it", way)
        if way == "waits":
            await term.stopping.wait()
            await asyncio.sleep(ttl_s / 10 * rng.random())
        elif way == "goes on":
            await asyncio.sleep(ttl_s * (0.5 + 1.5 * rng.random()))
        else:
            await asyncio.sleep(3 * ttl_s * rng.random() ** 2)
            if way == "fails":
                raise WorkFailed

    # ---- what it is told ----

    def _start(self, term: Term) -> None:
        if self.stand is not None:
            self.simulation.fail(f"{self.stand.who} has not stopped, and {self.name} starts another term")
        self.stand = self.simulation.begin(self, term)

    def _stop(self, term: Term) -> None:
        stand, self.stand = self.stand, None
        if stand is None or stand.term is not term:
            self.simulation.fail(f"{self.name} is stopped in a term that it has not started")
            return
        stand.works = False
        self.simulation.end(stand)

    def _note_leader(self, leader: Any) -> None:
        if leader.term <= self.last_seen:
            self.simulation.fail(f"{self.name} is told of term {leader.term} after {self.last_seen}")
        self.last_seen = leader.term


class Observer:
    """Observes the leaders.

    Attributes:
        last: the last term that it has seen.
        looks_anew: as of a `Candidate`.
    """

    looks_anew = 1

    def __init__(self, simulation: Simulation, site: Site) -> None:
        self.simulation = simulation
        self.process = site.process
        self.site = site
        self.name = f"{site.process.name} observer"
        self.last = 0
        client: Any = site.transport
        new = partial(Election, client, KEY, simulation.ttl_ms / 1000, sleep=simulation.interval_s)
        self.election: Election = site.loop.run(new)
        self.task = site.loop.create_task(self._observe())

    async def _observe(self) -> None:
        async for leader in self.election.observe():
            self.simulation.world.tell(self.name, "sees", leader.value, "in term", leader.term)
            if leader.term <= self.last:
                self.simulation.fail(f"{self.name} sees term {leader.term} after {self.last}")
            self.last = leader.term

    def stop(self) -> None:
        """Observe no more."""
        self.site.loop.run(self.election.stop)
