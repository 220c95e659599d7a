"""The transport of a client whose own methods must send the requests, for threads; see `_transport/kinds.py`."""

from __future__ import annotations

import weakref
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, RedisError, ResponseError

from redislock_fast._pipe.base import Args, Bulk, ConnectionBroken, OnReply, Reply
from redislock_fast._protocol.claims import ReplyTaker
from redislock_fast._protocol.operation import Exchange, Operation
from redislock_fast._transport.base import BlockingEncoding
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
from redislock_fast._transport.threads.server import ThreadServerTransport


class _Pipe:
    """Sends each request by the client's methods, in the calling thread; see `_pipe.base.Pipe`.

    Args:
        transport: of the client.
    """

    broken = False
    silence_s = 0.0

    def __init__(self, transport: ThreadClientTransport) -> None:
        self._transport = weakref.ref(transport)

    def call(self, args: Args, timeout_s: float = -1.0) -> Reply:  # noqa: ARG002  # the client has limits of its own
        transport = self._transport()
        if transport is None:
            raise ConnectionError("the client is gone")
        return answered_here(args) or transport.send(args)

    def ask(self, args: Args, timeout_s: float, inside: set[int]) -> Reply:  # noqa: ARG002  # no thread reads for others
        return self.call(args)

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> list[Reply]:  # noqa: ARG002  # as above
        return list(map(self._try, requests_of(requests)))

    def _try(self, args: Args) -> Reply:
        """`call`, whose error for one lock of a batch must not hide the replies for the others."""
        try:
            return self.call(args)
        except ResponseError as error:
            return hiredis.ReplyError(str(error))

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        try:
            reply = self.call(args)
        except Exception as error:
            raise ConnectionBroken(True, str(error)) from error
        if on_reply is not None:
            on_reply(reply)


class ThreadClientTransport(ThreadServerTransport):
    """All locks of one client, by the client's own methods.

    Args:
        owner: the client.
    """

    is_observable = False
    connects = False
    sends_wait = False

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.connection = self._new_connection()

    def _new_connection(self) -> Any:
        return ClientConnection(_Pipe(self))

    def forget(self) -> None:
        """In a forked child: leave the cleanup to the parent."""
        super().forget()
        self.connection = self._new_connection()

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:  # noqa: ARG004  # the client applies its own
        return {}

    @staticmethod
    def encoding_of(owner: Any) -> ClientEncoding:
        return ClientEncoding(owner, BlockingEncoding)

    def send(self, request: Args) -> Reply:
        """Send a request by the client's methods, and wait for the reply."""
        try:
            with shown_errors():
                answer = start(self._live_owner(), request)
        except UnicodeDecodeError:  # the client decodes replies, and another owner's token is no text
            answer = b""
        return read_reply(request, answer, self.encoding.encode)

    def call_for_claim(self, connection: Any, operation: Exchange, request: Args, timeout_s: float) -> Reply:
        """`ThreadServerTransport.call_for_claim`; no reply comes later."""
        taker = ReplyTaker(operation, request, no_caller)
        taker(connection.pipe.call(request, timeout_s))
        return taker.reply

    def execute_dedicated(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:  # noqa: ARG002  # all
        """Refuse; see `NO_WAITING`.

        Raises:
            redis.exceptions.RedisError: always.
        """
        raise RedisError(NO_WAITING)
