"""How an observer finds each new leader: the server tells of it, by client tracking of the leader's record."""

from __future__ import annotations

from typing import Any, Final, Protocol

from redislock_fast._election.record import read_leader
from redislock_fast._protocol.keys import leader_key
from redislock_fast._protocol.leading import Leader, WatchLeader
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._queue.waiters import Waiter
from redislock_fast._util.times import clock

_LOOK_S: Final = 15.0
"""After how long an observer looks, whatever the server tells: a message may be lost with its connection."""

_LISTEN_S: Final = 0.5
"""How long it listens before it looks whether it is to stop."""


class Until(Protocol):
    """An event of threads or tasks."""

    def is_set(self) -> bool:
        """Whether it is set."""


class Observing:
    """Finds one new leader after the other: `drive(observing.steps())`, again and again.

    Between two of these, nothing of it is on any connection: a forked child goes on as its parent does.

    Args:
        lock: the election's.
        until: once it is set, nothing is waited for any more.
    """

    def __init__(self, lock: Any, until: Until) -> None:
        self._lock = lock
        self._key: bytes = lock._key  # noqa: SLF001  # as its own class would
        self._until = until
        self._last = 0  # the highest term so far
        self._is_denied = False

    def steps(self) -> Steps:
        """Wait for a leader with a higher term than all before.

        Returns:
            The `Leader`. None where `until` is set, and where the server tells nothing: look again after a while.
        """
        seen = yield from read_leader(self._key, with_process=False)  # this connects, too
        leader = yield from self._if_new(seen)
        if leader is not None or self._is_denied:
            return leader
        token = self._lock._transport.new_token(self._key)  # noqa: SLF001  # as its own class would
        waiter = yield Do("enter", leader_key(self._key), token, None)
        if waiter is None:
            return None
        try:
            return (yield from self._watch(waiter))
        finally:
            waiter.registry.leave(waiter)

    def _watch(self, waiter: Waiter) -> Steps:
        """Look whenever the record has changed, until the connection is lost. Returns as `steps`."""
        leader: Leader | None = None
        while leader is None and waiter.current and not self._until.is_set():
            watch = WatchLeader(self._key)
            yield Do("execute", watch)
            self._is_denied = watch.denied
            if watch.denied:
                break
            leader = yield from self._if_new(watch.leader)
            if leader is None:
                yield from self._listen(waiter)
        return leader

    def _listen(self, waiter: Waiter) -> Steps:
        """Return when something has changed, when it is time to look, or to stop."""
        message, looks_at = None, clock() + _LOOK_S
        while message is None and not self._until.is_set() and (left_s := looks_at - clock()) > 0:
            message = yield Do("next_message", waiter, min(left_s, _LISTEN_S))

    def _if_new(self, seen: Leader | None) -> Steps:
        """The leader with its process, if it leads still and its term is a higher one."""
        if seen is None or seen.term <= self._last:
            return None
        leader = yield from read_leader(self._key, with_process=True)
        if leader is None or leader.term <= self._last:
            return None
        self._last = leader.term
        return leader
