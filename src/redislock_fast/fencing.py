"""`Guard`: writes to Redis that are refused once a later owner of the lock has written.

    lock = Lock(client, "report", timeout=10, fencing=True)
    guard = Guard(client)
    with lock:
        guard.set("report:today", render(), lock.fence)

An owner that was paused for longer than its lease believes that it still holds the lock. Its writes carry its fence, a
number that is higher for each later owner: a write with a lower fence than an earlier write is refused (Kleppmann, "How
to do distributed locking"). https://redislock-fast.github.io/redislock_fast/how-to/fencing.html has recipes for
SQL databases.

Rules: a check and its write are one script; nothing is sent for bad parameters; the user's own client sends the
commands, so retries, connections and errors are redis-py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis
import redis.asyncio
from redis.exceptions import LockError, ResponseError

from redislock_fast._protocol.keys import guard_key
from redislock_fast._protocol.scripts import GUARD, GUARDED_SET
from redislock_fast._transport.loop import driver as loop_driver
from redislock_fast._transport.threads import driver as thread_driver
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util.times import positive_ms

__all__ = ["AsyncGuard", "Guard", "StaleFenceError"]

Key: TypeAlias = "str | bytes"
Value: TypeAlias = "str | bytes | int | float"

_HIGHEST = 1 << 53  # Lua's numbers are exact up to here


class StaleFenceError(LockError):
    """A later owner of the lock has written, so the caller has lost it. Nothing was written.

    Attributes:
        fence: the fence that was refused.
        highest: the highest fence that has written.
    """

    def __init__(self, fence: int, highest: int) -> None:
        message = f"fence {fence} is stale: {highest} has written"
        super().__init__(message)
        self.args = (message,)  # as in `LockLostError`
        self.fence = fence
        self.highest = highest

    def __reduce__(self) -> tuple[type[StaleFenceError], tuple[int, int]]:
        return type(self), (self.fence, self.highest)


@contextmanager
def _checked(fence: int | None) -> Iterator[int]:
    """A context with a fence that may be sent, in which the server's refusal of it is raised as `StaleFenceError`."""
    if type(fence) is not int:
        raise TypeError(f"fence must be the fence of a held lock, an int, not {type(fence).__name__}")
    if not 0 < fence <= _HIGHEST:
        raise ValueError(f"fence must be from 1 to 2**53, not {fence}")
    try:
        yield fence
    except ResponseError as error:
        code, _, highest = str(error).partition(" ")
        if code != "STALEFENCE":
            raise
        raise StaleFenceError(fence, int(highest)) from None


class _GuardBase:
    """Builds the arguments of a guard's `EVAL`."""

    def __init__(self, client: Any, transport: ThreadServerTransport | loop_driver.AsyncTransport) -> None:
        self._client = client
        self._key_of = transport.encoding.key_of

    def _eval_args(self, script: str, keys: Sequence[Key], args: Sequence[Value], fence: int) -> list[Value]:
        if isinstance(keys, (str, bytes)) or not keys:
            raise ValueError("keys must be a list of keys; the first one is guarded")
        first, *others = map(self._key_of, keys)
        shebang, line_end, body = script.partition("\n") if script.startswith("#!") else ("", "", script)
        guarded = shebang + line_end + GUARD + body  # a server takes a shebang in the first line alone
        return [guarded, len(keys) + 1, first, *others, guard_key(first), *args, fence]

    def _set_args(self, key: Key, value: Value, fence: int, ttl: float | None) -> list[Value]:
        ttl_ms = 0 if ttl is None else positive_ms(ttl, "ttl")
        return self._eval_args(GUARDED_SET, [key], [value, ttl_ms], fence)


class Guard(_GuardBase):
    """Makes a write unless a higher fence has written to the same key.

    The highest fence is kept under another key in the same hash slot, which never expires: neither the guarded key's
    ttl nor `DEL` lets a stale writer in. All writers of a key must use a guard, with fences of one lock.

    Args:
        client: a `redis.Redis` or `redis.RedisCluster` of any kind, which sends the commands. It need not be the lock's
            server.

    Raises:
        TypeError: for a pipeline or an asyncio client.
    """

    def __init__(self, client: redis.Redis | redis.RedisCluster) -> None:
        super().__init__(client, thread_driver.transport_of(client))

    def set(self, key: Key, value: Value, fence: int | None, *, ttl: float | None = None) -> None:
        """Set a key. Sends `EVAL`, with `SET key value [PX ms]` in it.

        Args:
            key: the guarded key, bytes or str.
            value: any value that redis-py takes.
            fence: `lock.fence` of the held lock. A fence that has written may write again.
            ttl: the key's ttl in seconds, rounded up to whole milliseconds. None: it does not expire.

        Raises:
            StaleFenceError: a higher fence has written. Nothing is changed.
            TypeError: a fence that is no int, such as None of a lock that is not held.
            ValueError: a fence below 1 or beyond 2**53, or a `ttl` that is not above 0, or not finite.
            redis.exceptions.RedisError: what redis-py raises for `EVAL`.
        """
        with _checked(fence) as checked:
            self._client.eval(*self._set_args(key, value, checked, ttl))

    def eval(self, script: str, keys: Sequence[Key], args: Sequence[Value], fence: int | None) -> Any:
        """Run a Lua script that writes. Sends `EVAL`, with the guard's check before the script's first line.

        The script is written as for `EVAL` alone; it may begin with `#!lua`, but not with the flag `no-writes`. If it
        fails, its fence counts as one that has written.

        Args:
            script: the script's text.
            keys: the script's keys, bytes or str; the first one is guarded. In a cluster, all are in one slot.
            args: the script's arguments.
            fence: `lock.fence` of the held lock. A fence that has written may write again.

        Returns:
            The script's reply, as redis-py returns it.

        Raises:
            StaleFenceError: a higher fence has written. The script did not run.
            TypeError: a fence that is no int, such as None of a lock that is not held.
            ValueError: a fence below 1 or beyond 2**53, or no keys.
            redis.exceptions.RedisError: what redis-py raises for `EVAL`.
        """
        with _checked(fence) as checked:
            return self._client.eval(*self._eval_args(script, keys, args, checked))


class AsyncGuard(_GuardBase):
    """`Guard` for asyncio clients. It uses the same keys, so both may guard the same key.

    Args:
        client: a `redis.asyncio.Redis` or `redis.asyncio.RedisCluster` of any kind, which sends the commands.

    Raises:
        TypeError: for a pipeline or a client that blocks.
    """

    def __init__(self, client: redis.asyncio.Redis | redis.asyncio.RedisCluster) -> None:
        super().__init__(client, loop_driver.transport_of(client))

    async def set(self, key: Key, value: Value, fence: int | None, *, ttl: float | None = None) -> None:
        """Set a key; see `Guard.set`."""
        with _checked(fence) as checked:
            await self._client.eval(*self._set_args(key, value, checked, ttl))

    async def eval(self, script: str, keys: Sequence[Key], args: Sequence[Value], fence: int | None) -> Any:
        """Run a Lua script that writes; see `Guard.eval`."""
        with _checked(fence) as checked:
            return await self._client.eval(*self._eval_args(script, keys, args, checked))
