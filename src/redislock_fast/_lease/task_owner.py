"""The owners of tasks: `owner.Owner` for asyncio.

Thread safety: `TaskOwners` may be used from several loops in several threads, so its dict is used by atomic
methods alone. Each entry is used by its own task while that lives, and by the tasks that run what it has called. An
owner is first removed and then checked for a token; an acquire first notes the token and then checks whether its owner
was removed. So one of them notices the other.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, TypeAlias

from redislock_fast._lease.owner import Owner
from redislock_fast._pipe.loop_py import running_loop

__all__ = ["TaskOwners"]

# Hot path: names of the module's own save an attribute look-up for every acquire and release.
_current_task = asyncio.current_task
_ref = weakref.ref


_Key: TypeAlias = "weakref.ref[asyncio.Task[Any]] | None"


class _TaskOwner(Owner):
    """The owner of one task."""

    def __init__(self, task: _Key) -> None:
        self._task = task

    def hold(self, token: bytes | None) -> None:
        """Note that the lock was acquired, perhaps after the task has ended: a release must find the owner again."""
        super().hold(token)
        owners = self.forgotten_by
        if owners is not None:
            self.forgotten_by = None
            owners[self._task] = self

    def note_forgotten(self, owners: dict[_Key, _TaskOwner]) -> None:
        """Note that it was removed from `owners`; an acquire that its task has called may run in another task."""
        self.forgotten_by = owners
        if self.token is not None:
            self.hold(self.token)

    @property
    def forsaken(self) -> bool:
        """Whether its task has ended, or there never was one."""
        task = None if self._task is None else self._task()
        return task is None or task.done()


class TaskOwners:
    """The owners of all tasks that use one lock object.

    Where a task has ended while it held the lock, any task without a token of its own may release the lock, as with
    redis-py: `asyncio.wait_for` (before Python 3.12) and `gather` acquire in tasks of their own, which end.
    """

    __slots__ = ("_owners", "_tidy_at")

    def __init__(self) -> None:
        # By weak reference: a dead one equals no other, even where a new task has the old one's address.
        self._owners: dict[_Key, _TaskOwner] = {}
        self._tidy_at = 8

    def mine(self) -> Owner:
        """The calling task's owner. All callers outside of tasks share one."""
        try:
            task = _current_task(running_loop())
        except RuntimeError:  # no loop runs here
            task = None
        key = None if task is None else _ref(task)
        owner = self._owners.get(key)
        if owner is None:
            if len(self._owners) >= self._tidy_at:
                self._tidy()
            owner = self._owners.setdefault(key, _TaskOwner(key))
        return owner

    def held(self) -> Owner:
        """The calling task's owner if it has a token, else the last one with a token whose task has ended."""
        mine = self.mine()
        if mine.token is None:
            for owner in reversed(list(self._owners.values())):
                if owner.token is not None and owner.forsaken:
                    return owner
        return mine

    def is_held(self) -> bool:
        """Whether any task holds the lock by this object."""
        return any(owner.token is not None for owner in list(self._owners.values()))

    def _tidy(self) -> None:
        """Remove the owners without a token whose tasks have ended; called whenever the number of owners doubles."""
        owners = self._owners
        for key, owner in list(owners.items()):
            if key is not None and owner.token is None and owner.forsaken:  # outside of tasks, there is only one
                owners.pop(key, None)
                owner.note_forgotten(owners)
        self._tidy_at = 2 * len(owners) + 8

    @property
    def token(self) -> bytes | None:
        """The token with which the calling task may release the lock."""
        return self.held().token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self.held().token = token
