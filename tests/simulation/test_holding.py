"""Thousands of stories of holders with faults. Planted faults show that each invariant can fail."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

from redislock_fast._lease.lease import Lease
from redislock_fast._procedures import loss
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._protocol.commands import Acquire, Reacquire, ReadHolder
from redislock_fast._renewal.loop import LoopRenewer
from redislock_fast._renewal.off_loop import LoopWatch, OffLoopRenewer
from redislock_fast._renewal.schedule import Record, Schedule
from redislock_fast._util.errors import LossReason
from tests.simulation.faulty_models import GivesTheSameNumberAgain, SetsHalfTheTtl
from tests.simulation.holding import Simulation
from tests.simulation.model import Model
from tests.simulation.seeds import violation_of, violations
from tests.support.selection import in_two_runs

pytestmark = pytest.mark.timeout(600)  # seconds of a processor that a busy machine may not give in two minutes

_SEEDS_FOR_FAULTS = range(2000)


@in_two_runs(range(1_200), 300)
def test_no_story_breaks_an_invariant(seeds: range) -> None:
    assert next(violations(Simulation, seeds), None) is None


@pytest.mark.parametrize("seed", [4219])
def test_no_story_breaks_an_invariant_that_once_did(seed: int) -> None:
    assert violation_of(Simulation, seed) is None


@pytest.mark.parametrize(
    ("model", "kind", "violation"),
    [
        (GivesTheSameNumberAgain, "calm", "with fence"),
        (SetsHalfTheTtl, "calm", "left, and it ends"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_scripts(model: type[Model], kind: str, violation: str) -> None:
    assert any(
        re.search(violation, found) for found in violations(Simulation, _SEEDS_FOR_FAULTS, kind=kind, model=model)
    )


_real_add = Schedule.add


def _renew_without_looking(self: Reacquire, capabilities: Any, now: float) -> Any:
    """A renewal brings a lost lock back."""
    self.sent_at = self.sent_at or now
    self._native = True
    return (b"SET", self.key, self.token, b"PX", self.ttl_ms)


def _believe_the_renewal(self: Lease, expires_at: float, certainly: bool) -> None:
    """The renewal's lease counts, even if the holder has set another meanwhile."""
    self.expires_at = expires_at


@contextlib.contextmanager
def _believe_the_holder(self: Lease, local: Any, new_ttl_ms: int | None) -> Iterator[None]:
    """The holder's own lease counts, even if a renewal is under way."""
    self.busy += 1
    self.touched = True
    local.expiry = (self.token, self.expires_at)
    try:
        yield
    finally:
        self.expires_at = local.expires_at(self.token)
        self.busy -= 1


def _count_from_the_reply(attempt: Acquire) -> tuple[bytes, float]:
    """The lease counts from the moment at which the reply is read."""
    return attempt.token, vars(loss)["clock"]() + (attempt.ttl_ms or 0) / 1000


def _add_before_its_time(self: Schedule, record: Record, due_at: float, interval_s: float) -> bool:
    """A lease that is due is renewed too soon, again and again."""
    return _real_add(self, record, min(due_at, vars(loss)["clock"]()), interval_s)


def _never_undo(self: LoopRenewer, entries: Any) -> None:
    """A dropped lock stays."""


def _lose_in_silence(lease: Lease, reason: LossReason, losses: list[LeaseLoss]) -> None:
    """A loss is not reported."""
    lease.lose(reason)


def _lose_again(lease: Lease, reason: LossReason, losses: list[LeaseLoss]) -> None:
    """A loss is reported twice."""
    lease.lose(reason)
    losses += [LeaseLoss(lease, reason)] * 2


def _guess(look: ReadHolder) -> LossReason:
    """The reason is made up."""
    return LossReason.DELETED if look.result else LossReason.TAKEN


def _renew_at_the_end(self: Lease, now: float, chance: float) -> float:
    """Renewals come too late."""
    return self.deadline


def _trust_each_loop(self: LoopWatch, now: float) -> float:
    """The locks of a loop that hangs are renewed forever."""
    return 0.0


def _ask_first(self: LoopWatch, now: float) -> float:
    """A question is noted after it was asked: the loop may have answered by then."""
    if self._asked_at is None:
        self.call(self._answer)
        self._asked_at = now
    return now - self._asked_at


def _report_in_the_thread(self: OffLoopRenewer, losses: list[LeaseLoss]) -> None:
    """The thread calls what the loop is to call."""
    for lost in losses:
        lost.lease.record.side.report_losses([lost])


def _give_up(self: OffLoopRenewer, lease: Lease) -> bool:
    """A thread that can never connect does not give its leases to the loop."""
    return False


def _renew_for_ever(self: Lease, now: float) -> int | None:
    """`max_hold` is ignored."""
    return self.ttl_ms if self.options.auto_renew else None


@pytest.mark.parametrize(
    ("place", "name", "broken", "kind", "violation"),
    [
        (Reacquire, "request", _renew_without_looking, "faults", "the key does not say so|has done with it|and so is"),
        (Lease, "renewed", _believe_the_renewal, "rough", "left, and it ends|the key does not say so"),
        (Lease, "prolonged_by_hand", _believe_the_holder, "rough", "left, and it ends|the key does not say so"),
        (Lease, "due_at", _renew_at_the_end, "calm", "could be renewed"),
        (Lease, "renewal_ms", _renew_for_ever, "calm", "longer than it wants"),
        (Acquire, "expiry", property(_count_from_the_reply), "rough", "left, and it ends"),
        (Schedule, "add", _add_before_its_time, "calm", "forever"),
        (LoopRenewer, "_clean_up", _never_undo, "calm", "has done with it"),
        (loss, "lose", _lose_in_silence, "faults", "is not told|forever"),
        (loss, "lose", _lose_again, "faults", "reported twice"),
        (loss, "reason_of", _guess, "faults", "is told that it was lost"),
        (LoopWatch, "stalled_s", _trust_each_loop, "busy", "and still holds"),
        (LoopWatch, "stalled_s", _ask_first, "busy", "is told that it was lost: event loop stalled"),
        (OffLoopRenewer, "_report_losses", _report_in_the_thread, "busy", "outside of its loop"),
        (OffLoopRenewer, "_is_for_loop", _give_up, "calm", "has lost what could be renewed|is told that it was lost"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_machines(
    place: Any, name: str, broken: Any, kind: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, broken)
    found = violations(Simulation, _SEEDS_FOR_FAULTS, kind=kind)
    assert any(re.search(violation, one) for one in found)
