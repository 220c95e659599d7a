"""The lease of a Redlock: its token, how long a majority of the servers grants it, and its renewal by majority rounds.

Rules of the renewal: those of `_renewal/schedule.py`, which renews locks on one server. Where a majority agrees, the
lease is renewed. Where a majority refuses, the lock is lost. Where too few servers vote, the renewal is retried until
the lease ends. All leases that are due are renewed at once.
"""

from __future__ import annotations

import weakref
from typing import Any

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.loss import (
    LeaseLoss,
    Verdict,
    attempt_renewal,
    ignoring_errors,
    limit_s,
    lose,
    renewable,
)
from redislock_fast._protocol.steps import Steps
from redislock_fast._redlock.quorum import MajorityEntry, ask_servers
from redislock_fast._redlock.rounds import (
    AcquireRound,
    LeaseRound,
    MajorityRound,
    ReacquireRound,
    ReleaseRound,
    TakenRound,
    valid_s,
)
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock


class MajorityLease:
    """The lease of a Redlock.

    Thread safety: every thread or task that shares the lock object may prolong the lease, also at once. `times` is
    assigned as a whole, so each of them notices that another has begun meanwhile.

    Args:
        acquired: the round that has acquired the lock.

    Attributes:
        token: the token under which the lock is held.
        ttl_ms: with which it was acquired: that of the lock object may have changed since.
        times: `valid_until` and `ends_at`; another tuple whenever a request that sets the lease begins or succeeds.
        refusals: by server: False where it certainly does not hold the token, because it was never sent there.
        releasing: the last release of unknown outcome.
    """

    def __init__(self, acquired: AcquireRound) -> None:
        self.token = acquired.token
        self.ttl_ms = acquired.ttl_ms
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
        retries: how often the last acquire attempted again.
    """

    majority: MajorityLease | None = None
    round: MajorityRound | None = None
    retries: int = 0

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


def majority_of(owner: Owner) -> MajorityLease | None:
    """The lease of the owner's token; None where it has none. An acquire notes its lease before its token."""
    majority = standing_of(owner).majority
    return majority if majority is not None and majority.token == owner.token else None


_MOST_AT_ONCE = 256
"""Majority rounds under way at once: so few that all replies that a frozen server owes fit one connection."""


class RedlockLease(Lease):
    """The lease of a Redlock that is held on options.

    Args:
        lock: the lock object.
        keys: the key, by server.
        majority: the lock's lease without options.
        options: the lock's options.
        quorum: the lock's servers.
    """

    __slots__ = ("_quorum", "keys", "majority")

    def __init__(self, lock: Any, keys: list[bytes], majority: MajorityLease, options: Options, quorum: Any) -> None:
        super().__init__(weakref.ref(lock), keys[0], majority.token, majority.ttl_ms, majority.ends_at, options)
        self.keys = keys
        self.majority = majority
        self._quorum = quorum

    @property
    def entry(self) -> MajorityEntry:
        """The entry with which all servers are cleaned up."""
        return MajorityEntry(self.keys, self.token, self._quorum)

    def may_be_left(self, reason: LossReason) -> bool:  # noqa: ARG002  # for any reason
        """Whether a server may still hold the lock after the loss: a minority may."""
        return self.options.auto_renew

    def renewed(self, expires_at: float, certainly: bool) -> None:
        """Note a renewal, in the `MajorityLease` too: an extend adds to the ttl that was set last."""
        super().renewed(expires_at, certainly)
        if self.expires_at == expires_at:
            self.majority.times = (self.majority.valid_until, expires_at)


def renew(quorum: Any, due: list[Any], losses: list[LeaseLoss]) -> Any:
    """Renew the leases that are due at the servers of a Redlock; a `RenewalBatch`."""
    return quorum.drive(renew_leases(quorum, due, losses))


def renew_leases(quorum: Any, leases: list[RedlockLease], losses: list[LeaseLoss]) -> Steps:
    """Renew those of the due leases that can be renewed. Adds losses to `losses`. Sends what `Redlock.extend` sends."""
    open_ones: list[Any] = renewable(list(leases), losses)
    for at in range(0, len(open_ones), _MOST_AT_ONCE):
        yield from _renew_batch(quorum, open_ones[at : at + _MOST_AT_ONCE], losses)


def _renew_batch(quorum: Any, leases: list[RedlockLease], losses: list[LeaseLoss]) -> Steps:
    now = clock()
    asked: list[Any] = []
    rounds: list[ReacquireRound] = []
    for lease in leases:
        ttl_ms = lease.begin_renewal(now)
        if ttl_ms is not None:
            asked.append(lease)
            rounds.append(
                ReacquireRound(lease.keys, lease.token, ttl_ms, limit_s([lease], now), list(lease.majority.refusals))
            )
    if asked:
        gone: list[Any] = yield from attempt_renewal(
            asked, ask_servers(quorum, *rounds), lambda: [*map(_verdict, rounds)], losses
        )
        if gone:
            yield from _find_out_why(quorum, gone, losses)


def _verdict(round_: ReacquireRound) -> Verdict:
    held = True if round_.agreed else False if round_.refused else None
    return Verdict(held, round_.ends_at if any(round_.sent) else None)


def _find_out_why(quorum: Any, leases: list[RedlockLease], losses: list[LeaseLoss]) -> Steps:
    now = clock()
    rounds = [TakenRound(lease.keys, lease.token, limit_s([lease], now)) for lease in leases]
    with ignoring_errors():
        yield ask_servers(quorum, *rounds)
    for lease, round_ in zip(leases, rounds, strict=True):
        lose(lease, reason_of_round(round_), losses)


def reason_of_round(round_: TakenRound) -> LossReason:
    """Why a lock was lost whose lease has not ended, judged by the values that a majority of the servers has now."""
    if round_.agreed:
        return LossReason.TAKEN
    return LossReason.DELETED if round_.refused else LossReason.SERVER_GONE
