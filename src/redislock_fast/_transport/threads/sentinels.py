"""The search of redis-py for the primary of a service, by threads that do not wait for it longer than they may.

redis-py asks one sentinel after the other, and waits for each that is silent by the settings of the sentinels' clients.
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import TimeoutError

from redislock_fast._transport.threads.starting import Task
from redislock_fast._util import patching
from redislock_fast._util.redis_py import own_copy, redis_errors


class Search:
    """A search, which goes on when nobody waits for it any more. A sentinel that answers is asked first from then on.

    Args:
        pool: a connection pool that asks sentinels.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, pool: Any) -> None:
        self._error: Exception | None = None
        self._task = Task("sentinels", patching.own_thread(self._ask), pool)

    def _ask(self, pool: Any) -> None:
        try:
            with redis_errors():
                pool.get_master_address()
        except Exception as error:
            self._error = error.with_traceback(None)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._task.is_over

    def wait(self, limit_s: float) -> None:
        """Wait until it has ended.

        Raises:
            redis.exceptions.TimeoutError: it goes on after so many seconds.
            redis.exceptions.ConnectionError: or another error of redis-py: no primary was found.
        """
        self._task.wait(limit_s)
        if not self._task.is_over:
            raise TimeoutError("no sentinel has named the primary in time")
        if self._error is not None:
            raise own_copy(self._error)
