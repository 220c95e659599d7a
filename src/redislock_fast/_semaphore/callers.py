"""The permits that each thread or task has acquired by one semaphore object.

A caller's permits are referred to here until they are released, so that a caller need not keep what `acquire` returns,
as with `threading.Semaphore`. They are dropped, and so released in the background with a ResourceWarning, when the
thread or task that has acquired them is gone, or the semaphore object is.

Thread safety: each `Permits`, and `Callers.open`, is changed by atomic methods of a list or dict alone: any thread may
release a permit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from abc import abstractmethod
from typing import Any

from redislock_fast._lease import owner
from redislock_fast._lease.owner import current_task
from redislock_fast._lease.prolonging import mutex
from redislock_fast._util import fork, patching


class Permits(list[Any]):
    """The permits of one caller, the latest last.

    Attributes:
        entered: those of its `with` blocks, the innermost last. Some may have been released in the block.
        weak: a weak reference to this.
    """

    __slots__ = ("__weakref__", "entered", "weak")

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[Any] = []
        self.weak = weakref.ref(self)


class Callers:
    """The permits of all callers of one semaphore object.

    A block may be left by another thread or task than has entered it: a generator is closed anywhere. Such a caller
    takes the permit of any open block, so that each block's end gives one permit back, and no block is without one.

    Attributes:
        open: the permits of all open blocks, by the order in which they were entered, each with the `entered` of its
            caller. They stay until the block is left even if the thread or task that has entered it is gone.
    """

    open: dict[Any, list[Any]]
    _generation = -1  # no process's

    @abstractmethod
    def mine(self) -> Permits:
        """The calling thread's or task's. A forked child has none of its parent's."""

    def enter(self, permit: Any) -> None:
        """Note that the caller has entered a block."""
        entered = self.mine().entered
        entered.append(permit)
        self.open[permit] = entered

    def leave(self) -> Any:
        """The permit of the caller's innermost block, or else of the latest block of another; None: none is open."""
        entered = self.mine().entered
        try:
            while entered:
                permit = entered.pop()
                if self.open.pop(permit, None) is not None:  # else another caller has left the block
                    return permit
            permit, entered = self.open.popitem()
        except (IndexError, KeyError):  # a child that was forked in a block
            return None
        with contextlib.suppress(ValueError):  # its caller leaves the block, too
            entered.remove(permit)  # which would keep the permit
        return permit


class ThreadCallers(Callers):
    """The permits of each thread, or of each greenlet."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Begin with no permits. Threads of a child may do so at the same time: the first one decides."""
        generation, local, owners = fork.generation(), patching.in_force, owner.of_threads()
        with mutex.lock:
            if self._generation != generation:
                self.open = {}
                self._local = local
                self._owners: Any = owners
                self._generation = generation  # last: others go on once they see it

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


class TaskCallers(Callers):
    """The permits of each task. All callers outside of tasks share one entry."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """As `ThreadCallers._forget`: threads may have event loops."""
        generation, outside = fork.generation(), Permits()
        with mutex.lock:
            if self._generation != generation:
                self.open = {}
                self._of_tasks: dict[weakref.ref[asyncio.Task[Any]], Permits] = {}
                self._outside = outside
                self._generation = generation  # last, as there

    def mine(self) -> Permits:
        """The calling task's. A forked child has none of its parent's."""
        if self._generation != fork.generation():
            self._forget()
        task = current_task()
        if task is None:
            return self._outside
        of_tasks = self._of_tasks  # a WeakKeyDictionary would take five times as long
        permits = of_tasks.get(weakref.ref(task))
        if permits is None:
            # `pop`: an interrupt cannot strike in a method of C.
            permits = of_tasks[weakref.ref(task, of_tasks.pop)] = Permits()
        return permits
