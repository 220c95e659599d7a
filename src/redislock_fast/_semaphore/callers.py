"""The permits that each thread or task has acquired by one semaphore object.

A caller's permits are referred to here until they are released, so that a caller need not keep what `acquire` returns,
as with `threading.Semaphore`. They are dropped, and so released in the background with a ResourceWarning, when the
thread or task that has acquired them is gone, or the semaphore object is.

Thread safety: each `Permits` is changed by atomic methods of a list alone: any thread may release a permit.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

from redislock_fast._lease import owner
from redislock_fast._lease.owner import current_task
from redislock_fast._util import fork, patching

__all__ = ["Permits", "TaskCallers", "ThreadCallers"]


class Permits(list[Any]):
    """The permits of one caller, the latest last.

    Attributes:
        entered: those of its `with` blocks, the innermost last; some may have been released in the block.
    """

    __slots__ = ("__weakref__", "entered")

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[Any] = []


class ThreadCallers:
    """The permits of each thread, or of each greenlet."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._generation = fork.generation()
        self._local = patching.in_force
        self._owners: Any = owner.of_threads()

    def mine(self) -> Permits:
        """The calling thread's. A forked child has none of its parent's."""
        if self._generation != fork.generation():
            self._forget()
        if self._local is not threading.local:
            patching.adapt()
            if self._local is not patching.in_force:
                self._local = patching.in_force
                self._owners = owner.heirs_of(self._owners)
        mine = self._owners.owner
        if mine.extra is None:
            mine.extra = Permits()
        permits: Permits = mine.extra
        return permits


class TaskCallers:
    """The permits of each task. All callers outside of tasks share one entry."""

    def __init__(self) -> None:
        self._generation = fork.generation()
        self._of_tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], Permits] = weakref.WeakKeyDictionary()
        self._outside = Permits()

    def mine(self) -> Permits:
        """The calling task's. A forked child has none of its parent's."""
        if self._generation != fork.generation():
            self.__init__()  # type: ignore[misc]  # it begins anew
        task = current_task()
        if task is None:
            return self._outside
        permits = self._of_tasks.get(task)
        if permits is None:
            permits = self._of_tasks[task] = Permits()
        return permits
