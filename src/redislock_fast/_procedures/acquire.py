"""How a lock is acquired: the first request, attempts, waiting between them, and what options ask for.

The first request of a `Call` mostly settles it. Otherwise the steps of `acquire_lock` go on, in one of three ways:

- By push: one attempt, unless others are known to wait, then the lock's queue (`_queue/waiting.py`).
- By polling: an attempt, a pause, and so on, where `wait` asks for it or the connection takes no messages.
- By an overridden `do_acquire`: polling, by calls of that hook.

Where an acquire fails, its steps add what must be cleaned up to `Call.left`, and the driver cleans it up: an interrupt,
a cancel or the end of a dropped task may come at any step.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import TimeoutError

from redislock_fast._lease.callbacks import current_callback
from redislock_fast._lease.holding import Holding
from redislock_fast._lease.metrics import Wait, end_count, report, report_call, waiting_of
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import NEVER, Owner, PendingOwner
from redislock_fast._pipe.base import NOT_ASKED, Args
from redislock_fast._procedures.lease import forget_lease, reenter, report_failure, would_wait_for_itself
from redislock_fast._procedures.lock import Backoff, LockBase, hooks_of
from redislock_fast._protocol.commands import Acquire, Reacquire
from redislock_fast._protocol.fenced import MANY, AcquireFenced, Fence, fence_given
from redislock_fast._protocol.operation import FirstRequest
from redislock_fast._protocol.replicas import Replicate
from redislock_fast._protocol.steps import ENTERED, CleanupEntries, Do, Steps
from redislock_fast._queue.waiters import Grant
from redislock_fast._queue.waiting import POLL, TIME_UP, Waiting, log_wait_if_long
from redislock_fast._util import fork
from redislock_fast._util.errors import NotReplicatedError, shown
from redislock_fast._util.times import FOREVER_S, GRACE_S, Limit, blocks, clock, poll_seconds, wait_seconds
from redislock_fast._util.tokens import PERMIT, PLAIN, TokenSource, is_held_with, is_ours, listens, without_flag
from redislock_fast._util.tracing import OWN, OWN_ASYNC, is_observed, providers

_Client = redis.Redis

_AsyncClient = redis.asyncio.Redis

_NUMBERS = (float, int)

_NO_INTERRUPTS = (redis.RedisError, asyncio.CancelledError, GeneratorExit)
"""Errors of servers and locks, and of tasks: they come where they are expected, and so does their cleanup."""

_WAIT_GRACE_S = GRACE_S / 2
"""How long replicas may take after the acquire's deadline; the other half of the grace is for the server's reply."""

_ASKING_S = 0.005
"""The grace that an attempt that must not wait gives to a process in which the key lingers."""


class Call(FirstRequest):
    """One acquire, made by the public method and handed down alone. It belongs to the thread or task that has made it.

    Attributes:
        owner: the caller's, in which the acquire is noted.
        sleep: the parameter of `acquire`, and so are the next two.
        blocking: see there.
        blocking_timeout: see there.
        own_token: the token that the caller passed; None where the caller passed none.
        task: the task that will hold the lock; None in threads, and where no option needs it.
        before: the token that the owner held before.
        sleep_s: how long to pause between two attempts or two health checks, in seconds.
        waits: whether to wait after the first attempt.
        limit: the deadline; None before the steps begin.
        kind: the operation of the first attempt.
        ttl_ms: the key's ttl.
        linger_ms: how long the key may outlive the lease, in milliseconds.
        begins: whether its first request may leave at once; see `new_call`.
        token_kind: the kind of the tokens that the call draws; see `tokens.py`.
        joins: whether the caller may join the lock's queue instead of an attempt.
        token: the token of the attempts; None before the first one is drawn.
        is_contended: whether others were known to wait, so that the first request was not sent.
        attempt: the last attempt.
        retries: how often the acquire polled again.
        hook_expiry: the lease that an attempt within an overridden `do_acquire` has got, as `Owner.expiry`.
        is_refused: whether the reply to the first request has said that the lock is another's.
        is_kept: whether the key that was granted is noted in the cache of keys, which gives it back.
        ticket: the token with which the caller waits, or has waited, in the lock's queue; None where it has not.
        left: what must be cleaned up when the acquire fails; not set before the steps begin.
    """

    owner: Owner
    sleep: Any = None
    blocking: Any = None
    blocking_timeout: Any = None
    own_token: Any = None
    task: asyncio.Task[Any] | None = None
    kind: type[Acquire]
    ttl_ms: int | None
    before: bytes | None = None
    sleep_s: float = 0.1
    waits: bool = True
    limit: Limit | None = None
    linger_ms: int | None = None
    begins: bool = False
    token_kind: bytes = PLAIN
    joins: bool = False
    token: bytes | None = None
    is_contended: bool = False
    attempt: Acquire | None = None
    retries: int = 0
    hook_expiry: tuple[bytes | None, float | None] = NEVER
    is_refused: bool = False
    is_kept: bool = False
    ticket: bytes | None = None
    left: CleanupEntries

    def request_on(self, connection: Any, tokens: TokenSource) -> Args | None:
        """The first request, with a new token; None where others are known to wait, so that it would fail."""
        self.token = token = tokens.new_token(self.token_kind)
        if self.joins:
            registry, wait_s = connection.registry, self.wait_s
            if (
                registry is not None
                and (registry.key_queues or registry.handed_over)  # mostly empty: a call would take 2 % of a pair
                and registry.is_contended(self.key, wait_s is None or wait_s > self.sleep_s)
            ):
                self.is_contended = True
                return None
        self.request, self.ours = self.kind.first_request(connection.capabilities, self.key, token, self.ttl_ms)
        self.connection = connection
        return self.request

    @property
    def deadline(self) -> Limit:
        """The deadline of a call whose steps have begun."""
        assert self.limit is not None
        return self.limit


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
            and hooks_of(lock.__class__) == lock._own_hooks
            and not (lock.__dict__ and lock._overrides_here())
            and _Client.execute_command is OWN
            and _AsyncClient.execute_command is OWN_ASYNC
            and "execute_command" not in lock._redis.__dict__
            and providers._observability_instance._provider_manager is None
        ):
            return call
    except AttributeError:  # a client without attributes, or the metrics were reset
        return call
    call.begins = True
    call.kind = lock._attempt_kind
    call.ttl_ms = lock._ttl_ms
    if wait_s is not None:
        call.wait_s, call.sleep_s = wait_s, sleep_s
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
        drop_acquired(call.owner, token)
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
        holding.belong_to(weakref.ref(lock))
    holding.over = False
    if options.observers:  # before the renewer may find out a loss
        options.reports_of(lock._name).begin(holding, acquired_at - asked_at, attempts)
    holding.held = (lock._key, token, ttl_ms, expires_at, options, acquired_at)
    owner.token = token
    if owner.forgotten_by is not None:  # else `hold` would do no more
        owner.hold(token)
    if ttl_ms is not None and options.watches and (holding.listed_ms != ttl_ms or holding.renewer is not renewer):
        assert expires_at is not None
        renewer.list_holding(holding, ttl_ms, expires_at - ttl_ms / 1000)
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
        drop_acquired(owner, token)
        tokens.append(token)
    lock._transport.clean_up([(lock._key, one) for one in dict.fromkeys(tokens)])


def drop_acquired(owner: Owner, token: bytes) -> None:
    """Drop what an acquire has got that was interrupted just then."""
    lease = owner.lease
    if lease is not None and lease.token == token:
        forget_lease(owner, lease)
    if owner.holding is not None and owner.holding.held is None:
        end_count(owner.holding)
    if owner.token == token:
        owner.token = None


def give_back(lock: LockBase, owner: Owner, token: bytes) -> None:
    """Drop what an acquire has got, and release it in the background: nobody else will do it."""
    drop_acquired(owner, token)
    with suppress(redis.RedisError):  # a cluster without a node for the key: it ends with its ttl
        lock._transport.clean_up([(lock._key, token)])


# ---- the steps ----


def acquire_lock(lock: LockBase, call: Call) -> Steps:
    """The steps of an acquire. They return whether the lock is held."""
    call.left = []
    if lock._options is None:
        return acquire_plain(lock, call)
    return acquire_on_options(lock, lock._options, call)


def acquire_plain(lock: LockBase, call: Call) -> Steps:
    """The steps of an acquire without what its options ask for once the lock is held."""
    return lock._linger.acquire(lock, call) if lock._listens else acquire_until(lock, call)


def set_limit(lock: LockBase, call: Call) -> None:
    """Set the times of an acquire whose steps begin now, or have begun with its first request.

    Raises:
        TypeError: for a parameter of the wrong kind.
        ValueError: for an impossible time.
    """
    wait_s = lock.blocking_timeout if call.blocking_timeout is None else call.blocking_timeout
    call.wait_s = None if wait_s is None else wait_seconds(wait_s, "blocking_timeout")
    if call.limit is None:
        call.limit = Limit(call.wait_s, call.sent_at)
    call.sleep_s = poll_seconds(lock.sleep if call.sleep is None else call.sleep)
    call.waits = blocks(lock.blocking if call.blocking is None else call.blocking) and call.deadline.waits


def acquire_until(lock: LockBase, call: Call) -> Steps:
    """Acquire before the deadline. Returns whether the lock is held.

    With `call.linger_ms`, the key gets a ttl that is so much longer, and the owner notes when the key expires.
    """
    set_limit(lock, call)
    owner, limit = call.owner, call.deadline
    call.before = owner.token
    if call.token is None:
        call.token = lock._next_token(call.own_token)
    was_sent = call.attempt is not None
    try:
        if not (was_sent or call.is_contended) and lock._is_overridden("do_acquire"):
            return (yield from poll_by_hook(lock, call))
        contended = not was_sent and (call.is_contended or is_contended(lock, call))
        if not (contended or call.is_refused) and (yield from make_attempt(lock, call)):
            return True
        if not call.waits:
            return (yield from ask_once(lock, call))
        note_failure(lock, call, not contended)
        if not contended and limit.is_over:
            return False
        if lock._wait != "push":
            return (yield from poll(lock, call))
        with waiting_of(lock._options, lock._name, "queue", call.token) as wait:
            outcome = yield from wait_by_push(lock, call, wait)
            return (yield from poll(lock, call, wait=wait)) if outcome is POLL else outcome is not TIME_UP
    except TimeoutError:  # what was asked for is cleaned up
        limit.refused = limit.refused or (call.attempt is not None and call.attempt.refused)
        if not limit.is_settled:
            raise
        return False
    except BaseException:  # an interrupt or a cancel may come between the server's reply and the return
        if must_clean_up_interrupted(call):
            call.left.append((lock._key, call.token))
        raise


def is_contended(lock: LockBase, call: Call) -> bool:
    """Whether others are known to wait, so that an attempt would fail."""
    if not (call.waits and lock._wait == "push" and call.own_token is call.before is None):
        return False
    is_patient = call.wait_s is None or call.wait_s > call.sleep_s
    contended: bool = lock._transport.is_contended(lock._key, is_patient)
    return contended


def key_ttl_ms(lock: LockBase, linger_ms: int | None) -> int | None:
    """The key's ttl on the server, in milliseconds."""
    return lock._ttl_ms if linger_ms is None or lock._ttl_ms is None else lock._ttl_ms + linger_ms


