"""What each task holds: `ownership.Owner` for asyncio.

Who may touch what: `TaskOwners` may be used from several loops in several threads: its dict is used by atomic methods
alone, each entry by its own task while that lives, and by the tasks that do what it has asked for. A holding is
forgotten and then looked at again, while who acquires notes the token and then looks whether it was forgotten: one of
them sees the other.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, TypeAlias

from redislock_fast._lease.owner import Owner
from redislock_fast._pipe.loop_py import running_loop

__all__ = ["TaskOwners"]

# Names of their own: each attribute of a module less is one look-up less for every acquire and release.
_current_task = asyncio.current_task
_ref = weakref.ref


_Key: TypeAlias = "weakref.ref[asyncio.Task[Any]] | None"


class _TaskOwner(Owner):
    """What one task holds."""

    def __init__(self, task: _Key) -> None:
        self._task = task

    def hold(self, token: bytes | None) -> None:
        """The lock was acquired, perhaps long after the task had ended: it is to be found again, to be released."""
        super().hold(token)
        holdings = self.forgotten_by
        if holdings is not None:
            self.forgotten_by = None
            holdings[self._task] = self

    def note_forgotten(self, holdings: dict[_Key, _TaskOwner]) -> None:
        """It was taken from among these; an acquire that its task has asked for may be under way in another task."""
        self.forgotten_by = holdings
        if self.token is not None:
            self.hold(self.token)

    @property
    def forsaken(self) -> bool:
        """Whether its task has ended, or there never was one."""
        task = None if self._task is None else self._task()
        return task is None or task.done()


class TaskOwners:
    """What each task holds.

    A task that ended while it held was a helper: `asyncio.wait_for` (before Python 3.12) and `gather` run what they are
    given in tasks of their own. What it held belongs to whoever has the lock object and no token of his own, as with
    redis-py.
    """

    __slots__ = ("_holdings", "_tidy_at")

    def __init__(self) -> None:
        # By weak reference: a dead one equals no other, even where a new task has the old one's address.
        self._holdings: dict[_Key, _TaskOwner] = {}
        self._tidy_at = 8

    def mine(self) -> Owner:
        """The calling task's holding. Outside of tasks there is one for all."""
        try:
            task = _current_task(running_loop())
        except RuntimeError:  # no loop runs here
            task = None
        key = None if task is None else _ref(task)
        holding = self._holdings.get(key)
        if holding is None:
            if len(self._holdings) >= self._tidy_at:
                self._tidy()
            holding = self._holdings.setdefault(key, _TaskOwner(key))
        return holding

    def held(self) -> Owner:
        """The calling task's holding if it has a token, else the last one that an ended task has left."""
        mine = self.mine()
        if mine.token is None:
            for holding in reversed(list(self._holdings.values())):
                if holding.token is not None and holding.forsaken:
                    return holding
        return mine

    def _tidy(self) -> None:
        """Forget tasks that have ended and hold nothing. As often as their number doubles."""
        holdings = self._holdings
        for key, holding in list(holdings.items()):
            if key is not None and holding.token is None and holding.forsaken:  # the one of no task is one only
                holdings.pop(key, None)
                holding.note_forgotten(holdings)
        self._tidy_at = 2 * len(holdings) + 8

    @property
    def token(self) -> bytes | None:
        """The token that the calling task may release by."""
        return self.held().token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self.held().token = token
