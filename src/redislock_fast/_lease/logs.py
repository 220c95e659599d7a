"""The logs of calls and of long waits. A lock that is not logged has no observer for them, so they cost it nothing.

- Calls: a DEBUG record of the logger `redislock_fast.calls` for each acquire, wait, renewal and release of a lock that
  was made while the logger was enabled for DEBUG.
- Long waits: a warning of the logger `redislock_fast.waiting` for each, once, with who holds the lock.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from redislock_fast._util.errors import shown
from redislock_fast._util.times import Limit
from redislock_fast._util.tokens import token_id_of

_call_logger = logging.getLogger("redislock_fast.calls")
_wait_logger = logging.getLogger("redislock_fast.waiting")

logs_calls = partial(_call_logger.isEnabledFor, logging.DEBUG)
"""Whether the locks that are made now are logged."""

knows_whether = partial(getattr(_call_logger, "_cache", {}).get, logging.DEBUG)
"""False: they are not; anything else: `logs_calls` must be asked. The logger's own cache, at a tenth of the cost."""


class CallLog:
    """An observer that logs."""

    def record_call(self, what: str, name: Any, seconds: float, token: bytes | None = None, more: str = "") -> None:
        """A call, or a part of it, has ended.

        Args:
            what: what was done with the lock, and what the time is; "{}" stands for the name.
            name: the lock's.
            seconds: the time.
            token: of the holding, where there is one. The record has its id, which releases nothing.
            more: how it has ended.
        """
        token_id = "" if token is None else f", token id {token_id_of(token)}"
        _call_logger.debug("%s %.3f ms%s%s", what.format(shown(name)), 1000 * seconds, token_id, more and f", {more}")


CALL_LOG = CallLog()


def is_logged() -> bool:
    """Whether the program logs long waits."""
    return _wait_logger.isEnabledFor(logging.WARNING)


def log_wait(key: bytes, waited_s: float, holder: str, kind: str = "lock") -> None:
    """Log that a caller has waited for a lock, or what else it is, for so many seconds."""
    text = "The %s %s has been waited for since %.1f s. It is held by %s."
    _wait_logger.warning(text, kind, shown(key), waited_s, holder)


def log_if_long(key: bytes, limit: Limit, holder: str) -> None:
    """Log once that an acquire waits for a lock for long, where its holder cannot be read by one request."""
    waited_s = limit.long_wait_s()
    if waited_s is not None:
        log_wait(key, waited_s, holder)