def new_attempt(lock: LockBase, token: bytes, own: bool, linger_ms: int | None = None) -> Acquire:
    """Make the next attempt; `own`: its token is the caller's own."""
    kind = lock._own_kind if own else lock._attempt_kind
    return kind(lock._key, token, key_ttl_ms(lock, linger_ms))


def make_attempt(lock: LockBase, call: Call) -> Steps:
    """Make one attempt. Returns whether the lock is held."""
    owner, attempt = call.owner, call.attempt
    if attempt is None or attempt.first_outcome is None:
        assert call.token is not None
        attempt = call.attempt = new_attempt(lock, call.token, call.own_token is not None, call.linger_ms)
    yield Do("execute", attempt, call.deadline.left_s())
    if attempt.result:
        owner.expiry = attempt.expiry
        if not is_ours(attempt.token):
            owner.contended = call.token
        owner.hold(call.token)
    return attempt.result


def attempt_for_caller(lock: LockBase, token: Any) -> Steps:
    """Make one attempt for a caller of `do_acquire`. Returns whether the lock is held."""
    call: Call | None = lock._acting_call()
    token = lock._encoded(token)
    attempt = new_attempt(lock, token, call is not None and call.own_token is not None and token is call.token)
    if call is not None:
        call.attempt = attempt
    yield Do("execute", attempt, None if call is None else call.deadline.left_s())
    if attempt.result and call is not None:
        call.hook_expiry = attempt.expiry
    elif attempt.result:
        lock._mine().expiry = attempt.expiry
    return attempt.result


