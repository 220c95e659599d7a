"""How a lock is acquired: attempts, and waiting between them. `lock.py` adds what options ask for.

A lock is acquired in one of three ways:

- By push: one attempt, unless others are known to wait, then the lock's queue (`waiting.py`).
- By polling: an attempt, a pause, and so on, where `wait` asks for it or the connection takes no messages.
- By an overridden `do_acquire`: polling, by calls of that hook.

Where an acquire fails, its steps add what must be cleaned up to `Call.left`, and the driver cleans it up: an interrupt,
a cancel or the end of a dropped task may come at any step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from redis.exceptions import (
    TimeoutError,  # noqa: A004  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.metrics import (
    Wait,
    waiting_of,
)
from redislock_fast._lease.owner import Owner, PendingOwner
from redislock_fast._procedures.call import Call
from redislock_fast._procedures.lease import (
    would_wait_for_itself,
)
from redislock_fast._procedures.lock import Backoff, LockBase
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.steps import ENTERED, Do, Steps
from redislock_fast._queue.waiters import Grant
from redislock_fast._queue.waiting import POLL, TIME_UP, Waiting, log_wait_if_long
from redislock_fast._util.times import (
    Limit,
    blocks,
    poll_seconds,
    wait_seconds,
)
from redislock_fast._util.tokens import PERMIT, is_held_with, is_ours, listens, without_flag
from redislock_fast._util.tracing import is_observed

__all__ = []

_ASKING_S = 0.005
"""The grace that an attempt that must not wait gives to a process in which the key lingers."""

# ---- acquire ----


def set_limit(lock: LockBase, call: Call) -> None:
    """Set the times of an acquire whose steps begin now; its deadline, unless that is set.

    Raises:
        TypeError: for a parameter of the wrong kind.
        ValueError: for an impossible time.
    """
    wait_s = lock.blocking_timeout if call.blocking_timeout is None else call.blocking_timeout
    call.wait_s = None if wait_s is None else wait_seconds(wait_s, "blocking_timeout")
    if call.limit is None:
        call.limit = Limit(call.wait_s)
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


def new_attempt(lock: LockBase, token: bytes, own: bool, owner: Owner, linger_ms: int | None = None) -> Acquire:
    """Make the next attempt and note it for hooks and fences; `own`: its token is the caller's own."""
    kind = lock._own_kind if own else lock._attempt_kind
    owner.attempt = attempt = kind(lock._key, token, key_ttl_ms(lock, linger_ms))
    return attempt


def note_lease(attempt: Acquire, owner: Owner) -> None:
    """Note the lease that the attempt has got."""
    ttl_ms = attempt.ttl_ms
    owner.expiry = (attempt.token, None if ttl_ms is None else attempt.sent_at + ttl_ms / 1000)


def make_attempt(lock: LockBase, call: Call) -> Steps:
    """Make one attempt. Returns whether the lock is held."""
    owner, attempt = call.owner, call.attempt
    if attempt is not None and attempt.first_outcome is not None:
        owner.attempt = attempt
    else:
        assert call.token is not None
        attempt = call.attempt = new_attempt(lock, call.token, call.own_token is not None, owner, call.linger_ms)
    yield Do("execute", attempt, call.deadline.left_s())
    if attempt.result:
        note_lease(attempt, owner)
        if not is_ours(attempt.token):
            owner.contended = call.token
        owner.hold(call.token)
    return attempt.result


def attempt_for_caller(lock: LockBase, token: Any) -> Steps:
    """Make one attempt for a caller of `do_acquire`. Returns whether the lock is held."""
    owner = lock._acting() or lock._mine()
    token = lock._encoded(token)
    attempt = new_attempt(lock, token, token is owner.own_token, owner)
    yield Do("execute", attempt, None if owner.limit is None else owner.limit.left_s())
    if attempt.result:
        note_lease(attempt, owner)
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


def poll(lock: LockBase, call: Call, pending: PendingOwner | None = None, wait: Wait | None = None) -> Steps:
    """Pause and attempt, again and again. Returns whether the lock is held.

    An overridden `do_acquire` notes its attempts in `pending`, which is None for attempts without a hook. `wait` is
    the wait that goes on; None: it begins.
    """
    begins = waiting_of(lock._options, lock._name, "polling", call.token) if wait is None else nullcontext(wait)
    with begins as polls:
        if polls is not None:
            polls.mode = "polling" if lock._transport.sends_wait else "client"
        return (yield from poll_on(lock, call, pending))


def poll_on(lock: LockBase, call: Call, pending: PendingOwner | None) -> Steps:
    backoff = Backoff(lock._wait, call.sleep_s)
    call.deadline.begin_wait()
    while True:
        yield from log_wait_if_long(lock._key, call.deadline, lock._token_kind is PERMIT)
        pause_s = backoff.next_s()
        if not call.deadline.allows(pause_s):
            return False
        yield Do("sleep", pause_s)
        call.owner.retries += 1
        attempting = make_attempt(lock, call) if pending is None else attempt_by_hook(lock, call, pending)
        if (yield from attempting):
            return True
        note_failure(lock, call, True)


def poll_by_hook(lock: LockBase, call: Call) -> Steps:
    """Call an overridden `do_acquire` until it has the lock. Returns whether the lock is held."""
    pending = PendingOwner(call.owner)
    pending.limit = call.deadline
    pending.own_token = None if call.own_token is None else call.token
    if (yield from attempt_by_hook(lock, call, pending)):
        return True
    if not call.waits:
        return False
    note_failure(lock, call, True)
    return (yield from poll(lock, call, pending))


def attempt_by_hook(lock: LockBase, call: Call, pending: PendingOwner) -> Steps:
    """Make an attempt by an overridden `do_acquire`. Returns whether the lock is held."""
    owner = call.owner
    try:
        acquired = bool((yield from lock._calling(pending, lock.do_acquire, call.token)))
    finally:
        call.attempt = pending.attempt
    if acquired:
        owner.attempt, owner.expiry = pending.attempt, pending.expiry
        owner.hold(call.token)
    return acquired


# ---- waiting by push ----


def wait_by_push(lock: LockBase, call: Call, wait: Wait | None) -> Steps:
    """Wait until the server gives the lock, or sends a message of a change. Returns what `_queueing` does."""
    waiting = new_waiting(lock, call, call.sleep_s, call.deadline)
    outcome = yield from wait_in_queue(lock, waiting, call)
    call.attempt = waiting.attempt or call.attempt
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
            owner.attempt = waiting.attempt or owner.attempt
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
