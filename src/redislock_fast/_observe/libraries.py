"""`call_library`: calls of metrics libraries, which have mutexes that their thread may not enter again.

A signal handler may interrupt a thread that has such a mutex, and use a lock: its reports would wait for the thread
that it has interrupted, forever. So it leaves them, and they are made when the interrupted call has ended.

A handler that waits for a lock of another thread may still hang: the reports of that one may wait for the mutex.

Thread safety: any thread calls. `_inside` has the threads that are in a library, each of which adds and removes itself.
Any thread makes what is left, and makes at least as many calls as it asks for: so the calls that are left stay few.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from redislock_fast._util import fork

logger = logging.getLogger(__name__)


class _Calls:
    """The calls that are to be made, and the threads that make them."""

    def __init__(self) -> None:
        self.forget()
        fork.on_fork(self.forget)

    def forget(self) -> None:
        """In a forked child: leave to the parent what is not called yet."""
        self._left: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._inside: set[int] = set()

    def make(self, call: Callable[..., object], *args: Any) -> None:
        """Make this call, and those that signal handlers have left; in such a handler, leave it."""
        left, inside, thread = self._left, self._inside, threading.get_ident()
        left.append((call, args))
        if thread in inside:
            return
        try:
            inside.add(thread)
            while left:
                _make_next(left)
        finally:
            inside.discard(thread)


def _make_next(left: deque[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
    try:
        call, args = left.popleft()
    except IndexError:  # another thread was faster
        return
    try:
        call(*args)
    except Exception:
        logger.exception("metrics failed.")


call_library = _Calls().make
