"""How a leader's body runs in a thread: nothing can end it, so it must look at `stopping`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from redislock_fast._transport.threads.starting import start_thread

Stop: TypeAlias = "threading.Event"


def new_event() -> threading.Event:
    """Make an event."""
    return threading.Event()


def new_stop() -> threading.Event:
    """Make an event for whatever uses an election."""
    return threading.Event()


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """A context in which this work runs in a thread of its own, which may end after it.

    Raises:
        RuntimeError: no thread can be started.
    """
    start_thread("election", work)
    yield


class Body:
    """The thread that leads, from its election until its block ends."""

    def begin(self) -> None:
        """Note that it leads from now on."""

    def end_within(self, seconds: float) -> None:
        """Have the body end within so many seconds: that is its own affair."""

    def end(self) -> None:
        """Have the body end: as above."""

    def leave(self, error: BaseException | None) -> bool:  # noqa: ARG002  # tasks alone need it
        """Note that the body has ended. Returns False: nothing has cancelled it."""
        return False