def note_failure(lock: LockBase, call: Call, was_asked: bool) -> None:
    """Note that the last attempt has failed, or that others wait and no attempt was made.

    Raises:
        redis.exceptions.LockError: the caller holds the lock itself, and would wait forever.
    """
    call.deadline.refused = call.deadline.refused or was_asked
    attempt = call.attempt
    if call.own_token is None and attempt is not None and attempt.unsettled:
        # A token that is being cleaned up is not used again.
        call.token = lock._next_token(None)
    if call.deadline.wait_s is None:
        refuse_to_wait_for_itself(lock, call.owner, attempt)


def refuse_to_wait_for_itself(lock: LockBase, owner: Owner, attempt: Acquire | None) -> None:
    if (
        lock.thread_local
        and (lock._ttl_ms is None or (owner.lease is not None and owner.lease.is_endless))
        and attempt is not None
        and owner.token is not None
        and is_held_with(attempt.holder, owner.token)
    ):
        raise would_wait_for_itself(lock.name, "task" if lock._is_for_tasks else "thread")


# ---- polling ----


def poll(
    lock: LockBase, call: Call, attempt: Callable[[LockBase, Call], Steps] = make_attempt, wait: Wait | None = None
) -> Steps:
    """Pause and attempt, again and again. Returns whether the lock is held.

    `wait` is the wait that goes on; None: it begins.
    """
    begins = waiting_of(lock._options, lock._name, "polling", call.token) if wait is None else nullcontext(wait)
    with begins as polls:
        if polls is not None:
            polls.mode = "polling" if lock._transport.sends_wait else "client"
        return (yield from poll_on(lock, call, attempt))


