"""The cleanup of one server transport for an event loop, in a task of its own that ends when nothing is left.

Thread safety: everything belongs to the loop's thread. While the task waits for the server, other tasks add entries to
`pending`, and remove those that they are about to set again.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING

from redislock_fast._protocol.operation import Operation, Redirected
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import LeaveQueue
from redislock_fast._transport.base import Attempts
from redislock_fast._transport.cleanup import CLEANUP_FIRST_S, CLEANUP_LAST_S, CLEANUP_LIMIT_S, Cleanup
from redislock_fast._transport.loop.connect import AsyncConnection

if TYPE_CHECKING:
    from redislock_fast._transport.loop.server import LoopServerTransport


class LoopCleanup(Cleanup["LoopServerTransport"]):
    """The part of a `LoopServerTransport` that cleans up.

    Args:
        server: the transport.

    Attributes:
        cleaner: the task that cleans up; None before there was one, and where it is not to go on.
    """

    def __init__(self, server: LoopServerTransport) -> None:
        super().__init__(server)
        self._loop, self._end = server.loop, server.end  # a dropped task may end after the server
        self.cleaner: asyncio.Task[None] | None = None

    async def clean_up_some(self) -> bool:
        """Clean up the oldest entries. Returns False when the server could not be asked."""
        cleaning_up = self._next()
        entries = self.pending[: len(cleaning_up)]
        unanswered: list[int] = []
        try:
            await self.server.execute(cleaning_up, CLEANUP_LIMIT_S, [])
        except Redirected:  # no retry mends that: those locks end with their ttl
            unanswered = sorted(set(cleaning_up.unfinished).difference(cleaning_up.redirected))
        except Exception:  # any: connecting runs users' code, too, for example for credentials
            unanswered = cleaning_up.unfinished
        # Behind the others, as in `ThreadCleanup`.
        postponed = [*cleaning_up.to_clean_up(failed=False), *map(entries.__getitem__, unanswered)]
        gone = set(entries)
        self.pending[:] = [*(entry for entry in self.pending if entry not in gone), *postponed]
        if postponed or not self.pending:
            self._end.kept.pop(self.server, None)
        return not postponed

    def cleaning_up(self) -> asyncio.Task[None] | None:
        """The task that cleans up; None where nothing is to be cleaned up, or nothing can be."""
        if self.idle:
            return None
        self.start()  # the end of a loop cancels all tasks, and then closes the connections
        return self.cleaner

    def start(self) -> bool:
        server = self.server
        if self.cleaner is None or self.cleaner.done():
            # The task keeps no server transport alive, except for its first attempt.
            self._end.kept[server] = server.owner()
            self.cleaner = cleaner = server.start(_clean_up_in_background(self._server))
            cleaner.add_done_callback(partial(_clean_up_again, self._server))
        return True

    async def before(self, operation: Operation, attempts: Attempts) -> None:
        """Clean up what an earlier operation left with a key and token that this one is about to set."""
        returning = self._returning(operation)
        if not returning:
            return
        if self.cleaner is not None:  # it would clean up again what it has begun
            self.cleaner.cancel()
            self.cleaner = None
        gone = set(returning)
        self.pending[:] = [entry for entry in self.pending if entry not in gone]
        try:
            await self.server.execute(
                Pipeline([LeaveQueue(key, token) for key, token in returning]), attempts.left_s(), []
            )
        except GeneratorExit:  # the task was dropped: see `tidy_failed`
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.server.clean_up, returning)
            raise
        except BaseException:
            self.server.clean_up(returning)
            raise
        if self.pending:
            self.start()
        else:
            self._end.kept.pop(self.server, None)

    def tidy_failed(self, operation: Operation, unanswered: list[AsyncConnection], error: BaseException) -> None:
        """`tidy` for an operation that ends with an error, in the loop's thread."""
        if not isinstance(error, GeneratorExit):
            self.tidy(operation, unanswered, failed=True)
        elif not self._loop.is_closed():  # the task was dropped: the garbage collector closes it, in any thread
            self._loop.call_soon_threadsafe(self.server.call, self.tidy, operation, unanswered, True)


async def _clean_up_in_background(server_ref: weakref.ref[LoopServerTransport]) -> None:
    delay_s = CLEANUP_FIRST_S
    while delay_s < CLEANUP_LAST_S:
        server = server_ref()
        if server is None:
            return
        if server.cleanup.idle:
            server.close_if_idle()
            return
        if await server.cleanup.clean_up_some():
            delay_s = CLEANUP_FIRST_S
        else:
            del server
            await asyncio.sleep(delay_s)
            delay_s *= 2


def _clean_up_again(server_ref: weakref.ref[LoopServerTransport], cleaner: asyncio.Task[None]) -> None:
    """Start another task if this one was cancelled, perhaps with all others of the loop, or interrupted."""
    failed = cleaner.cancelled() or cleaner.exception() is not None
    server = server_ref()
    if failed and server is not None and server.cleanup.cleaner is cleaner and not server.has_ended:
        server.cleanup.cleaning_up()
