"""What a `Redlock` does, step by step, for threads and for tasks.

Rules:
- Every attempt has a token of its own, so nothing that an earlier attempt has left can be taken for it. The tokens lack
  the marker of `_util/tokens.py`: no queue forms behind a Redlock, since no single server can hand it over.
- Where no majority can agree because too many servers refuse, that is an answer. Where it cannot because too many do
  not answer, that is an error, unless there is time for another attempt.
- A lock that is held on options has a `Tenure`, which says until when it is held. Without one, its `QuorumLease` does.

Who may touch what: a holding is its owner's; where threads or tasks share it, each attribute is assigned as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import weakref

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    LockError,
    LockNotOwnedError,
    TimeoutError,  # noqa: A004
)

from redislock_fast._lease.majority_lease import QuorumLease
from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding
from redislock_fast._lease.telling import end_telling
from redislock_fast._lease.tenure import Tenure
from redislock_fast._procedures.lease import Keeper
from redislock_fast._procedures.redlock_renewal import QuorumTenure, reason_of_round
from redislock_fast._procedures.redlock_settings import RedlockSettings
from redislock_fast._procedures.steps import Ask, Sleep, Steps
from redislock_fast._protocol.majority import (
    AcquireRound,
    LookRound,
    ReacquireRound,
    ReleaseRound,
    Round,
    TakenRound,
    valid_s,
)
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._util.errors import LossReason
from redislock_fast._util.redis_py import own_copy, redis_error
from redislock_fast._util.times import added_ms, clock, drift_s, poll_seconds, wait_seconds
from redislock_fast._util.tokens import MARKER, new_token

__all__ = ["RedlockBase"]

_SILENT_ATTEMPTS = 3
"""So many attempts in a row without the votes of a majority end an `acquire` that would wait for ever."""

_dice = random.SystemRandom()  # the module's own is the user's, who may have seeded all contenders alike

_NO_RETRY_MENDS = (Refused, Redirected, AuthenticationError, AuthorizationError)


class RedlockBase(RedlockSettings, Keeper):
    """A Redlock without its servers. The parameters stand on the classes that users name."""

    # ---- what the caller holds ----

    @property
    def votes(self) -> tuple[bool | None, ...]:
        """How the servers have voted in the caller's last operation on this lock.

        By server: True for agreed, False for refused, None where no reply has come, or an error. A vote that comes
        after the outcome was certain is still noted here.
        """
        round_ = self._held().round
        return (None,) * len(self._servers) if round_ is None else tuple(round_.votes)

    @property
    def valid(self) -> bool:
        """Whether the caller's lease is certainly valid now, by the clock. Asks no server."""
        return self.remaining() > 0

    def remaining(self) -> float:
        """For how long the caller's lease is certainly valid from now, in seconds; 0.0 if it is not. Asks no server.

        0.0 too after a release of unknown outcome.
        """
        held = self._held()
        return 0.0 if self._is_released(held) else max(self._valid_until(held) - clock(), 0.0)

    @property
    def lost(self) -> bool:
        """Whether the lock was lost before it was released, as far as is known without asking the servers."""
        held = self._held()
        return held.token is not None and clock() >= self._valid_until(held)

    def _valid_until(self, local: Holding) -> float:
        """Until when the lock is certainly held, in the clock's seconds."""
        tenure = self._tenure_of(local)
        if tenure is not None:
            return -math.inf if tenure.loss is not None else tenure.deadline
        return -math.inf if local.quorum is None else local.quorum.valid_until

    def _is_released(self, local: Holding) -> bool:
        """Whether its release was called, and may have been executed although that failed."""
        return local.quorum is not None and local.quorum.releasing is not None

    def _lease(self, local: Holding, verb: str) -> QuorumLease:
        self._refuse_in_callback(verb, local)
        if local.quorum is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self._name)
        return local.quorum

    def _forget(self, local: Holding, token: bytes) -> None:
        """The lock is not held under this token any more."""
        tenure = local.tenure
        if tenure is not None and tenure.token == token:
            self._let_go(tenure)
            tenure.end()
            local.tenure = None
        if local.token == token:  # where the holding is shared, another caller may have acquired meanwhile
            local.token = local.quorum = None

    # ---- acquire ----

    def _acquiring(
        self,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        attempts: list[AcquireRound],
        task: asyncio.Task[object] | None = None,
    ) -> Steps:
        """Attempt until the lock is held or the time is up. Returns whether it is held.

        Args:
            local: the caller's holding.
            sleep: as for `acquire`, and so the next two; None for the lock's own setting.
            blocking: whether to wait.
            blocking_timeout: for how long, in seconds.
            attempts: gets the last attempt, for `_undo_unnoticed`: the holding may be shared.
            task: the task that holds the lock, to be cancelled for a loss; None in threads.
        """
        lease: QuorumLease | None = yield from self._attempting(local, sleep, blocking, blocking_timeout, attempts)
        if lease is None:
            return False
        if self._terms is not None:
            try:
                self._begin(self._terms, local, lease, task)
            except BaseException:  # no thread can be started: the lock is not held
                self._undo_unnoticed(local, attempts)
                raise
        local.quorum = lease
        local.hold(lease.token)
        return True

    def _attempting(
        self,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        attempts: list[AcquireRound],
    ) -> Steps:
        """Attempt until a majority agrees or the time is up. Returns the lease, yet to be noted, or None."""
        sleep = poll_seconds(self.sleep if sleep is None else sleep)
        blocking = self.blocking if blocking is None else blocking
        blocking_timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        deadline = math.inf
        if blocking_timeout is not None:
            deadline = clock() + wait_seconds(blocking_timeout, "blocking_timeout")
        silent = 0
        while True:
            token = new_token()[len(MARKER) :]
            local.round = attempt = AcquireRound(self._keys, token, self._ttl_ms, self._limit_s)
            attempts[:] = [attempt]
            yield Ask(attempt)
            if not attempt.undone:
                return QuorumLease(attempt)
            silent = 0 if attempt.answered else silent + 1
            # Two callers that have split the votes must not meet again: each waits for another time.
            pause_s = _dice.uniform(0, sleep)
            is_last = not blocking or clock() + pause_s >= deadline
            gives_up = is_last or _is_hopeless(attempt) or (silent >= _SILENT_ATTEMPTS and deadline == math.inf)
            if silent and gives_up:
                raise _trouble(attempt)
            if is_last:
                return None
            if deadline == math.inf:
                self._refuse_to_wait_for_itself(local, attempt)
            yield Sleep(pause_s)

    def _refuse_to_wait_for_itself(self, local: Holding, attempt: AcquireRound) -> None:
        tenure, token = local.tenure, local.token
        endless = self.thread_local and tenure is not None and tenure.is_endless
        if endless and token is not None and attempt.is_held_with(token):
            raise LockError("Cannot acquire a lock that its owner holds: it is renewed", lock_name=self._name)

    def _begin(self, terms: Terms, local: Holding, lease: QuorumLease, task: asyncio.Task[object] | None) -> None:
        """Begin to hold on options; before the lease is noted, or another owner might release it without a tenure."""
        before, local.tenure = local.tenure, None
        end_telling(self)
        if before is not None:
            self._end_lost(before, LossReason.DELETED)
        local.tenure = tenure = QuorumTenure(self, self._keys, lease, self._ttl_ms, terms, self._quorum)
        tenure.task = None if task is None else weakref.ref(task)
        self._keep(tenure)

    def _undo_unnoticed(self, local: Holding, attempts: list[AcquireRound]) -> None:
        """An interrupt came between the outcome and its return to the caller, so the lock is not held."""
        for attempt in attempts:
            self._forget(local, attempt.token)
            self._quorum.undo_round(attempt)

    # ---- release ----

    def _releasing(self, local: Holding) -> Steps:
        """Release everywhere.

        Raises:
            redis.exceptions.LockNotOwnedError: so many servers do not hold the token that no majority can have done so.
        """
        self._refuse_in_callback("release", local)
        lease = local.quorum
        if lease is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", lock_name=self._name)
        tenure = self._tenure_of(local)
        if tenure is not None:
            self._let_go(tenure)
            if not tenure.end():
                self._forget(local, tenure.token)
                raise self._lost_error("release", tenure)
            if tenure.expires_at is not None:
                lease.times = (lease.valid_until, min(lease.ends_at, tenure.expires_at))
        local.round = round_ = self._release_round(lease)
        yield Ask(round_)
        if not round_.refused and not round_.answered:
            raise _trouble(round_)
        self._forget(local, lease.token)
        if round_.refused:
            if tenure is None:
                raise self._lost("release")
            yield from self._raising_lost("release", tenure, by_release=True)

    def _release_round(self, lease: QuorumLease) -> ReleaseRound:
        votes = list(lease.refusals)
        doubtful = [False] * len(votes)
        before = lease.releasing
        if before is not None:  # what it has achieved counts, and what it may have achieved
            votes = [refusal if vote is None else vote for vote, refusal in zip(before.votes, votes, strict=True)]
            doubtful = list(before.sent)
        lease.releasing = ReleaseRound(self._keys, lease.token, lease.ends_at, self._limit_s, votes, doubtful)
        return lease.releasing

    # ---- extend, reacquire ----

    def _extending(self, local: Holding, additional_time: float, replace_ttl: bool) -> Steps:
        """Prolong the lease by a time, or set it to that."""
        add_ms = added_ms(additional_time, replace_ttl)
        lease = self._lease(local, "extend")
        left_ms = 0 if replace_ttl else max(math.ceil((lease.ends_at - clock()) * 1000), 0)
        yield from self._prolonging(local, lease, "extend", left_ms + add_ms)

    def _reacquiring(self, local: Holding) -> Steps:
        """Set the lease back to its whole ttl."""
        yield from self._prolonging(local, self._lease(local, "reacquire"), "reacquire", self._ttl_ms)

    def _prolonging(self, local: Holding, lease: QuorumLease, verb: str, ttl_ms: int) -> Steps:
        """Set the lease anew. Where it was lost, what is left of it is given back."""
        tenure = self._tenure_of(local)
        if tenure is not None:
            yield from self._prolonging_on_terms(local, tenure, lease, verb, ttl_ms)
        elif not (yield from self._setting_lease(local, lease, ttl_ms)):
            self._forget(local, lease.token)
            yield Ask(self._release_round(lease))
            raise self._lost(verb)

    def _prolonging_on_terms(self, local: Holding, tenure: Tenure, lease: QuorumLease, verb: str, ttl_ms: int) -> Steps:
        if tenure.loss is not None:
            raise self._lost_error(verb, tenure)
        try:
            with tenure.prolonged_by_hand(local, ttl_ms):
                lease.times = (tenure.deadline, lease.ends_at)
                try:
                    prolonged = yield from self._setting_lease(local, lease, ttl_ms)
                finally:  # as a lease of the usual ttl that is valid as long
                    local.lease = (lease.token, lease.valid_until + drift_s(self._ttl_ms / 1000))
        except GeneratorExit:  # the task was dropped: the garbage collector runs this, outside of the loop
            raise
        except BaseException:
            if tenure.loss is None:
                self._keep(tenure)  # it may have made the lease shorter
            raise
        if not prolonged or tenure.loss is not None:  # a loss that was told meanwhile stands
            self._quorum.undo([tenure.entry])
            yield from self._raising_lost(verb, tenure)
        self._keep(tenure)

    def _setting_lease(self, local: Holding, lease: QuorumLease, ttl_ms: int) -> Steps:
        """Set the lease anew. Returns False where it was lost.

        A majority that agrees when the lease was over prolongs nothing.
        """
        limit_s = max(min(self._limit_s, valid_s(ttl_ms)), 0.0)
        local.round = round_ = ReacquireRound(self._keys, lease.token, ttl_ms, limit_s, list(lease.refusals))
        if clock() < lease.valid_until:
            before = lease.shorten(ttl_ms)
            yield Ask(round_)
            if round_.agreed and clock() < lease.valid_until:
                lease.renew(round_, before)
                return True
            if not round_.refused and clock() < lease.valid_until:
                raise _trouble(round_)
        return False

    # ---- look ----

    def _looking(self, local: Holding, token: bytes) -> Steps:
        """Whether a majority holds the token; any value, for an empty one."""
        local.round = round_ = LookRound(self._keys, token, self._limit_s)
        yield Ask(round_)
        if not round_.decided:
            raise _trouble(round_)
        return round_.agreed

    # ---- loss ----

    def _lost(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self._name)

    def _finding_out(self, tenure: Tenure) -> Steps:
        """Why it is lost. Sends `GET name` where the lease has not ended."""
        if clock() >= tenure.deadline:
            return LossReason.EXPIRED
        round_ = TakenRound(self._keys, tenure.token, self._limit_s)
        with contextlib.suppress(Exception):  # then nothing is known
            yield Ask(round_)
        return reason_of_round(round_)


# ---- errors ----


def _is_hopeless(round_: Round) -> bool:
    """Whether no majority can vote because of errors that no retry mends."""
    errors = sum(isinstance(error, _NO_RETRY_MENDS) for error in round_.errors)
    return errors > len(round_.votes) // 2


def _trouble(round_: Round) -> Exception:
    """The error of a round with too few votes: the gravest of the servers' errors, or how many servers have voted."""
    errors = [error for error in round_.errors if error is not None]
    for error in errors:
        if isinstance(error, _NO_RETRY_MENDS):
            return redis_error(str(error)) if isinstance(error, Refused | Redirected) else own_copy(error)
    count = len(round_.votes)
    voted = count - round_.votes.count(None)
    message = f"only {voted} of {count} servers have voted within {round_.limit_s:g} s"
    if not errors:
        return TimeoutError(message)
    if isinstance(errors[0], NotExecuted):
        return redis_error(str(errors[0]))
    return ConnectionError(f"{message}; one of the others: {errors[0]}")
