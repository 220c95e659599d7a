"""Stories of an election with faults. Planted faults show that each invariant can fail."""

from __future__ import annotations

import re
from typing import Any

import pytest

from redislock_fast._election.loop import Body
from redislock_fast._election.observing import Observing
from redislock_fast._pipe.base import Reply
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.leading import Leader
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast.asyncio.election import Term
from tests.simulation.elections import Simulation
from tests.simulation.faulty_models import GivesTheSameNumberAgain, SetsHalfTheTtl
from tests.simulation.model import Model
from tests.simulation.seeds import violation_of, violations
from tests.support.selection import in_two_runs

pytestmark = pytest.mark.timeout(600)  # seconds of a processor that a busy machine may not give in two minutes

_SEEDS_FOR_FAULTS = range(300)
_RARE = {"_end_in_danger": 13, "end": 13}
"""Methods whose fault few stories find: the first seed to try."""


@in_two_runs(range(120), 20)
def test_no_story_breaks_an_invariant(seeds: range) -> None:
    assert next(violations(Simulation, seeds), None) is None


@pytest.mark.parametrize("seed", [3175, 5280])
def test_no_story_breaks_an_invariant_that_once_did(seed: int) -> None:
    assert violation_of(Simulation, seed) is None


# ---- faults of the server ----


class _TellsNoObserver(Model):
    """A new leader is noted, and nobody is told."""

    def _lead(self, value: bytes | None, leader: Any, *words: Any) -> Reply:
        listeners = self._tracked.pop(leader, [])
        reply = super()._lead(value, leader, *words)
        self._tracked[leader] = listeners
        return reply


class _HandsOverToNobody(Model):
    """A release tells no waiter."""

    def _pass_on(self, policy: Any, queue: Any, waiters: Any, token: Any) -> Reply:
        return policy.remove(token) if policy.held(token) else 0


@pytest.mark.parametrize(
    ("model", "kind", "violation"),
    [
        (GivesTheSameNumberAgain, "calm", "has the number"),
        (SetsHalfTheTtl, "calm", "left, and it ends|the key does not say so"),
        (_TellsNoObserver, "calm", "does not see term"),
        (_HandsOverToNobody, "calm", "is first in line"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_server(model: type[Model], kind: str, violation: str) -> None:
    found = violations(Simulation, _SEEDS_FOR_FAULTS, kind=kind, model=model)
    assert any(re.search(violation, one.splitlines()[0]) for one in found)


# ---- faults of elections ----

_real_leave = Term._leave


def _renew_without_looking(self: Reacquire, capabilities: Any, now: float) -> Any:
    """A renewal brings a lost lock back."""
    self.sent_at = self.sent_at or now
    self._native = True
    return (b"SET", self.key, self.token, b"PX", self.ttl_ms)


def _ignore_danger(self: Term, lock: Any) -> None:
    """The leader is not told that its lease is in danger."""


def _end_nothing(self: Body) -> None:
    """A body that does not stop goes on."""


def _let_go_first(self: Term) -> None:
    """A leader that is to resign gives the lock back while its work goes on."""
    self.stopping.set()
    token = self._lock._held().token
    self._lock._transport.clean_up([(self._lock._key, token)])


async def _leave_in_silence(self: Term, error: BaseException | None) -> None:
    """`on_stopped` is not called."""
    self._has_started = False
    await _real_leave(self, error)


async def _keep(self: Term, error: BaseException | None) -> None:
    """The lock of a term that has ended is kept."""


def _see_all(self: Observing, seen: Leader | None) -> Steps:
    """An observer takes each leader for a new one."""
    yield from ()
    return seen


def _listen_to_nothing(self: Observing, waiter: Any) -> Steps:
    """An observer looks again and again, whatever it is told."""
    yield Do("sleep", 0.1)


@pytest.mark.parametrize(
    ("place", "name", "broken", "kind", "violation"),
    [
        (Reacquire, "request", _renew_without_looking, "rough", "leads, and so does|the key does not say so"),
        (Term, "_end_in_danger", _ignore_danger, "faults", "is not told to stop"),
        (Body, "end", _end_nothing, "faults", "its work goes on|and the work of"),
        (Term, "resign", _let_go_first, "calm", "and the work of|the key does not say so"),
        (Term, "_leave", _leave_in_silence, "calm", "has not stopped, and"),
        (Term, "_let_go", _keep, "calm", "nobody leads|the lock is left"),
        (Observing, "_if_new", _see_all, "calm", "sees term"),
        (Observing, "_listen", _listen_to_nothing, "calm", "would have done"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_elections(
    place: Any, name: str, broken: Any, kind: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, broken)
    found = violations(Simulation, _SEEDS_FOR_FAULTS[_RARE.get(name, 0) :], kind=kind)
    assert any(re.search(violation, one.splitlines()[0]) for one in found)
