"""An acquire of a lock with `linger` by a task: in memory, or by one request as any lock.

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
    release_here,
    take_at_once,
    take_kept,
)
from redislock_fast._linger.watching_loop import LoopLingering
from redislock_fast._procedures.acquire import Call, clean_up_after, go_on, new_call
from redislock_fast._procedures.lock import LockBase
from redislock_fast._procedures.release import release_what
from redislock_fast._transport.loop.driver import drive
from redislock_fast._util.coroutines import runs

if TYPE_CHECKING:
    from redislock_fast._lease.owner import Owner
    from redislock_fast._linger.key_cache import CachedKey

__all__ = ["LINGER", "acquire_lingering", "release_lingering"]

LINGER = Linger(LoopLingering)


@runs("Lock.acquire")
async def acquire_lingering(lock: LockBase, owner: Owner, blocking: bool | None) -> bool:
    """Acquire a lock with `linger` and no other option, without a token or a deadline for this acquire."""
    cached = lock._cached
    if cached is None or not cached.cache.is_here:
        cached = cached_key(lock)
    is_own = getattr(lock.do_acquire, "__func__", None) is lock._own_hooks.do_acquire
    if is_own and not cached.waiters and take_at_once(lock, cached, owner):
        return True
    if not cached.is_current:
        cached = cached_key(lock)
    call, turn = new_call(lock, owner, None, blocking), Turn()
    try:
        if call.begins:
            if cached.locked_by and call.waits and call.wait_s is None:
                waiter = turn.begin(cached, cached.cache.new_waiter())
                turn.join()
                if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                    await waiter.woken
                if turn.leave() and take_kept(lock, turn, cached, owner):
                    return True
            elif may_begin(lock, call, turn, cached):
                await _begin_lingering(lock, call, turn)
                if turn.expiry is not None:
                    return True
        call.left = []
        return bool(await drive(lock._transport, acquire_in_memory(lock, call, turn), call.left, lock._redis))
    except BaseException as error:  # a cancel or an interrupt may come before the steps begin
        turn.end(owner)
        clean_up_after(lock, error, owner, call)
        raise


async def _begin_lingering(lock: LockBase, call: Call, turn: Turn) -> None:
    """Take the key by the call's first request, and note it in the turn, which has the local lock."""
    reply: object = None
    try:
        sent = lock._transport.of_running_loop().begin(call)
        if sent is not None:
            reply = await sent
            if reply == call.ours:
                keep_first_grant(lock, call, turn)
                return
    except BaseException as interruption:
        if not is_fetching(call, turn):
            raise
        go_on(lock, call, None, interruption)
    else:
        go_on(lock, call, reply)


@runs("Lock.release")
async def release_lingering(lock: LockBase, owner: Owner, cached: CachedKey, holding_id: object) -> None:
    """Release a lock with `linger` and no other option. `holding_id` names what was held when that was called."""
    if cached.cache.is_here and cached.locked_by.get(0) is holding_id:
        release_here(lock, owner, cached)
    else:  # the loop of the key may have ended
        await drive(lock._transport, release_what(lock, owner, holding_id), None, lock._redis)
