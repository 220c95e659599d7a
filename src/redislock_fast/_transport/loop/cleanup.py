"""The cleanup of one server transport for an event loop, in a task of its own that ends when nothing is left.

Who may touch what: everything belongs to the loop's thread. While the task waits for the server, other tasks add
entries to `_undone`, and take those that they are about to set again.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import abstractmethod
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from redislock_fast._protocol.operation import Operation, Redirected
from redislock_fast._protocol.pipeline import Many
from redislock_fast._protocol.queue import Leave
from redislock_fast._transport.base import Channel
from redislock_fast._transport.cleanup import UNDO_FIRST_S, UNDO_LAST_S, UNDO_LIMIT_S
from redislock_fast._transport.loop.connect import AsyncLink
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.retries import Attempts

__all__ = ["LoopCleanup"]

_Result = TypeVar("_Result")


class LoopCleanup(Channel[AsyncLink]):
    """The part of a `LoopChannel` that cleans up, with the tasks that belong to it.

    Args:
        owner: the connection pool of the server.
        end: the end of the running loop.
    """

    def __init__(self, owner: Any, end: LoopEnd) -> None:
        super().__init__(owner)
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._undoer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def execute(self, operation: Operation, limit_s: float | None, loose: list[AsyncLink] | None) -> None:
        """Drive an operation until it is finished; see `LoopChannel.execute`."""

    @property
    def has_ended(self) -> bool:
        """Whether the loop is being closed: a connection that breaks now is not replaced."""
        return self._end.has_come

    async def undo_some(self) -> bool:
        """Clean up the oldest entries. Returns False when the server could not be asked."""
        undoing = self._next_undoing()
        entries = self._undone[: len(undoing)]
        unanswered: list[int] = []
        try:
            await self.execute(undoing, UNDO_LIMIT_S, [])
        except Redirected:
            pass  # no retry mends that: the locks end with their ttl
        except Exception:  # any: connecting runs users' code, too, for example for credentials
            unanswered = undoing.unfinished
        # Behind the others, as in `ThreadCleanup`.
        postponed = [*undoing.to_undo(failed=False), *map(entries.__getitem__, unanswered)]
        gone = set(entries)
        self._undone[:] = [*(entry for entry in self._undone if entry not in gone), *postponed]
        if postponed or not self._undone:
            self._end.kept.pop(self, None)
        return not postponed

    def undoing(self) -> asyncio.Task[None] | None:
        """The task that cleans up; None where nothing is to be cleaned up, or nothing can be."""
        if self.idle:
            return None
        self._start_undoing()  # the end of a loop cancels all tasks, and then closes the connections
        return self._undoer

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

    def _start_undoing(self) -> None:
        if self._undoer is None or self._undoer.done():
            # The task keeps no server transport alive, except for its first attempt.
            self._end.kept[self] = self._owner()
            self._undoer = undoer = self._start(_undo_in_background(weakref.ref(self)))
            undoer.add_done_callback(partial(_undo_again, weakref.ref(self)))

    async def _undo_before(self, operation: Operation, attempts: Attempts) -> None:
        """Clean up what an earlier operation left with a key and token that this one is about to set."""
        returning = self._returning(operation)
        if not returning:
            return
        if self._undoer is not None:  # it would try again what it has begun
            self._undoer.cancel()
            self._undoer = None
        gone = set(returning)
        self._undone[:] = [entry for entry in self._undone if entry not in gone]
        try:
            await self.execute(Many([Leave(key, token) for key, token in returning]), attempts.left_s(), [])
        except GeneratorExit:  # the task was dropped: see `_tidy_failed`
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.undo, returning)
            raise
        except BaseException:
            self.undo(returning)
            raise
        if self._undone:
            self._start_undoing()
        else:
            self._end.kept.pop(self, None)

    def _tidy_failed(self, operation: Operation, loose: list[AsyncLink], error: BaseException) -> None:
        """`tidy` for an operation that ends with an error, in the loop's thread."""
        if not isinstance(error, GeneratorExit):
            self.tidy(operation, loose, failed=True)
        elif not self._loop.is_closed():  # the task was dropped, and the garbage collector closes it, in any thread
            self._loop.call_soon_threadsafe(self.tidy, operation, loose, True)


async def _undo_in_background(channel_ref: weakref.ref[LoopCleanup]) -> None:
    delay_s = UNDO_FIRST_S
    while delay_s < UNDO_LAST_S:
        channel = channel_ref()
        if channel is None or channel.idle:
            return
        if await channel.undo_some():
            delay_s = UNDO_FIRST_S
        else:
            del channel
            await asyncio.sleep(delay_s)
            delay_s *= 2


def _undo_again(channel_ref: weakref.ref[LoopCleanup], undoer: asyncio.Task[None]) -> None:
    """Start another task if this one was cancelled, perhaps with all others of the loop, or interrupted."""
    failed = undoer.cancelled() or undoer.exception() is not None
    channel = channel_ref()
    if failed and channel is not None and channel._undoer is undoer and not channel.has_ended:  # noqa: SLF001  # its own
        channel.undoing()
