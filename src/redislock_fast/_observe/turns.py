"""`in_turn`: calls of metrics libraries, which have mutexes of their own, without waiting for one of them.

A signal handler may interrupt a thread that has such a mutex, and use a lock: its reports would wait for the thread
that it has interrupted, forever. It may also wait for a lock of another thread, whose reports would wait for that mutex
(decision 0021). So one caller at a time calls a library. Another one leaves its calls to it, and goes on.

Thread safety: any thread calls. A caller first adds its call and then looks at `_turn`; the one that has the turn first
gives it up and then looks at `_calls`. So no call is forgotten. What an interrupt leaves, the next call makes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from redislock_fast._util import fork

logger = logging.getLogger(__name__)


class _Turns:
    """The calls that are to be made, and whose turn it is."""

    def __init__(self) -> None:
        self.forget()
        fork.on_fork(self.forget)

    def forget(self) -> None:
        """In a forked child: leave to the parent what is not called yet."""
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._turn: dict[int, object] = {}

    def take(self, call: Callable[..., object], *args: Any) -> None:
        """Make this call, and those that others leave meanwhile; or leave it to the caller whose turn it is."""
        calls, turn, me = self._calls, self._turn, object()
        calls.append((call, args))
        try:
            while calls and turn.setdefault(0, me) is me:
                _make_all(calls)
                turn.pop(0)
        finally:
            if turn.get(0) is me:  # an interrupt
                turn.pop(0)


def _make_all(calls: deque[tuple[Callable[..., object], tuple[Any, ...]]]) -> None:
    while calls:
        call, args = calls.popleft()
        try:
            call(*args)
        except Exception:
            logger.exception("metrics failed.")


in_turn = _Turns().take
