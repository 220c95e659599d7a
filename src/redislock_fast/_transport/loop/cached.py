"""An acquire of a lock with `linger` by a task, as `_transport/threads/cached.py` has it.

A key that lingers is taken in memory; the local lock is waited for, or one request leaves, without steps. Only the
usual outcomes are handled here. Any other one is handed to the steps of `_procedures/lingering.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._procedures.lingering import Turn
from redislock_fast._protocol.commands import Acquire, acquire_request
from redislock_fast._transport.loop.driver import drive
from redislock_fast._transport.loop.uncontended import UncontendedBase
from redislock_fast._util.coroutines import runs
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._lease.key_cache import CachedKey
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.acquisition import CleanupEntries
    from redislock_fast._protocol.operation import Begun
    from redislock_fast._transport.loop.server import LoopServerTransport

__all__ = ["CachedBase"]


class CachedBase(UncontendedBase):
    """A lock for tasks whose key may linger. The public classes describe the parameters.

    By steps, a local hand-over takes half as much CPU again.
    """

    @runs("Lock.acquire")
    async def _acquire_lingering(self, owner: Owner, blocking: bool | None) -> bool:
        """Acquire with `linger`, and without other options, a token and a deadline for this acquire."""
        cached = self._cached
        if cached is None or not cached.cache.is_here:
            cached = self._cached_key()
        is_own = getattr(self.do_acquire, "__func__", None) is self._own_hooks.do_acquire
        if is_own and not cached.waiters and self._take_at_once(cached, owner):
            return True
        if not cached.is_current:
            cached = self._cached_key()
        turn = Turn()
        attempt: Acquire | None = None
        to_clean_up: CleanupEntries = []
        try:
            if is_own and self._has_usual_settings(blocking):
                waits = self.blocking if blocking is None else blocking
                if cached.locked_by and waits:
                    waiter = turn.begin(cached, cached.cache.new_waiter())
                    turn.join()
                    if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                        await waiter.woken
                    if turn.leave() and self._take(turn, cached, owner):
                        return True
                elif not cached.locked_by and self._is_plain_acquire():
                    attempt = await self._begin_fetching(turn, cached, owner, waits and owner.token is None)
                    if turn.expiry is not None:
                        return True
            steps = self._acquiring_by(self._limit(None), owner, None, blocking, None, to_clean_up, attempt, turn)
            return bool(await drive(self._transport, steps, to_clean_up, self._redis))
        except BaseException:  # a cancel or an interrupt may come before the steps begin
            turn.end(owner)
            raise

    async def _begin_fetching(self, turn: Turn, cached: CachedKey, owner: Owner, waits: bool) -> Acquire | None:
        """Take a free key by one request, or a contended one by the queue if the caller waits.

        Returns the attempt where it has another outcome.
        """
        server, ttl_ms = self._transport.of_running_loop(), self._key_ttl_ms(self._linger_ms)
        connection, registry = server.connection, server.registry_of(self._key)
        if connection is None or registry is None:
            return None
        token = registry.new_token(listens=True)
        turn.begin(cached, token)
        if not self._may_ask(turn, token):
            return None
        if waits and registry.is_contended(self._key, True):
            connection = None
            await self._begin_queueing(server, turn, owner, token)
            return None
        request, ours = acquire_request(connection.capabilities, self._key, token, ttl_ms)
        begun: Begun | None = None
        sent_at = clock()
        try:
            reply = await connection.pipe.call(request, connection.timeout_s)
            if reply == ours:
                self._note_granted(turn, owner, token, sent_at + (ttl_ms or 0) / 1000, registry)
                return None
            begun = (connection, reply, None)
        except BaseException as interruption:
            if cached.lease is not None or cached.locked_by.get(0) is not token:  # not between request and reply
                raise
            begun = (connection, None, interruption)
        if waits and self._can_queue_at_once(begun):
            connection = begun = None  # an error keeps this frame, which must keep no connection
            await self._begin_queueing(server, turn, owner, token)
            return None
        attempt = Acquire(self._key, token, ttl_ms)
        attempt.begin(request, connection.capabilities, sent_at, begun)
        return attempt

    async def _begin_queueing(self, server: LoopServerTransport, turn: Turn, owner: Owner, token: bytes) -> None:
        """Get a contended key by the server's queue, where that is possible. Has the local lock."""
        try:
            if await self._acquire_contended(server, owner, token, self._linger_ms):
                self._note_acquired(turn, owner)
                return
        except BaseException:
            server.clean_up(self._undo(turn, owner, None))
            raise
        turn.end(owner)

    @runs("Lock.release")
    async def _release_lingering(self, owner: Owner, cached: CachedKey, holding: object) -> None:
        """Release a lock with `linger` and no other option. `holding` names what was held when that was called."""
        if cached.cache.is_here and cached.locked_by.get(0) is holding:
            self._release_here(owner, cached)
        else:  # the loop of the key may have ended
            await drive(self._transport, self._releasing_what(owner, holding), None, self._redis)
