"""Thousands of stories of waiters with faults. Planted faults show that each invariant can fail."""

from __future__ import annotations

import re
from typing import Any

import pytest

from redislock_fast._pipe.base import Reply
from redislock_fast._protocol.claims import Claim
from redislock_fast._protocol.queue import JoinQueue
from redislock_fast._protocol.scripts import RELEASE
from redislock_fast._protocol.steps import Steps
from redislock_fast._queue import waiters, waiting
from redislock_fast._queue.waiters import Grant, Waiter, WaiterRegistry
from redislock_fast._queue.waiting import Waiting
from tests.simulation import model
from tests.simulation import process as waiting_process
from tests.simulation.model import Given, Model
from tests.simulation.seeds import violation_of, violations
from tests.simulation.waiting import Simulation
from tests.support.selection import in_two_runs

pytestmark = pytest.mark.timeout(600)  # seconds of a processor that a busy machine may not give in two minutes

_SEEDS_FOR_FAULTS = range(15_000)
_RARE = {"leave": 4_590}
"""Methods whose fault few stories find: the first seed to try."""


@in_two_runs(range(2_500), 200)
def test_no_story_breaks_an_invariant(seeds: range) -> None:
    assert next(violations(Simulation, seeds), None) is None


@in_two_runs(range(700), 200)
def test_no_story_breaks_an_invariant_where_each_script_passes_over_one_waiter(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_MOST_PASSES", 1)
    assert next(violations(Simulation, seeds), None) is None


@in_two_runs(range(2_500), 200)
def test_no_story_of_callers_that_share_a_token_breaks_an_invariant(seeds: range) -> None:
    assert next(violations(Simulation, seeds, shares=True), None) is None


@pytest.mark.parametrize("seed", [9993])
def test_request_after_the_lock_of_another_with_the_token_is_given_back(seed: int) -> None:
    assert violation_of(Simulation, seed, kind="rough", shares=True) is None


# ---- faults of the scripts ----


class _HandsOverToTheDead(Model):
    """A hand-over does not check that a listener gets the message."""

    def _is_heard(self, publish: bytes, channel: bytes) -> bool:
        return True


class _LeavesWithoutPassingOn(Model):
    """A waiter that gives up keeps a lock that is granted at the same moment."""

    def _leave(self, policy: Any, queue: Any, waiters: Any, token: Any, what: Any, terms: Any = 0) -> Reply:
        if what == b"pass on":
            policy.value = None
        return super()._leave(policy, queue, waiters, token, what, terms)


class _QueuesWithoutMarking(Model):
    """A waiter does not set the contended flag."""

    def _wait(self, policy: Any, queue: Any, waiters: Any, token: Any, *words: Any) -> Reply:
        value = policy.value
        reply = super()._wait(policy, queue, waiters, token, *words)
        if isinstance(reply, list) and reply[0] == 0 and value is not None and value[-1:] != b"+":
            self.put(policy.key, value, None if reply[2] == -1 else reply[2])  # type: ignore[arg-type]
        return reply


class _LastComeFirstServed(Model):
    """The queue is a stack."""

    def _hand_over(self, policy: Any, queue: bytes, waiters: bytes, asking: bytes | None = None) -> Given:
        waiting = self._items(queue)
        for token in waiting:
            waiting[token] = -waiting[token]
        return super()._hand_over(policy, queue, waiters, asking)


class _LosesItsPlace(Model):
    """A waiter that asks again goes to the end of the queue."""

    def _wait(self, policy: Any, queue: Any, waiters: Any, token: Any, *words: Any) -> Reply:
        self._remove_item(queue, token)
        return super()._wait(policy, queue, waiters, token, *words)


class _DeletesInsteadOfHandingOver(Model):
    """A release of a contended lock notifies no waiter."""

    def _pass_on(self, policy: Any, queue: Any, waiters: Any, token: Any) -> Reply:
        return self._run_on_one(RELEASE.sha, policy.key, self.entry(policy.key), token, ())


class _PassesOverNobody(Model):
    """Sleepers stay at the head of the queue."""

    def _pass_over_sleepers(self, queue: bytes, waiters: bytes, token: bytes) -> None:
        pass


class _ReleasesAnybodysLock(Model):
    """A hand-over does not check which token the lock has."""

    def _pass_on(self, policy: Any, queue: Any, waiters: Any, token: Any) -> Reply:
        return 2 if self._hand_over(policy, queue, waiters)[0] else 1


# ---- faults of the machines ----


def _take_for_anybody(self: WaiterRegistry, push: list[Reply]) -> None:
    """Each waiter takes a grant for its own."""
    for key_queue in self.key_queues.values():
        for waiter in list(key_queue.waiters.values()):
            waiter.mailbox.put(Grant(waiter.token + b"+", waiter.since, b"1"))


def _take_and_count_from_now(self: Waiting, waiter: Waiter, message: object) -> Grant | None:
    """The lease counts from the moment at which the message is read."""
    return message._replace(since=vars(waiting)["clock"]()) if isinstance(message, Grant) else None


def _take_as_it_is(self: Waiting, waiter: Waiter, grant: Grant) -> Steps:
    """A grant is taken without a check of its age."""
    yield from ()
    return grant


def _take_whatever_comes(self: Waiting, waiter: Waiter, message: object) -> Grant | None:
    """The first message is believed without a check of its age."""
    return message if isinstance(message, Grant) else None


def _never_due(self: Waiter) -> None:
    """No waiter makes a health check."""


def _undo_nothing(self: JoinQueue, failed: bool) -> list[tuple[bytes, bytes]]:
    """A place in the queue of unknown outcome is not cleaned up."""
    return []


def _give_up_at_once(self: Waiting, waiter: Waiter, limit_s: float | None) -> Steps:
    """A waiter whose time is up does not leave the queue."""
    yield from ()


def _leave_without_heir(self: WaiterRegistry, waiter: Waiter) -> None:
    """The poller leaves, and no other waiter becomes the poller."""
    waiter.key_queue.waiters.pop(waiter.token, None)


def _undo_no_more(self: Any, entries: Any) -> None:
    """A failed acquire is not cleaned up."""


def _hear_no_claim(self: Claim) -> None:
    """A reply that comes after its caller has given up does not count."""


_real_note = Waiter.note


def _note_by_the_clock(self: Waiter, word: bytes, asked_at: float, left_ms: int) -> None:
    """The server's answer counts from its arrival."""
    _real_note(self, word, vars(waiters)["clock"](), left_ms)


@pytest.mark.parametrize(
    ("faulty", "kind", "violation"),
    [
        (_HandsOverToTheDead, "rough", "whose connection is gone"),
        (_LeavesWithoutPassingOn, "rough", "left with"),
        (_QueuesWithoutMarking, "calm", "is free, and a waiter is in the queue"),
        (_LastComeFirstServed, "calm", "had the first place"),
        (_LosesItsPlace, "calm", "had the first place"),
        (_DeletesInsteadOfHandingOver, "calm", "is free, and a waiter is in the queue"),
        (_PassesOverNobody, "rough", "is at the head and asleep"),
        (_ReleasesAnybodysLock, "rough", "the key does not say so|holds, and so does"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_scripts(
    faulty: type[Model], kind: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_AWAKE_MS", 0)  # the sooner a waiter counts as asleep, the sooner faults are found
    assert any(
        re.search(violation, found) for found in violations(Simulation, _SEEDS_FOR_FAULTS, kind=kind, model=faulty)
    )


def test_stories_of_callers_that_share_a_token_find_a_planted_fault() -> None:
    found = violations(Simulation, _SEEDS_FOR_FAULTS, kind="rough", shares=True, model=_ReleasesAnybodysLock)
    assert any(
        re.search("own:.*the key does not say so|the key does not say so.*own:", one, re.DOTALL) for one in found
    )


@pytest.mark.parametrize(
    ("machine", "method", "broken", "kind", "violation"),
    [
        (WaiterRegistry, "take_push", _take_for_anybody, "calm", "it never had|later than it was granted"),
        (Waiting, "granted", _take_and_count_from_now, "calm", "believes"),
        (Waiting, "_if_fresh", _take_as_it_is, "rough", "not been renewed"),
        (Waiting, "granted", _take_whatever_comes, "rough", "not been renewed"),
        (Waiter, "due_at", _never_due, "rough", "wait too long"),
        (Waiter, "note", _note_by_the_clock, "calm", "believes"),
        (JoinQueue, "to_clean_up", _undo_nothing, "rough", "left with"),
        (Waiting, "_leave", _give_up_at_once, "rough", "left with"),
        (WaiterRegistry, "leave", _leave_without_heir, "rough", "wait too long"),
        (waiting_process.Process, "clean_up", _undo_no_more, "rough", "left with"),
        (Claim, "take", _hear_no_claim, "rough", "left with b'own"),
    ],
)
def test_the_simulation_finds_a_planted_fault_of_the_machines(
    machine: Any, method: str, broken: Any, kind: str, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, method, broken)
    found = violations(Simulation, _SEEDS_FOR_FAULTS[_RARE.get(method, 0) :], kind=kind)
    assert any(re.search(violation, one) for one in found)
