"""What a Redlock holds on a majority of its servers, and until when."""

from __future__ import annotations

from redislock_fast._protocol.majority import AcquireRound, LeaseRound, ReleaseRound, valid_s
from redislock_fast._util.times import clock

__all__ = ["QuorumLease"]


class QuorumLease:
    """What a Redlock holds.

    Who may touch what: whoever shares the lock object may prolong the lease, also at once. Its two times are assigned
    as a whole, so who has begun sees that another has come in between.

    Attributes:
        token: under which.
        times: the two that follow; another tuple whenever anybody has begun to set the lease, or has done so.
        refusals: by server: False where it certainly does not hold the token, because it was never sent there.
        releasing: the last release that came to no end.
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
        """When the servers may end it first."""
        return self.times[1]

    def renew(self, round_: LeaseRound, before: tuple[float, float]) -> None:
        """Note the lease that a round has set, and `before`, what stood here when it left.

        Where that has changed, another has set the lease, too, and nobody knows which of the two the servers have heard
        last: only the shorter is certain.
        """
        times = self.times
        if times is before:
            self.times = (round_.valid_until, round_.ends_at)
        else:
            self.times = (min(times[0], round_.valid_until), min(times[1], round_.ends_at))

    def shorten(self, ttl_ms: int) -> tuple[float, float]:
        """Believe in no more of the lease than what a request for another one, from now on, may leave of it."""
        now = clock()
        self.times = times = (min(self.valid_until, now + valid_s(ttl_ms)), min(self.ends_at, now + ttl_ms / 1000))
        return times
