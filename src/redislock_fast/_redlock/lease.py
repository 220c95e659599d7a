"""The lease of a Redlock: its token, and until when a majority of the servers grants it."""

from __future__ import annotations

from typing import Any, NamedTuple

from redislock_fast._lease.owner import Owner
from redislock_fast._redlock.rounds import AcquireRound, LeaseRound, MajorityRound, ReleaseRound, valid_s
from redislock_fast._util.times import clock

__all__ = ["MajorityEntry", "MajorityLease", "Standing", "new_standing_of", "standing_of"]


class MajorityEntry(NamedTuple):
    """A Redlock to be cleaned up.

    Attributes:
        keys: the key, by server.
        token: the token under which it was held.
        quorum: the servers; kept alive, since a dropped lock may be the last that has a reference.
    """

    keys: list[bytes]
    token: bytes
    quorum: Any

    def __repr__(self) -> str:
        """Without the token."""
        return object.__repr__(self)


class MajorityLease:
    """The lease of a Redlock.

    Thread safety: every thread or task that shares the lock object may prolong the lease, also at once. `times` is
    assigned as a whole, so each of them notices that another has begun meanwhile.

    Args:
        acquired: the round that has acquired the lock.

    Attributes:
        token: the token under which the lock is held.
        times: `valid_until` and `ends_at`; another tuple whenever a request that sets the lease begins or succeeds.
        refusals: by server: False where it certainly does not hold the token, because it was never sent there.
        releasing: the last release of unknown outcome.
    """

    def __init__(self, acquired: AcquireRound) -> None:
        self.token = acquired.token
        self.times = (acquired.valid_until, acquired.ends_at)
        self.refusals: list[bool | None] = [None if sent else False for sent in acquired.sent]
        self.releasing: ReleaseRound | None = None

    @property
    def valid_until(self) -> float:
        """Until when the lease is certainly valid, in the clock's seconds."""
        return self.times[0]

    @property
    def ends_at(self) -> float:
        """When the first server may end the lease, in the clock's seconds."""
        return self.times[1]

    def renew(self, round_: LeaseRound, before: tuple[float, float]) -> None:
        """Note the lease that a round has set. `before`: `times` when the round's requests left.

        Where `times` has changed, another caller has set the lease meanwhile. The servers may have executed either
        request last, so only the shorter lease is certain.
        """
        times = self.times
        if times is before:
            self.times = (round_.valid_until, round_.ends_at)
        else:
            self.times = (min(times[0], round_.valid_until), min(times[1], round_.ends_at))

    def shorten(self, ttl_ms: int) -> tuple[float, float]:
        """Assume the shorter one of the present lease and this ttl. Returns the new `times`."""
        now = clock()
        self.times = times = (min(self.valid_until, now + valid_s(ttl_ms)), min(self.ends_at, now + ttl_ms / 1000))
        return times


class Standing:
    """What one owner has of a Redlock, beside its token; it is the owner's `extra`.

    Thread safety: as for the owner: where that is shared, each attribute is assigned as a whole.

    Attributes:
        majority: the lease that is held under the token; None where none is.
        round: the last operation; None before the first.
    """

    majority: MajorityLease | None = None
    round: MajorityRound | None = None

    @property
    def ends_at(self) -> float | None:
        """When the first server may end the lease, in the clock's seconds; None where there is none."""
        return None if self.majority is None else self.majority.ends_at


_NONE = Standing()


def standing_of(owner: Owner) -> Standing:
    """What the owner has, to be read."""
    standing: Standing = owner.extra or _NONE
    return standing


def new_standing_of(owner: Owner) -> Standing:
    """What the owner has, to be changed. Of callers that share the owner, one makes it."""
    if owner.extra is None:
        fresh = Standing()
        with owner.book_mutex:
            if owner.extra is None:
                owner.extra = fresh
    standing: Standing = owner.extra
    return standing
