"""How threads of this package are started: at once or not at all, whatever interrupts the caller.

`Thread.start` waits for the new thread in Python code, under a lock that an exception of a signal handler may leave
taken forever: then the new thread waits for it, and does nothing. So a caller starts a bare thread, by one call of C,
and that one starts the `Thread`. No signal handler runs there.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


def start_thread(name: str, work: Callable[..., object], *args: Any) -> None:
    """Have a new daemon thread do this work. It returns without waiting for the thread.

    An interrupt before the thread is started is raised without it; one just after, although it is started.

    Args:
        name: of the thread, after "redislock_fast-".
        work: what the thread does.
        args: for the work.

    Raises:
        RuntimeError: no thread can be started: there are too many, or the interpreter ends.
    """
    if sys.is_finalizing():  # Python 3.11 and earlier start a thread that never runs
        raise RuntimeError("the interpreter ends")
    _thread.start_new_thread(_start, (f"redislock_fast-{name}", work, args))


def _start(name: str, work: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        threading.Thread(target=work, args=args, name=name, daemon=True).start()
    except RuntimeError:  # there was room for the bare thread only, or the interpreter has begun to end since
        work(*args)


class Task:
    """Work in a thread of its own, for which other threads may wait.

    Thread safety: any thread waits, on a lock of its own, which it lists before it looks at `is_over`. The thread that
    works sets `is_over` before it looks at the list. So it wakes each that waits, and an interrupt harms no other one.

    Args:
        name: of the thread, after "redislock_fast-".
        work: what the thread does.
        args: for the work.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, name: str, work: Callable[..., object], *args: Any) -> None:
        self._pid = os.getpid()
        self._has_ended = False
        self._waiting: deque[threading.Lock] = deque()
        start_thread(name, self._run, work, args)

    def _run(self, work: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            work(*args)
        finally:
            self._has_ended = True
            while self._waiting:
                self._waiting.pop().release()

    @property
    def is_over(self) -> bool:
        """Whether the work has ended, with the interpreter perhaps, or is that of another process, which has forked."""
        return self._has_ended or self._pid != os.getpid() or sys.is_finalizing()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until the work has ended, for so many seconds at most; None: without a limit."""
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append(woken)
        if not self.is_over:
            woken.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
