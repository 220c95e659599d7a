"""Has tracers and redis-py's metrics observe an operation as a command of redis-py.

`execute_command` of a stand-in for a client is called with the operation's first request. So the wrapper of a tracer,
or what redis-py itself records, is around it as around any command. Where redis-py would send the command, the
operation is executed by our transport. Pipelines are not observed: they do what redis-py's locks do not.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import LockError

from redislock_fast._pipe.base import Args
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import Operation
from redislock_fast._transport.client import read_reply
from redislock_fast._util.times import clock
from redislock_fast._util.tracing import traced, tracer_of


class _Retry:
    """Makes one attempt: the transport retries by itself."""

    def call_with_retry(self, do: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Do it once."""
        return do()


class _Connection:
    """What redis-py reads of a connection, to record it."""

    retry = _Retry()

    def __init__(self, settings: dict[str, Any]) -> None:
        self.host = settings.get("host", "localhost")
        self.port = settings.get("port", 6379)
        self.db = settings.get("db", 0)

    @staticmethod
    def should_reconnect() -> bool:
        """Never: it is no connection."""
        return False


class _StandIn:
    """The part of the stand-ins for a client that threads and tasks share. It is used for one command.

    Args:
        pool: of the client.
        key: of the lock.
        execute: executes the operation.
    """

    _single_connection_client = single_connection_client = False

    # Not redis-py's: that would open a client.
    def __init__(self, pool: Any, key: bytes, execute: Callable[[], Any]) -> None:
        self.connection_pool = pool
        self.connection = _Connection(pool.connection_kwargs)
        self._key = key
        self._execute = execute
        self._words: list[Any] = []
        self.has_executed = False

    def observed_as(self, request: Args) -> list[Any]:
        """Make this request the next one. Returns its words as redis-py has them: tracers expect text."""
        self._words = [word.decode(errors="replace") if isinstance(word, bytes) else word for word in request]
        return self._words

    def __del__(self) -> None:
        """Leave the pool alone."""

    def _send_command_parse_response(self, _connection: Any, _name: str, *words: Any, **_: Any) -> Any:
        if list(words) != self._words:  # redis-py's lock would take another key, or another token
            name = self._key.decode(errors="replace")
            text = f"Cannot lock {name!r}: a function in the place of redis-py's execute_command changes its commands"
            raise LockError(f"{text}. Override the method in a class of your own instead", lock_name=name)
        self.has_executed = True
        return self._execute()


class _Client(_StandIn, redis.Redis):  # type: ignore[misc]
    pass


class _AsyncClient(_StandIn, redis.asyncio.Redis):  # type: ignore[misc]
    async def initialize(self) -> Any:
        return self


class Observed:
    """A server transport for threads whose operations are observed as commands of a client.

    Args:
        transport: what executes them.
        client: whose commands; None: redis-py's.
    """

    _kind: type[_StandIn] = _Client

    def __init__(self, transport: Any, client: Any) -> None:
        self._transport = transport
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def execute(self, operation: Operation, limit_s: float | None = None) -> Any:
        """As the transport's own; for tasks, an awaitable."""
        transport = self._transport
        if _is_unseen(operation, transport):
            transport.execute(operation, limit_s)
            return

        def execute() -> bool:
            transport.execute(operation, limit_s)
            return operation.result

        stand_in, send = self._stand_in(operation, execute)
        capabilities, encode = _capabilities_of(transport), transport.encoding.encode
        finished = False
        while not finished:
            request = operation.request(capabilities, clock())
            answer = send(*stand_in.observed_as(request))
            finished = stand_in.has_executed or operation.feed(read_reply(request, answer, encode), capabilities)

    def _stand_in(self, operation: Operation, execute: Callable[[], Any]) -> tuple[_StandIn, Callable[..., Any]]:
        """A stand-in, and its `execute_command`, with the tracer of the client around it where that has its own."""
        stand_in: Any = self._kind(self._transport.server_of(operation.key).pool(), operation.key, execute)
        tracer = tracer_of(self._client)
        return stand_in, stand_in.execute_command if tracer is None else traced(tracer, stand_in.execute_command)


class AsyncObserved(Observed):
    """The same for tasks."""

    _kind = _AsyncClient

    async def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        transport = self._transport
        if _is_unseen(operation, transport):
            await transport.execute(operation, limit_s)
            return

        async def execute() -> bool:
            await transport.execute(operation, limit_s)
            return operation.result

        stand_in, send = self._stand_in(operation, execute)
        capabilities, encode = _capabilities_of(transport), transport.encoding.encode
        finished = False
        while not finished:
            request = operation.request(capabilities, clock())
            answer = await send(*stand_in.observed_as(request))
            finished = stand_in.has_executed or operation.feed(read_reply(request, answer, encode), capabilities)


def _is_unseen(operation: Operation, transport: Any) -> bool:
    """Whether the operation is executed without an observer."""
    return operation.is_pipeline or operation.first_outcome is not None or not transport.is_observable


def _capabilities_of(transport: Any) -> Capabilities:
    """Those of the connection; the plain ones where there is none yet, or the requests never leave."""
    connection = transport.connection
    return Capabilities() if connection is None else copy(connection.capabilities)
