"""Notices in a child that it was forked, so that it forgets what belongs to its parent.

A fork counts however it was made. Python's `os.fork` calls a hook; C code that embeds Python, such as uWSGI, calls the
system's `fork` and no hook. So whatever uses something that a child must not use calls `generation` first, which finds
out by itself, and has all forget what is the parent's before it returns. An object that holds such a thing compares the
generation in which it was made, or registers with `forget_in_child`.

Where threads contend for a list, set or dict, CPython 3.13 without the GIL leaves its lock taken in a child that is
forked then: whatever the child does with it hangs. So what is forgotten is replaced by another object, not cleared.

Thread safety: a child has one thread at first, but may have started others before it notices. They wait for the one
that notices: no thread has a generation before all is forgotten. `_turns` has a lock for each process, so none that
another thread of the parent may hold. A signal handler or finalizer of the same thread may come in the midst, and goes
on with the rest itself. After an interrupt, the next caller goes on. `_left` and `_known` are changed under that lock,
`_forgetters` under the GIL or, in a free-threaded build, under the set's own lock.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

_Member = TypeVar("_Member")


def members(weak_set: weakref.WeakSet[_Member]) -> list[_Member]:
    """What is in the set now, from any thread.

    Going through a weak set is not atomic, with the GIL or without it: it raises where another thread adds meanwhile.
    """
    while True:
        with contextlib.suppress(RuntimeError):
            return list(weak_set)


class _Forgetful(Protocol):
    def forget(self) -> None: ...


_forgetters: weakref.WeakSet[_Forgetful] = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []

_known = os.getpid()  # the generation that has forgotten all that is its parent's
_turns: dict[int, threading.RLock] = {}
_left: dict[int, list[Callable[[], None]]] = {}  # for a generation that forgets just now: what has still to forget


def _process_id() -> int:
    """A number that no parent of this process has had. In a child, its first call has all forget what is the parent's.

    So is every `generation`: without the compiled core it is the process id, which takes a system call.
    """
    process = os.getpid()
    if process != _known:
        forget_parent(process)
    return process


generation: Callable[[], int] = _process_id


def count_by(counter: Callable[[], int]) -> None:
    """Have another function in the place of `generation`, before anything is made that compares it."""
    global generation, _known  # noqa: PLW0603  # the only place, beside `forget_parent`
    generation = counter
    _known = counter()


def forget_in_child(holder: _Forgetful) -> None:
    """Have `holder.forget()` called in every child of this process, as long as the holder lives."""
    generation()  # what is made in a child is the child's
    _forgetters.add(holder)


def on_fork(callback: Callable[[], None]) -> None:
    """Have a module's function called in every child of this process."""
    generation()
    _callbacks.append(callback)


def forget_parent(process: int) -> None:
    """Have all forget what is the parent's, once in each child. Returns when that is done, by whichever thread.

    Args:
        process: the generation of this process.
    """
    global _known  # noqa: PLW0603  # the only place, beside `count_by`
    with _turns.setdefault(process, threading.RLock()):
        if _known == process:
            return
        left = _left.get(process)
        if left is None:
            _left.clear()  # of a parent that has forked meanwhile
            left = _left[process] = [*_callbacks, *(holder.forget for holder in members(_forgetters))]
        while left:
            forget = left[0]
            forget()
            with contextlib.suppress(ValueError):  # a signal handler has gone on meanwhile
                left.remove(forget)
        _known = process
        _left.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: generation())  # noqa: PLW0108  # `count_by` may come later


_LIBRARIES = ("multiprocessing.util", "billiard.util")
_LAST = -100  # after all that a program has registered, which may use locks

_registered: set[Callable[[], None]] = set()
on_fork(_registered.clear)


def at_child_exit(work: Callable[[], None]) -> None:
    """Have the work, which is an exit handler already, called at the end of this process if that is such a child.

    Such a child of `multiprocessing` or Celery ends by `os._exit`, after it has run the finalizers of `multiprocessing`
    or of Celery's `billiard`. Any thread may call this, and again; after a race, the work is called twice. In another
    process that uses one of these libraries, the work is called once more than else.
    """
    if work in _registered:
        return
    _registered.add(work)
    for name in _LIBRARIES:
        library = sys.modules.get(name)
        if library is not None:
            library.Finalize(None, work, exitpriority=_LAST)
