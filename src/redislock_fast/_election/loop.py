"""How a leader's body runs in a task: it is cancelled before its lease ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any


class Stop:
    """An event for the tasks of several event loops, one after the other: an `asyncio.Event` serves only its first."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, forever. Those who wait go on."""
        self._is_set = True
        for waiter in list(self._waiters):
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Return once it is set, after so many seconds at most."""
        if self._is_set:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            self._waiters.discard(waiter)


def new_event() -> asyncio.Event:
    """Make an event."""
    return asyncio.Event()


def new_stop() -> Stop:
    """Make an event for whatever uses an election."""
    return Stop()


@contextlib.asynccontextmanager
async def beside(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """A context in which this work runs in a task of its own."""
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


class Body:
    """The task that leads, from its election until its block ends."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_cancelled = False
        self._cancels_before = 0

    def begin(self) -> None:
        """Note that the running task leads from now on."""
        self._task = asyncio.current_task()
        if sys.version_info >= (3, 11) and self._task is not None:
            self._cancels_before = self._task.cancelling()

    def end_within(self, seconds: float) -> None:
        """Have the body cancelled after so many seconds, unless it has ended."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        """Cancel the body, unless it has ended."""
        if self._task is not None and self._task is not asyncio.current_task() and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    def leave(self, error: BaseException | None) -> bool:
        """Note that the body has ended. Returns whether it was cancelled here, and by nobody else."""
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if task is None or not self._is_cancelled:
            return False
        is_ours = True
        if sys.version_info >= (3, 11):
            is_ours = task.uncancel() <= self._cancels_before
        return is_ours and isinstance(error, asyncio.CancelledError)
