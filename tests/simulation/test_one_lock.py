"""Thousands of schedules of lost requests, lost replies, errors and rivals, played against the model server.

A schedule that fails names its seed or its bytes, and what every request did. Planted faults show that each invariant
can fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import strategies

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol import commands
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.fenced import AcquireFenced, AcquireOwnFenced
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._util.tokens import CONTENDED_FLAG
from tests.simulation.one_lock import KEY, TOKEN, Listed, Machines, Seeded, Simulation, Violation
from tests.support.selection import in_two_runs

_SEEDS = range(8_000)


def _violations(machines: Machines, neighbours: bool = False, seeds: range = _SEEDS) -> Iterator[str]:
    for seed in seeds:
        try:
            Simulation(Seeded(seed), machines, neighbours).run()
        except Violation as violation:
            yield f"seed {seed}: {violation}"


_BY_EACH_ACQUIRE = pytest.mark.parametrize(
    "machines",
    [Machines(acquire=kind) for kind in (commands.Acquire, AcquireOwn, AcquireFenced, AcquireOwnFenced)],
    ids=["a token made for it", "the caller's own token", "with a number", "the caller's own token, with a number"],
)


@pytest.mark.parametrize("neighbours", [False, True], ids=["alone", "with neighbours on the connection"])
@_BY_EACH_ACQUIRE
@in_two_runs(_SEEDS, 2_000)
def test_no_schedule_breaks_an_invariant(machines: Machines, neighbours: bool, seeds: range) -> None:
    assert next(_violations(machines, neighbours, seeds), None) is None


@pytest.mark.slow
@_BY_EACH_ACQUIRE
@hypothesis.settings(max_examples=1500, database=None)
@hypothesis.given(schedule=strategies.binary(max_size=120), neighbours=strategies.booleans())
def test_no_schedule_that_hypothesis_thinks_of_breaks_an_invariant(
    machines: Machines, schedule: bytes, neighbours: bool
) -> None:
    Simulation(Listed(schedule), machines, neighbours).run()


class _AcquireBlindToItself(commands.Acquire):
    """Takes its own token, set by an attempt without a reply, for another's."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        self.result = self.result and reply != self.token
        return finished


class _AcquireThatTrustsALoss(commands.Acquire):
    """Takes any holder, after an attempt without a reply, for itself."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        self.result = self.result or (self.unsettled and type(reply) is bytes)
        return finished


class _AcquireThatForgetsLosses(commands.Acquire):
    """Gives up without saying that a cleanup is due."""

    def note_unanswered(self, sent: bool) -> None:
        pass


class _AcquireByForce(commands.Acquire):
    """Sets the key even if it is held."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        return tuple(word for word in super().request(capabilities, now) if word != b"NX")


class _AcquireThatCountsFromTheLastRequest(commands.Acquire):
    """Believes that the lease began with the request that was answered."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        request = super().request(capabilities, now)
        self.sent_at = now
        return request


class _AcquireOwnThatTrustsWhatItFinds(AcquireOwn):
    """Believes that a lock with its token has a whole ttl left."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        self.result = self.result or self._renewal is not None
        return finished or self.result


class _AcquireOwnThatLeavesTheTtl(AcquireOwn):
    """Finds its token at a lock that expires, asks for one that does not, and leaves it as it is."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        request = super().request(capabilities, now)
        return (b"GET", self.key) if self.ttl_ms is None and b"IFEQ" in request else request

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        return super().feed(b"OK" if self._renewal is not None and type(reply) is bytes else reply, capabilities)


class _AcquireOwnThatTakesWhatIsGone(AcquireOwn):
    """Does not look at the reply to its reacquire."""

    def _renewed(self, renewal: commands.Reacquire, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super()._renewed(renewal, reply, capabilities)
        self.result = self.result or self._renewal is None
        return finished or self.result


class _AcquireOwnThatForgetsLosses(AcquireOwn):
    """Takes every request for a reacquire, after which no cleanup is due."""

    def note_unanswered(self, sent: bool) -> None:
        pass


class _AcquireOwnByForce(AcquireOwn):
    """Renews the lease of any holder."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        request = super().request(capabilities, now)
        return request[:3] + request[5:] if b"IFEQ" in request else request


class _ReleaseBlindToItself(commands.Release):
    """Takes the success of its own attempt without a reply for a loss of the lock."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        self.result = reply == 1
        return finished


class _ReleaseThatAlwaysSucceeds(commands.Release):
    """Does not look at the reply."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        self.result = True
        return finished


