"""redis-py's settings and errors: retry policies, what to make a connection with, and the error of an error reply."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.exceptions import RedisError

from redislock_fast._util.times import MOST_FAILURES

__all__ = ["RetryPolicy", "own_copy", "redis_error", "settings_of"]

_Error = TypeVar("_Error", bound=BaseException)

# Settings of a pool that make sense for the pool alone: these notices ask a pool to move its connections elsewhere.
_POOL_ONLY = (
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "oss_cluster_maint_notifications_handler",
)


class RetryPolicy:
    """How often and how fast a pool's owner wants failed commands to be tried again.

    At least once: a connection that was closed while idle is noticed by the request that it fails.

    Attributes:
        retries: attempts after the first; below 0 for no limit.
    """

    __slots__ = ("_backoff", "retries")

    def __init__(self, retry: Any) -> None:
        wanted = getattr(retry, "_retries", 0)
        self.retries: int = wanted if wanted < 0 else max(wanted, 1)
        self._backoff = copy.deepcopy(getattr(retry, "_backoff", NoBackoff()))

    def delay_s(self, failures: int) -> float:
        """How long to wait after so many failures, in seconds. The first retry leaves at once."""
        return 0.0 if failures <= 1 else float(self._backoff.compute(min(failures - 1, MOST_FAILURES)))


def redis_error(text: str) -> RedisError:
    """The exception that redis-py raises for an error reply."""
    error: RedisError = DefaultParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


def own_copy(error: _Error) -> _Error:
    """An equal error without a traceback; the same one where its class knows no copies, as users' classes may."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:
        return error


def settings_of(pool: Any) -> dict[str, Any]:
    """What to make a connection of our own with. Whoever calls decides whether to try again, and adds `retry`."""
    settings = {name: value for name, value in pool.connection_kwargs.items() if name not in _POOL_ONLY}
    settings["retry_on_error"] = []
    return settings