def poll_on(lock: LockBase, call: Call, attempt: Callable[[LockBase, Call], Steps]) -> Steps:
    backoff = Backoff(lock._wait, call.sleep_s)
    call.deadline.begin_wait()
    while True:
        yield from log_wait_if_long(lock._key, call.deadline, lock._token_kind is PERMIT)
        pause_s = backoff.next_s()
        if not call.deadline.allows(pause_s):
            return False
        yield Do("sleep", pause_s)
        call.retries += 1
        if (yield from attempt(lock, call)):
            return True
        note_failure(lock, call, True)


def poll_by_hook(lock: LockBase, call: Call) -> Steps:
    """Call an overridden `do_acquire` until it has the lock. Returns whether the lock is held."""
    if (yield from attempt_by_hook(lock, call)):
        return True
    if not call.waits:
        return False
    note_failure(lock, call, True)
    return (yield from poll(lock, call, attempt_by_hook))


def attempt_by_hook(lock: LockBase, call: Call) -> Steps:
    """Make an attempt by an overridden `do_acquire`. Returns whether the lock is held."""
    owner = call.owner
    acquired = bool((yield from lock._call_hook(owner, lock.do_acquire, call.token, call=call)))
    if acquired:
        owner.expiry = call.hook_expiry
        owner.hold(call.token)
    return acquired


# ---- waiting by push ----


def wait_by_push(lock: LockBase, call: Call, wait: Wait | None) -> Steps:
    """Wait until the server gives the lock, or sends a message of a change. Returns what `_wait_in_queue` does."""
    waiting = new_waiting(lock, call, call.sleep_s, call.deadline)
    outcome = yield from wait_in_queue(lock, waiting, call)
    if waiting.own is None:
        call.token = waiting.token
    if wait is not None:
        wait.mode = "tracking" if waiting.tracks else "queue"
        wait.handed_over = type(outcome) is Grant and not waiting.tracks
    return outcome


