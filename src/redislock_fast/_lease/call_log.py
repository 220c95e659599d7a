"""The log of calls: a DEBUG record of the logger `redislock_fast.calls` for each acquire, wait, renewal and release.

A lock is logged if the logger was enabled for DEBUG when it was made. All others have no observer, so it costs them
nothing.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from redislock_fast._util.errors import shown
from redislock_fast._util.tokens import token_id_of

__all__ = ["CALL_LOG", "knows_whether", "logs_calls"]

_logger = logging.getLogger("redislock_fast.calls")

logs_calls = partial(_logger.isEnabledFor, logging.DEBUG)
"""Whether the locks that are made now are logged."""

knows_whether = partial(getattr(_logger, "_cache", {}).get, logging.DEBUG)
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
        _logger.debug("%s %.3f ms%s%s", what.format(shown(name)), 1000 * seconds, token_id, more and f", {more}")


CALL_LOG = CallLog()
