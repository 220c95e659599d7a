"""The log of long waits: a warning for each, once, with who holds the lock."""

from __future__ import annotations

import logging

from redislock_fast._util.errors import shown
from redislock_fast._util.times import Limit

__all__ = ["is_logged", "tell_if_long", "tell_of_wait"]

_logger = logging.getLogger("redislock_fast.waiting")


def is_logged() -> bool:
    """Whether the program logs long waits."""
    return _logger.isEnabledFor(logging.WARNING)


def tell_of_wait(key: bytes, waited_s: float, holder: str) -> None:
    """Log that a caller has waited for a lock for so many seconds."""
    text = "The lock %s has been waited for since %.1f s. It is held by %s."
    _logger.warning(text, shown(key), waited_s, holder)


def tell_if_long(key: bytes, limit: Limit, holder: str) -> None:
    """Log once that an acquire waits for a lock for long, where its holder cannot be read by one request."""
    waited_s = limit.long_wait_s()
    if waited_s is not None:
        tell_of_wait(key, waited_s, holder)
