"""An acquire of a lock with `linger` by a thread, in as few calls as can be.

A key that lingers is taken in memory; the local lock is waited for, or one request leaves, without steps. Only the
usual outcomes are handled here. Any other one is handed to the steps of `_procedures/lingering.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._pipe.base import NOT_ASKED
from redislock_fast._procedures.lingering import Turn
from redislock_fast._protocol.commands import Acquire, acquire_request
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.uncontended import UncontendedBase
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._lease.key_cache import CachedKey
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.acquisition import CleanupEntries
    from redislock_fast._protocol.operation import Begun

__all__ = ["CachedBase"]


class CachedBase(UncontendedBase):
    """A lock for threads whose key may linger. The public classes describe the parameters.

    By steps, a local hand-over takes twice the CPU, and a new name a third more.
    """

    def _acquire_lingering(self, owner: Owner, blocking: bool | None) -> bool:
        """Acquire with `linger`, and without other options, a token and a deadline for this acquire."""
        cached = self._cached or self._cached_key()
        own_hook = self._own_hooks.do_acquire
        if getattr(self.do_acquire, "__func__", None) is own_hook and self._take_at_once(cached, owner):
            return True
        if not cached.is_current:
            cached = self._cached_key()
        turn: Turn | None = None
        attempt: Acquire | None = None
        to_clean_up: CleanupEntries = []
        try:
            if (
                self.blocking_timeout is None
                and self._wait == "push"
                and self.sleep >= 0
                and blocking in (None, True, False)
                and self._is_plain_acquire()
            ):
                waits = self.blocking if blocking is None else blocking
                if not cached.locked_by:
                    turn, attempt = self._begin_fetching(cached, owner, waits and owner.token is None)
                elif waits:
                    turn = self._begin_waiting(cached, owner)
                if turn is not None and turn.expiry is not None:
                    return True
            steps = self._acquiring_by(self._limit(None), owner, None, blocking, None, to_clean_up, attempt, turn)
            return bool(drive(self._transport, steps, to_clean_up, self._redis))
        except BaseException:  # an interrupt may come before the steps begin
            if turn is not None:
                turn.end(owner)
            raise

    def _begin_waiting(self, cached: CachedKey, owner: Owner) -> Turn | None:
        """Wait for the local lock, and take the key. Returns the turn where the local lock was got."""
        turn = Turn(self._transport.key_cache_of(self._key))
        waiter = turn.begin(cached, self._transport.local_waiter())
        try:
            turn.join()
            if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                waiter.wait(None)
            if not cached.leave(waiter):
                self._take(turn, owner)
                return turn
        except BaseException:
            turn.end(owner)
            raise
        return None

    def _begin_fetching(self, cached: CachedKey, owner: Owner, waits: bool) -> tuple[Turn | None, Acquire | None]:
        """Take a free key by one request, or a contended one by the queue if the caller waits.

        Returns the turn, and the attempt where it has another outcome.
        """
        transport, ttl_ms = self._transport, self._key_ttl_ms(self._linger_ms)
        connection, registry = transport.connection, transport.registry_of(self._key)
        if connection is None or registry is None:
            return None, None
        token = registry.new_token(listens=True)
        turn = Turn(transport.key_cache_of(self._key))
        turn.begin(cached, token)
        if waits and registry.is_contended(self._key, True):
            return self._begin_queueing(turn, owner, token), None
        request, ours = acquire_request(connection.capabilities, self._key, token, ttl_ms)
        begun: Begun | None = None
        sent_at = clock()
        try:
            if self._may_ask(turn, token):
                reply = connection.pipe.ask(request, transport.timeout_s, transport.inside)
                if reply == ours:
                    self._note_granted(turn, owner, token, sent_at + (ttl_ms or 0) / 1000, registry)
                    return turn, None
                begun = (connection, reply, None)
        except BaseException as interruption:
            if cached.lease is not None or cached.locked_by.get(0) is not token:  # not between request and reply
                turn.end(owner)
                raise
            begun = (connection, None, interruption)
        if begun is None or begun[1] is NOT_ASKED:
            turn.end(owner)
            return None, None
        attempt = Acquire(self._key, token, ttl_ms)
        attempt.begin(request, connection.capabilities, sent_at, begun)
        return turn, attempt

    def _begin_queueing(self, turn: Turn, owner: Owner, token: bytes) -> Turn | None:
        """Get a contended key by the server's queue. Returns the turn where that was possible."""
        try:
            if self._may_ask(turn, token) and self._acquire_contended(owner, token, self._linger_ms):
                self._note_acquired(turn, owner)
                return turn
        except BaseException:
            self._transport.clean_up(self._undo(turn, owner, None))
            raise
        turn.end(owner)
        return None
