"""A Redlock that is interrupted when a majority has just granted it, and one that is prolonged or renewed in vain.

Rules: no server. The tests set the votes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import LossReason
from redislock_fast._lease.options import Options
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._redlock.lease import MajorityLease, new_standing_of
from redislock_fast._redlock.renewal import RedlockLease, renewing
from redislock_fast._redlock.rounds import AcquireRound, MajorityRound, ReacquireRound, ReleaseRound, TakenRound
from redislock_fast._util.times import clock

PORTS = (1, 2, 3)
KEYS = [b"name"] * len(PORTS)
TTL_MS = 60_000


def round_of(step: Do) -> Any:
    """The round that a step asks the servers for."""
    _, round_ = step.args
    return round_


class Agreeing:
    """Servers that agree, and an interrupt when the steps have ended.

    Attributes:
        asked: the rounds.
        cleaned_up: the rounds that were cleaned up.
    """

    def __init__(self) -> None:
        self.asked: list[MajorityRound] = []
        self.cleaned_up: list[MajorityRound] = []

    def drive(self, steps: Steps) -> Any:
        """Drive the steps to their end, and interrupt their caller."""
        step = next(steps)
        round_ = round_of(step)
        assert isinstance(round_, AcquireRound)
        self.asked.append(round_)
        round_.votes[:] = [True] * len(PORTS)
        with pytest.raises(StopIteration):
            steps.send(None)
        raise KeyboardInterrupt

    def ask(self, *rounds: MajorityRound) -> None:
        """Not called: the tests set the votes."""
        raise NotImplementedError

    def clean_up_round(self, round_: MajorityRound) -> None:
        """Note the round."""
        self.cleaned_up.append(round_)


class AsyncAgreeing(Agreeing):
    """The same for tasks."""

    async def drive(self, steps: Steps) -> Any:
        """Drive the steps to their end, and interrupt their caller."""
        return super().drive(steps)


def test_interrupted_redlock_is_cleaned_up() -> None:
    lock: Any = redislock_fast.Redlock([redis.Redis(port=port) for port in PORTS], "name", timeout=60)
    lock._quorum = quorum = Agreeing()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert quorum.cleaned_up == quorum.asked
    assert (len(quorum.asked), lock.local.token, lock.valid) == (1, None, False)


def test_interrupted_redlock_of_a_task_is_cleaned_up() -> None:
    async def scenario() -> None:
        clients = [redis.asyncio.Redis(port=port) for port in PORTS]
        lock: Any = redislock_fast.asyncio.Redlock(clients, "name", timeout=60)
        lock._quorum = quorum = AsyncAgreeing()
        with pytest.raises(KeyboardInterrupt):
            await lock.acquire()
        assert quorum.cleaned_up == quorum.asked
        assert (len(quorum.asked), lock.valid) == (1, False)

    asyncio.run(scenario())


def granted() -> MajorityLease:
    """The lease of a Redlock that all servers have granted half a minute ago."""
    acquired = AcquireRound(KEYS, b"token", TTL_MS, 1.0)
    acquired.began = clock() - 30
    acquired.sent[:] = [True] * len(PORTS)
    return MajorityLease(acquired)


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "after the lease"])
def test_extend_that_a_majority_agrees_to_counts_while_the_lease_is_valid(is_late: bool) -> None:
    lock: Any = redislock_fast.Redlock([redis.Redis(port=port) for port in PORTS], "name", timeout=TTL_MS / 1000)
    owner = lock._mine()
    new_standing_of(owner).majority = majority = granted()
    owner.hold(majority.token)
    steps = lock._extending(owner, 60, True)
    round_ = round_of(next(steps))
    assert isinstance(round_, ReacquireRound)
    round_.began = clock()
    round_.votes[:] = [True] * len(PORTS)
    if not is_late:
        with pytest.raises(StopIteration):
            steps.send(None)
        assert lock.remaining() > 50
        return
    majority.times = (clock(), clock())
    assert isinstance(round_of(steps.send(None)), ReleaseRound)
    with pytest.raises(LockNotOwnedError):
        steps.send(None)
    assert not lock.valid


class Lock:
    """A lock that can be referred to weakly."""


@pytest.mark.parametrize("votes", [[None] * 3, [False, None, None], [True, False, None]], ids=str)
def test_renewal_that_a_majority_does_not_answer_is_tried_again(votes: list[bool | None]) -> None:
    lock = Lock()
    lease = RedlockLease(lock, KEYS, granted(), TTL_MS, Options(auto_renew=True), None)
    before = lease.expires_at
    losses: list[LeaseLoss] = []
    steps = renewing(Agreeing(), [lease], losses)
    round_of(next(steps)).votes[:] = votes
    with pytest.raises(StopIteration):
        steps.send(None)
    assert (losses, lease.troubled, lease.loss, lease.expires_at) == ([], True, None, before)


def test_renewal_that_a_majority_refuses_is_a_loss() -> None:
    lock = Lock()
    lease = RedlockLease(lock, KEYS, granted(), TTL_MS, Options(auto_renew=True), None)
    losses: list[LeaseLoss] = []
    steps = renewing(Agreeing(), [lease], losses)
    round_of(next(steps)).votes[:] = [False, False, None]
    round_ = round_of(steps.send(None))
    assert isinstance(round_, TakenRound)
    round_.votes[:] = [True, True, None]
    with pytest.raises(StopIteration):
        steps.send(None)
    assert losses == [LeaseLoss(lease, LossReason.TAKEN)]
