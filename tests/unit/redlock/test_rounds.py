"""A majority round of a Redlock: its outcome, the end of its lease, and its cleanup.

Rules: no server. The votes are set by hand.
"""

from __future__ import annotations

import pytest

from redislock_fast._pipe.base import Malformed
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._redlock.rounds import AcquireRound, valid_s

TOKEN = b"token"
CAPABILITIES = Capabilities()


def round_of(votes: list[bool | None], began: float = 100.0) -> AcquireRound:
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
    acquire = round_of(votes)
    assert (acquire.agreed, acquire.refused, acquire.decided) == (agreed, refused, agreed or refused)


def test_lease_is_valid_for_its_ttl_less_what_clocks_may_drift() -> None:
    assert valid_s(10_000) == pytest.approx(9.898)
    assert round_of([True], began=100.0).valid_until == pytest.approx(109.898)


@pytest.mark.parametrize(("now", "is_held"), [(109.8, True), (109.9, False)])
def test_majority_that_agrees_after_the_lease_does_not_hold_the_lock(now: float, is_held: bool) -> None:
    acquire = round_of([True, True, True])
    acquire.close(now)
    assert acquire.given_up is not is_held
    assert bool(acquire.to_clean_up()) is not is_held


def test_attempt_without_a_majority_is_cleaned_up_wherever_it_may_have_set_the_key() -> None:
    acquire = round_of([True, False, None, False, False])
    acquire.close(101.0)
    assert acquire.to_clean_up() == {0: (b"0", TOKEN), 2: (b"2", TOKEN)}


def test_vote_of_a_malformed_reply_is_none() -> None:
    round_ = round_of([None])
    with pytest.raises(Malformed):
        round_.take(0, 7, CAPABILITIES)
    assert (round_.votes, round_.errors, round_.decided) == ([None], [None], False)
