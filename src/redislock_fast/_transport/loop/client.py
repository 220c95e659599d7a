"""The transport of a client whose own methods must send the requests, for event loops; see `_transport/kinds.py`."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import hiredis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError, NoScriptError, RedisError, ResponseError

from redislock_fast._pipe.base import Args, Bulk, OnReply, Reply
from redislock_fast._protocol.claims import ReplyTaker
from redislock_fast._protocol.operation import Exchange, Operation
from redislock_fast._transport.base import Encoding
from redislock_fast._transport.client import (
    NO_WAITING,
    ClientConnection,
    ClientEncoding,
    answered_here,
    no_caller,
    read_reply,
    requests_of,
    shown_errors,
    start,
)
from redislock_fast._transport.kinds import client_of
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.loop.server import LoopServerTransport


class _Pipe:
    """Sends each request by the client's methods, in the calling task; see `_pipe.loop_py.Pipe`.

    Args:
        transport: of the client.

    Attributes:
        closed: never done.
    """

    broken = False
    silence_s = 0.0

    def __init__(self, transport: LoopClientTransport) -> None:
        self._transport = weakref.ref(transport)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def call(self, args: Args, timeout_s: float = -1.0) -> Reply:  # noqa: ARG002  # the client has its own limits
        transport = self._transport()
        if transport is None:
            raise ConnectionError("the client is gone")
        return answered_here(args) or await transport.send(args)

    async def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> list[Reply]:  # noqa: ARG002  # as above
        return [await self._try(args) for args in requests_of(requests)]

    async def _try(self, args: Args) -> Reply:
        """`call`, whose error for one lock of a batch must not hide the replies for the others."""
        try:
            return await self.call(args)
        except ResponseError as error:
            return hiredis.ReplyError(str(error))

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        transport = self._transport()
        if transport is not None:
            transport.start(self._post(args, on_reply))

    async def _post(self, args: Args, on_reply: OnReply | None) -> None:
        with contextlib.suppress(Exception):  # no caller waits: without a reply, the outcome is unknown
            reply = await self.call(args)
            if on_reply is not None:
                on_reply(reply)

    def abandon(self) -> None:
        """In a forked child: do nothing, since the client's connections are its own affair."""


class LoopClientTransport(LoopServerTransport):
    """All locks of one client in one event loop, by the client's own methods.

    Args:
        owner: the client.
        end: as for `LoopServerTransport`.
        client_of: gives the client whose methods are called; None where that is the owner.
    """

    is_observable = False
    connects = False
    sends_wait = False

    def __init__(self, owner: Any, end: LoopEnd | None = None, client_of: Callable[[Any], Any] | None = None) -> None:
        super().__init__(owner, end)
        self._client_of = client_of
        connection: Any = ClientConnection(_Pipe(self))
        self.connection = connection

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:  # noqa: ARG004  # the client applies its own
        return {}

    @staticmethod
    def encoding_of(owner: Any) -> ClientEncoding:
        return ClientEncoding(owner, Encoding)

    async def send(self, request: Args) -> Reply:
        """Send a request by the client's methods, and wait for the reply."""
        try:
            with shown_errors():
                answer = await self._answer(request)
        except UnicodeDecodeError:  # the client decodes replies, and another owner's token is no text
            answer = b""
        return read_reply(request, answer, self.encoding.encode)

    def _client(self) -> Any:
        owner = self._live_owner()
        return owner if self._client_of is None else self._client_of(owner)

    async def _answer(self, request: Args) -> Any:
        """The client's answer. The cluster client of redis-py 7.1 may load a script on all nodes but the key's."""
        client = self._client()
        try:
            return await start(client, request)
        except NoScriptError:
            if not isinstance(client, RedisCluster):
                raise
            key: Any = request[3]
            await client.execute_command("SCRIPT LOAD", request[1], target_nodes=client.get_node_from_key(key))
            return await start(client, request)

    async def _call_for_claim(self, connection: Any, operation: Exchange, request: Args, timeout_s: float) -> Reply:
        """`LoopServerTransport._call_for_claim`; no reply comes later."""
        taker = ReplyTaker(operation, request, no_caller)
        taker(await connection.pipe.call(request, timeout_s))
        return taker.reply

    async def execute_dedicated(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:  # noqa: ARG002  # all
        """Refuse; see `NO_WAITING`.

        Raises:
            redis.exceptions.RedisError: always.
        """
        raise RedisError(NO_WAITING)


def transport_of_pool(pool: Any) -> LoopClientTransport:
    """All locks of one connection pool in the running loop, by the methods of redis-py's own client.

    A client would keep the pool alive, so each request has a new one.
    """
    return LoopClientTransport(pool, client_of=client_of)
