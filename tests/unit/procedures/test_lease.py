"""The reason of a loss that the next acquire of the owner finds, because no renewer has.

Rules: no server, and no renewer that watches.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from redislock_fast import Lock, LossReason
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.owner import PendingOwner
from redislock_fast._util.times import clock
from tests.support.holding import Losses


class Idle:
    """A renewer that does nothing."""

    def keep(self, lease: Lease) -> None:
        """Do not watch the lease."""

    def let_go(self, lease: Lease) -> None:
        """There is nothing to end."""


class Unwatched(Lock):
    """A lock whose loss no renewer notices."""

    def _renewer(self) -> Any:
        return Idle()


def acquired(lock: Lock, token: bytes, expires_at: float) -> None:
    """Note an acquire of the lock, as its steps do at their end."""
    owner = lock._mine()
    pending = PendingOwner(owner)
    pending.token = token
    pending.expiry = (token, expires_at)
    assert lock._options is not None
    lock._begin(lock._options, owner, pending)


@pytest.mark.parametrize(
    ("left_s", "reason"), [(-1.0, LossReason.EXPIRED), (60.0, LossReason.DELETED)], ids=["expired", "deleted"]
)
def test_next_acquire_reports_why_the_lock_was_lost(left_s: float, reason: LossReason) -> None:
    losses = Losses()
    lock = Unwatched(redis.Redis(), "name", timeout=60, on_lost=losses)
    acquired(lock, b"first", clock() + left_s)
    acquired(lock, b"second", clock() + 60)
    assert losses.until() == [reason]
    assert lock.valid
