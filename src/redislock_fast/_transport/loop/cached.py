"""An acquire of a lock with `linger` by a task: in memory, or by one request as any lock.

Only the usual outcomes are handled here. Any other one is handed to the steps of `_procedures/lingering.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._procedures.call import Call
from redislock_fast._procedures.lingering import Turn
from redislock_fast._procedures.lock import LockBase
from redislock_fast._transport.loop.driver import AsyncTransport, drive
from redislock_fast._util.coroutines import runs

if TYPE_CHECKING:
    from redislock_fast._lease.key_cache import CachedKey
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.steps import Steps

__all__ = ["CachedBase"]


class CachedBase(LockBase):
    """A lock for tasks whose key may linger. The public classes describe the parameters.

    By steps, a local hand-over takes half as much CPU again.
    """

    _transport: AsyncTransport

    @runs("Lock.acquire")
    async def _acquire_lingering(self, owner: Owner, blocking: bool | None) -> bool:
        """Acquire a lock with `linger` and no other option, without a token or a deadline for this acquire."""
        cached = self._cached
        if cached is None or not cached.cache.is_here:
            cached = self._cached_key()
        is_own = getattr(self.do_acquire, "__func__", None) is self._own_hooks.do_acquire
        if is_own and not cached.waiters and self._take_at_once(cached, owner):
            return True
        if not cached.is_current:
            cached = self._cached_key()
        call, turn = self._call(owner, None, blocking), Turn()
        try:
            if self._begins(call):
                if cached.locked_by and call.waits and call.wait_s is None:
                    waiter = turn.begin(cached, cached.cache.new_waiter())
                    turn.join()
                    if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                        await waiter.woken
                    if turn.leave() and self._take(turn, cached, owner):
                        return True
                elif self._may_begin(call, turn, cached):
                    await self._begin_lingering(call, turn)
                    if turn.expiry is not None:
                        return True
            return bool(await drive(self._transport, self._acquiring(call, turn), call.left, self._redis))
        except BaseException:  # a cancel or an interrupt may come before the steps begin
            turn.end(owner)
            raise

    async def _begin_lingering(self, call: Call, turn: Turn) -> None:
        """Take the key by the call's first request, and note it in the turn, which has the local lock."""
        reply: object = None
        try:
            sent = self._transport.of_running_loop().begin(call)
            if sent is not None:
                reply = await sent
                if reply == call.ours:
                    self._note_begun(call, turn)
                    return
        except BaseException as interruption:
            if not self._is_fetching(call, turn):
                raise
            self._go_on(call, None, interruption)
        else:
            self._go_on(call, reply)

    def _releasing_what(self, owner: Owner, holding: object) -> Steps:
        """`_releasing`, of what the owner held when that was called, though it may hold the lock anew by now."""
        if owner.token is not None and owner.holding != holding:
            raise self._not_owned("release")
        yield from self._releasing(owner)

    @runs("Lock.release")
    async def _release_lingering(self, owner: Owner, cached: CachedKey, holding: object) -> None:
        """Release a lock with `linger` and no other option. `holding` names what was held when that was called."""
        if cached.cache.is_here and cached.locked_by.get(0) is holding:
            self._release_here(owner, cached)
        else:  # the loop of the key may have ended
            await drive(self._transport, self._releasing_what(owner, holding), None, self._redis)
