"""The `on_lost` callback that runs now: a lock object must not treat calls from its callback as calls of its owner.

Thread safety: a `_Callback` belongs to its callback, and to the threads and tasks that the callback starts. Its one
attribute is assigned as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from redislock_fast._lease.lease import Lease


class _Callback:
    """One call of an `on_lost`.

    Attributes:
        lease: the lease that was lost; None once the callback has acquired the lock again.
    """

    __slots__ = ("lease",)

    def __init__(self, lease: Lease) -> None:
        self.lease: Lease | None = lease


_current: ContextVar[_Callback | None] = ContextVar("redislock_fast-callback", default=None)

current_callback = _current.get
"""Returns the call of an `on_lost` in which this is called; None outside of all. Costs less than a function of ours."""


@contextlib.contextmanager
def in_callback(lease: Lease) -> Iterator[None]:
    """A context in which to call `on_lost` for a lease. A task that is made in it belongs to the callback, too."""
    before = _current.set(_Callback(lease))
    try:
        yield
    finally:
        _current.reset(before)


def lease_of_callback(lock: Any) -> Lease | None:
    """The lost lease of this lock, where its own callback calls and has not acquired the lock again; else None."""
    current = _current.get()
    if current is None or current.lease is None or current.lease.lock() is not lock:
        return None
    return current.lease


def end_callback(lock: Any) -> None:
    """Note that the lock was acquired. Where its own callback has done that, the callback is the owner from now on."""
    current = _current.get()
    if current is not None and lease_of_callback(lock) is not None:
        current.lease = None
