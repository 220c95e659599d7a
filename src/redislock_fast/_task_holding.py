"""What each task holds: `_ownership.Holding` for asyncio.

Who may touch what: `TaskHoldings` may be used from several loops in several threads: its dict is used by atomic methods
alone, each entry by its own task while that lives.

Must not know: servers, times of the API.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from redislock_fast._async_pipe import running_loop
from redislock_fast._ownership import Holding

__all__ = ["TaskHoldings"]

# Names of their own: each attribute of a module less is one look-up less for every acquire and release.
_current_task = asyncio.current_task
_ref = weakref.ref


class _TaskHolding(Holding):
    def __init__(self, task: weakref.ref[asyncio.Task[Any]] | None) -> None:
        self._task = task

    @property
    def forsaken(self) -> bool:
        """Whether its task has ended, or there never was one."""
        task = None if self._task is None else self._task()
        return task is None or task.done()


class TaskHoldings:
    """What each task holds.

    A task that ended while it held was a helper: `asyncio.wait_for` (before Python 3.12) and `gather` run what they are
    given in tasks of their own. What it held belongs to whoever has the lock object and no token of his own, as with
    redis-py.
    """

    __slots__ = ("_holdings", "_tidy_at")

    def __init__(self) -> None:
        # By weak reference: a dead one equals no other, even where a new task has the old one's address.
        self._holdings: dict[weakref.ref[asyncio.Task[Any]] | None, _TaskHolding] = {}
        self._tidy_at = 8

    def mine(self) -> Holding:
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
            holding = self._holdings.setdefault(key, _TaskHolding(key))
        return holding

    def held(self) -> Holding:
        """The calling task's holding if it has a token, else the last one that an ended task has left."""
        mine = self.mine()
        if mine.token is None:
            for holding in reversed(list(self._holdings.values())):
                if holding.token is not None and holding.forsaken:
                    return holding
        return mine

    def _tidy(self) -> None:
        """Forget tasks that have ended and hold nothing. As often as their number doubles."""
        for key, holding in list(self._holdings.items()):
            if holding.token is None and holding.forsaken:
                self._holdings.pop(key, None)
        self._tidy_at = 2 * len(self._holdings) + 8

    @property
    def token(self) -> bytes | None:
        """The token that the calling task may release by."""
        return self.held().token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self.held().token = token
