"""Opening connections for event loops: redis-py opens a connection, and a `Pipe` takes its asyncio transport over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from redislock_fast._pipe.base import Args, ConnectionBroken, NoReply, is_unauthenticated
from redislock_fast._pipe.loop_py import Pipe, new_pipe
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._queue.waiters import BROKEN, WaiterRegistry
from redislock_fast._transport.greeting import first_requests, leave_unnamed, take_greeting
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.threads.connect import address_of, connecting_error
from redislock_fast._util import fork
from redislock_fast._util.redis_py import redis_error, redis_errors, settings_of
from redislock_fast._util.tokens import TokenSource


class AsyncConnection:
    """A connection of an event loop, as `threads.connect.Connection` is one of threads.

    Attributes:
        pipe, capabilities, ending, registry, address: as there.
        callers: functions that wake callers that wait for the reply to a posted request; called with BROKEN when the
            reply cannot come any more.
        timeout_s: how long a reply may take by the pool's settings, in seconds; below 0 forever.
    """

    __slots__ = (
        "_end",
        "_generation",
        "address",
        "callers",
        "capabilities",
        "ending",
        "pipe",
        "registry",
        "timeout_s",
    )

    def __init__(
        self,
        pipe: Pipe,
        tokens: TokenSource,
        capabilities: Capabilities,
        ending: Args | None,
        end: LoopEnd,
        timeout_s: float,
        address: tuple[Any, Any],
    ) -> None:
        self.pipe = pipe
        self.address = address
        self.capabilities = capabilities
        self.ending = ending
        self._end = end
        self._generation = fork.generation()
        self.timeout_s = timeout_s
        self.registry: WaiterRegistry | None = None
        self.callers: set[Callable[[object], None]] = set()
        pipe.closed.add_done_callback(partial(_put_in_all, self.callers))
        if capabilities.push:
            self.registry = registry = WaiterRegistry(capabilities, tokens)
            pipe.on_push = registry.take_push
            pipe.closed.add_done_callback(lambda _: registry.put_all(BROKEN))

    def close(self) -> None:
        """Break the pipe. Each caller that still waits gets an error."""
        self.pipe.close()

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:  # bound here: at the end, global names are None
        if not is_finalizing() and self._generation == fork.generation():  # in a forked child the loop is the parent's
            self._end.retire(self.pipe)


def _put_in_all(callers: set[Callable[[object], None]], _: object) -> None:
    for put in list(callers):
        put(BROKEN)


def _is_of_ended_transport(error: Exception) -> bool:
    """Whether asyncio's own `writelines` has failed: some releases of CPython 3.12 to 3.14 use None there."""
    place: Any = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    return bool(place.tb_frame.f_code.co_name == "writelines")


async def open_connection(pool: Any, tokens: TokenSource, end: LoopEnd, greets: bool) -> AsyncConnection:
    """Connect to a pool's server within the pool's own limits; else as `threads.connect.open_connection`.

    `end` closes the connection.
    """
    settings = settings_of(pool)
    settings["retry"] = Retry(NoBackoff(), 0)
    connection = pool.connection_class(**settings)
    if greets:
        leave_unnamed(connection)
    try:
        with redis_errors():
            try:
                await connection.connect()
            except (AttributeError, TypeError) as error:
                if not _is_of_ended_transport(error):
                    raise
                raise ConnectionError("the connection ended while it was made") from None
    except BaseException:  # redis-py cleans up after errors by itself, but not after a cancel
        await connection.disconnect(nowait=True)
        raise
    # redis-py has no public names for them. Without them, it does not touch the transport any more.
    reader, writer = connection._reader, connection._writer  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    if reader.at_eof() or writer.transport.is_closing():  # then the pipe would not be told of its end any more
        writer.close()
        raise ConnectionError("the server closed the connection")
    pipe: Pipe = new_pipe(writer.transport, (writer, end), bytes(reader._buffer))  # noqa: SLF001
    end.guard(pipe, writer.transport)
    timeout_s = settings.get("socket_timeout")
    timeout_s = -1.0 if timeout_s is None else float(timeout_s)
    try:
        replies = await pipe.call_many(first_requests(tokens, greets), timeout_s)
        if is_unauthenticated(replies[0]):
            raise redis_error(str(replies[0]))
        greeted = take_greeting(pipe, tokens, replies)
    except (ConnectionBroken, NoReply) as trouble:
        pipe.close()
        raise connecting_error(trouble, greets) from None
    except BaseException:
        pipe.close()
        raise
    try:
        return AsyncConnection(pipe, tokens, *greeted, end, timeout_s, address_of(connection))
    finally:
        del connection, reader, writer, pipe  # see `LoopServerTransport._open`