def new_waiting(lock: LockBase, call: Call, sleep_s: float, limit: Limit) -> Waiting:
    """Make the `Waiting` with the call's token, or with a ticket where the token must not be in the queue.

    That is the caller's own token, and one that a user's hooks compare with the lock's value.
    """
    token, own_token, observed = call.token, call.own_token, is_observed(lock._redis)
    assert token is not None
    kind = lock._attempt_kind if own_token is None else lock._own_kind
    if own_token is None and is_ours(token):
        call.ticket = token
        return Waiting(lock._key, token, key_ttl_ms(lock, call.linger_ms), sleep_s, limit, None, kind, observed)
    ticket = call.ticket = lock._transport.new_token(lock._key)
    return Waiting(lock._key, ticket, lock._ttl_ms, sleep_s, limit, token, kind, observed)


def wait_in_queue(lock: LockBase, waiting: Waiting, call: Call) -> Steps:
    """Wait in the lock's queue. Returns a Grant, TIME_UP or POLL.

    Mostly one message grants the lock. Everything else goes to the steps of `waiting`.
    """
    owner, outcome = call.owner, None
    waiter: Any = None
    message: object = ENTERED
    try:
        waiter = yield Do("enter", waiting.key, waiting.token, waiting.limit_s())
        try:
            timeout_s = None if waiter is None else waiting.join(waiter)
            if timeout_s is not None:
                message = yield Do("next_message", waiter, timeout_s)
                outcome = waiting.granted(waiter, message)
                if outcome is not None:
                    waiter.registry.leave(waiter)
        except BaseException as error:
            message, outcome = error, None
        if outcome is None:
            outcome = yield from waiting.steps((waiter, message))
        if type(outcome) is Grant:
            outcome.note(owner, waiting.held_with, waiting.ttl_ms)
        call.attempt = waiting.attempt or call.attempt
        return outcome  # noqa: TRY300  # after an interrupt here, the lock is cleaned up, too
    except BaseException:  # after any error, the lock is not held
        call.left += [(lock._key, token) for token in left_by_waiting(waiting, owner)]
        raise
    finally:
        waiter = message = None  # else an error would keep this frame, and this frame the error


def ask_once(lock: LockBase, call: Call) -> Steps:
    """Ask another process for a key that may linger there, after an attempt that must not wait has failed.

    It is asked as by any waiter: the queue's script tells the holder. Returns whether the lock is held.
    """
    attempt = call.attempt
    holder = None if attempt is None else attempt.holder
    if lock._wait != "push" or holder is None or not listens(without_flag(holder)):
        return False
    if call.own_token is None:
        call.token = lock._next_token(None)
    waiting = new_waiting(lock, call, _ASKING_S, Limit(_ASKING_S))
    try:
        outcome = yield from wait_in_queue(lock, waiting, call)
    except TimeoutError:  # what was asked for is cleaned up
        return False
    return type(outcome) is Grant


# ---- what a failed acquire leaves ----


def must_clean_up_interrupted(call: Call) -> bool:
    """Whether an interrupted acquire must be cleaned up: the server's reply has not reached its caller."""
    owner, token, attempt = call.owner, call.token, call.attempt
    if token == call.before:
        return False
    acquired = attempt is not None and attempt.token is token and attempt.result
    # Else another caller with the same token of its own has noted it.
    noted = owner.token == token and (acquired or call.own_token is None)
    if noted:
        owner.token = None
    if call.own_token is not None:
        return acquired and attempt is not None and attempt.took
    return noted or acquired


def left_by_waiting(waiting: Waiting, owner: Owner) -> list[bytes]:
    """The tokens under which a waiting that an error has ended may have got the lock.

    A caller's own token is among them only where an attempt of the waiting has taken the lock with it, since other
    callers may use that token too.
    """
    attempt, own = waiting.attempt, waiting.own
    if own is not None and attempt is not None and attempt.result and owner.token == own:
        owner.token = None
    left = [waiting.token]
    if own is not None and attempt is not None and attempt.token == own and attempt.took:
        left.append(own)
    if owner.token in left:
        owner.token = None
    return left


# ---- on options ----


