"""The callback for a loss that runs now: in it, a lock object must not take its calls for those of a holder.

Who may touch what: a `_Telling` belongs to its callback, and to the threads and tasks that the callback starts. Its one
attribute is assigned as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from redislock_fast._lease.tenure import Tenure

__all__ = ["end_telling", "telling", "told_of"]


class _Telling:
    """One call of an `on_lost`.

    Attributes:
        tenure: what was lost; None once the callback has acquired the lock anew.
    """

    __slots__ = ("tenure",)

    def __init__(self, tenure: Tenure) -> None:
        self.tenure: Tenure | None = tenure


_current: ContextVar[_Telling | None] = ContextVar("redislock_fast-telling", default=None)


@contextlib.contextmanager
def telling(tenure: Tenure) -> Iterator[None]:
    """While the callback for the loss of a tenure is called; a task that is made meanwhile belongs to it, too."""
    before = _current.set(_Telling(tenure))
    try:
        yield
    finally:
        _current.reset(before)


def told_of(lock: Any) -> Tenure | None:
    """What of this lock was lost, where its callback calls and has not acquired the lock anew; else None."""
    current = _current.get()
    if current is None or current.tenure is None or current.tenure.lock() is not lock:
        return None
    return current.tenure


def end_telling(lock: Any) -> None:
    """The lock was acquired: where its callback has done that, it holds the lock from now on."""
    current = _current.get()
    if current is not None and told_of(lock) is not None:
        current.tenure = None
