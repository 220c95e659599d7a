"""The option `linger` for tasks: the acquire and the release, and the timer that gives up what has lingered.

An acquire is in memory, or by one request as any lock. Only its usual outcomes are handled here. Any other one is
handed to the steps of `procedures.py`. The loop reads the connection.

Thread safety: everything belongs to the loop's thread. Where the garbage collector closes a dropped task in another
thread, the loop gives the keys back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from redislock_fast._linger.key_cache import KeyLease, Lingering, LocalWaiter
from redislock_fast._linger.procedures import (
    Linger,
    Turn,
    acquire_in_memory,
    cached_key,
    is_fetching,
    keep_first_grant,
    may_begin,
    own_cached_key,
    release_here,
    take_at_once,
    take_kept,
)
from redislock_fast._pipe.base import Args, Reply
from redislock_fast._procedures.acquire import Call, clean_up_after, go_on, new_call
from redislock_fast._procedures.lock import LockBase
from redislock_fast._procedures.release import release_what
from redislock_fast._transport.loop.driver import drive
from redislock_fast._util import fork
from redislock_fast._util.coroutines import runs
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._lease.owner import Owner
    from redislock_fast._linger.key_cache import CachedKey
    from redislock_fast._transport.loop.server import LoopServerTransport


class _TaskWaiter(LocalWaiter):
    """A task that waits for a local lock.

    Attributes:
        woken: is done once the task is to look whether it has the local lock.
    """

    __slots__ = ("_loop", "woken")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self.woken: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        if asyncio._get_running_loop() is self._loop:  # as in `Mailbox.put`
            if not self.woken.done():
                self.woken.set_result(None)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.wake)

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until it is woken, for so many seconds at most."""
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self.wake)
        try:
            await self.woken
        finally:
            if timer is not None:
                timer.cancel()
        if not self.is_given:
            self.woken = self._loop.create_future()


class LoopLingering(Lingering["LoopServerTransport"]):
    """The part of a `LoopServerTransport` that keeps keys for locks with `linger`.

    Args:
        server: the transport.
    """

    def __init__(self, server: LoopServerTransport) -> None:
        self._loop = server.loop
        super().__init__(server, partial(_TaskWaiter, self._loop))
        self.key_cache.loop = self._loop
        self._listening_on: Any = None
        self._turn: object = None  # of the next look at the keys
        self._timers: list[asyncio.TimerHandle] = []  # for it

    def _post_many(self, connection: Any, requests: list[Args], on_replies: Callable[[list[Reply]], object]) -> None:
        replies: list[Reply] = []

        def note(reply: Reply) -> None:
            replies.append(reply)
            if len(replies) == len(requests):
                on_replies(replies)

        for request in requests:
            connection.pipe.post(request, note)

    def _give_back(self, leases: list[KeyLease], is_wanted: bool) -> None:
        self.server.in_loop(super()._give_back, leases, is_wanted)

    def _watch_keys(self) -> None:
        self.server.in_loop(self._watch_later)

    def _watch_later(self) -> None:
        """Look at the keys at the next tick.

        An interrupt may strike the callback at its first instruction, which loses it. So there are two timers: the
        second one calls where the first call has made no others. They keep the transport alive, but not the client:
        where that is gone, what lingers must be given back.
        """
        turn = object()
        ticks_s = self.tick_s, 2 * self.tick_s
        timers = [self._loop.call_later(after_s, self.watch_keys, turn, self.server) for after_s in ticks_s]
        former, self._timers, self._turn = self._timers, timers, turn
        self._cancel(former)

    @staticmethod
    def _cancel(timers: list[asyncio.TimerHandle]) -> None:
        for timer in timers:
            timer.cancel()

    def watch_keys(self, turn: object, _server: LoopServerTransport) -> None:
        """Give up what has lingered for long enough, and look again later if anything lingers."""
        if turn is not self._turn:  # an interrupt has made other timers
            return
        fork.generation()  # has the keys forgotten in a child that runs its parent's loop
        try:
            self._watch_later()  # first: an interrupt may strike the loop, which may run again
        except BaseException:
            self._watch_later()
            raise
        if not self._sweep_keys():
            self._cancel(self._timers)
            self.server.close_if_idle()

    def _sweep_keys(self) -> bool:
        self._leave_if_unconfirmed()
        cache, server = self.key_cache, self.server
        connection = server.connection
        if server.owner() is None:
            cache.drop_all()
        if connection is None or connection is not self._listening_on:
            self._listening_on = connection
            self.drop(None if connection is None else connection.registry)
            if connection is not None:
                connection.pipe.closed.add_done_callback(partial(_note_broken, self._server))
        return cache.sweep(clock()) or self.has_unconfirmed or not cache.rests()


def _note_broken(server_ref: weakref.ref[LoopServerTransport], _: object) -> None:
    server = server_ref()
    if server is not None:
        lingering: Any = server.lingering
        lingering.drop()


LINGER = Linger(LoopLingering)


@runs("Lock.acquire")
async def acquire_lingering(lock: LockBase, owner: Owner, blocking: bool | None) -> bool:
    """Acquire a lock with `linger` and no other option, without a token or a deadline for this acquire."""
    cached = lock._cached
    if cached is None or not cached.cache.is_here:
        cached = own_cached_key(lock)
    if cached is not None and not cached.waiters and take_at_once(lock, cached, owner):
        return True
    call, turn = new_call(lock, owner, None, blocking), Turn()
    try:
        if call.begins:
            if cached is None or not cached.is_current:
                cached = cached_key(lock)
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
