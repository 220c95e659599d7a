"""How a lock is acquired on options: it is reentered, or acquired and completed, and gets a lease."""

from __future__ import annotations

from typing import Any

from redis.exceptions import (
    TimeoutError,  # noqa: A004  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.metrics import report
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner, PendingOwner
from redislock_fast._procedures.acquisition import acquire_until
from redislock_fast._procedures.call import Call
from redislock_fast._procedures.first_request import hold_on_options
from redislock_fast._procedures.lease import (
    forget_lease,
    reenter,
    report_failure,
)
from redislock_fast._procedures.lock import LockBase
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.fenced import MANY, AcquireFenced, Fence
from redislock_fast._protocol.replicas import Replicate
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import NotReplicatedError, shown
from redislock_fast._util.times import (
    GRACE_S,
    Limit,
    clock,
)

__all__ = []

_WAIT_GRACE_S = GRACE_S / 2
"""How long replicas may take after the acquire's deadline; the other half of the grace is for the server's reply."""

# ---- acquire ----


def acquire_lock(lock: LockBase, call: Call) -> Steps:
    """The steps of an acquire. They return whether the lock is held."""
    call.left = []
    if lock._options is None:
        return acquire_plain(lock, call)
    return acquire_on_options(lock, lock._options, call)


def acquire_plain(lock: LockBase, call: Call) -> Steps:
    """The steps of an acquire without what its options ask for once the lock is held."""
    return lock._linger.acquire(lock, call) if lock._listens else acquire_until(lock, call)


# ---- on options ----


def acquire_on_options(lock: LockBase, options: Options, call: Call) -> Steps:
    """Acquire, and do what the options ask for. Returns whether the lock is held."""
    owner, token = call.owner, call.own_token
    if call.attempt is None and reenter(lock, owner, token):
        return True
    adapt(lock, options)
    asked_at = call.sent_at or clock()
    pending = call.owner = PendingOwner(owner)
    before = pending.token
    try:
        with options.guarded():
            acquired = yield from acquire_plain(lock, call)
            if acquired and not (yield from complete_acquire(lock, options, pending, call.deadline)):
                call.left += drop_failed(lock, owner, pending, before, token)
                acquired = False
            if acquired and not (call.begins and hold_by_steps(lock, options, owner, pending, asked_at)):
                lock._keep(lock._begin(options, owner, pending, asked_at, call.task))
    except BaseException as error:  # after any error, the lock is not held
        call.left += drop_failed(lock, owner, pending, before, token)
        report_failure(lock, options, pending, asked_at, error)
        raise
    if not acquired and lock._at_least_s is None:
        report_failure(lock, options, pending, asked_at, None)
    elif not acquired:  # a run of a job that is skipped: nothing has failed
        report(options.observers, "record_skip", lock.name, clock() - asked_at)
    return acquired


def hold_by_steps(lock: LockBase, options: Options, owner: Owner, pending: PendingOwner, asked_at: float) -> bool:
    """Hold a lock whose first request might have been all that it needs; see `hold_on_options`."""
    token, ttl_ms = pending.token, lock._ttl_ms
    assert token is not None
    expiry = (token, pending.expires_at(token))
    renewer = lock._renewer() if options.watches else None
    if not hold_on_options(lock, options, owner, expiry, ttl_ms, pending.fence, renewer, asked_at, pending.retries + 1):
        return False
    owner.contended = pending.contended
    return True


def adapt(lock: LockBase, options: Options) -> None:
    """Set the ttl by the hold times. Half of it at least is left after the wait for the replicas."""
    if options.adaptive is not None:
        ttl_ms = max(options.adaptive.ttl_ms(lock._name), 2 * options.wait_ms)
        lock._ttl_ms = ttl_ms
        lock._timeout = ttl_ms / 1000


def complete_acquire(lock: LockBase, options: Options, owner: Owner, limit: Limit) -> Steps:
    """Do what the options ask for once the lock is held: a certain lease, a fence, replicas.

    Returns:
        False where the time was up before, after another owner had the lock.

    Raises:
        LockLostError: the lock was lost before that was done.
        NotReplicatedError: too few replicas had the lock in time.
        redis.exceptions.TimeoutError: no reply in time, and no reply said that another owner has the lock.
    """
    token = owner.token
    assert token is not None
    try:
        if lock._ttl_ms is not None and owner.expires_at(token) is None:  # acquired by a hook, at an unknown time
            yield from confirm_lease(lock, owner, token, lock._ttl_ms, limit)
        owner.fence = None
        if options.fencing:
            owner.fence = yield from fetch_fence(lock, owner, token, limit)
        if options.wait_replicas:
            yield from wait_for_replicas(lock, options, owner, token, limit)
    except TimeoutError:
        if not limit.is_settled:
            raise
        return False
    return True


def fetch_fence(lock: LockBase, owner: Owner, token: bytes, limit: Limit) -> Steps:
    """Returns the fence of the lock."""
    attempt, lease = owner.attempt, None if owner.cached is None else owner.cached.lease
    fence = None if lease is None else lease.take_fence()
    if fence is not None:
        return fence
    if isinstance(attempt, AcquireFenced) and attempt.result and attempt.token == token:
        first = attempt.fence
    else:  # the lock was handed over, or acquired by a hook
        numbering = Fence(lock._key, token, 1 if lease is None else MANY)
        yield Do("execute", numbering, limit.left_s())
        if not numbering.result:
            raise lock._lost_at_once()
        first = numbering.fence
    if lease is not None:
        lease.fences = range(first + 1, first + MANY)
    return first


def wait_for_replicas(lock: LockBase, options: Options, owner: Owner, token: bytes, limit: Limit) -> Steps:
    """Wait for the replicas, no longer than the lease and the acquire's deadline allow."""
    ttl_ms = lock._ttl_ms
    assert ttl_ms is not None
    expires_at = owner.expires_at(token)
    left_s = ttl_ms / 1000 if expires_at is None else max(expires_at - clock(), 0.0)
    wait_ms = options.wait_ms
    time_left_s = limit.left_s()
    if time_left_s is not None:
        left_s = min(left_s, time_left_s)
        wait_ms = max(min(wait_ms, int(1000 * (time_left_s + _WAIT_GRACE_S))), 1)
    wait_s = wait_ms / 1000
    replicate = Replicate(lock._key, token, ttl_ms, owner.contended == token, options.wait_replicas, wait_ms)
    try:
        yield Do("execute_dedicated", replicate, left_s, wait_s)
    except TimeoutError:
        if not limit.is_over:
            raise
    else:  # servers end a WAIT up to 0.1 s late, so the deadline may come first
        if not replicate.held:
            raise lock._lost_at_once()
    if not replicate.result:
        had = f"{replicate.replicas} of {options.wait_replicas} replicas had the lock within {wait_s} s"
        raise NotReplicatedError(f"{had}: {shown(lock.name)}", lock_name=lock.name, replicas=replicate.replicas)
    owner.expiry = (token, replicate.sent_at + ttl_ms / 1000)


def confirm_lease(lock: LockBase, owner: Owner, token: bytes, ttl_ms: int, limit: Limit) -> Steps:
    confirming = Reacquire(lock._key, token, ttl_ms)
    yield Do("execute", confirming, limit.left_s())
    if not confirming.result:
        raise lock._lost_at_once()
    owner.expiry = (token, confirming.sent_at + ttl_ms / 1000)


def drop_failed(
    lock: LockBase, owner: Owner, pending: PendingOwner, before: bytes | None, own_token: Any
) -> list[tuple[bytes, bytes]]:
    """Drop what a failed acquire has got. Returns what must be cleaned up.

    `before` is the token that was held before, `own_token` the token that the caller passed, or None.
    """
    token = pending.token
    if token is None or token == before:
        return []
    is_given_back = pending.give_cached_back()
    lease = owner.lease
    if lease is not None and lease.token == token:
        forget_lease(lock, owner, lease)
    if owner.token == token:  # where the token is shared, another may have acquired meanwhile
        owner.token = None
    attempt = pending.attempt
    took = attempt is not None and attempt.token == token and attempt.took
    if is_given_back:  # a cleanup beside its release would look like a loss
        return []
    return [(lock._key, token)] if own_token is None or took else []
