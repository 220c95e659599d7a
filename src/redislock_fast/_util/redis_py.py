"""redis-py's settings and errors: retry policies, the settings of a connection, and the error of an error reply."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

import redis.exceptions
from redis.backoff import NoBackoff
from redis.connection import DefaultParser
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterCrossSlotError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    RedisError,
    TryAgainError,
)

from redislock_fast._util.times import MOST_FAILURES

_Error = TypeVar("_Error", bound=BaseException)

# Settings for the pool alone: these notices ask a pool to move its connections to another server.
_POOL_ONLY = (
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "oss_cluster_maint_notifications_handler",
)


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]  # it is a variable
    """Makes the errors of clusters, too, which redis-py 5.0 leaves to the parser of its cluster clients."""

    EXCEPTION_CLASSES: ClassVar[dict[str, Any]] = {
        "ASK": AskError,
        "CLUSTERDOWN": ClusterDownError,
        "CROSSSLOT": ClusterCrossSlotError,
        "MASTERDOWN": MasterDownError,
        "MOVED": MovedError,
        "TRYAGAIN": TryAgainError,
        **DefaultParser.EXCEPTION_CLASSES,
    }


_WRAPPED = re.compile(r"^(?:ERR )?Error running script .*? -([A-Z]+ .*)")

BAD_CREDENTIALS = (AuthenticationError, AuthorizationError)
"""The errors of a server that does not accept the client's user and password: a `ConnectionError`, but no outage."""


class RetryPolicy:
    """How often, and after which pauses, a pool wants failed commands to be sent again.

    At least once: only a request that fails shows that a connection was closed while idle.

    Args:
        retry: redis-py's `Retry`; None for none.

    Attributes:
        retries: how many attempts follow the first; below 0 for no limit.
    """

    __slots__ = ("_backoff", "retries")

    def __init__(self, retry: Any) -> None:
        wanted = getattr(retry, "_retries", 0)
        self.retries: int = wanted if wanted < 0 else max(wanted, 1)
        self._backoff = copy.deepcopy(getattr(retry, "_backoff", NoBackoff()))

    def delay_s(self, failures: int) -> float:
        """How long to wait after this number of failures, in seconds. The first retry leaves at once."""
        return 0.0 if failures <= 1 else float(self._backoff.compute(min(failures - 1, MOST_FAILURES)))


def redis_error(text: str) -> RedisError:
    """The exception that redis-py raises for an error reply, in the class of `command_error`. The text stays."""
    error: RedisError = _Parser.parse_error(text)
    cause = command_error(text)
    return error if cause is text else type(_Parser.parse_error(cause))(str(error))


def command_error(text: str) -> str:
    """The error of the command that failed, where it failed in a script; any other error as it is.

    Before Redis 7.0 a script wraps it: "ERR Error running script ...: -OOM command ...".
    """
    wrapped = _WRAPPED.search(text)
    return wrapped[1] if wrapped else text


_CONNECTION_ENDED = "the handler is closed"
"""Ends uvloop's `RuntimeError` for a write to a connection that has ended. redis-py expects an `OSError` there."""


@contextlib.contextmanager
def redis_errors() -> Iterator[None]:
    """Raise redis-py's errors in place of valkey-py's, whose classes have the same names, and of uvloop's."""
    try:
        yield
    except Exception as error:
        kind = next(filter(None, map(_redis_pys, type(error).__mro__)), None)
        if isinstance(error, RuntimeError) and str(error).endswith(_CONNECTION_ENDED):
            kind = redis.exceptions.ConnectionError
        if kind is None:
            raise
        ours = kind(*error.args)
        error.__traceback__ = error.__context__ = None  # they keep valkey-py's frames, and all frames of our callers
        raise ours from None


def _redis_pys(kind: type) -> type[Exception] | None:
    if kind.__module__ != "valkey.exceptions":
        return None
    found: type[Exception] | None = getattr(redis.exceptions, kind.__name__.replace("Valkey", "Redis"), None)
    return found


def own_copy(error: _Error) -> _Error:
    """An equal error without a traceback; the same error where its class, perhaps a user's, cannot be copied."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:
        return error


def settings_of(pool: Any) -> dict[str, Any]:
    """The settings for a connection that is not the pool's. The caller adds `retry`, as it decides on retries."""
    settings = {name: value for name, value in pool.connection_kwargs.items() if name not in _POOL_ONLY}
    settings["retry_on_error"] = []
    return settings
