"""The common types of all alternatives. A lock without a queue on the server polls, as redis-py's lock does."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from bench.contestants import SLEEP_S, AnyLock, CheckFailedError

if TYPE_CHECKING:
    from typing_extensions import Self

MakeLock = Callable[[str], AnyLock]
"""Makes a lock from a name."""


@dataclass(frozen=True)
class Alternative:
    """A system with locks, in one configuration.

    Attributes:
        name: in the table.
        kept: where an acquired lock is kept when the server has replied.
        server: its kind and version, if there is one.
        new_client: called once for a process; returns the function that makes locks, each for one thread.
    """

    name: str
    kept: str
    server: str | None
    new_client: Callable[[], MakeLock]


class PollingLock(ABC):
    """A lock that polls with attempts."""

    @abstractmethod
    def attempt(self) -> bool:
        """Acquire the lock unless it is held, and return whether it was acquired."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock.

        Raises:
            CheckFailedError: when it was not held.
        """

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock; without `blocking`, return False at once when it is held."""
        while not self.attempt():
            if not blocking:
                return False
            time.sleep(SLEEP_S)
        return True

    def __enter__(self) -> Self:
        """Acquire the lock."""
        self.acquire()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self.release()


def released(was_held: bool) -> None:
    """Check that a release found its lock.

    Raises:
        CheckFailedError: when it did not.
    """
    if not was_held:
        raise CheckFailedError("released a lock that it did not hold")


def check(holder: AnyLock, rival: AnyLock) -> None:
    """Check that two locks of one name, of two clients, exclude each other.

    Raises:
        CheckFailedError: at the first violation.
    """

    def expect(right: bool, complaint: str) -> None:
        if not right:
            raise CheckFailedError(complaint)

    for one, other in ((holder, rival), (rival, holder)):
        expect(one.acquire(blocking=False), "a free lock could not be acquired")
        expect(not other.acquire(blocking=False), "two holders at a time")
        one.release()
