"""Connecting for event loops: redis-py opens, we take over its transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError  # noqa: A004  # redis-py's, as everywhere in its users' code

from redislock_fast._pipe.base import Args, Lost, NoReply, is_unauthenticated
from redislock_fast._pipe.loop_py import Pipe, new_pipe
from redislock_fast._procedures.waiters import BROKEN, Room
from redislock_fast._protocol import capabilities
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.threads.connect import connecting_error
from redislock_fast._util import fork
from redislock_fast._util.redis_py import redis_error, settings_of

__all__ = ["AsyncLink", "open_link"]


class AsyncLink:
    """A connected pipe with what its server understands. Never reused once broken.

    Attributes:
        pipe: drives the transport.
        dialect: what the server understands.
        ending: what ends it when another connection sends it; None where the server does not tell.
        room: who waits on it for messages; None where none can come.
        callers: tell each caller that waits for the reply to a posted request; told BROKEN when it cannot come.
        timeout_s: how long the pool's settings let a reply take; below 0 for ever.
    """

    __slots__ = ("_end", "_generation", "callers", "dialect", "ending", "pipe", "room", "timeout_s")

    def __init__(
        self,
        pipe: Pipe,
        dialect: capabilities.Dialect,
        ending: Args | None,
        end: LoopEnd,
        timeout_s: float,
    ) -> None:
        self.pipe = pipe
        self.dialect = dialect
        self.ending = ending
        self._end = end
        self._generation = fork.generation
        self.timeout_s = timeout_s
        self.room: Room | None = None
        self.callers: set[Callable[[object], None]] = set()
        pipe.closed.add_done_callback(partial(_tell_all, self.callers))
        if dialect.push:
            self.room = room = Room(dialect)
            pipe.on_push = room.hear
            pipe.closed.add_done_callback(lambda _: room.tell_all(BROKEN))

    def close(self) -> None:
        """Break the pipe; whoever still waits is told."""
        self.pipe.close()

    def __del__(self) -> None:
        if self._generation == fork.generation:  # else the loop is the parent's
            self._end.retire(self.pipe)


def _tell_all(callers: set[Callable[[object], None]], _: object) -> None:
    for tell in list(callers):
        tell(BROKEN)


async def open_link(pool: Any, end: LoopEnd) -> AsyncLink:
    """Connect to a pool's server, by redis-py and within the pool's own limits, and take its transport over.

    Args:
        pool: any of redis-py's asyncio connection pools.
        end: closes the connection.

    Raises:
        redis.exceptions.ConnectionError: and every other error of redis-py's own `connect()`.
        redis.exceptions.TimeoutError: the server did not answer in time.
        redis.exceptions.AuthenticationError: it wants credentials that the pool does not have.
    """
    settings = settings_of(pool)
    settings["retry"] = Retry(NoBackoff(), 0)
    connection = pool.connection_class(**settings)
    try:
        await connection.connect()
    except BaseException:  # redis-py itself cleans up after errors, not after a cancel
        await connection.disconnect(nowait=True)
        raise
    # redis-py has no public names for them. Without them, it leaves the transport alone.
    reader, writer = connection._reader, connection._writer  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    if reader.at_eof() or writer.transport.is_closing():  # then nobody would tell the pipe of its end any more
        writer.close()
        raise ConnectionError("the server closed the connection")
    pipe: Pipe = new_pipe(writer.transport, (writer, end), bytes(reader._buffer))  # noqa: SLF001
    end.guard(pipe, writer.transport)
    timeout_s = settings.get("socket_timeout")
    timeout_s = -1.0 if timeout_s is None else float(timeout_s)
    try:
        requests = [capabilities.PROBE, capabilities.HELLO, capabilities.CLIENT_INFO]
        probed, greeted, described = await pipe.call_many(requests, timeout_s)
        if is_unauthenticated(probed):
            raise redis_error(str(probed))
    except (Lost, NoReply) as trouble:
        pipe.close()
        raise connecting_error(trouble) from None
    except BaseException:
        pipe.close()
        raise
    try:
        return AsyncLink(pipe, capabilities.Dialect(probed, greeted), capabilities.ending(described), end, timeout_s)
    finally:
        del connection, reader, writer, pipe  # see LoopChannel._open