class _ReleaseOfAnybodysLock(commands.Release):
    """Deletes a lock with any token."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        return tuple(b"rival" if word == self.token else word for word in super().request(capabilities, now))


class _ReleaseThatFreesMarkedLocksOfOthers(commands.Release):
    """Takes any value with a contended flag for its own."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        request = super().request(capabilities, now)
        return tuple(b"rival" if word == self.token + CONTENDED_FLAG else word for word in request)


class _ReleaseBlindToMarks(commands.Release):
    """Does not use the queue where the key has not its plain token."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        super().feed(reply, capabilities)
        self.result = reply == 1
        return True


class _ExtendWithoutTheCap(commands.Extend):
    """Adds again whenever it is sent again."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        request = super().request(capabilities, now)
        return request[:-1] if len(request) == 8 else request


class _ExtendThatBelievesTooMuch(commands.Extend):
    """Believes in twice the addition."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        if finished and self.result and self.expires_at is not None:
            self.expires_at += self._add_ms / 1000
        return finished


class _ReacquireThatCreates(commands.Reacquire):
    """Sets the key even where it is gone."""

    def request(self, capabilities: Capabilities, now: float) -> Args:
        self.sent_at = now
        self._native = True
        assert self.ttl_ms is not None
        return (b"SET", self.key, self.token, b"PX", self.ttl_ms)


class _ReacquireBlindToMarks(commands.Reacquire):
    """Does not ask again for the token with the contended flag."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        return super().feed(reply, capabilities) or reply is None


class _ReacquireThatAlwaysSucceeds(commands.Reacquire):
    """Does not look at the reply."""

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        self.result = True
        return finished


@pytest.mark.parametrize(
    ("machines", "violation"),
    [
        (Machines(acquire=_AcquireBlindToItself), "acquire ended False"),
        (Machines(acquire=_AcquireThatTrustsALoss), "acquire ended True"),
        (Machines(acquire=_AcquireThatForgetsLosses), "acquire (ended False|was given up, holds the lock)"),
        (Machines(acquire=_AcquireByForce), "an acquire changed a key that was not free"),
        (Machines(acquire=_AcquireThatCountsFromTheLastRequest), "believed until"),
        (Machines(acquire=_AcquireOwnThatTrustsWhatItFinds), "believed until"),
        (Machines(acquire=_AcquireOwnThatLeavesTheTtl), "believed until None"),
        (Machines(acquire=_AcquireOwnThatTakesWhatIsGone), "acquire ended True"),
        (Machines(acquire=_AcquireOwnThatForgetsLosses), "acquire (ended False|was given up, holds the lock)"),
        (Machines(acquire=_AcquireOwnByForce), "a request changed a key that was not ours"),
        (Machines(release=_ReleaseBlindToItself), "release ended False for a lock that it deleted itself"),
        (Machines(release=_ReleaseThatAlwaysSucceeds), "release ended True for a lock that was not ours"),
        (Machines(release=_ReleaseOfAnybodysLock), "(changed a key that was not ours|left the lock)"),
        (Machines(release=_ReleaseBlindToMarks), "release ended False and left the lock"),
        (Machines(release=_ReleaseThatFreesMarkedLocksOfOthers), "a request changed a key that was not ours"),
        (Machines(reacquire=_ReacquireBlindToMarks), "reacquire ended False"),
        (Machines(extend=_ExtendWithoutTheCap), "extend by .* raised the end"),
        (Machines(extend=_ExtendThatBelievesTooMuch), "believed until"),
        (Machines(reacquire=_ReacquireThatCreates), "changed a key that was not ours"),
        (Machines(reacquire=_ReacquireThatAlwaysSucceeds), "reacquire ended True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_simulation_finds_a_planted_fault(machines: Machines, violation: str) -> None:
    assert any(re.search(violation, found) for found in _violations(machines))


def test_the_simulation_finds_a_missing_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.one_lock.LeaveQueue", lambda *_: commands.ReadHolder(KEY))
    assert any("the cleanup left the lock behind" in found for found in _violations(Machines()))


def test_a_quiet_schedule_takes_and_releases() -> None:
    simulation = Simulation(Listed(b""), Machines())
    simulation.run()
    assert [request[0] for request in simulation.requests] == [b"SET", b"DELIFEQ"]
    assert all(TOKEN in request for request in simulation.requests)
