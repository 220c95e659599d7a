"""The end of processes that run no exit handlers of Python's: children of `multiprocessing`, and Celery's.

Such a child ends by `os._exit`, after it has run the finalizers of `multiprocessing`, or of Celery's `billiard`.

Thread safety: any thread calls `at_child_exit`. After a race, the work is called twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from redislock_fast._util import fork

__all__ = ["at_child_exit"]

_LIBRARIES = ("multiprocessing.util", "billiard.util")
_LAST = -100  # after all that a program has registered, which may use locks

_registered: set[Callable[[], None]] = set()
fork.on_fork(_registered.clear)


def at_child_exit(work: Callable[[], None]) -> None:
    """Have the work, which is an exit handler already, called at the end of this process if that is such a child.

    May be called again. In another process that uses one of these libraries, the work is called once more than else.
    """
    if work in _registered:
        return
    _registered.add(work)
    for name in _LIBRARIES:
        library = sys.modules.get(name)
        if library is not None:
            library.Finalize(None, work, exitpriority=_LAST)
