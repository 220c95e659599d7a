"""How a waiter gets a contended lock: a procedure of steps, without I/O.

He stands in the lock's queue and is told when the lock is handed to him. Lost messages, dead holders, deleted keys and
flushed servers are found by looking: the line's first waiter repeats his request once an interval, and whoever waits
does when the holder's ttl has ended. What the server denies makes him fall back, first to watching the key and trying
when it changes, then to polling.

Must not know: sockets, threads, event loops.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from redislock_fast._ownership import Holding
from redislock_fast._protocol import Acquire, Reacquire
from redislock_fast._queue import Leave, Wait, Watch
from redislock_fast._room import BROKEN, Grant, Seat
from redislock_fast._steps import Enter, Execute, Listen, Steps
from redislock_fast._times import clock
from redislock_fast._tokens import MARK, is_ours

__all__ = ["POLL", "TIME_UP", "Granted", "waiting"]

POLL: Final = "poll"
"""The outcome where nobody can be told anything: who waits must poll."""

TIME_UP: Final = "time up"
"""The outcome when the lock was not to be had in time."""

_DENIED: Final = "denied"

_FRESH = 0.75
"""What must be left of a lease that is returned; below, it is renewed first."""

_SHORTEST_INTERVAL_S = 0.01
_AWAKE_INTERVALS = 8  # a process that has not looked for so many intervals and a second is asleep, and passed over
_AWAKE_MS = 1000
_KEPT_MS = 3_600_000  # what everybody has left behind goes after an hour


class Granted(NamedTuple):
    """The lock is ours: its lease counts from `since`; `queued` says whether somebody waits behind us."""

    since: float
    queued: bool

    def note(self, local: Holding, token: bytes, ttl_ms: int | None) -> None:
        """Let the waiter hold it."""
        local.lease = (token, None if ttl_ms is None else self.since + ttl_ms / 1000)
        local.queued = token if self.queued else None
        local.token = token


def waiting(key: bytes, token: bytes, ttl_ms: int | None, interval_s: float, deadline: float | None) -> Steps:
    """Wait for a lock that another holds.

    Args:
        key: the lock.
        token: the waiter's.
        ttl_ms: of the lock, once it is granted.
        interval_s: how often to look whether all is well, in seconds.
        deadline: when to give up, in the clock's seconds; None: never.

    Returns:
        Granted; TIME_UP; POLL when there is no way to be told.

    If it raises, or is closed, the waiter may stand in the queue or have been granted the lock: whoever drives it then
    sends `Leave`.
    """
    return _Waiting(key, token, ttl_ms, max(interval_s, _SHORTEST_INTERVAL_S), deadline).run()


class _Waiting:
    def __init__(self, key: bytes, token: bytes, ttl_ms: int | None, interval_s: float, deadline: float | None) -> None:
        self._key = key
        self._token = token
        self._ttl_ms = ttl_ms
        self._interval_s = interval_s
        self._deadline = deadline
        self._awake_ms = int(1000 * _AWAKE_INTERVALS * interval_s) + _AWAKE_MS
        self._since = 0.0  # over all connections

    def run(self) -> Steps:
        """Take a seat, and another one when the connection has changed."""
        while True:
            seat: Seat | None = yield Enter(self._key, self._token, self._limit_s())
            if seat is None:
                return POLL
            seat.since = self._since or clock()
            try:
                # A token that a caller has brought may be another holder's too: with it, nobody can be told apart.
                queues = seat.channel is not None and is_ours(self._token)
                outcome = (yield from self._queueing(seat)) if queues else _DENIED
                if outcome is _DENIED:
                    outcome = yield from self._watching(seat)
            finally:
                seat.leave()
            if outcome is not BROKEN:
                return outcome
            self._since = seat.since

    def _limit_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - clock(), 0.0)

    # ---- in the queue ----

    def _queueing(self, seat: Seat) -> Steps:
        watches = True
        again = False
        assert seat.channel is not None
        while True:
            wait = Wait(
                self._key,
                self._token,
                self._ttl_ms,
                seat.publish,
                seat.channel,
                self._awake_ms,
                max(_KEPT_MS, 2 * self._awake_ms),
            )
            yield Execute(wait, self._limit_s())
            if wait.denied:
                return _DENIED
            if wait.result:
                granted = yield from self._accept(wait.word, seat.since)
                if granted:
                    return granted
                continue
            seat.note(wait.word, wait.sent_at, wait.left_ms)
            if not seat.current:
                return BROKEN
            if again and not wait.was_queued:  # all who wait have lost their places
                seat.wake_others()
            again = True
            if wait.foreign and watches:
                watch = Watch(self._key)
                yield Execute(watch, self._limit_s())
                watches = not watch.denied
                if watches and watch.word != wait.word:
                    continue
            outcome = yield from self._told(seat)
            if outcome is not None:
                return outcome

    def _told(self, seat: Seat) -> Steps:
        """Listen. Returns what has come of the waiting, or None to ask again."""
        while True:
            message = yield from self._listen(seat, seat.due_at(self._interval_s))
            if isinstance(message, Grant):
                # Where the server has since said that the lock is not ours, that may have been later: with a ttl,
                # `_accept` finds out.
                if self._ttl_ms is None and message.since < seat.since:
                    return None
                return (yield from self._accept(message.word, message.since))
            if message is TIME_UP:
                leave = Leave(self._key, self._token, keep=True)
                yield Execute(leave, 0.0)
                return (yield from self._accept(leave.word, seat.since)) if leave.result else TIME_UP
            if message is not None:
                return BROKEN if message is BROKEN else None
            if seat.due_at(self._interval_s) <= clock():  # else another of the line has looked
                seat.line.looked_at = clock()
                return None

    def _listen(self, seat: Seat, until: float) -> Steps:
        """A message; None when `until` has come; TIME_UP."""
        if self._deadline is not None and self._deadline <= until:
            message = yield Listen(seat, max(self._deadline - clock(), 0.0))
            return TIME_UP if message is None else message
        return (yield Listen(seat, max(until - clock(), 0.0)))

    def _accept(self, word: bytes, since: float) -> Steps:
        """The lock is ours since then at the earliest. Returns None when it turns out to be lost again."""
        queued = word.endswith(MARK)
        if self._ttl_ms is not None and clock() - since > (1 - _FRESH) * self._ttl_ms / 1000:
            reacquire = Reacquire(self._key, self._token, self._ttl_ms, queued)
            yield Execute(reacquire, self._limit_s())
            if not reacquire.result:
                return None
            since = reacquire.sent_at
        return Granted(since, queued)

    # ---- without a queue ----

    def _watching(self, seat: Seat) -> Steps:
        while True:
            watch = Watch(self._key)
            yield Execute(watch, self._limit_s())
            if watch.denied:
                return POLL
            if watch.word is None:
                attempt = Acquire(self._key, self._token, self._ttl_ms)
                yield Execute(attempt, self._limit_s())
                if attempt.result:
                    return Granted(attempt.sent_at, False)
                continue
            if not seat.current:
                return BROKEN
            message = yield from self._listen(seat, clock() + self._interval_s)
            if message is TIME_UP:
                return TIME_UP
            if message is BROKEN:
                return BROKEN