def acquire_on_options(lock: LockBase, options: Options, call: Call) -> Steps:
    """Acquire, and do what the options ask for. Returns whether the lock is held."""
    owner = call.owner
    if call.attempt is None and reenter(lock, owner, call.own_token):
        return True
    lock._adapt(options)
    asked_at = call.sent_at or clock()
    pending = call.owner = PendingOwner(owner)
    before = pending.token
    try:
        with options.guarded():
            acquired = yield from acquire_plain(lock, call)
            if acquired and not (yield from complete_acquire(lock, options, call)):
                call.left += drop_failed(lock, call, owner, before)
                acquired = False
            if acquired and not (call.begins and hold_by_steps(lock, options, owner, call, asked_at)):
                lock._keep(lock._begin(options, owner, pending, asked_at, call.retries + 1, call.task))
    except BaseException as error:  # after any error, the lock is not held
        call.left += drop_failed(lock, call, owner, before)
        report_failure(lock, options, call.retries + 1, asked_at, error)
        raise
    if not acquired and lock._at_least_s is None:
        report_failure(lock, options, call.retries + 1, asked_at, None)
    elif not acquired:  # a run of a job that is skipped: nothing has failed
        report(options.observers, "record_skip", lock.name, clock() - asked_at)
    return acquired


def hold_by_steps(lock: LockBase, options: Options, owner: Owner, call: Call, asked_at: float) -> bool:
    """Hold a lock whose first request might have been all that it needs; see `hold_on_options`."""
    pending, ttl_ms = call.owner, lock._ttl_ms
    token = pending.token
    assert token is not None
    expiry = (token, pending.expires_at(token))
    renewer = lock._renewer() if options.watches else None
    if not hold_on_options(lock, options, owner, expiry, ttl_ms, pending.fence, renewer, asked_at, call.retries + 1):
        return False
    owner.contended = pending.contended
    return True


def complete_acquire(lock: LockBase, options: Options, call: Call) -> Steps:
    """Do what the options ask for once the lock is held: a certain lease, a fence, replicas.

    Returns:
        False where the time was up before, after another owner had the lock.

    Raises:
        LockLostError: the lock was lost before that was done.
        NotReplicatedError: too few replicas had the lock in time.
        redis.exceptions.TimeoutError: no reply in time, and no reply said that another owner has the lock.
    """
    owner, limit, token = call.owner, call.deadline, call.owner.token
    assert token is not None
    try:
        if lock._ttl_ms is not None and owner.expires_at(token) is None:  # acquired by a hook, at an unknown time
            yield from confirm_lease(lock, owner, token, lock._ttl_ms, limit)
        owner.fence = None
        if options.fencing:
            owner.fence = yield from fetch_fence(lock, call, token)
        if options.wait_replicas:
            yield from wait_for_replicas(lock, options, owner, token, limit)
    except TimeoutError:
        if not limit.is_settled:
            raise
        return False
    return True


def fetch_fence(lock: LockBase, call: Call, token: bytes) -> Steps:
    """Returns the fence of the lock."""
    attempt, cached = call.attempt, call.owner.cached
    lease = None if cached is None else cached.lease
    fence = None if lease is None else lease.take_fence()
    if fence is not None:
        return fence
    if isinstance(attempt, AcquireFenced) and attempt.result and attempt.token == token:
        first = attempt.fence
    else:  # the lock was handed over, or acquired by a hook
        numbering = Fence(lock._key, token, 1 if lease is None else MANY)
        yield Do("execute", numbering, call.deadline.left_s())
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


def drop_failed(lock: LockBase, call: Call, owner: Owner, before: bytes | None) -> list[tuple[bytes, bytes]]:
    """Drop what a failed acquire has got for the owner, which had the token `before`. Returns what to clean up."""
    pending, attempt = call.owner, call.attempt
    token = pending.token
    if token is None or token == before:
        return []
    is_given_back = pending.give_cached_back()
    lease = owner.lease
    if lease is not None and lease.token == token:
        forget_lease(owner, lease)
    if owner.token == token:  # where the token is shared, another may have acquired meanwhile
        owner.token = None
    took = attempt is not None and attempt.token == token and attempt.took
    if is_given_back:  # a cleanup beside its release would look like a loss
        return []
    return [(lock._key, token)] if call.own_token is None or took else []
