"""The lease of a Redlock while requests that set it have an unknown outcome.

Rules: no server.
"""

from __future__ import annotations

import pytest

from redislock_fast._redlock.lease import MajorityLease
from redislock_fast._redlock.rounds import AcquireRound, ReacquireRound, valid_s
from redislock_fast._util.times import clock

KEYS = [b"name"] * 3
TOKEN = b"token"


def lease(ttl_ms: int) -> MajorityLease:
    """The lease of a Redlock that was acquired just now."""
    acquired = AcquireRound(KEYS, TOKEN, ttl_ms, 1.0)
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
    renewal = ReacquireRound(KEYS, TOKEN, 60_000, 1.0, [None] * 3)
    renewal.began = clock()
    majority.renew(renewal, before)
    assert majority.times == ((renewal.valid_until, renewal.ends_at) if is_alone else shorter)
