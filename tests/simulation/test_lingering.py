"""Hundreds of stories of locks with `linger`. Planted faults show that each invariant can fail."""

from __future__ import annotations

import re
from typing import Any

import pytest

from redislock_fast._linger.key_cache import CachedKey, KeyCache, KeyLease, LocalWaiter
from redislock_fast._linger.loop import LoopLingering
from redislock_fast._protocol.queue import WANTED
from tests.simulation.lingering import Simulation
from tests.simulation.model import Model
from tests.simulation.seeds import violations
from tests.support.selection import in_two_runs

pytestmark = pytest.mark.timeout(600)  # seconds of a processor that a busy machine may not give in two minutes

_SEEDS_FOR_FAULTS = range(3000)
_RARE = {"drop_all": 290, "free": 1_530}
"""Methods whose fault few stories find: the first seed to try."""


@in_two_runs(range(500), 100)
def test_no_story_breaks_an_invariant(seeds: range) -> None:
    assert next(violations(Simulation, seeds), None) is None


class _TellsNoHolder(Model):
    """A waiter does not say that it wants the lock."""

    def _publish(self, command: bytes, channel: bytes, message: bytes) -> None:
        if not message.startswith(WANTED):
            super()._publish(command, channel, message)


def _take_for_ever(self: KeyLease, ttl_ms: int) -> float:
    """A key may be taken in memory until it expires."""
    return self.expires_at


def _believe_the_reply(self: KeyLease, expires_at: float) -> None:
    """A confirmed key lives from the reply on."""
    self.expires_at = self.deadline = expires_at + 1.0
    self.take_until = self.deadline - self._lead_s


def _unlock_the_last(self: CachedKey) -> None:
    """The last waiter comes first."""
    self.waiters.reverse()
    _real_unlock(self)
    self.waiters.reverse()


def _free_without_a_look(self: CachedKey) -> None:
    """A caller that frees the local lock does not look whether the key is wanted."""
    self.unlock()


def _pass_on_for_ever(self: CachedKey, now: float) -> bool:
    """A wanted key goes to each local waiter first."""
    return self.lease is not None


def _hear_nothing(self: KeyCache, key: bytes) -> None:
    """No "wanted" counts."""


def _keep_all(self: KeyCache, except_of: Any = None) -> None:
    """The keys of a lost connection are kept."""


def _remember_all(self: Any) -> None:
    """A forked child has its parent's keys."""


def _leave_without_a_word(self: LocalWaiter) -> bool:
    """A waiter that gives up leaves the local lock behind that it has got."""
    _real_give_up(self)
    return True


def _give_up_nothing(self: LoopLingering, leases: list[KeyLease], is_wanted: bool) -> None:
    """A key that lingered is never released."""


def _sweep_held_keys(self: KeyCache, now: float) -> bool:
    """The sweep gives up a key that is held."""
    for cached in list(self._keys.values()):
        if cached.lease is not None and cached.idle_until <= now:
            cached.drop()
    return _real_sweep(self, now)


def _forget_unconfirmed(self: LoopLingering, leases: list[KeyLease]) -> None:
    """A posted release without a reply is not cleaned up."""


_real_unlock, _real_give_up, _real_sweep = CachedKey.unlock, LocalWaiter.give_up, KeyCache.sweep


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "method", "broken", "kind", "violation"),
    [
        (KeyLease, "take_until_for", _take_for_ever, "calm", "believes|not say so|less than"),
        (KeyLease, "set_end", _believe_the_reply, "rough", "believes|not say so"),
        (CachedKey, "unlock", _unlock_the_last, "calm", "another waiter than the first"),
        (CachedKey, "free", _free_without_a_look, "rough", "keeps a|wanted"),
        (CachedKey, "_may_pass", _pass_on_for_ever, "rough", "passes a wanted key|keeps a wanted key"),
        (KeyCache, "take_wanted", _hear_nothing, "calm", "too long|keeps a wanted key"),
        (KeyCache, "drop_all", _keep_all, "rough", "cannot hear"),
        (LoopLingering, "forget", _remember_all, "rough", "holds, and so does|not say so|left"),
        (LocalWaiter, "give_up", _leave_without_a_word, "rough", "wait"),
        (LoopLingering, "_give_back", _give_up_nothing, "calm", "left"),
        (KeyCache, "sweep", _sweep_held_keys, "calm", "not say so|did not hold"),
        (LoopLingering, "_clean_up_unconfirmed", _forget_unconfirmed, "rough", "left|watches forever"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_keys(
    machine: Any, method: str, broken: Any, kind: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, method, broken)
    found = violations(Simulation, _SEEDS_FOR_FAULTS[_RARE.get(method, 0) :], kind=kind)
    assert any(re.search(violation, one.splitlines()[0]) for one in found)


def test_the_simulation_finds_a_waiter_that_does_not_say_that_it_wants_the_lock() -> None:
    found = violations(Simulation, _SEEDS_FOR_FAULTS, kind="calm", model=_TellsNoHolder)
    assert any("too long for a key that only lingers" in one for one in found)
