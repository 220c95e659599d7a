"""Tells objects and modules of a fork, so that a child forgets what belongs to its parent.

`generation` counts the forks between this process and the one that imported the package. An object that holds what a
child must not use compares it, or registers with `forget_in_child`.

Thread safety: `generation` changes, and `_forgetters` is walked, only in a child right after the fork, which has
one thread. `_forgetters` is added to under the GIL or, in a free-threaded build, under the set's own lock.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["forget_in_child", "generation", "on_fork"]


class _Forgetful(Protocol):
    def forget(self) -> None: ...


generation = 0
_forgetters: weakref.WeakSet[_Forgetful] = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []


def forget_in_child(holder: _Forgetful) -> None:
    """Have `holder.forget()` called in every child of this process, as long as the holder lives."""
    _forgetters.add(holder)


def on_fork(callback: Callable[[], None]) -> None:
    """Have a module's function called in every child of this process."""
    _callbacks.append(callback)


def _in_child() -> None:
    global generation  # noqa: PLW0603  # the only place that changes it
    generation += 1
    for callback in _callbacks:
        callback()
    for holder in list(_forgetters):
        holder.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
