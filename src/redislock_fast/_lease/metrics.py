"""`Metrics`: the calls by which a lock reports its acquisitions and releases."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Metrics"]


class Metrics(Protocol):
    """Gets each acquisition and each release of a lock.

    Called after the server's reply, by the thread or in the event loop that acquires or releases, and by many threads
    at once. An implementation must be quick, and must neither block nor raise.
    """

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """A lock was acquired.

        Args:
            name: the lock's name, as it was given to the lock.
            seconds: from the call until the lock was acquired, waiting included.
            attempts: the number of attempts; 1 where the lock was free.
        """

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """A lock was released.

        Args:
            name: the lock's name, as it was given to the lock.
            hold_s: from the acquire to the release, in seconds.
            success: False where the lock was lost before: it expired, was deleted, or has another owner.
        """
