"""How a waiter gets a contended lock: a procedure of steps, and what those come to on a usual day.

He stands in the lock's queue and is told when the lock is handed to him. Lost messages, dead holders, deleted keys and
flushed servers are found by looking: one waiter of each line repeats his request once an interval (the first time
later, where the last wait was long), and when the holder's ttl has ended. What the server denies makes him fall back,
first to watching the key and trying when it changes, then to polling.

On a usual day there are no steps: `join`, listen, `granted`. That takes half as many calls. Whatever else happens is
told to the steps, which go on from there.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, TypeGuard

from redislock_fast._pipe.base import Lost
from redislock_fast._procedures.steps import ENTERED, Enter, Execute, Listen, Sleep, Steps
from redislock_fast._procedures.waiters import BROKEN, RECKON, Grant, Seat
from redislock_fast._protocol.commands import Acquire, Reacquire
from redislock_fast._protocol.queue import MOVING, Leave, Wait, Watch, first_wait
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import is_held_with, new_token

__all__ = ["POLL", "TIME_UP", "Waiting"]

POLL: Final = "poll"
"""The outcome where nobody can be told anything: who waits must poll."""

TIME_UP: Final = "time up"
"""The outcome when the lock was not to be had in time."""

_DENIED: Final = "denied"
_LOOK: Final = "look"
_DUE: Final = "due"

_NEVER = math.inf

_SPENT = 0.25
"""How much of a lease may have passed when it is returned; beyond, it is renewed first."""

_SHORTEST_INTERVAL_S = 0.01
_LONGEST_S = 1e9
_AWAKE_INTERVALS = 8  # a process that has not looked for so many intervals and a second is asleep, and passed over
_AWAKE_MS = 1000
_KEPT_MS = 3_600_000  # what everybody has left behind goes after an hour


@lru_cache(128)
def _patience(interval_s: float) -> tuple[float, int, int]:
    """How often a waiter looks, and for how long he counts as awake and the queue is kept."""
    interval_s = max(interval_s, _SHORTEST_INTERVAL_S)
    awake_ms = int(1000 * _AWAKE_INTERVALS * min(interval_s, _LONGEST_S)) + _AWAKE_MS
    return interval_s, awake_ms, max(_KEPT_MS, 2 * awake_ms)


class Waiting:
    """Waiting for a lock that another holds.

    Args:
        key: the lock.
        token: the waiter's.
        ttl_ms: of the lock, once it is granted.
        interval_s: how often to look whether all is well, in seconds.
        limit: when to give up.
        queues: whether the token was made for this waiter. One that a caller has brought may be another holder's too:
            with it, nobody can be told apart.
        kind: how the lock is taken where nobody hands it over.

    Attributes:
        ttl_ms: as above.
        attempt: the last one to take it where nobody handed it over.
        token: the waiter's. Whatever ends the steps without a grant, the lock may be granted to it: unless that was
            said to be TIME_UP or POLL, whoever drives them then sends `Leave`.
    """

    __slots__ = (
        "_awake_ms",
        "_interval_s",
        "_kept_ms",
        "_kind",
        "_limit",
        "attempt",
        "key",
        "queues",
        "token",
        "ttl_ms",
    )

    def __init__(
        self,
        key: bytes,
        token: bytes,
        ttl_ms: int | None,
        interval_s: float,
        limit: Limit,
        queues: bool = True,
        kind: type[Acquire] = Acquire,
    ) -> None:
        self.token = token
        self.attempt: Acquire | None = None
        self._kind = kind
        self.queues = queues
        self.key = key
        self.ttl_ms = ttl_ms
        self._limit = limit
        self._interval_s, self._awake_ms, self._kept_ms = _patience(interval_s)

    def join(self, seat: Seat) -> float | None:
        """Join the queue, without waiting for the reply: that saves a wake-up.

        Returns:
            For how long to listen, in seconds; None where that could not be done.
        """
        channel = seat.channel
        if not self.queues or channel is None:
            return None
        seat.interval_s = self._interval_s
        publish = seat.room.publish
        request = first_wait(self.key, self.token, self.ttl_ms, publish, channel, self._awake_ms, self._kept_ms)
        seat.asked_at = clock()
        try:
            seat.node.post(seat.link, request, seat.answer)
        except Lost:
            return None
        return self._listen_s(seat)

    def granted(self, seat: Seat, message: object) -> Grant | None:
        """The first message, if it is a grant that needs no second look: no place was lost yet, so it is ours."""
        if type(message) is Grant:
            now = clock()
            ttl_ms = self.ttl_ms
            if ttl_ms is None or now - message.since <= ttl_ms * _SPENT / 1000:
                seat.waited_s = now - seat.taken_at
                return message
        return None

    def steps(self, begun: tuple[Seat | None, object] | None = None) -> Steps:
        """Returns a `Grant`; TIME_UP; POLL when there is no way to be told.

        A token is used on one connection only, since what was sent on a lost one may be executed at any time. So who
        loses his connection loses his place.

        Args:
            begun: the answer to `Enter`, and what has been heard since `join`: a message, None when none has come in
                time, what was raised, or ENTERED.
        """
        while True:
            if begun is None:
                begun = (yield Enter(self.key, self.token, self.limit_s())), ENTERED
            (seat, heard), begun = begun, None
            if seat is None:
                return POLL
            try:
                queues = self.queues and seat.channel is not None
                outcome = yield from self._joining(seat, heard)
                if queues and outcome in (_DENIED, BROKEN) and self.token is seat.token:
                    grant = yield from self._leave(seat, self.limit_s())
                    if grant:
                        return grant
                if outcome is _DENIED:
                    seat.leave_queue()
                    outcome = yield from self._watching(seat)
                if seat.asked_at and outcome in (BROKEN, TIME_UP):
                    seat.withdraw()
                if outcome is not BROKEN:
                    return outcome
                if queues:
                    self.token = new_token()
            except GeneratorExit:  # in whatever thread
                raise
            except BaseException:
                seat.withdraw()
                raise
            finally:
                self._limit.refused = self._limit.refused or seat.refused
                seat.room.leave(seat)
                heard = None  # an error would keep this frame, and this frame the error

    def limit_s(self) -> float | None:
        """How long to wait at most from now on, in seconds; below 0 when the time is up."""
        return self._limit.left_s()

    # ---- in the queue ----

    def _joining(self, seat: Seat, heard: object) -> Steps:
        if isinstance(heard, BaseException):
            try:
                raise heard
            finally:
                del heard  # likewise
        if not self.queues or seat.channel is None:
            return _DENIED
        if heard is ENTERED:
            timeout_s = self.join(seat)
            if timeout_s is None:
                return (yield from self._queueing(seat, None))
            heard = yield Listen(seat, timeout_s)
        outcome = yield from self._listening(seat, heard)
        if outcome is not _LOOK and outcome is not _DUE:
            return outcome
        return (yield from self._queueing(seat, seat.oldest() if outcome is _DUE else None))

    def _queueing(self, seat: Seat, oldest: Seat | None) -> Steps:
        """Ask, listen, and ask again: also for the oldest, when it is time to look."""
        watches = True
        while True:
            wait = self._wait(seat, b"" if oldest is None else oldest.token)
            yield Execute(wait, self.limit_s())
            if wait.denied == MOVING:
                return (yield from self._trying())
            if wait.unsettled:  # it is undone
                self.token = new_token()
                return BROKEN
            if wait.denied:
                if wait.denied == "NOPERM":
                    seat.room.forbid(self.key)
                return _DENIED
            if not seat.current:
                return BROKEN
            seat.asked_at = 0.0  # what was posted before has been executed before
            if wait.result:
                grant = yield from self._found(seat, wait.word)
                if grant:
                    return grant
                continue
            seat.note(wait.word, wait.sent_at, wait.left_ms)
            seat.arrival = wait.arrival or seat.arrival  # a grant to an earlier place is not worth anything any more
            if oldest is not None and self._is_lost(wait, oldest):
                seat.wake_others()
            if wait.foreign and watches:
                watch = Watch(self.key)
                yield Execute(watch, self.limit_s())
                watches = not watch.denied
                if watches and watch.word != wait.word:
                    continue
            outcome = yield from self._listening(seat, (yield Listen(seat, self._listen_s(seat))))
            if outcome is not _LOOK and outcome is not _DUE:
                return outcome
            oldest = seat.oldest() if outcome is _DUE else None

    @staticmethod
    def _is_lost(wait: Wait, oldest: Seat) -> bool:
        """Whether who should be in the queue is not there: then all have lost their places."""
        return not wait.is_there and oldest.is_queued and not is_held_with(wait.word, oldest.token)

    def _wait(self, seat: Seat, look_for: bytes) -> Wait:
        assert seat.channel is not None
        words = (seat.room.publish, seat.channel, self._awake_ms, self._kept_ms, look_for)
        return Wait(self.key, self.token, self.ttl_ms, *words)

    def _listen_s(self, seat: Seat) -> float:
        """For how long to listen, in seconds."""
        until = seat.due_at() or _NEVER
        deadline = self._limit.deadline
        if deadline is not None:
            seat.gives_up_at = deadline
            until = min(until, deadline)
        seat.until = until
        return max(until - clock(), 0.0)

    @staticmethod
    def _is_ours(message: object, seat: Seat) -> TypeGuard[Grant]:
        """Whether it is a grant, and not of a place that we had, and lost, and have since been told so."""
        return type(message) is Grant and (not seat.arrival or float(message.arrival or 0) >= seat.arrival)

    def _listening(self, seat: Seat, message: object) -> Steps:
        """Returns what has come of the waiting, or to ask again: _LOOK when told to, _DUE when it is time to look."""
        while True:
            if self._is_ours(message, seat):
                return (yield from self._if_fresh(seat, message)) or _LOOK
            if message is None:
                now = clock()
                if self._limit.is_over:
                    return (yield from self._leave(seat, 0.0)) or TIME_UP
                if now >= (seat.due_at() or _NEVER):  # else another of the line looks
                    seat.line.looked_at = now
                    seat.line.spare_s = 0.0
                    return _DUE
            elif message is not RECKON and type(message) is not Grant:
                return BROKEN if message is BROKEN else _LOOK
            message = yield Listen(seat, self._listen_s(seat))

    def _leave(self, seat: Seat, limit_s: float | None) -> Steps:
        """Leave the queue. Returns the grant, if there was one meanwhile, or the lock is free and nobody else's turn.

        Not where a posted wait is unanswered and on another connection: `withdraw` will undo that.
        """
        leave = Leave(self.key, self.token, seat.current or not seat.asked_at, self.ttl_ms)
        yield Execute(leave, limit_s)
        return (yield from self._found(seat, leave.word)) if leave.result else None

    def _found(self, seat: Seat, word: bytes) -> Steps:
        """The lock is ours, of which no message has told: the grant; None when the lock is lost."""
        grant = yield from self._if_fresh(seat, Grant(word, seat.since))
        seat.waited_s = 0.0
        return grant

    def _if_fresh(self, seat: Seat, grant: Grant) -> Steps:
        """The grant, with its lease renewed if that may have lasted for long; None when the lock is lost."""
        if self.granted(seat, grant):
            return grant
        reacquire = Reacquire(self.key, self.token, self.ttl_ms, queued=True)
        yield Execute(reacquire, self.limit_s())
        return Grant(grant.word, reacquire.sent_at) if reacquire.result else None

    # ---- without a queue ----

    def _trying(self) -> Steps:
        """The lock's slot is moving, and has no queue until it has arrived: try once, and pause.

        With a token of its own, because the other one may have a place in the queue that is left only by and by.
        """
        self.token = new_token()
        self.attempt = attempt = self._kind(self.key, self.token, self.ttl_ms)
        yield Execute(attempt, self.limit_s())
        if attempt.result:
            return Grant(self.token, attempt.sent_at)
        left_s = self.limit_s()
        if left_s is not None and left_s <= self._interval_s:
            yield Sleep(max(left_s, 0.0))
            return TIME_UP
        yield Sleep(self._interval_s)
        return BROKEN

    def _watching(self, seat: Seat) -> Steps:
        while True:
            watch = Watch(self.key)
            yield Execute(watch, self.limit_s())
            if watch.denied:
                return POLL
            held_with_brought = not self.queues and is_held_with(watch.word, self.token)
            if watch.word is None or held_with_brought:
                self.attempt = attempt = self._kind(self.key, self.token, self.ttl_ms)
                yield Execute(attempt, self.limit_s())
                if attempt.result:
                    return Grant(self.token, attempt.sent_at)
                if attempt.unsettled and self.queues:  # it is undone
                    self.token = new_token()
                continue
            if self.queues and is_held_with(watch.word, self.token):  # granted to a place that could not be left
                grant = yield from self._found(seat, watch.word)
                if grant:
                    return grant
            seat.refused = True
            if not seat.current:
                return BROKEN
            left_s = self.limit_s()
            if left_s is not None and left_s <= 0:
                return TIME_UP
            timeout_s = self._interval_s if left_s is None else min(self._interval_s, left_s)
            message = yield Listen(seat, timeout_s)
            if message is BROKEN:
                return BROKEN
