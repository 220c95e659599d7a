"""The owners of tasks: `owner.Owner` for asyncio.

Thread safety: `TaskOwners` may be used from several loops in several threads, so its dict is used by atomic
methods alone. Each entry is used by its own task, by the tasks that run what it has called, and by those that hold
nothing themselves: as with a `SharedOwner`, each attribute is assigned as a whole. Its own task alone acquires. An
owner is first removed and then checked for a token; an acquire first notes the token and then checks whether its owner
was removed. So one of them notices the other.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, TypeAlias

from redislock_fast._lease.owner import Owner
from redislock_fast._pipe.loop_py import running_loop

# Hot path: names of the module's own save an attribute look-up for every acquire and release.
_current_task = asyncio.current_task
_ref = weakref.ref


_Key: TypeAlias = "weakref.ref[asyncio.Task[Any]] | None"


class _TaskOwner(Owner):
    """The owner of one task."""

    __slots__ = ("_task",)

    def __init__(self, task: _Key) -> None:
        super().__init__()
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

    A task without a token, while exactly one owner may hold the lock, uses that one's: a heartbeat task, a timer, a
    signal handler, or whatever closes a generator or an exit stack. With redis-py, too, each of them can prolong, ask
    about and release what another task has acquired. But it never holds the lock by that: an acquire is noted in the
    task's own owner.
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
        """The owner whose lock the calling task may use: its own if that has a token, else the only one that may hold.

        Where none may hold, the last one with a token: its release, say, was cancelled, and is called again. Where
        several may, the calling task's own, which has no token.
        """
        mine = self.mine()
        if mine.token is None:
            holding = self._holding()
            if len(holding) == 1:
                return holding[0]
        return mine

    def taken(self) -> Owner:
        """The owner in whose place the calling task may hold: its own, or the last one whose task has ended."""
        mine = self.mine()
        if mine.token is None:
            for owner in reversed(list(self._owners.values())):
                if owner.token is not None and owner.forsaken:
                    return owner
        return mine

    def count(self) -> int:
        """How many tasks may hold the lock by this object, as far as is known here."""
        return len(self._holding())

    @property
    def has_held(self) -> bool:
        """Whether the calling task has held the lock by this object itself, perhaps long ago."""
        mine = self.mine()
        return mine.expiry[0] is not None or mine.extra is not None

    def _holding(self) -> list[_TaskOwner]:
        """The owners that may hold the lock; where none may, the last one with a token."""
        with_token = [owner for owner in list(self._owners.values()) if owner.token is not None]
        return [owner for owner in with_token if owner.may_hold] or with_token[-1:]

    def _tidy(self) -> None:
        """Remove the owners that hold nothing and whose tasks have ended; called whenever the number of owners doubles.

        The release of what an owner has left goes on without it.
        """
        owners = self._owners
        for key, owner in list(owners.items()):
            is_free = owner.token is None or owner.token == owner.left
            if key is not None and is_free and owner.forsaken:  # outside of tasks, there is only one
                owner.token = None
                owners.pop(key, None)
                owner.note_forgotten(owners)
        self._tidy_at = 2 * len(owners) + 8

    @property
    def token(self) -> bytes | None:
        """The token with which the calling task may release the lock."""
        return self.held().token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self.taken().token = token
