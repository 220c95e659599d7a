"""Redlocks without a server: interrupts, rounds, leases, and the pauses before a server is tried again.

Rules: no server, and no time passes. The tests set the votes.
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
from redislock_fast._pipe.base import Malformed
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._redlock.lease import MajorityLease, RedlockLease, new_standing_of, renew_leases
from redislock_fast._redlock.procedures import extend_redlock
from redislock_fast._redlock.quorum import ServerHealth, resend
from redislock_fast._redlock.rounds import (
    AcquireRound,
    MajorityRound,
    ReacquireRound,
    ReleaseRound,
    TakenRound,
    valid_s,
)
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
    steps = extend_redlock(lock, owner, 60, True)
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
    lease = RedlockLease(lock, KEYS, granted(), Options(auto_renew=True), None)
    before = lease.expires_at
    losses: list[LeaseLoss] = []
    steps = renew_leases(Agreeing(), [lease], losses)
    round_of(next(steps)).votes[:] = votes
    with pytest.raises(StopIteration):
        steps.send(None)
    assert (losses, lease.troubled, lease.loss, lease.expires_at) == ([], True, None, before)


def test_renewal_that_a_majority_refuses_is_a_loss() -> None:
    lock = Lock()
    lease = RedlockLease(lock, KEYS, granted(), Options(auto_renew=True), None)
    losses: list[LeaseLoss] = []
    steps = renew_leases(Agreeing(), [lease], losses)
    round_of(next(steps)).votes[:] = [False, False, None]
    round_ = round_of(steps.send(None))
    assert isinstance(round_, TakenRound)
    round_.votes[:] = [True, True, None]
    with pytest.raises(StopIteration):
        steps.send(None)
    assert losses == [LeaseLoss(lease, LossReason.TAKEN)]


# A majority round: its outcome, the end of its lease, and its cleanup


TOKEN = b"token"
CAPABILITIES = Capabilities()


def voted(votes: list[bool | None], began: float = 100.0) -> AcquireRound:
    """An acquire at so many servers, all of which were asked, and some of which have voted."""
    acquire = AcquireRound([b"%d" % index for index in range(len(votes))], TOKEN, 10_000, 1.0)
    acquire.began = began
    for index, vote in enumerate(votes):
        acquire.request(index, CAPABILITIES)
        if vote is not None:
            while not acquire.take(index, b"OK" if vote else None, CAPABILITIES):
                acquire.request(index, CAPABILITIES)
    return acquire


@pytest.mark.parametrize(
    ("votes", "agreed", "refused"),
    [
        ([True, True, None, None, None], False, False),
        ([True, True, True, None, None], True, False),
        ([False, False, None, None, None], False, False),
        ([False, False, False, None, None], False, True),
        ([True, True, False, False, None], False, False),
        ([True, True, False, False], False, True),
        ([True, True, True, None], True, False),
    ],
)
def test_more_than_half_of_the_servers_decide(votes: list[bool | None], agreed: bool, refused: bool) -> None:
    acquire = voted(votes)
    assert (acquire.agreed, acquire.refused, acquire.decided) == (agreed, refused, agreed or refused)


def test_lease_is_valid_for_its_ttl_less_what_clocks_may_drift() -> None:
    assert valid_s(10_000) == pytest.approx(9.898)
    assert voted([True], began=100.0).valid_until == pytest.approx(109.898)


@pytest.mark.parametrize(("now", "is_held"), [(109.8, True), (109.9, False)])
def test_majority_that_agrees_after_the_lease_does_not_hold_the_lock(now: float, is_held: bool) -> None:
    acquire = voted([True, True, True])
    acquire.close(now)
    assert acquire.given_up is not is_held
    assert bool(acquire.to_clean_up()) is not is_held


def test_attempt_without_a_majority_is_cleaned_up_wherever_it_may_have_set_the_key() -> None:
    acquire = voted([True, False, None, False, False])
    acquire.close(101.0)
    assert acquire.to_clean_up() == {0: (b"0", TOKEN), 2: (b"2", TOKEN)}


def test_vote_of_a_malformed_reply_is_none() -> None:
    round_ = voted([None])
    with pytest.raises(Malformed):
        round_.take(0, 7, CAPABILITIES)
    assert (round_.votes, round_.errors, round_.decided) == ([None], [None], False)


# The pauses before a server that cannot be reached is tried again


TROUBLE = ConnectionError("refused")


def test_server_that_could_not_be_reached_is_left_alone_for_a_while() -> None:
    health = ServerHealth()
    assert not health.backs_off(100.0)
    health.failed(TROUBLE, 100.0)
    assert (health.backs_off(100.04), health.backs_off(100.06)) == (True, False)


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 0.05), (2, 0.1), (3, 0.2), (5, 0.8), (6, 1.0), (5000, 1.0)])
def test_pause_doubles_up_to_a_second(failures: int, pause_s: float) -> None:
    health = ServerHealth()
    for _ in range(failures):
        health.failed(TROUBLE, 100.0)
    assert health.retry_at == pytest.approx(100.0 + pause_s)


def test_connection_ends_the_pause() -> None:
    health = ServerHealth()
    for _ in range(10):
        health.failed(TROUBLE, 100.0)
    health.connected()
    assert not health.backs_off(100.0)
    health.failed(TROUBLE, 100.0)
    assert health.retry_at == pytest.approx(100.05)


def test_server_that_made_a_round_wait_comes_last_until_that_is_forgotten() -> None:
    slow, soon = ServerHealth(), ServerHealth()
    slow.note_wait(0.001)
    soon.note_wait(0.0004)
    assert (2, 0) == (slow.slowness, soon.slowness)
    rounds = 0
    while slow.slowness:
        slow.note_wait(None)
        rounds += 1
    assert 100 < rounds < 1000


# The lease while requests that set it have an unknown outcome


KEYS_OF_ALL = [b"name"] * 3


def lease(ttl_ms: int) -> MajorityLease:
    """The lease of a Redlock that was acquired just now."""
    acquired = AcquireRound(KEYS_OF_ALL, TOKEN, ttl_ms, 1.0)
    acquired.began = clock()
    return MajorityLease(acquired)


def test_request_that_sets_a_shorter_ttl_shortens_the_lease_before_it_is_answered() -> None:
    majority = lease(60_000)
    before = clock()
    times = majority.shorten(5000)
    assert times == (majority.valid_until, majority.ends_at)
    assert before + valid_s(5000) <= majority.valid_until <= clock() + valid_s(5000)
    assert before + 5 <= majority.ends_at <= clock() + 5


def test_request_that_sets_a_longer_ttl_leaves_the_lease_as_it_is_until_it_is_answered() -> None:
    majority = lease(5000)
    before = majority.times
    assert majority.shorten(60_000) == before


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
def test_of_two_requests_that_set_the_lease_at_once_the_shorter_lease_is_certain(is_alone: bool) -> None:
    majority = lease(5000)
    before = majority.shorten(60_000)
    if not is_alone:
        majority.shorten(5000)
    shorter = majority.times
    renewal = ReacquireRound(KEYS_OF_ALL, TOKEN, 60_000, 1.0, [None] * 3)
    renewal.began = clock()
    majority.renew(renewal, before)
    assert majority.times == ((renewal.valid_until, renewal.ends_at) if is_alone else shorter)


NO_SERVER: Any = None


def test_what_is_unanswered_on_the_former_connection_is_one_callers() -> None:
    health = ServerHealth()
    vote, connected = object(), Capabilities()
    assert health.use_connection(Capabilities()) == set()
    health.unanswered.add(vote)
    assert [health.use_connection(connected) for _ in range(2)] == [{vote}, None]
    assert health.unanswered == set()


def test_last_reply_may_come_while_releases_are_done_again() -> None:
    class Overtaken(set[Any]):
        """Votes of which another thread takes the last one."""

        def pop(self) -> Any:
            self.clear()
            return super().pop()

    unanswered = Overtaken([object()])
    resend(NO_SERVER, unanswered)
    assert unanswered == set()
