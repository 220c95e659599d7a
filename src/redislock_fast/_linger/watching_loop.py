"""The keys that linger, for an event loop: the loop reads the connection, and a timer gives up what has lingered.

Thread safety: everything belongs to the loop's thread. Where the garbage collector closes a dropped task in another
thread, the loop gives the keys back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from redislock_fast._linger.giving_back import Lingering
from redislock_fast._linger.key_lease import KeyLease, LocalWaiter
from redislock_fast._pipe.base import Args, Reply
from redislock_fast._util import fork
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._transport.loop.server import LoopServerTransport

__all__ = ["LoopLingering"]


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
