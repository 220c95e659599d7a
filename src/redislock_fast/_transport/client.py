"""Requests by a client's own methods: the part that threads and event loops share.

The methods are those that redis-py's locks call, with the same arguments. So a client that changes keys, counts calls
or stands for a server does so for these locks, too. The client alone decides on retries and time limits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import hiredis
from redis.connection import Encoder  # type: ignore[attr-defined]
from redis.exceptions import ResponseError

from redislock_fast._pipe.base import Args, Bulk, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import without_arguments
from redislock_fast._transport.base import Encoding
from redislock_fast._util.redis_py import redis_errors


class Name(bytes):
    """A lock's name as bytes. `name` is what the user gave: a client may change that before it is encoded."""

    name: Any


class ClientEncoding(Encoding):
    """The encoding of a client whose own methods send the requests.

    Args:
        client: may be a mock, whose encoder encodes nothing.
        kind: the encoding of such a client whose requests leave on connections of ours.
    """

    def __init__(self, client: Any, kind: type[Encoding]) -> None:
        encoder = client.get_encoder() if hasattr(client, "get_encoder") else None
        if isinstance(encoder, Coroutine):  # of an asynchronous mock
            encoder.close()
        if not isinstance(encoder, Encoder):
            encoder = Encoder("utf-8", "strict", False)  # type: ignore[no-untyped-call]
        super().__init__(encoder)
        self._plain = kind(encoder)

    def key_of(self, name: object) -> Name:
        """A lock's name as bytes, with the name itself."""
        if isinstance(name, Name):
            return name
        key = Name(self._plain.key_of(name))
        key.name = name
        return key

    def keys_of(self, names: Sequence[Any]) -> tuple[list[bytes], bool]:
        """Many names as bytes. Only their keys tell whether they differ."""
        return [self.key_of(name) for name in names], False


_NOSCRIPT = hiredis.ReplyError("NOSCRIPT the client's own script object sends the SHA-1")


NO_WAITING = "a lock cannot wait for replicas here: its client sends commands in its own way"
"""Why `WAIT` is refused: the client may send each request on another connection, and `WAIT` is about its own."""


def no_caller(_: object) -> None:
    """Wake no caller: the one that takes the reply is running."""


class ClientConnection:
    """A client in the place of a connection.

    Attributes:
        pipe: sends requests by the client's methods.
        capabilities: those of every server, since a client may know no other commands. A prefix may miss the keys of
            the queue.
        ending: None: its connections are its own affair.
        registry: None: no messages come, so waiters poll.
        address: None: it is the client's affair where its server is.
        timeout_s: below 0: the client applies its own time limits.
    """

    ending = None
    registry = None
    address = None
    timeout_s = -1.0

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.capabilities = Capabilities(queues=False)

    def close(self) -> None:
        """Do nothing: the client is the user's."""

    forget = close


def start(client: Any, request: Args) -> Any:
    """Call the client's method for a request. Returns the client's answer; that of an asyncio client is awaitable."""
    command: Any = request[0]
    words: Any = request[1:]
    if command == b"SET":
        key, token, _, *ttl = words
        return client.set(_name_of(key), token, nx=True, px=ttl[1] if ttl else None)
    if command == b"GET":
        return client.get(_name_of(words[0]))
    if command == b"EVAL":
        text, count, *rest = words
        script = client.register_script(text.decode())
        return script(keys=[_name_of(key) for key in rest[:count]], args=rest[count:], client=client)
    return client.execute_command(command.decode(), *map(_name_of, words))


@contextlib.contextmanager
def shown_errors() -> Iterator[None]:
    """Raise redis-py's errors, without the arguments that a server quotes where it does not know a command."""
    try:
        with redis_errors():
            yield
    except ResponseError as error:
        error.args = tuple(without_arguments(arg) if isinstance(arg, str) else arg for arg in error.args)
        raise


def requests_of(requests: list[Args] | Bulk) -> list[Args]:
    """The requests of a pipeline, one by one: a client may have no pipelines, or others."""
    return requests.requests() if isinstance(requests, Bulk) else requests


def answered_here(request: Args) -> hiredis.ReplyError | None:
    """The reply to a request that need not be sent; None for all others.

    A script object of redis-py needs the text, and sends the SHA-1 first.
    """
    return _NOSCRIPT if request[0] == b"EVALSHA" else None


def read_reply(request: Args, answer: Any, encode: Callable[[object], bytes]) -> Reply:
    """A client's answer as the server's reply. A client decodes some replies, and a mock answers anything."""
    if request[0] == b"SET":
        return b"OK" if answer else None
    if answer is None or type(answer) is int or type(answer) is bytes:
        return answer
    if isinstance(answer, str):
        return encode(answer)
    if isinstance(answer, (list, tuple)):
        return _encoded(answer, encode)
    return b"" if request[0] == b"GET" else int(bool(answer))


def _encoded(items: list[Any] | tuple[Any, ...], encode: Callable[[object], bytes]) -> list[Any]:
    """The items as a server sends them: some clients decode texts, and make tuples of pairs."""
    return [
        encode(item) if isinstance(item, str) else _encoded(item, encode) if isinstance(item, (list, tuple)) else item
        for item in items
    ]


def _name_of(key: Any) -> Any:
    return key.name if isinstance(key, Name) else key
