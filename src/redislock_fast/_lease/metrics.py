"""`Metrics`: what a lock tells whoever watches it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Metrics"]


class Metrics(Protocol):
    """Told of each acquisition and each release of a lock.

    Called after the server's verdict, by the thread or in the event loop that acquires or releases, and by many threads
    at once. So an implementation is quick, does not block and does not raise.
    """

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """A lock was acquired.

        Args:
            name: the lock's, as its caller gave it.
            seconds: from the call to the lock, waiting included.
            attempts: how often it was tried to take it; 1 where nobody held it.
        """

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """A lock was given back.

        Args:
            name: the lock's, as its caller gave it.
            hold_s: from the acquire to the release, in seconds.
            success: False where the lock had been lost before: it expired, or was deleted or taken by another.
        """
