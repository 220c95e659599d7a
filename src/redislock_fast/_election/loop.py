"""How a leader's body runs in a task: it is cancelled before its lease ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeAlias

Event: TypeAlias = "asyncio.Event"


def new_event() -> asyncio.Event:
    """Make an event."""
    return asyncio.Event()


async def until_set(event: Event, seconds: float) -> None:
    """Return once the event is set, after so many seconds at most."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


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
