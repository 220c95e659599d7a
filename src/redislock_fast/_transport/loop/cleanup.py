"""The cleanup of one server transport for an event loop, in a task of its own that ends when nothing is left.

Thread safety: everything belongs to the loop's thread. While the task waits for the server, other tasks add entries to
`_pending_cleanup`, and remove those that they are about to set again.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import abstractmethod
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from redislock_fast._protocol.operation import Operation, Redirected
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import LeaveQueue
from redislock_fast._transport.base import ServerTransport
from redislock_fast._transport.cleanup import CLEANUP_FIRST_S, CLEANUP_LAST_S, CLEANUP_LIMIT_S
from redislock_fast._transport.loop.connect import AsyncConnection
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.retries import Attempts

__all__ = ["LoopCleanup"]

_Result = TypeVar("_Result")


class LoopCleanup(ServerTransport[AsyncConnection]):
    """The part of a `LoopServerTransport` that cleans up, with the tasks that belong to it.

    Args:
        owner: the connection pool of the server.
        end: the end of the running loop.
    """

    def __init__(self, owner: Any, end: LoopEnd) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(owner)
        self._end = end
        self._cleaner: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def execute(
        self, operation: Operation, limit_s: float | None, unanswered: list[AsyncConnection] | None
    ) -> None:
        """Drive an operation until it is finished; see `LoopServerTransport.execute`."""

    @property
    def has_ended(self) -> bool:
        """Whether the loop is being closed: a connection that breaks now is not replaced."""
        return self._end.has_come

    async def clean_up_some(self) -> bool:
        """Clean up the oldest entries. Returns False when the server could not be asked."""
        cleaning_up = self._next_cleanup()
        entries = self._pending_cleanup[: len(cleaning_up)]
        unanswered: list[int] = []
        try:
            await self.execute(cleaning_up, CLEANUP_LIMIT_S, [])
        except Redirected:
            pass  # no retry mends that: the locks end with their ttl
        except Exception:  # any: connecting runs users' code, too, for example for credentials
            unanswered = cleaning_up.unfinished
        # Behind the others, as in `ThreadCleanup`.
        postponed = [*cleaning_up.to_clean_up(failed=False), *map(entries.__getitem__, unanswered)]
        gone = set(entries)
        self._pending_cleanup[:] = [*(entry for entry in self._pending_cleanup if entry not in gone), *postponed]
        if postponed or not self._pending_cleanup:
            self._end.kept.pop(self, None)
        return not postponed

    def cleaning_up(self) -> asyncio.Task[None] | None:
        """The task that cleans up; None where nothing is to be cleaned up, or nothing can be."""
        if self.idle:
            return None
        self._start_cleanup()  # the end of a loop cancels all tasks, and then closes the connections
        return self._cleaner

    def stop(self) -> set[asyncio.Task[Any]]:
        """Cancel the tasks of the server transport, and return them."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_cleanup(self) -> bool:
        if self._cleaner is None or self._cleaner.done():
            # The task keeps no server transport alive, except for its first attempt.
            self._end.kept[self] = self._owner()
            self._cleaner = cleaner = self._start(_clean_up_in_background(weakref.ref(self)))
            cleaner.add_done_callback(partial(_clean_up_again, weakref.ref(self)))
        return True

    async def _clean_up_before(self, operation: Operation, attempts: Attempts) -> None:
        """Clean up what an earlier operation left with a key and token that this one is about to set."""
        returning = self._returning(operation)
        if not returning:
            return
        if self._cleaner is not None:  # it would clean up again what it has begun
            self._cleaner.cancel()
            self._cleaner = None
        gone = set(returning)
        self._pending_cleanup[:] = [entry for entry in self._pending_cleanup if entry not in gone]
        try:
            await self.execute(Pipeline([LeaveQueue(key, token) for key, token in returning]), attempts.left_s(), [])
        except GeneratorExit:  # the task was dropped: see `_tidy_failed`
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.clean_up, returning)
            raise
        except BaseException:
            self.clean_up(returning)
            raise
        if self._pending_cleanup:
            self._start_cleanup()
        else:
            self._end.kept.pop(self, None)

    def _tidy_failed(self, operation: Operation, unanswered: list[AsyncConnection], error: BaseException) -> None:
        """`tidy` for an operation that ends with an error, in the loop's thread."""
        if not isinstance(error, GeneratorExit):
            self.tidy(operation, unanswered, failed=True)
        elif not self._loop.is_closed():  # the task was dropped, and the garbage collector closes it, in any thread
            self._loop.call_soon_threadsafe(self.tidy, operation, unanswered, True)


async def _clean_up_in_background(server_ref: weakref.ref[LoopCleanup]) -> None:
    delay_s = CLEANUP_FIRST_S
    while delay_s < CLEANUP_LAST_S:
        server = server_ref()
        if server is None:
            return
        if server.idle:
            server.close_if_idle()
            return
        if await server.clean_up_some():
            delay_s = CLEANUP_FIRST_S
        else:
            del server
            await asyncio.sleep(delay_s)
            delay_s *= 2


def _clean_up_again(server_ref: weakref.ref[LoopCleanup], cleaner: asyncio.Task[None]) -> None:
    """Start another task if this one was cancelled, perhaps with all others of the loop, or interrupted."""
    failed = cleaner.cancelled() or cleaner.exception() is not None
    server = server_ref()
    if failed and server is not None and server._cleaner is cleaner and not server.has_ended:  # noqa: SLF001  # its own
        server.cleaning_up()
