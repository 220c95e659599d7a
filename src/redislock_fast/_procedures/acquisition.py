"""How a lock is acquired: attempts, and waiting between them. `lock.py` adds what options ask for.

A lock is acquired in one of three ways:

- By push: one attempt, unless others are known to wait, then the lock's queue (`waiting.py`).
- By polling: an attempt, a pause, and so on, where `wait` asks for it or the connection takes no messages.
- By an overridden `do_acquire`: polling, by calls of that hook.

Where an acquire fails, its steps add what must be cleaned up to the list `to_clean_up`, and the driver cleans it up: an
interrupt, a cancel or the end of a dropped task may come at any step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from redis.exceptions import (
    TimeoutError,  # noqa: A004  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.metrics import Wait, waiting_of
from redislock_fast._lease.owner import Owner, PendingOwner
from redislock_fast._procedures.handles import HandleBase
from redislock_fast._procedures.settings import Backoff, would_wait_for_itself
from redislock_fast._procedures.steps import ENTERED, Enter, Execute, Listen, Sleep, Steps
from redislock_fast._procedures.waiters import Grant, Waiter
from redislock_fast._procedures.waiting import POLL, TIME_UP, Waiting, telling_if_long
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.operation import Begun
from redislock_fast._util.times import Limit, blocks, poll_seconds, wait_seconds
from redislock_fast._util.tokens import is_held_with, is_ours, listens, without_flag
from redislock_fast._util.tracing import is_observed

__all__ = ["AcquireBase", "CleanupEntries"]

_ASKING_S = 0.005
"""For how long an attempt that must not wait gives another process the time to give up a key that lingers there."""

CleanupEntries = list[tuple[bytes, bytes]]
"""Keys and tokens that must be cleaned up when an acquire fails: the steps fill it, and the driver cleans up."""


class _Call:
    """One acquire under way. It belongs to the thread or task that acquires.

    Args:
        owner: the caller's owner.
        token: the token of the attempts.
        own_token: the token that the caller passed; None where the caller passed none.
        waits: whether to wait after the first attempt.
        sleep_s: how long to pause between two attempts or two health checks, in seconds.
        limit: the deadline.
        linger_ms: for how long the key may outlive the lease, in milliseconds.

    Attributes:
        before: the token that was held before.
        attempt: the last attempt.
    """

    __slots__ = ("attempt", "before", "limit", "linger_ms", "own_token", "owner", "sleep_s", "token", "waits")

    def __init__(
        self,
        owner: Owner,
        token: bytes,
        own_token: Any,
        waits: bool,
        sleep_s: float,
        limit: Limit,
        linger_ms: int | None = None,
    ) -> None:
        self.owner = owner
        self.before = owner.token
        self.own_token = own_token
        self.token = token
        self.waits = waits
        self.sleep_s = sleep_s
        self.limit = limit
        self.linger_ms = linger_ms
        self.attempt: Acquire | None = None


class AcquireBase(HandleBase):
    """A lock that can be acquired. The public classes describe the parameters."""

    # ---- acquire ----

    def _limit(self, blocking_timeout: float | None) -> Limit:
        """The deadline of an acquire that begins now."""
        wait_s = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return Limit(None if wait_s is None else wait_seconds(wait_s, "blocking_timeout"))

    def _acquiring_until(
        self,
        limit: Limit,
        owner: Owner,
        sleep: float | None,
        blocking: bool | None,
        token: Any,
        to_clean_up: CleanupEntries,
        begun: Acquire | None = None,
        linger_ms: int | None = None,
    ) -> Steps:
        """Acquire before the deadline. Returns whether the lock is held.

        `to_clean_up` gets what must be cleaned up where this fails. `begun` is the first attempt, where its request
        has been sent already. With `linger_ms`, the key gets a ttl that is so much longer, and the owner notes when the
        key expires. The other parameters are those of `acquire`.
        """
        sleep_s = poll_seconds(self.sleep if sleep is None else sleep)
        waits = blocks(self.blocking if blocking is None else blocking) and limit.waits
        first = begun.token if begun else self._next_token(token)
        call = _Call(owner, first, token, waits, sleep_s, limit, linger_ms)
        call.attempt = begun
        try:
            if begun is None and self._is_overridden("do_acquire"):
                return (yield from self._polling_by_hook(call))
            contended = begun is None and self._is_contended(call)
            if not contended and (yield from self._attempting(call)):
                return True
            if not waits:
                return (yield from self._asking_once(call, to_clean_up))
            self._note_failure(call, not contended)
            if not contended and limit.is_over:
                return False
            if self._wait != "push":
                return (yield from self._polling(call))
            with waiting_of(self._options, self._name, "queue", call.token) as wait:
                outcome = yield from self._waiting_by_push(call, to_clean_up, wait)
                return (yield from self._polling(call, wait=wait)) if outcome is POLL else outcome is not TIME_UP
        except TimeoutError:  # what was asked for is cleaned up
            limit.refused = limit.refused or (call.attempt is not None and call.attempt.refused)
            if not limit.is_settled:
                raise
            return False
        except BaseException:  # an interrupt or a cancel may come between the server's reply and the return
            if self._must_clean_up_interrupted(call):
                to_clean_up.append((self._key, call.token))
            raise

    def _is_contended(self, call: _Call) -> bool:
        """Whether others are known to wait, so that an attempt would fail."""
        if not (call.waits and self._wait == "push" and call.own_token is call.before is None):
            return False
        is_patient = call.limit.wait_s is None or call.limit.wait_s > call.sleep_s
        contended: bool = self._transport.is_contended(self._key, is_patient)
        return contended

    def _can_queue_at_once(self, begun: Begun) -> bool:
        """Whether the reply to a first request is another holder's token, and the connection hears of the queue."""
        connection, reply, _ = begun
        return (
            type(reply) is bytes
            and connection.capabilities.set_get
            and connection.registry is not None
            and connection.registry.channel_of(self._key) is not None
        )

    def _key_ttl_ms(self, linger_ms: int | None) -> int | None:
        """The key's ttl on the server, in milliseconds."""
        return self._ttl_ms if linger_ms is None or self._ttl_ms is None else self._ttl_ms + linger_ms

    def _new_attempt(self, token: bytes, own: bool, owner: Owner, linger_ms: int | None = None) -> Acquire:
        """Make the next attempt and note it for hooks and fences; `own`: its token is the caller's own."""
        kind = self._own_kind if own else self._attempt_kind
        owner.attempt = attempt = kind(self._key, token, self._key_ttl_ms(linger_ms))
        return attempt

    @staticmethod
    def _note(attempt: Acquire, owner: Owner) -> None:
        """Note the lease that the attempt has got."""
        ttl_ms = attempt.ttl_ms
        owner.expiry = (attempt.token, None if ttl_ms is None else attempt.sent_at + ttl_ms / 1000)

    def _attempting(self, call: _Call) -> Steps:
        """Make one attempt. Returns whether the lock is held."""
        owner, attempt = call.owner, call.attempt
        if attempt is not None and attempt.begun is not None:
            owner.attempt = attempt
        else:
            attempt = call.attempt = self._new_attempt(call.token, call.own_token is not None, owner, call.linger_ms)
        yield Execute(attempt, call.limit.left_s())
        if attempt.result:
            self._note(attempt, owner)
            if not is_ours(call.token):
                owner.contended = call.token
            owner.hold(call.token)
        return attempt.result

    def _attempting_for_caller(self, token: Any) -> Steps:
        """Make one attempt for a caller of `do_acquire`. Returns whether the lock is held."""
        owner = self._acting() or self._mine()
        token = self._encoded(token)
        attempt = self._new_attempt(token, token is owner.own_token, owner)
        yield Execute(attempt, None if owner.limit is None else owner.limit.left_s())
        if attempt.result:
            self._note(attempt, owner)
        return attempt.result

    def _note_failure(self, call: _Call, was_asked: bool) -> None:
        """Note that the last attempt has failed, or that others wait and no attempt was made.

        Raises:
            redis.exceptions.LockError: the caller holds the lock itself, and would wait for ever.
        """
        call.limit.refused = call.limit.refused or was_asked
        attempt = call.attempt
        if call.own_token is None and attempt is not None and attempt.unsettled:
            # A token that is being cleaned up is not used again.
            call.token = self._next_token(None)
        if call.limit.wait_s is None:
            self._refuse_to_wait_for_itself(call.owner, attempt)

    def _refuse_to_wait_for_itself(self, owner: Owner, attempt: Acquire | None) -> None:
        if (
            self.thread_local
            and (self._ttl_ms is None or (owner.lease is not None and owner.lease.is_endless))
            and attempt is not None
            and owner.token is not None
            and is_held_with(attempt.holder, owner.token)
        ):
            raise would_wait_for_itself(self.name, "task" if self._is_for_tasks else "thread")

    # ---- polling ----

    def _polling(self, call: _Call, pending: PendingOwner | None = None, wait: Wait | None = None) -> Steps:
        """Pause and attempt, again and again. Returns whether the lock is held.

        An overridden `do_acquire` notes its attempts in `pending`, which is None for attempts without a hook. `wait` is
        the wait that goes on; None: it begins.
        """
        begins = waiting_of(self._options, self._name, "polling", call.token) if wait is None else nullcontext(wait)
        with begins as polls:
            if polls is not None:
                polls.mode = "polling" if self._transport.sends_wait else "client"
            return (yield from self._polling_on(call, pending))

    def _polling_on(self, call: _Call, pending: PendingOwner | None) -> Steps:
        backoff = Backoff(self._wait, call.sleep_s)
        call.limit.begin_wait()
        while True:
            yield from telling_if_long(self._key, call.limit)
            pause_s = backoff.next_s()
            if not call.limit.allows(pause_s):
                return False
            yield Sleep(pause_s)
            call.owner.retries += 1
            attempting = self._attempting(call) if pending is None else self._attempting_by_hook(call, pending)
            if (yield from attempting):
                return True
            self._note_failure(call, True)

    def _polling_by_hook(self, call: _Call) -> Steps:
        """Call an overridden `do_acquire` until it has the lock. Returns whether the lock is held."""
        pending = PendingOwner(call.owner)
        pending.limit = call.limit
        pending.own_token = None if call.own_token is None else call.token
        if (yield from self._attempting_by_hook(call, pending)):
            return True
        if not call.waits:
            return False
        self._note_failure(call, True)
        return (yield from self._polling(call, pending))

    def _attempting_by_hook(self, call: _Call, pending: PendingOwner) -> Steps:
        """Make an attempt by an overridden `do_acquire`. Returns whether the lock is held."""
        owner = call.owner
        try:
            acquired = bool((yield from self._calling(pending, self.do_acquire, call.token)))
        finally:
            call.attempt = pending.attempt
        if acquired:
            owner.attempt, owner.expiry = pending.attempt, pending.expiry
            owner.hold(call.token)
        return acquired

    # ---- waiting by push ----

    def _waiting_by_push(self, call: _Call, to_clean_up: CleanupEntries, wait: Wait | None) -> Steps:
        """Wait until the server gives the lock, or tells of a change. Returns what `_queueing` does."""
        observed = is_observed(self._redis)
        waiting = self._waiting(call.token, call.own_token, call.sleep_s, call.limit, observed, call.linger_ms)
        outcome = yield from self._queueing(waiting, call.owner, to_clean_up)
        call.attempt = waiting.attempt or call.attempt
        if waiting.own is None:
            call.token = waiting.token
        if wait is not None:
            wait.mode = "tracking" if waiting.tracks else "queue"
            wait.handed_over = type(outcome) is Grant and not waiting.tracks
        return outcome

    def _waiting(
        self,
        token: bytes,
        own_token: Any,
        sleep_s: float,
        limit: Limit,
        observed: bool = False,
        linger_ms: int | None = None,
    ) -> Waiting:
        """Make the `Waiting` with this token, or with a ticket where the token must not be in the queue.

        That is the caller's own token, and one that a user's hooks compare with the lock's value.
        """
        kind = self._attempt_kind if own_token is None else self._own_kind
        if own_token is None and is_ours(token):
            return Waiting(self._key, token, self._key_ttl_ms(linger_ms), sleep_s, limit, None, kind, observed)
        ticket = self._transport.new_token(self._key)
        return Waiting(self._key, ticket, self._ttl_ms, sleep_s, limit, token, kind, observed)

    def _queueing(
        self,
        waiting: Waiting,
        owner: Owner,
        to_clean_up: CleanupEntries,
        begun: tuple[Waiter, object] | None = None,
    ) -> Steps:
        """Wait in the lock's queue. Returns a Grant, TIME_UP or POLL.

        Mostly one message grants the lock. Everything else goes to the steps of `waiting`, and so does a wait that has
        `begun`; see there.
        """
        waiter, heard = begun or (None, ENTERED)
        outcome = None
        try:
            if begun is None:
                waiter = yield Enter(waiting.key, waiting.token, waiting.limit_s())
                try:
                    timeout_s = None if waiter is None else waiting.join(waiter)
                    if timeout_s is not None:
                        heard = yield Listen(waiter, timeout_s)
                        outcome = waiting.granted(waiter, heard)
                        if outcome is not None:
                            waiter.registry.leave(waiter)
                except BaseException as error:
                    heard, outcome = error, None
            if outcome is None:
                outcome = yield from waiting.steps((waiter, heard))
            if type(outcome) is Grant:
                outcome.note(owner, waiting.token, waiting.ttl_ms)
                if waiting.own is not None:
                    owner.contended = waiting.token
                owner.attempt = waiting.attempt or owner.attempt
            return outcome  # noqa: TRY300  # after an interrupt here, the lock is cleaned up, too
        except BaseException:  # after any error, the lock is not held
            to_clean_up += [(self._key, token) for token in self._left_by_waiting(waiting, owner)]
            raise
        finally:
            waiter = heard = begun = None  # else an error would keep this frame, and this frame the error

    def _asking_once(self, call: _Call, to_clean_up: CleanupEntries) -> Steps:
        """Ask another process for a key that may linger there, after an attempt that must not wait has failed.

        It is asked as by any waiter: the queue's script tells the holder. Returns whether the lock is held.
        """
        attempt = call.attempt
        holder = None if attempt is None else attempt.holder
        if self._wait != "push" or holder is None or not listens(without_flag(holder)):
            return False
        if call.own_token is None:
            call.token = self._next_token(None)
        limit, observed = Limit(_ASKING_S), is_observed(self._redis)
        waiting = self._waiting(call.token, call.own_token, _ASKING_S, limit, observed, call.linger_ms)
        try:
            outcome = yield from self._queueing(waiting, call.owner, to_clean_up)
        except TimeoutError:  # what was asked for is cleaned up
            return False
        return type(outcome) is Grant

    # ---- what a failed acquire leaves ----

    def _must_clean_up_interrupted(self, call: _Call) -> bool:
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

    @staticmethod
    def _left_by_waiting(waiting: Waiting, owner: Owner) -> list[bytes]:
        """The tokens under which a waiting that an error has ended may have got the lock.

        A caller's own token is among them only where an attempt of the waiting has taken the lock with it, since other
        callers may use that token too.
        """
        attempt, own = waiting.attempt, waiting.own
        if own is not None and attempt is not None and attempt.result and owner.token == own:
            owner.token = None
        left = [waiting.token] if waiting.queues else []
        if own is not None and attempt is not None and attempt.token == own and attempt.took:
            left.append(own)
        if owner.token in left:
            owner.token = None
        return left
