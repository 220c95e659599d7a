"""The operations of a `Redlock`, step by step, for threads and for tasks.

Rules:
- Every attempt has a token of its own, so what an earlier attempt has left is never mistaken for it. The tokens lack
  the marker of `_util/tokens.py`: a Redlock has no queue, since no single server can hand it over.
- Where too many servers refuse, the result is negative. Where too many do not reply, that is an error, unless there is
  time for another attempt.
- A lock that is held on options has a `Lease`, which says until when it is held. Without one, its `MajorityLease` does.

Thread safety: see `_lease/owner.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import weakref
from dataclasses import dataclass

from redis.exceptions import ConnectionError, TimeoutError

from redislock_fast._lease.callbacks import end_callback
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.logs import log_if_long
from redislock_fast._lease.metrics import end_count, report_call, waiting_of
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.lease import (
    UNLOCKED,
    end_lost,
    leave_once,
    lost_error,
    raise_lost,
    reenter,
    refuse_in_callback,
    report_failure,
    report_release,
    unlocked_error,
    would_wait_for_itself,
)
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._redlock.lease import MajorityLease, RedlockLease, majority_of, new_standing_of, standing_of
from redislock_fast._redlock.lock import RedlockBase
from redislock_fast._redlock.quorum import Owing, ask_servers
from redislock_fast._redlock.rounds import (
    AcquireRound,
    MajorityRound,
    ReacquireRound,
    ReadRound,
    ReleaseRound,
    valid_s,
)
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.redis_py import BAD_CREDENTIALS, own_copy, redis_error
from redislock_fast._util.times import Limit, added_ms, blocks, clock, drift_s, poll_seconds, wait_seconds
from redislock_fast._util.tokens import MARKER, new_token

_SILENT_ATTEMPTS = 3
"""After so many attempts in a row without the votes of a majority, an `acquire` without a deadline raises."""

_random = random.SystemRandom()  # a user may have seeded the module's own alike in all contenders

_PERMANENT = (Refused, Redirected, *BAD_CREDENTIALS)


def owned_majority(lock: RedlockBase, owner: Owner, verb: str) -> MajorityLease:
    """The lease that the owner holds.

    Raises:
        redis.exceptions.LockError: it holds nothing, or is in a callback of a loss.
    """
    refuse_in_callback(lock, verb, owner)
    majority = majority_of(owner)
    if majority is None:
        raise unlocked_error(lock, f"Cannot {verb} an unlocked lock")
    return majority


def forget(lock: RedlockBase, owner: Owner, token: bytes) -> None:
    """Note that the lock is not held under this token any more."""
    lease = owner.lease
    if lease is not None and lease.token == token:
        lock._let_go(lease)
        lease.end()
        end_count(lease)
        owner.lease = None
    if owner.token == token:  # where the owner is shared, another caller may have acquired meanwhile
        owner.token = new_standing_of(owner).majority = None


# ---- acquire ----


@dataclass(slots=True)
class RedlockCall:
    """One acquire, made by the public method and handed down alone. It belongs to the thread or task that has made it.

    Attributes:
        owner: the caller's, in which the acquire is noted.
        sleep: the parameter of `acquire`; None: the lock's own setting. So are the next two.
        blocking: see there.
        blocking_timeout: see there.
        task: the task that will hold the lock; None in threads.
        attempt: the attempt under way, or that has succeeded, which nobody else cleans up: the owner may be shared.
    """

    owner: Owner
    sleep: float | None = None
    blocking: bool | None = None
    blocking_timeout: float | None = None
    task: asyncio.Task[object] | None = None
    attempt: AcquireRound | None = None


def acquire_redlock(lock: RedlockBase, call: RedlockCall) -> Steps:
    """Acquire, and do what the options ask for. Returns whether the lock is held. See `clean_up_after`."""
    options, owner = lock._options, call.owner
    majority: MajorityLease | None
    if options is None:
        majority = yield from acquire_until(lock, call)
    elif reenter(lock, owner):
        return True
    else:
        majority = yield from acquire_on_options(lock, options, call)
    if majority is None:
        return False
    new_standing_of(owner).majority = majority
    owner.hold(majority.token)
    return True


def acquire_on_options(lock: RedlockBase, options: Options, call: RedlockCall) -> Steps:
    """`acquire_until`, with the beginning of the lease and a report of the outcome. Returns the lease or None."""
    if options.adaptive is not None:
        lock._set_ttl(options.adapted_ms(lock._name))
    asked_at = clock()
    try:
        with options.guarded():
            majority = yield from acquire_until(lock, call)
        if majority is not None:
            begin_lease(lock, options, call, majority, asked_at)
    except BaseException as error:
        report_failure(lock, options, standing_of(call.owner).retries + 1, asked_at, error)
        raise
    if majority is None:
        report_failure(lock, options, standing_of(call.owner).retries + 1, asked_at, None)
    return majority


def acquire_until(lock: RedlockBase, call: RedlockCall) -> Steps:
    """Attempt until a majority agrees or the time is up. Returns the lease or None; the caller must note it."""
    sleep_s = poll_seconds(lock.sleep if call.sleep is None else call.sleep)
    waits = blocks(lock.blocking if call.blocking is None else call.blocking)
    wait_s = lock.blocking_timeout if call.blocking_timeout is None else call.blocking_timeout
    asked_at = clock()
    limit = Limit(None if wait_s is None else wait_seconds(wait_s, "blocking_timeout"))
    standing = new_standing_of(call.owner)
    silent = standing.retries = 0
    has_waited = False
    with contextlib.ExitStack() as reports:
        while True:
            token = new_token()[len(MARKER) :]
            standing.round = attempt = AcquireRound(lock._keys, token, lock._ttl_ms, lock._limit_s)
            call.attempt = attempt
            yield ask_servers(lock._quorum, attempt)
            if not attempt.given_up:
                return MajorityLease(attempt)
            call.attempt = None  # it was cleaned up
            silent = 0 if attempt.answered else silent + 1
            # Two callers that have split the votes must not meet again: each waits for another time.
            pause_s = _random.uniform(0, sleep_s)
            is_last = not waits or not limit.allows(pause_s)
            is_patient = limit.deadline is None
            gives_up = is_last or _is_hopeless(attempt) or (silent >= _SILENT_ATTEMPTS and is_patient)
            if silent and gives_up:
                raise error_of(lock, attempt, asked_at)
            if is_last:
                return None
            if is_patient:
                refuse_to_wait_for_itself(lock, call.owner, attempt)
            if not has_waited:
                reports.enter_context(waiting_of(lock._options, lock._name, "polling"))
                has_waited = True
                limit.begin_wait()
            log_if_long(lock._keys[0], limit, "another owner")
            yield Do("sleep", pause_s)
            standing.retries += 1


def refuse_to_wait_for_itself(lock: RedlockBase, owner: Owner, attempt: AcquireRound) -> None:
    lease, token = owner.lease, owner.token
    endless = lock.thread_local and lease is not None and lease.is_endless
    if endless and token is not None and attempt.is_held_with(token):
        raise would_wait_for_itself(lock._name, "task" if lock._is_for_tasks else "thread")


def begin_lease(
    lock: RedlockBase, options: Options, call: RedlockCall, majority: MajorityLease, asked_at: float
) -> None:
    """Begin the lease of a lock that is held on options.

    This comes before the token is noted: another caller that shares the owner must not release the lock without it.
    """
    owner, task = call.owner, call.task
    before, owner.lease = owner.lease, None
    end_callback(lock)
    if before is not None:
        end_lost(lock, before, LossReason.DELETED)
    owner.lease = lease = RedlockLease(lock, lock._keys, majority, options, lock._quorum)
    lease.task = None if task is None else weakref.ref(task)
    lock._keep(lease)
    waited_s = lease.acquired_at - asked_at
    lease.report_begin(waited_s, standing_of(owner).retries + 1)
    report_call(options, "acquired {} after", lock._name, waited_s, lease.token)


def clean_up_after(lock: RedlockBase, call: RedlockCall) -> None:
    """Clean up after an acquire that has raised: the lock is not held.

    That may be an interrupt between the outcome and its return to the caller; or no thread can be started.
    """
    if call.attempt is not None:
        forget(lock, call.owner, call.attempt.token)
        lock._quorum.clean_up_round(call.attempt)


# ---- release ----


def release_redlock(lock: RedlockBase, owner: Owner) -> Steps:
    """Release the lock at all servers, as `release` does."""
    refuse_in_callback(lock, "release", owner)
    majority = majority_of(owner)
    if majority is None:
        raise unlocked_error(lock, UNLOCKED)
    lease = owner.held_lease
    if lease is not None:
        if leave_once(lock, lease):
            return
        lock._let_go(lease)
        if not lease.end():
            forget(lock, owner, lease.token)
            report_release(lock, lease, False)
            raise lost_error(lock, "release", lease)
        if lease.expires_at is not None:
            majority.times = (majority.valid_until, min(majority.ends_at, lease.expires_at))
    new_standing_of(owner).round = round_ = release_round(lock, majority)
    try:
        yield ask_servers(lock._quorum, round_)
    except asyncio.CancelledError:  # the caller has left the release, which goes on
        owner.left = majority.token
        if lease is not None:
            owner.lease = None
            report_release(lock, lease, True)
        raise
    if not round_.refused and not round_.answered:
        raise error_of(lock, round_)
    forget(lock, owner, majority.token)
    if lease is not None:
        report_release(lock, lease, not round_.refused)
    if round_.refused:
        if lease is None:
            raise lock._not_owned("release")
        yield from raise_lost(lock, "release", lease, by_release=True)


def release_round(lock: RedlockBase, majority: MajorityLease) -> ReleaseRound:
    votes = list(majority.refusals)
    before, doubtful = majority.releasing, False
    if before is not None:  # its votes count. Servers without a vote may have executed it, or were cleaned up.
        doubtful = before.may_be_done
        votes = [refusal if vote is None else vote for vote, refusal in zip(before.votes, votes, strict=True)]
    majority.releasing = ReleaseRound(lock._keys, majority.token, majority.ends_at, lock._limit_s, votes, doubtful)
    return majority.releasing


# ---- extend, reacquire ----


def extend_redlock(lock: RedlockBase, owner: Owner, additional_time: float, replace_ttl: bool) -> Steps:
    """Add to the lease, or set its ttl."""
    add_ms = added_ms(additional_time, replace_ttl)
    majority = owned_majority(lock, owner, "extend")
    left_ms = 0 if replace_ttl else max(math.ceil((majority.ends_at - clock()) * 1000), 0)
    yield from prolong(lock, owner, majority, "extend", left_ms + add_ms)


def reacquire_redlock(lock: RedlockBase, owner: Owner) -> Steps:
    """Set the lease back to its whole ttl."""
    yield from prolong(lock, owner, owned_majority(lock, owner, "reacquire"), "reacquire", lock._ttl_ms)


def prolong(lock: RedlockBase, owner: Owner, majority: MajorityLease, verb: str, ttl_ms: int) -> Steps:
    """Set the ttl of the lease. Where the lock was lost, the servers that still hold it are asked to release it."""
    lease = owner.held_lease
    if lease is not None:
        yield from prolong_on_options(lock, owner, lease, majority, verb, ttl_ms)
    elif not (yield from set_lease(lock, owner, majority, ttl_ms)):
        forget(lock, owner, majority.token)
        yield ask_servers(lock._quorum, release_round(lock, majority))
        raise lock._not_owned(verb)


def prolong_on_options(
    lock: RedlockBase, owner: Owner, lease: Lease, majority: MajorityLease, verb: str, ttl_ms: int
) -> Steps:
    if lease.loss is not None:
        raise lost_error(lock, verb, lease)
    try:
        with lease.prolonged_by_hand(owner, ttl_ms):
            majority.times = (lease.deadline, majority.ends_at)
            try:
                prolonged = yield from set_lease(lock, owner, majority, ttl_ms)
            finally:  # the drift of the lease's ttl is added, which `Lease.deadline` subtracts
                owner.expiry = (majority.token, majority.valid_until + drift_s(majority.ttl_ms / 1000))
    except GeneratorExit:  # the task was dropped: the garbage collector runs this, outside of the loop
        raise
    except BaseException:
        if lease.loss is None:
            lock._keep(lease)  # it may have made the lease shorter
        raise
    if not prolonged or lease.loss is not None:  # a loss that was reported meanwhile stands
        lock._quorum.clean_up([lease.entry])
        yield from raise_lost(lock, verb, lease)
    lock._keep(lease)


def set_lease(lock: RedlockBase, owner: Owner, majority: MajorityLease, ttl_ms: int) -> Steps:
    """Set the ttl of the lease. Returns False where the lock was lost.

    Where a majority agrees after the end of the lease, the lock was lost.
    """
    limit_s = max(min(lock._limit_s, valid_s(ttl_ms)), 0.0)
    round_ = ReacquireRound(lock._keys, majority.token, ttl_ms, limit_s, list(majority.refusals))
    new_standing_of(owner).round = round_
    if clock() < majority.valid_until:
        before = majority.shorten(ttl_ms)
        yield ask_servers(lock._quorum, round_)
        if round_.agreed and clock() < majority.valid_until:
            majority.renew(round_, before)
            return True
        if not round_.refused and clock() < majority.valid_until:
            raise error_of(lock, round_)
    return False


# ---- query ----


def read_redlock(lock: RedlockBase, owner: Owner, token: bytes) -> Steps:
    """Returns whether a majority has the key with this token, or with any value for an empty token."""
    new_standing_of(owner).round = round_ = ReadRound(lock._keys, token, lock._limit_s)
    yield ask_servers(lock._quorum, round_)
    if not round_.decided:
        raise error_of(lock, round_)
    return round_.agreed


def error_of(lock: RedlockBase, round_: MajorityRound, asked_at: float | None = None) -> Exception:
    """The error of a round with too few votes: that with which a majority has replied, or how many servers have voted.

    `asked_at` is when the caller asked, in the clock's seconds, where the round was not the first.
    """
    count = len(round_.votes)
    errors = [error for error in round_.errors if error is not None and not isinstance(error, Owing)]
    replies = [error for error in errors if isinstance(error, (*_PERMANENT, NotExecuted))]
    if len(replies) > count // 2:
        error = next((reply for reply in replies if isinstance(reply, _PERMANENT)), replies[0])
        return own_copy(error) if isinstance(error, BAD_CREDENTIALS) else redis_error(str(error))
    voted = count - round_.votes.count(None)
    took_s = clock() - (round_.began if asked_at is None else asked_at)
    message = (
        f"the lock {shown(lock._name)}: only {voted} of {count} servers have voted within {round_.limit_s:g} s, "
        f"and the call took {took_s:.3f} s"
    )
    if not errors:
        return TimeoutError(message)
    return ConnectionError(f"{message}; the errors of others: {'; '.join(dict.fromkeys(map(str, errors)))}")


def _is_hopeless(round_: MajorityRound) -> bool:
    """Whether no majority can vote because of permanent errors."""
    errors = sum(isinstance(error, _PERMANENT) for error in round_.errors)
    return errors > len(round_.votes) // 2
