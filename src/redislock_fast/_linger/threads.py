"""An acquire of a lock with `linger` by a thread: in memory, or by one request as any lock.

Only the usual outcomes are handled here. Any other one is handed to the steps of `procedures.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._linger.procedures import (
    Linger,
    Turn,
    acquire_in_memory,
    cached_key,
    is_fetching,
    keep_first_grant,
    may_begin,
    take_at_once,
    take_kept,
)
from redislock_fast._linger.watching_threads import ThreadLingering
from redislock_fast._procedures.acquire import clean_up_after, go_on
from redislock_fast._procedures.lock import LockBase
from redislock_fast._transport.threads.driver import drive

if TYPE_CHECKING:
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.acquire import Call

__all__ = ["LINGER", "acquire_lingering", "take_lingering"]

LINGER = Linger(ThreadLingering)


def take_lingering(lock: LockBase, owner: Owner) -> bool:
    """Take a key that lingers in this process. Returns False where it does not, or another caller was faster."""
    cached = lock._cached or cached_key(lock)
    is_own = getattr(lock.do_acquire, "__func__", None) is lock._own_hooks.do_acquire
    return is_own and not cached.waiters and take_at_once(lock, cached, owner)


def acquire_lingering(lock: LockBase, call: Call) -> bool:
    """Acquire a lock with `linger` and no other option, whose key does not linger or is in use."""
    cached = lock._cached
    if cached is None or not cached.is_current:
        cached = cached_key(lock)
    owner, turn = call.owner, Turn()
    try:
        if call.begins:
            if cached.locked_by and call.waits and call.wait_s is None:
                waiter = turn.begin(cached, cached.cache.new_waiter())
                turn.join()
                if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                    waiter.wait(None)
                if turn.leave() and take_kept(lock, turn, cached, owner):
                    return True
            elif may_begin(lock, call, turn, cached):
                _begin_lingering(lock, call, turn)
                if turn.expiry is not None:
                    return True
        call.left = []
        return bool(drive(lock._transport, acquire_in_memory(lock, call, turn), call.left, lock._redis))
    except BaseException as error:  # an interrupt may come before the steps begin
        turn.end(owner)
        clean_up_after(lock, error, owner, call)
        raise


def _begin_lingering(lock: LockBase, call: Call, turn: Turn) -> None:
    """Take the key by the call's first request, and note it in the turn, which has the local lock."""
    try:
        reply = lock._transport.begin(call)
        if reply == call.ours:
            keep_first_grant(lock, call, turn)
            return
    except BaseException as interruption:
        if not is_fetching(call, turn):
            raise
        go_on(lock, call, None, interruption)
    else:
        go_on(lock, call, reply)
