"""The circuit breaker of a lock: it gets connection errors and timeouts, and refuses calls while it is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from redis.exceptions import ConnectionError, TimeoutError


class Breaker(Protocol):
    """The part of a circuit breaker that is used; pybreaker's `CircuitBreaker` has it."""

    def calling(self) -> AbstractContextManager[Any]:
        """A context manager: entered to make a call, left with the call's error or without one."""


@contextlib.contextmanager
def guarded(breaker: Breaker) -> Iterator[None]:
    """The context of an acquire. The breaker gets connection errors and timeouts alone."""
    other: BaseException | None = None
    with breaker.calling():
        try:
            yield
        except (ConnectionError, TimeoutError):
            raise
        except BaseException as error:
            other = error
    if other is not None:
        try:
            raise other
        finally:
            del other  # else this frame and the error would keep each other alive
