"""The first request of an acquire or a release, which mostly settles it: before it, and after its reply."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import redis
import redis.asyncio

from redislock_fast._lease.callbacks import current_callback
from redislock_fast._lease.holding import Holding
from redislock_fast._lease.metrics import end_count, report_call
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner
from redislock_fast._pipe.base import NOT_ASKED
from redislock_fast._procedures.call import Call, ReleaseCall
from redislock_fast._procedures.lease import (
    forget_lease,
)
from redislock_fast._procedures.lock import RELEASE, LockBase, hooks_of
from redislock_fast._procedures.release import release_of, report_end
from redislock_fast._protocol.commands import HANDED_OVER, Release
from redislock_fast._protocol.fenced import fence_given
from redislock_fast._util import fork
from redislock_fast._util.times import (
    FOREVER_S,
    Limit,
    clock,
)
from redislock_fast._util.tracing import OWN, OWN_ASYNC, providers

__all__ = []

_Client = redis.Redis

_AsyncClient = redis.asyncio.Redis

_NUMBERS = (float, int)

_NO_INTERRUPTS = (redis.RedisError, asyncio.CancelledError, GeneratorExit)
"""Errors of servers and locks, and of tasks: they come where they are expected, and so does their cleanup."""

# ---- the first request ----


def new_call(
    lock: LockBase,
    owner: Owner,
    sleep: Any = None,
    blocking: Any = None,
    blocking_timeout: Any = None,
    token: Any = None,
    task: Any = None,
) -> Call:
    """The call of an acquire with these parameters, and whether its first request may leave at once, as mostly.

    Not where a hook is overridden, something observes redis-py's commands, the caller holds the lock and may reenter
    it, or a parameter is not of the usual kind: then the steps decide. Hooks and tracers may come and go at any time,
    so every call looks.
    """
    call = Call()
    call.key = lock._key
    call.owner = owner
    call.sleep = sleep
    call.blocking = blocking
    call.blocking_timeout = blocking_timeout
    call.own_token = token
    call.wait_s = None
    call.begins = False
    call.token_kind = lock._token_kind
    if task is not None:
        call.task = task
    before, options = owner.token, lock._options
    wait_s = lock.blocking_timeout if blocking_timeout is None else blocking_timeout
    waits = lock.blocking if blocking is None else blocking
    sleep_s = lock.sleep if sleep is None else sleep
    try:
        if not (
            lock._is_direct
            and token is None
            and (wait_s is None or (type(wait_s) in _NUMBERS and 0 < wait_s < FOREVER_S))
            and type(sleep_s) in _NUMBERS
            and sleep_s >= 0
            and (waits is True or waits is False)
            and (options is None or (before is None and current_callback() is None))
            and hooks_of(lock) == lock._own_hooks
            and _Client.execute_command is OWN
            and _AsyncClient.execute_command is OWN_ASYNC
            and "execute_command" not in lock._redis.__dict__
            and providers._observability_instance._provider_manager is None
        ):
            return call
    except AttributeError:  # a hook that is no method, a client without attributes, or the metrics were reset
        return call
    call.begins = True
    call.kind = lock._attempt_kind
    call.ttl_ms = lock._ttl_ms
    if wait_s is not None:
        call.wait_s, call.limit, call.sleep_s = wait_s, Limit(wait_s), sleep_s
    call.waits = waits
    call.joins = waits and before is None and lock._wait == "push"
    return call


def go_on(lock: LockBase, call: Call, reply: Any, interruption: BaseException | None = None) -> None:
    """Have the steps go on from the outcome of the first request, which has not settled the acquire.

    Raises:
        BaseException: the interruption, where it came before the request left.
    """
    connection, call.connection = call.connection, None
    if connection is None or reply is NOT_ASKED:
        if interruption is not None:
            raise interruption
        return
    token, request = call.token, call.request
    assert token is not None
    assert request is not None
    if interruption is not None:
        drop_acquired(lock, call.owner, token)
    call.attempt = attempt = call.kind(lock._key, token, call.ttl_ms)
    capabilities = connection.capabilities
    attempt.begin(request, capabilities, call.sent_at, (connection, reply, interruption))
    first = attempt.first_outcome
    if type(reply) is bytes and attempt.with_get and first is not None and first[1] is reply:
        attempt.first_outcome = None
        attempt.feed(reply, capabilities)
        call.is_refused = True


def hold_by_reply(lock: LockBase, options: Options, call: Call, server: Any, reply: object) -> bool:
    """Hold the lock on options that ask for no more than this reply to the first request; see `hold_on_options`.

    Returns False where the reply does not mean that, either. Then steps go on from the reply.
    """
    fence = fence_given(reply) if options.fencing else None
    if fence is None and (options.fencing or reply != call.ours):
        return False
    renewer = server.renewer
    if renewer is None and options.watches:
        renewer = server.renewer = lock._renewer()
    token, ttl_ms, sent_at = call.token, call.ttl_ms, call.sent_at
    expiry = (token, None if ttl_ms is None else sent_at + ttl_ms / 1000)
    return hold_on_options(lock, options, call.owner, expiry, ttl_ms, fence, renewer, sent_at)


def hold_on_options(
    lock: LockBase,
    options: Options,
    owner: Owner,
    expiry: tuple[bytes | None, float | None],
    ttl_ms: int | None,
    fence: int | None,
    renewer: Any,
    asked_at: float,
    attempts: int = 1,
) -> bool:
    """Hold a lock that was acquired on options that ask for no more, with this token and end.

    Returns False where the owner holds something by now, as tasks that one task has started may acquire for it at the
    same time.
    """
    token, expires_at = expiry
    assert token is not None
    holding = owner.holding
    if owner.is_shared:
        return False
    if holding is None:
        holding = owner.holding = Holding(weakref.ref(lock))
    if owner.token is not None or holding.held is not None or holding.lease is not None:
        return False
    acquired_at = clock()
    owner.expiry = expiry
    owner.fence = fence
    if holding.lock() is not lock:  # two lock objects may have one owner
        holding.lock = weakref.ref(lock)
    holding.over = False
    reports = options.reports_of(lock._name) if options.observers else None
    if reports is not None:
        holding.count(reports)  # before the renewer may find out a loss
    holding.held = (lock._key, token, ttl_ms, expires_at, options, acquired_at)
    owner.token = token
    if owner.forgotten_by is not None:  # else `hold` would do no more
        owner.hold(token)
    if ttl_ms is not None and options.watches and (holding.listed_ms != ttl_ms or holding.renewer is not renewer):
        assert expires_at is not None
        renewer.list_holding(holding, ttl_ms, expires_at - ttl_ms / 1000)
    if reports is not None:
        reports.acquired(acquired_at - asked_at, attempts)
        if options.logs_calls:
            report_call(options, "acquired {} after", lock._name, acquired_at - asked_at, token)
    return True


def clean_up_after(lock: LockBase, error: BaseException, owner: Owner, call: Call) -> None:
    """Clean up whatever an acquire may have left that an interrupt has ended.

    The steps and the server transport do so as well. But the interrupt may have come before they have begun, at the
    beginning of their cleanup, or while they handled another error: this is the cleanup that needs none of them.
    """
    if isinstance(error, _NO_INTERRUPTS) or lock._generation != fork.generation():  # in a child, it is the parent's
        return
    token, attempt = call.token, call.attempt
    tokens = [] if call.ticket is None else [call.ticket]
    if call.own_token is not None:  # it may be another caller's, too: the reply decides
        if attempt is not None and attempt.claim is not None:
            claim, attempt.claim = attempt.claim, None
            claim.end(attempt.result)
    elif call.is_kept or token is None:
        return
    elif tokens or call.sent_at or (attempt is not None and attempt.sent_at):
        drop_acquired(lock, owner, token)
        tokens.append(token)
    lock._transport.clean_up([(lock._key, one) for one in dict.fromkeys(tokens)])


def drop_acquired(lock: LockBase, owner: Owner, token: bytes) -> None:
    """Drop what an acquire has got that was interrupted just then."""
    lease = owner.lease
    if lease is not None and lease.token == token:
        forget_lease(lock, owner, lease)
    if owner.holding is not None and owner.holding.held is None:
        end_count(owner.holding)
    if owner.token == token:
        owner.token = None


# ---- release ----


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
            and lock.lua_release is RELEASE
            and lock.do_release.__func__ is lock._own_hooks.do_release
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
    if holding is not None and held is not None and held[4].observers:
        report_end(lock, holding, held)


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
