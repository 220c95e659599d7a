"""`Metrics`: the calls by which a lock reports its acquisitions and releases."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Metrics"]


class Metrics(Protocol):
    """Is told of each acquisition and each release of a lock.

    Called after the server's verdict, by the thread or in the event loop that acquires or releases, and by many threads
    at once. An implementation is quick, does not block and does not raise.
    """

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """A lock was acquired.

        Args:
            name: the lock's, as its caller gave it.
            seconds: from the call until the lock was acquired, waiting included.
            attempts: the number of attempts; 1 where the lock was free.
        """

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """A lock was released.

        Args:
            name: the lock's, as its caller gave it.
            hold_s: from the acquire to the release, in seconds.
            success: False where the lock had been lost before: it expired, was deleted, or was taken by another holder.
        """
