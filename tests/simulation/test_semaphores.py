"""Thousands of stories of a semaphore with faults. Planted faults show that each invariant can fail."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from redislock_fast._pipe.base import Reply
from tests.simulation import model
from tests.simulation.model import Model
from tests.simulation.policies import PermitPolicy
from tests.simulation.seeds import violation_of, violations
from tests.simulation.semaphores import Simulation
from tests.support.selection import in_two_runs

pytestmark = pytest.mark.timeout(600)  # seconds of a processor that a busy machine may not give in two minutes

_SEEDS_FOR_FAULTS = range(15_000)


@in_two_runs(range(2_500), 200)
def test_no_story_breaks_an_invariant(seeds: range) -> None:
    assert next(violations(Simulation, seeds), None) is None


@in_two_runs(range(700), 100)
def test_no_story_breaks_an_invariant_where_each_script_passes_over_one_waiter(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_MOST_PASSES", 1)
    assert next(violations(Simulation, seeds), None) is None


def test_waiter_with_a_higher_limit_gets_what_the_waiter_that_asks_may_not_have() -> None:
    assert violation_of(Simulation, 4020) is None


def test_waiter_is_told_of_a_permit_whose_message_was_lost() -> None:
    assert violation_of(Simulation, 520, kind="rough") is None


# ---- faults of the scripts ----


class _HandsOverToTheDead(Model):
    """A hand-over does not check that a listener gets the message."""

    def _is_heard(self, publish: bytes, channel: bytes) -> bool:
        return True


class _ReleasesWithoutHandOver(Model):
    """A release tells no waiter."""

    def _release_permit(self, policy: PermitPolicy, queue: Any, waiters: Any, token: Any) -> Reply:
        return policy.remove(token)


class _Overtakes(Model):
    """An attempt takes what is free whoever waits for it."""

    def _acquire_permit(
        self, policy: PermitPolicy, queue: Any, waiters: Any, token: Any, ttl_ms: Any, own: Any
    ) -> Reply:
        if policy.count_room(policy.limit_for(own)) <= 0:
            return 0
        policy.set_end(token, ttl_ms)
        return 1


class _RecreatesByRenewal(Model):
    """A renewal does not look whether the permit has ended."""

    def _renew_permit(self, policy: PermitPolicy, _queue: Any, _waiters: Any, token: Any, ttl_ms: Any) -> Reply:
        policy.set_end(token, ttl_ms)
        return 1


class _PurgesByTheCallersTtl(Model):
    """A permit counts as ended after the ttl of the caller that looks."""

    def _acquire_permit(
        self, policy: PermitPolicy, queue: Any, waiters: Any, token: Any, ttl_ms: Any, own: Any
    ) -> Reply:
        ends_at_ms = self.now_ms + ttl_ms
        for other, other_ends_at_ms in list(policy.permits.items()):
            if other_ends_at_ms > ends_at_ms:
                policy.remove(other)
        return super()._acquire_permit(policy, queue, waiters, token, ttl_ms, own)


class _AsksByItsOwnLimit(Model):
    """A health check looks for what its waiter may have, not the first."""

    def _pass_over_sleepers(self, queue: bytes, waiters: bytes, token: bytes) -> None:
        super()._pass_over_sleepers(queue, waiters, token)


class _SaysThatItWaits(Model):
    """A health check is told that the first waiter waits, though it has a permit."""

    def _wait(self, policy: Any, queue: Any, waiters: Any, token: Any, *words: Any) -> Reply:
        reply = super()._wait(policy, queue, waiters, token, *words)
        return [*reply[:4], min(reply[4], 1)] if isinstance(reply, list) and len(reply) == 5 else reply  # type: ignore[type-var]


_RARE: dict[type[Model], int] = {_AsksByItsOwnLimit: 4_000, _SaysThatItWaits: 500}
"""Models whose fault few stories find: the first seed to try."""


# ---- faults of the policy ----

_real_count_room, _real_set_end = PermitPolicy.count_room, PermitPolicy.set_end


def _count_one_more(self: PermitPolicy, most: int) -> int:
    """There is room for one more than may hold."""
    return _real_count_room(self, most) + 1


def _shorten(self: PermitPolicy, token: bytes, ttl_ms: int) -> None:
    """The key ends with the permit that was granted last."""
    _real_set_end(self, token, ttl_ms)
    self.server._write(self.key, replace(self.server.entries[self.key], ends_at_ms=self.server.now_ms + ttl_ms))


def _see_no_operator(self: PermitPolicy, own: int) -> int:
    """The operator's limit does not count."""
    return own


def _end_early(self: PermitPolicy, token: bytes) -> bytes | None:
    """A permit ends at the beginning of its last millisecond."""
    return token + b"+" if self.permits.get(token, 0) > self.server.now_ms else None


def _know_no_end(self: PermitPolicy) -> int:
    """A waiter does not know when a permit ends."""
    return -1


@pytest.mark.parametrize(
    ("faulty", "kind", "violation"),
    [
        (_HandsOverToTheDead, "rough", "whose connection is gone"),
        (_ReleasesWithoutHandOver, "calm", "is free, and a waiter is in the queue"),
        (_Overtakes, "calm", "overtook"),
        (_RecreatesByRenewal, "rough", "a permit was granted by"),
        (_PurgesByTheCallersTtl, "calm", "the server does not say so"),
        (_AsksByItsOwnLimit, "", "for what is free"),
        (_SaysThatItWaits, "rough", "was not told"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_scripts(faulty: type[Model], kind: str, violation: str) -> None:
    seeds = _SEEDS_FOR_FAULTS[_RARE.get(faulty, 0) :]
    assert any(re.search(violation, found) for found in violations(Simulation, seeds, kind=kind, model=faulty))


@pytest.mark.parametrize(
    ("method", "broken", "violation"),
    [
        ("count_room", _count_one_more, r"\d hold, and \d may"),
        ("set_end", _shorten, "the server does not say so|ends before a permit"),
        ("limit_for", _see_no_operator, r"\d hold, and \d may"),
        ("held", _end_early, "the server does not say so"),
        ("next_end_ms", _know_no_end, "after another had ended"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_policy(
    method: str, broken: Any, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PermitPolicy, method, broken)
    found = violations(Simulation, _SEEDS_FOR_FAULTS, kind="calm")
    assert any(re.search(violation, one) for one in found)
