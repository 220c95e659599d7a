"""What every alternative gives: locks, and what is promised of them.

Rules: a lock without a server-side queue polls, as redis-py's does.
"""

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
"""Makes the lock of a name."""


@dataclass(frozen=True)
class Alternative:
    """A way to have a lock.

    Attributes:
        name: what the table calls it.
        kept: where a lock is when the server has answered, and so what it survives.
        server: the kind and version of it, if there is one.
        new_client: what a process does once; answers how the process then makes its locks, for one thread each.
    """

    name: str
    kept: str
    server: str | None
    new_client: Callable[[], MakeLock]


class PollingLock(ABC):
    """A lock that only knows how to try."""

    @abstractmethod
    def attempt(self) -> bool:
        """Take it, unless somebody holds it."""

    @abstractmethod
    def release(self) -> None:
        """Give it back.

        Raises:
            CheckFailedError: where it was not held.
        """

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it; without `blocking`, answer False at once where somebody holds it."""
        while not self.attempt():
            if not blocking:
                return False
            time.sleep(SLEEP_S)
        return True

    def __enter__(self) -> Self:
        """Take it."""
        self.acquire()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.release()


def released(was_held: bool) -> None:
    """Complain unless a release found its lock.

    Raises:
        CheckFailedError: where it did not.
    """
    if not was_held:
        raise CheckFailedError("released a lock that it did not hold")


def check(holder: AnyLock, rival: AnyLock) -> None:
    """See that two locks of one name, of two clients, exclude each other.

    Raises:
        CheckFailedError: at the first thing that is wrong.
    """

    def expect(right: bool, complaint: str) -> None:
        if not right:
            raise CheckFailedError(complaint)

    for one, other in ((holder, rival), (rival, holder)):
        expect(one.acquire(blocking=False), "a free lock could not be acquired")
        expect(not other.acquire(blocking=False), "two holders at a time")
        one.release()
