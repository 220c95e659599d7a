"""An acquire of a lock with `linger` by a thread: in memory, or by one request as any lock.

Only the usual outcomes are handled here. Any other one is handed to the steps of `_procedures/lingering.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._procedures.lingering import Turn
from redislock_fast._procedures.lock import LockBase
from redislock_fast._transport.threads.driver import drive

if TYPE_CHECKING:
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.call import Call
    from redislock_fast._transport.threads.server import ThreadServerTransport

__all__ = ["CachedBase"]


class CachedBase(LockBase):
    """A lock for threads whose key may linger. The public classes describe the parameters.

    By steps, a local hand-over takes twice the CPU, and a new name a third more.
    """

    _transport: ThreadServerTransport

    def _take_lingering(self, owner: Owner) -> bool:
        """Take a key that lingers in this process. Returns False where it does not, or another caller was faster."""
        cached = self._cached or self._cached_key()
        is_own = getattr(self.do_acquire, "__func__", None) is self._own_hooks.do_acquire
        return is_own and not cached.waiters and self._take_at_once(cached, owner)

    def _acquire_lingering(self, call: Call) -> bool:
        """Acquire a lock with `linger` and no other option, whose key does not linger or is in use."""
        cached = self._cached
        if cached is None or not cached.is_current:
            cached = self._cached_key()
        owner, turn = call.owner, Turn()
        try:
            if self._begins(call):
                if cached.locked_by and call.waits and call.wait_s is None:
                    waiter = turn.begin(cached, cached.cache.new_waiter())
                    turn.join()
                    if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                        waiter.wait(None)
                    if turn.leave() and self._take(turn, cached, owner):
                        return True
                elif self._may_begin(call, turn, cached):
                    self._begin_lingering(call, turn)
                    if turn.expiry is not None:
                        return True
            return bool(drive(self._transport, self._acquiring(call, turn), call.left, self._redis))
        except BaseException:  # an interrupt may come before the steps begin
            turn.end(owner)
            raise

    def _begin_lingering(self, call: Call, turn: Turn) -> None:
        """Take the key by the call's first request, and note it in the turn, which has the local lock."""
        try:
            reply = self._transport.begin(call)
            if reply == call.ours:
                self._note_begun(call, turn)
                return
        except BaseException as interruption:
            if not self._is_fetching(call, turn):
                raise
            self._go_on(call, None, interruption)
        else:
            self._go_on(call, reply)
