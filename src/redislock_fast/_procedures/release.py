"""How a lock is released, step by step."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.callbacks import current_callback
from redislock_fast._lease.holding import Held, Holding
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.metrics import report_call, report_end_later
from redislock_fast._lease.owner import Owner
from redislock_fast._pipe.base import NOT_ASKED, Args
from redislock_fast._procedures.lease import (
    UNLOCKED,
    leave_once,
    lost_error,
    raise_lost,
    refuse_in_callback,
    report_release,
    unlocked_error,
)
from redislock_fast._procedures.lock import RELEASE, LockBase, is_replaced
from redislock_fast._protocol.commands import HANDED_OVER, Reacquire, Release
from redislock_fast._protocol.operation import FirstRequest
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.times import clock, positive_ms
from redislock_fast._util.tokens import TokenSource
from redislock_fast._util.tracing import OWN, OWN_ASYNC, providers

_Client = redis.Redis

_AsyncClient = redis.asyncio.Redis

_LOOK_S = 0.002
"""How long to wait between two looks at a renewal that is under way."""


# ---- the first request ----


class ReleaseCall(FirstRequest):
    """One release of a lock without hooks. It belongs to the thread or task that has made it.

    Attributes:
        kind: the operation.
        token: with which it is held.
        contended: whether the first request hands the lock over; see `Release`.
        holding: what the owner has held on options; None where it never has.
        held: what it held when the release began.
    """

    kind: Any
    token: bytes
    contended: bool
    holding: Holding | None
    held: Held | None

    def request_on(self, connection: Any, tokens: TokenSource) -> Args:  # noqa: ARG002  # as for an acquire
        """The first request."""
        self.request, self.ours = self.kind.first_request(connection.capabilities, self.key, self.token, self.contended)
        self.connection = connection
        return self.request


def new_release(lock: LockBase, owner: Owner, token: object) -> ReleaseCall | None:
    """The call of a release whose first request may leave before anything else is done, as mostly.

    None where a hook is overridden that concerns it, something observes redis-py's commands, the key may linger, or the
    lease has to be asked: then the steps decide.
    """
    try:
        if not (
            type(token) is bytes
            and owner.releasing is None
            and lock._at_least_s is None
            and lock.__class__.lua_release is RELEASE
            and lock.__class__.do_release is lock._own_hooks.do_release
            and not (lock.__dict__ and lock._overrides_here())
            and _Client.execute_command is OWN
            and _AsyncClient.execute_command is OWN_ASYNC
            and "execute_command" not in lock._redis.__dict__
            and providers._observability_instance._provider_manager is None
        ):
            return None
    except AttributeError:  # as for an acquire
        return None
    call = ReleaseCall()
    call.holding = holding = owner.holding
    call.held = held = None if holding is None else holding.held
    if holding is not None:
        if held is None:
            if holding.lease is not None:
                return None
        elif not (current_callback() is None and holding.begin_release(token)):
            return None
    call.key = lock._key
    call.kind = lock._release_kind
    call.token = token
    call.contended = owner.contended == token
    call.wait_s = None
    return call


def settle_release(lock: LockBase, owner: Owner, call: ReleaseCall) -> None:
    """End what the owner holds: the first request has released the lock."""
    if call.ours == HANDED_OVER and call.connection.registry is not None:
        call.connection.registry.note_hand_over(lock._key, True)
    holding, held = call.holding, call.held
    if holding is not None and holding.held is held:
        holding.held = None
    if owner.token == call.token:  # where the token is shared, another caller may have acquired meanwhile
        owner.token = None
    if holding is not None and held is not None and holding.counted is not None:
        held_s = clock() - held[5]
        holding.counted[0].released(holding, held_s, True)
        if held[4].logs_calls:
            report_call(held[4], "released {}, held for", lock._name, held_s, call.token)


def release_from(
    lock: LockBase, owner: Owner, call: ReleaseCall, reply: Any, interruption: BaseException | None = None
) -> Release:
    """The operation that goes on from the outcome of the first request, which has not settled the release.

    Raises:
        BaseException: the interruption, where it came before the request left.
    """
    connection, call.connection = call.connection, None
    operation = release_of(lock, call.token, owner)
    if connection is not None and reply is not NOT_ASKED:
        first = (connection, reply, interruption)
        operation.begin(call.request, connection.capabilities, call.sent_at, first)
    elif interruption is not None:
        raise interruption
    return operation


# ---- the steps ----


def may_release(lock: LockBase, owner: Owner, lease: Lease) -> bool:
    """Whether a release must be sent. A lost lock is forgotten.

    Raises:
        LockLostError: the lock was lost.
    """
    refuse_in_callback(lock, "release", owner)
    if leave_once(lock, lease):
        return False
    lock._let_go(lease)
    if not lease.end():
        if owner.token == lease.token:
            owner.token = None
            owner.forget_cached()
        end_lease(lock, owner, lease, False)
        raise lost_error(lock, "release", lease)
    owner.expiry = (lease.token, lease.expires_at)
    if lease.contended:
        owner.contended = lease.token
    return True


def end_lease(lock: LockBase, owner: Owner, lease: Lease, released: bool) -> None:
    """Report how long the lock was held, for metrics and the adaptive ttl."""
    if owner.lease is lease:
        owner.lease = None
    report_release(lock, lease, released)


def release_lock(lock: LockBase, owner: Owner, sent: Release | None = None) -> Steps:
    """Release the lock that the caller holds. `sent`: its request has been sent already, without hooks."""
    token = owner.token if sent is None else sent.token
    if token is None:
        refuse_in_callback(lock, "release", owner)
        raise unlocked_error(lock, UNLOCKED)
    lease = owner.lease if sent is None or owner.token == token else None
    if lease is not None and not may_release(lock, owner, lease):
        return
    is_cached, expiry, release = owner.cached is not None, owner.expiry, object()
    holding = owner.holding
    try:
        if lease is not None and not lease.begin_release(release):
            raise unlocked_error(lock, UNLOCKED)  # a caller that shares the lock object releases it
        if not (yield from ask_release(lock, owner, token, sent)):
            raise lock._not_owned("release")
        # As `_forget_released`, but without a call, in which an interrupt could come: the verdict would be lost.
        if owner.token == token and (owner.expiry is expiry or not is_cached):
            if holding is not None and holding.lease is lease:
                # From now on, the holding ends with the lease object at the latest.
                holding.held = holding.lease = None
            owner.token = None
            if is_cached:
                owner.forget_cached()
    except LockNotOwnedError as error:
        forget_released(owner, token, expiry, is_cached)
        if lease is not None:
            end_lease(lock, owner, lease, False)
            yield from raise_lost(lock, "release", lease, error, by_release=True)
        raise
    except BaseException:
        end_failed_release(lock, owner, lease, token, release)
        raise
    if lease is not None:
        end_lease(lock, owner, lease, True)
    end_count_later(owner)


def release_what(lock: LockBase, owner: Owner, holding_id: object) -> Steps:
    """`release_lock`, of what the owner held when that was called, though it may hold the lock anew by now."""
    if owner.token is not None and owner.holding_id != holding_id:
        raise lock._not_owned("release")
    yield from release_lock(lock, owner)


def ask_release(lock: LockBase, owner: Owner, token: bytes, sent: Release | None) -> Steps:
    """Release by the token, or go on with a release that has begun. Returns whether the lock was held with it."""
    if sent is not None:
        return (yield from execute_release(lock, sent, owner))
    lease, at_least_s = owner.lease, lock._at_least_s
    if lease is not None and at_least_s is not None:
        while lease.renewing:  # executed after the request below, it would set another ttl
            yield Do("sleep", _LOOK_S)
        rest_s = lease.acquired_at + at_least_s - clock()
        if rest_s > 0:
            keeping = Reacquire(lock._key, token, positive_ms(rest_s, "at_least"), lease.contended)
            yield Do("execute", keeping)
            return keeping.result
    if lock._is_overridden("do_release"):
        yield from lock._call_hook(owner, lock.do_release, token)
        return True
    return (yield from release_token(lock, token, owner))


def end_failed_release(lock: LockBase, owner: Owner, lease: Lease | None, token: bytes, release: object) -> None:
    """End a release that has an unknown outcome for its caller, or was interrupted as its outcome was noted."""
    if lease is not None:
        lease.release_failed(release)
        if owner.left == token:  # the caller has left the release, which goes on
            end_lease(lock, owner, lease, True)
    end_count_later(owner)


def end_count_later(owner: Owner) -> None:
    """Have a lock that is released count as held no more, where an interrupt came as that was reported."""
    holding = owner.holding
    if holding is not None and holding.held is None and holding.counted is not None:
        report_end_later(holding.counted)


def forget_released(owner: Owner, token: bytes, expiry: object, is_cached: bool) -> None:
    """Note that the lock was released. Where the owner is shared, another caller may have acquired meanwhile.

    With a key of the cache, that has the same token, but another `expiry`.
    """
    if owner.token == token and (owner.expiry is expiry or not is_cached):
        owner.token = None
        owner.forget_cached()


def release_for_caller(lock: LockBase, expected_token: Any) -> Steps:
    """Release by token, for a caller of `do_release`."""
    if not (yield from release_token(lock, expected_token, lock._acting() or lock._held())):
        raise lock._not_owned("release")


def release_token(lock: LockBase, expected_token: Any, owner: Owner) -> Steps:
    """Release by token. Returns whether the lock was held with it."""
    if owner.cached is not None and lock._has_own_hooks() and owner.cached.is_here:
        return lock._linger.release(lock, owner)
    if is_replaced(lock.lua_release, RELEASE):
        return (yield from call_script(lock, lock.lua_release, [expected_token]))
    operation = release_of(lock, lock._encoded(expected_token), owner)
    return (yield from execute_release(lock, operation, owner))


def call_script(lock: LockBase, script: Any, args: list[Any]) -> Steps:
    """Run a script that a user has set for this lock. Returns whether it says yes."""
    return bool((yield Do("call", partial(script, keys=[lock.name], args=args, client=lock.redis))))


def execute_release(lock: LockBase, operation: Release, owner: Owner) -> Steps:
    """Returns whether the lock was held with the operation's token."""
    token, expires_at = operation.token, operation.expires_at
    try:
        yield Do("execute", operation)
        if operation.handed_over is not None:
            lock._transport.note_hand_over(lock._key, operation.handed_over)
    except BaseException as error:
        owner.note_release(operation)
        if isinstance(error, asyncio.CancelledError):
            # A cancelled release runs to its end, even if nothing was sent yet. A second call finds it done.
            if not operation.unsettled and (expires_at is None or clock() < expires_at):
                owner.releasing = token
            owner.left = token
            lock._transport.clean_up([(lock._key, token)])
        raise
    return owner.is_released(operation)


def release_of(lock: LockBase, token: bytes, owner: Owner) -> Release:
    """The release of what is held with this token."""
    operation: Release = lock._release_kind(
        lock._key, token, owner.expires_at(token), owner.releasing == token, owner.contended == token
    )
    return operation
