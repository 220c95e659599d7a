"""A lease that is renewed or lost, by its own rules.

Rules: no server, and no renewer.
"""

from __future__ import annotations

import math
import weakref

import pytest

from redislock_fast import LossReason
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import SharedOwner
from redislock_fast._procedures.loss import limit_s
from redislock_fast._util.times import clock

TOKEN = b"token"
TTL_MS = 60_000


class Lock:
    """A lock that can be referred to weakly."""


_lock = Lock()


def lease(max_hold: float | None = None) -> Lease:
    """A renewed lease of which half a minute is left."""
    options = Options(auto_renew=True, max_hold=max_hold)
    return Lease(weakref.ref(_lock), b"name", TOKEN, TTL_MS, clock() + 30, options)


def test_renewal_sets_the_whole_ttl() -> None:
    renewed = lease()
    assert renewed.begin_renewal(clock()) == TTL_MS
    renewed.renewed(clock() + 60, certainly=True)
    assert renewed.deadline > clock() + 50


def test_one_renewal_at_a_time_is_under_way() -> None:
    renewed = lease()
    renewed.begin_renewal(clock())
    renewed.renewing = True
    assert renewed.begin_renewal(clock()) is None


def test_released_or_lost_lock_is_not_renewed() -> None:
    released, lost = lease(), lease()
    assert released.end()
    assert lost.lose(LossReason.TAKEN)
    assert (released.begin_renewal(clock()), lost.begin_renewal(clock())) == (None, None)


def test_renewal_ends_at_max_hold() -> None:
    renewed = lease(max_hold=60)
    renewed.acquired_at -= 20
    assert renewed.begin_renewal(renewed.acquired_at + 20) == pytest.approx(40_000, abs=1)
    renewed.renewing = False
    assert renewed.begin_renewal(renewed.acquired_at + 60) is None


def test_loss_is_noted_once() -> None:
    lost = lease()
    assert lost.lose(LossReason.TAKEN)
    assert not lost.lose(LossReason.EXPIRED)
    assert lost.loss is LossReason.TAKEN


def test_lost_lock_is_not_revived_by_a_renewal() -> None:
    lost = lease()
    lost.begin_renewal(clock())
    lost.lose(LossReason.EXPIRED)
    before = lost.expires_at
    lost.renewed(clock() + 60, certainly=True)
    assert lost.expires_at == before


@pytest.mark.parametrize("new_ttl_ms", [5000, None], ids=["sets the ttl", "adds to the ttl"])
def test_renewal_that_was_under_way_beside_a_call_of_the_owner_prolongs_nothing(new_ttl_ms: int | None) -> None:
    renewed, owner = lease(), SharedOwner()
    renewed.begin_renewal(clock())
    with renewed.prolonged_by_hand(owner, new_ttl_ms):
        owner.expiry = (TOKEN, clock() + 5)
    before = renewed.expires_at
    renewed.renewed(clock() + 60, certainly=True)
    assert renewed.expires_at == before


def test_only_a_renewal_that_was_due_long_ago_is_late() -> None:
    now = clock()
    late, attached, failing, shortened, ends = (lease() for _ in range(5))
    for one in (late, attached, failing, shortened, ends):
        one.acquired_at, one.expires_at = now - 70, now + 9
    attached.acquired_at = now - 1
    failing.troubled = shortened.touched = True
    ends.options = Options(auto_renew=True, max_hold=79)
    in_time = lease()
    in_time.acquired_at -= 60
    assert late.is_late(now)
    assert not any(one.is_late(now) for one in (in_time, attached, failing, shortened, ends))


def in_danger() -> Lease:
    """A lease with `on_danger` whose renewal has failed, 30 s before its end."""
    failing = lease()
    failing.options = Options(auto_renew=True, on_danger=print)
    failing.troubled = True
    return failing


def test_danger_begins_with_a_third_of_the_ttl_left() -> None:
    failing = in_danger()
    danger_at = failing.deadline - 20
    assert failing.danger_at == danger_at
    assert [failing.is_in_danger(danger_at + s) for s in (-0.01, 0, 1)] == [False, True, False]
    assert failing.danger_at == math.inf


def test_danger_is_told_again_after_a_renewal_has_succeeded() -> None:
    failing = in_danger()
    now = failing.danger_at
    assert failing.is_in_danger(now)
    failing.troubled = False
    assert not failing.is_in_danger(now)
    failing.troubled = True
    assert failing.is_in_danger(now)


def test_lock_that_is_over_or_lost_is_in_no_danger() -> None:
    ended, released, lost, renewed = (in_danger() for _ in range(4))
    now = ended.danger_at + 1
    ended.expires_at = now
    released.end()
    lost.lose(LossReason.TAKEN)
    renewed.troubled = False
    assert not any(one.is_in_danger(now) for one in (ended, released, lost, renewed))


def test_renewal_is_tried_again_when_the_danger_begins_and_ends_by_then() -> None:
    failing = in_danger()
    before = failing.danger_at - 0.2
    assert failing.retry_at(before) == failing.danger_at
    assert failing.retry_at(failing.danger_at) == failing.danger_at + 6
    assert limit_s([lease(), failing], before) == pytest.approx(0.1)
    assert limit_s([failing], failing.danger_at) == 1.0


def test_danger_costs_an_acquire_nothing() -> None:
    assert Options(auto_renew=True, on_danger=print).need_reply_alone
