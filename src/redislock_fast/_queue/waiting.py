"""How a waiter gets a contended lock: a procedure of steps, with a shortcut for the usual case.

A waiter joins the lock's queue and gets a message when the lock is granted. Health checks find lost messages, dead
owners, deleted keys and flushed servers: one waiter of each key queue repeats its request once an interval (the first
time later, where the last wait was long), and when the owner's ttl has ended. Where the server denies something, the
waiter falls back, first to watching the key and trying when it changes, then to polling.

The usual case needs no steps: the caller calls `join`, listens, and calls `granted`. In all other cases it calls
`steps`, which go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from redislock_fast._protocol.commands import Acquire, Reacquire
from redislock_fast._protocol.fenced import AcquireFenced, RedeemFenced
from redislock_fast._protocol.own_token import Redeem
from redislock_fast._protocol.queue import MOVING, JoinQueue, LeaveQueue, Watch, join_request
from redislock_fast._protocol.steps import ENTERED, Do, Steps
from redislock_fast._queue.waiters import BROKEN, CHECK, RECKON, Grant, KeyQueue, Waiter
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import is_held_with, is_permit, kind_of

POLL: Final = "poll"
"""The outcome where the connection takes no messages: the caller must poll."""

TIME_UP: Final = "time up"
"""The outcome when the lock was not granted in time."""

_DENIED: Final = "denied"
_CHECK: Final = "check"
_DUE: Final = "due"

_SPENT = 0.25
"""The part of a lease that may have passed when the lock is returned; where more has, the lease is renewed first."""

_SHORTEST_INTERVAL_S = 0.01
_LONG_INTERVAL_S = 200.0  # from here on, a queue may have to be kept for longer than usual
_LONGEST_S = 1e9
_AWAKE_INTERVALS = 8  # a process without a health check for so many intervals and a second counts as asleep
_AWAKE_MS = 1000
_KEPT_MS = 3_600_000  # a queue whose waiters have all died is deleted after an hour


def _patience(interval_s: float) -> tuple[float, int, int]:
    """The interval of health checks, and for how long in ms a waiter counts as awake and the queue is kept."""
    if _SHORTEST_INTERVAL_S <= interval_s < _LONG_INTERVAL_S:  # `min` and `max` take two thirds of the rest
        return interval_s, int(1000 * _AWAKE_INTERVALS * interval_s) + _AWAKE_MS, _KEPT_MS
    interval_s = max(interval_s, _SHORTEST_INTERVAL_S)
    awake_ms = int(1000 * _AWAKE_INTERVALS * min(interval_s, _LONGEST_S)) + _AWAKE_MS
    return interval_s, awake_ms, max(_KEPT_MS, 2 * awake_ms)


def log_wait_if_long(key: bytes, limit: Limit, is_semaphore: bool = False) -> Steps:
    """Log once that an acquire waits for a lock or a semaphore for long, and who holds it."""
    waited_s = limit.long_wait_s()
    if waited_s is not None:
        from redislock_fast._queue.reporting import log_long_wait  # noqa: PLC0415  # few waits are long

        yield from log_long_wait(key, waited_s, limit.left_s(), is_semaphore)


class Waiting:
    """Waiting for a lock that another owner holds. It belongs to the thread or task that waits.

    A token is used on one connection only, since a request on a broken one may be executed at any time. So a waiter
    that loses its connection loses its place, and starts again as a new `Waiter` with a new token.

    Args:
        key: the lock.
        token: the waiter's first token.
        ttl_ms: the ttl of the lock once it is granted, in milliseconds.
        interval_s: how often health checks are made, in seconds.
        limit: when to give up.
        own: the caller's own token; None where it has none. Another owner may have the same one, and the queue could
            not tell the two apart. So the waiter queues by a ticket, its `token`, and redeems that: it puts `own` in
            the ticket's place once the lock is granted.
        kind: the operation that takes the lock where it is not handed over.
        refresh: with `own`, steps that are done at each turn, at least once an interval: what else the caller holds
            must not expire meanwhile. They return whether to stop waiting.
        observed: whether a tracer is to see the requests.

    Attributes:
        attempt: the last operation that tried to take the lock by itself, or that redeemed the ticket.
        token: names the waiter in the queue. Where the steps end without a grant, the lock may be granted to it all the
            same: the caller must clean up, unless the outcome was TIME_UP or POLL.
        tracks: whether the waiter watches the key, since the server denies it the queue.
    """

    __slots__ = (
        "_awake_ms",
        "_interval_s",
        "_kept_ms",
        "_kind",
        "_limit",
        "_longest_s",
        "_observed",
        "_refresh",
        "_terms",
        "attempt",
        "key",
        "own",
        "token",
        "tracks",
        "ttl_ms",
    )

    def __init__(
        self,
        key: bytes,
        token: bytes,
        ttl_ms: int | None,
        interval_s: float,
        limit: Limit,
        own: bytes | None = None,
        kind: type[Acquire] = Acquire,
        observed: bool = False,
        refresh: Callable[[], Steps] | None = None,
    ) -> None:
        self.token = token
        self.attempt: Acquire | None = None
        self._kind = kind
        self._terms = kind.terms(ttl_ms)
        self._observed = observed
        self.own = own
        self.tracks = False
        self.key = key
        self.ttl_ms = ttl_ms
        self._limit = limit
        self._refresh = refresh
        self._interval_s, self._awake_ms, self._kept_ms = _patience(interval_s)
        # A caller with its own token asks by itself, once an interval: the lock may get that token in another way.
        self._longest_s = math.inf if own is None else self._interval_s

    @property
    def held_with(self) -> bytes:
        """The token with which the lock is held once the steps have returned a Grant."""
        return self.token if self.own is None else self.own

    def join(self, waiter: Waiter) -> float | None:
        """Send the request to join the queue, without waiting for the reply: that saves a wake-up.

        Returns:
            How long to listen, in seconds; None where the request cannot be sent so.
        """
        channel = waiter.channel
        if channel is None:
            return None
        waiter.interval_s = self._interval_s
        self._limit.begin_wait()
        if self._observed:  # a tracer sees the request with its reply
            return None
        publish = waiter.registry.publish
        request = join_request(self.key, self.token, self._terms, publish, channel, self._awake_ms, self._kept_ms)
        timeout_s = waiter.post_wait(request, self._limit.wakes_at)
        return None if timeout_s is None else min(timeout_s, self._longest_s)

    def granted(self, waiter: Waiter, message: object) -> Grant | None:
        """The message if it is a grant that is recent enough, and not of a ticket, else None."""
        if type(message) is Grant and self.own is None:
            now = clock()
            ttl_ms = self.ttl_ms
            if ttl_ms is None or now - message.since <= ttl_ms * _SPENT / 1000:
                waiter.waited_s = now - waiter.taken_at
                return message
        return None

    def steps(self, so_far: tuple[Waiter | None, object] | None = None) -> Steps:
        """Wait for the lock. Returns a `Grant`; TIME_UP; POLL where the connection takes no messages.

        Args:
            so_far: the answer to `enter`, and what has come since: a message, None when none has come in time, the
                error that was raised, or ENTERED where `join` was not called.
        """
        while True:
            if so_far is None:
                so_far = (yield Do("enter", self.key, self.token, self.limit_s())), ENTERED
            (waiter, message), so_far = so_far, None
            if waiter is None:
                return POLL
            try:
                outcome = yield from self._go_on(waiter, message)
                outcome = yield from self._fall_back(waiter, outcome)
                if outcome is not BROKEN:
                    return outcome
            except GeneratorExit:  # the task was dropped: this may run in any thread, so nothing may be sent
                raise
            except BaseException:
                waiter.withdraw()
                raise
            finally:
                self._limit.refused = self._limit.refused or waiter.refused
                waiter.registry.leave(waiter)
                message = None  # else an error would keep this frame, and this frame the error

    def limit_s(self) -> float | None:
        """How long to wait at most from now on, in seconds; below 0 when the time is up."""
        return self._limit.left_s()

    def _fall_back(self, waiter: Waiter, outcome: object) -> Steps:
        """Go on where the queue has no result. Returns the outcome; BROKEN to start again as a new waiter."""
        queues = waiter.channel is not None
        if queues and outcome in (_DENIED, BROKEN) and self.token is waiter.token:
            outcome = (yield from self._leave(waiter, self.limit_s())) or outcome
        if outcome is _DENIED:
            waiter.key_queue.dequeue(waiter)
            outcome = POLL if is_permit(self.token) else (yield from self._watch_key(waiter))
        if waiter.asked_at and outcome in (BROKEN, TIME_UP):
            waiter.withdraw()
        if outcome is BROKEN and queues:
            self.token = waiter.node.new_token(self.key, kind_of(self.token))
        return outcome

    # ---- in the queue ----

    def _go_on(self, waiter: Waiter, message: object) -> Steps:
        if isinstance(message, BaseException):
            try:
                raise message
            finally:
                del message  # else an error would keep this frame, and this frame the error
        if waiter.channel is None:
            return _DENIED
        if message is ENTERED:
            timeout_s = self.join(waiter)
            if timeout_s is None:
                return (yield from self._wait_in_queue(waiter, None))
            message = yield Do("next_message", waiter, timeout_s)
        outcome = yield from self._listen(waiter, message)
        if outcome is not _CHECK and outcome is not _DUE:
            return outcome
        return (yield from self._wait_in_queue(waiter, waiter.oldest() if outcome is _DUE else None))

    def _wait_in_queue(self, waiter: Waiter, oldest: Waiter | None) -> Steps:
        """Ask the server, listen, and ask again. A health check asks for the oldest waiter, too."""
        watches = True
        while True:
            if self._refresh is not None and (yield from self._refresh()):
                return (yield from self._leave(waiter, self.limit_s())) or TIME_UP
            wait = self._wait(waiter, b"" if oldest is None else oldest.token)
            yield Do("execute", wait, self.limit_s())
            if wait.denied or wait.unsettled:
                return (yield from self._refused(waiter, wait))
            if not waiter.current:
                return BROKEN
            waiter.asked_at = 0.0  # an earlier posted request was executed before this one
            waiter.registry.is_proven = True
            if wait.result:
                grant = yield from self._found(waiter, wait.value)
                if grant:
                    return grant
                continue
            if self.own is not None and is_held_with(wait.value, self.own):
                return (yield from self._adopt(waiter))
            waiter.note(wait.value, wait.sent_at, wait.left_ms)
            waiter.arrival = wait.arrival or waiter.arrival  # a grant of an earlier place in the queue does not count
            if oldest is not None and self._is_lost(wait, oldest):
                waiter.wake_others()
            elif oldest is not None and wait.has_permit:  # its message has been missed, or is about to come
                oldest.mailbox.put(CHECK)
            if wait.foreign and watches and waiter.is_watcher:
                watch = yield from self._watch(waiter.key_queue)
                watches = not watch.denied
                if watches and watch.value != wait.value:
                    continue
            message = yield Do("next_message", waiter, self._listen_s(waiter))
            outcome = yield from self._listen(waiter, message)
            if outcome is not _CHECK and outcome is not _DUE:
                return outcome
            oldest = waiter.oldest() if outcome is _DUE else None

    def _refused(self, waiter: Waiter, wait: JoinQueue) -> Steps:
        """Go on where the server does not execute the request, or may still execute it. Returns the outcome."""
        if wait.denied == MOVING:
            return (yield from self._try_once(waiter))
        if wait.unsettled:  # it is cleaned up
            self.token = waiter.node.new_token(self.key, kind_of(self.token))
            return BROKEN
        if wait.denied == "NOPERM":
            waiter.registry.forbid(self.key)
        return _DENIED

    def _watch(self, key_queue: KeyQueue) -> Steps:
        """Have the server tell of the next change of the key. Returns the operation."""
        watch = Watch(self.key)
        key_queue.is_watched = True  # before it is so: the message of a change may come before this goes on
        try:
            yield Do("execute", watch, self.limit_s())
        except BaseException:
            key_queue.is_watched = False
            raise
        return watch

    @staticmethod
    def _is_lost(wait: JoinQueue, oldest: Waiter) -> bool:
        """Whether a waiter that should be in the queue is not there: then all have lost their places."""
        return not wait.is_there and oldest.is_queued and not is_held_with(wait.value, oldest.token)

    def _wait(self, waiter: Waiter, look_for: bytes) -> JoinQueue:
        assert waiter.channel is not None
        publish = waiter.registry.publish
        return JoinQueue(
            self.key, self.token, self._terms, publish, waiter.channel, self._awake_ms, self._kept_ms, look_for
        )

    def _listen(self, waiter: Waiter, message: object) -> Steps:
        """Returns the outcome, or why the server must be asked again: _CHECK for a message, _DUE for a health check."""
        while True:
            if waiter.accepts(message):
                return (yield from self._if_fresh(waiter, message)) or _CHECK
            if message is None:
                if self._limit.is_over:
                    return (yield from self._leave(waiter, self.limit_s())) or TIME_UP
                yield from log_wait_if_long(self.key, self._limit, is_permit(self.token))
                if waiter.is_due():
                    return _DUE
                if self.own is not None:
                    return _CHECK
            elif message is not RECKON and type(message) is not Grant:
                return BROKEN if message is BROKEN else _CHECK
            message = yield Do("next_message", waiter, self._listen_s(waiter))

    def _listen_s(self, waiter: Waiter) -> float:
        return min(waiter.listen_s(self._limit.wakes_at), self._longest_s)

    def _adopt(self, waiter: Waiter) -> Steps:
        """Take the lock that is held with the caller's own token. Returns a Grant; BROKEN where it ended meanwhile."""
        grant = yield from self._leave(waiter, self.limit_s())
        return grant or (yield from self._attempt()) or BROKEN

    def _attempt(self) -> Steps:
        """Try to take the lock. Returns a Grant, or None."""
        self.attempt = attempt = self._kind(self.key, self.held_with, self.ttl_ms)
        yield Do("execute", attempt, self.limit_s())
        return Grant(attempt.token, attempt.sent_at) if attempt.result else None

    def _leave(self, waiter: Waiter, limit_s: float | None) -> Steps:
        """Leave the queue. Returns the grant if there was one meanwhile, or if the lock is free and the queue empty.

        Not where a posted request is unanswered and on another connection: `withdraw` cleans that up.
        """
        leave = LeaveQueue(self.key, self.token, waiter.current or not waiter.asked_at, self._terms)
        yield Do("execute", leave, limit_s)
        return (yield from self._found(waiter, leave.value)) if leave.result else None

    def _found(self, waiter: Waiter, value: bytes) -> Steps:
        """Take the lock that the server says is the waiter's. Returns what `_if_fresh` does."""
        grant = yield from self._if_fresh(waiter, Grant(value, waiter.since))
        waiter.waited_s = 0.0
        return grant

    def _if_fresh(self, waiter: Waiter, grant: Grant) -> Steps:
        """Returns the grant, whose lease is renewed if much of it may have passed; None when the lock is lost.

        A ticket is always redeemed, which renews the lease. Where the lock is lost, that returns BROKEN: the ticket is
        not used again.
        """
        if self.granted(waiter, grant):
            return grant
        if self.own is None:
            reacquire = Reacquire(self.key, self.token, self.ttl_ms, contended=True)
            yield Do("execute", reacquire, self.limit_s())
            return Grant(grant.value, reacquire.sent_at) if reacquire.result else None
        kind = RedeemFenced if issubclass(self._kind, AcquireFenced) else Redeem
        self.attempt = redeem = kind(self.key, self.own, self.ttl_ms, self.token)
        yield Do("execute", redeem, self.limit_s())
        return Grant(grant.value, redeem.sent_at) if redeem.result else BROKEN

    # ---- without a queue ----

    def _try_once(self, waiter: Waiter) -> Steps:
        """Try once, and pause: the lock's slot is moving, and no queue can be joined until it has arrived.

        The token is a new one, because the old one may still have a place in the queue.
        """
        self.token = waiter.node.new_token(self.key, kind_of(self.token))
        grant = yield from self._attempt()
        if grant:
            return grant
        left_s = self.limit_s()
        if left_s is not None and left_s <= self._interval_s:
            yield Do("sleep", max(left_s, 0.0))
            return TIME_UP
        yield Do("sleep", self._interval_s)
        return BROKEN

    def _watch_key(self, waiter: Waiter) -> Steps:
        """Watch the key, and try to take the lock when it changes."""
        self.tracks = True
        self._limit.begin_wait()
        while True:
            if self._refresh is not None and (yield from self._refresh()):
                return TIME_UP
            watch = Watch(self.key)
            yield Do("execute", watch, self.limit_s())
            if watch.denied:
                return POLL
            if watch.value is None or (self.own is not None and is_held_with(watch.value, self.own)):
                grant = yield from self._attempt()
                if grant:
                    return grant
                if self.attempt is not None and self.attempt.unsettled:  # it is cleaned up
                    self.token = waiter.node.new_token(self.key, kind_of(self.token))
                continue
            if is_held_with(watch.value, self.token):  # granted to a place that could not be left
                grant = yield from self._found(waiter, watch.value)
                if grant:
                    return grant
            waiter.refused = True
            if not waiter.current:
                return BROKEN
            if self._limit.is_over:
                return TIME_UP
            yield from log_wait_if_long(self.key, self._limit)
            left_s = self._limit.listen_s()
            listen_s = self._interval_s if left_s is None else min(self._interval_s, left_s)
            message = yield Do("next_message", waiter, listen_s)
            if message is BROKEN:
                return BROKEN
