"""Opening connections for threads: redis-py opens a connection, and a `Pipe` takes its socket over.

redis-py's connection classes know URLs, AUTH, TLS, Sentinel, unix sockets and credential providers. So the connection
is made with the pool's own class and settings. It is never one of the pool's own, so a user's pool loses nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Encoder, HiredisRespSerializer, PythonRespSerializer  # type: ignore[attr-defined]
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from redislock_fast._pipe import threads_py
from redislock_fast._pipe.base import SPIN_US, Args, ConnectionBroken, NoReply, Pipe, is_unauthenticated
from redislock_fast._pipe.impl import compiled
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._queue.waiters import WaiterRegistry
from redislock_fast._transport.greeting import first_requests, leave_unnamed, take_greeting
from redislock_fast._util.patching import is_patched
from redislock_fast._util.redis_py import redis_error, redis_errors, settings_of
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import TokenSource


class GreetingBroken(ConnectionError):
    """The connection broke while the server was asked for its capabilities: it may have closed it for that."""


# In place of hiredis.pack_command, which crashes if a signal handler raises while it makes text of a number (3.5.0).
_PACKER = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode)  # type: ignore[no-untyped-call]


_PLAIN, _TLS = ("socket", "socket"), ("ssl", "SSLSocket")
_COMPILED_DRIVES = (_PLAIN, _TLS)
"""Module and name of the classes of sockets that the compiled pipe drives."""


class Connection:
    """A connected pipe with the capabilities of its server. It is never used again once it is broken.

    Attributes:
        pipe: drives the socket.
        capabilities: the capabilities.
        ending: the request that ends this connection when another one sends it; None where the server does not say.
        registry: the registry of its waiters; None where no messages can come.
        address: of the server, as redis-py has it.
    """

    __slots__ = ("_connection", "address", "capabilities", "ending", "pipe", "registry")

    def __init__(
        self, connection: Any, pipe: Pipe, tokens: TokenSource, capabilities: Capabilities, ending: Args | None
    ) -> None:
        self._connection = connection
        self.address = address_of(connection)
        self.pipe = pipe
        self.capabilities = capabilities
        self.ending = ending
        self.registry = None
        if capabilities.push:
            self.registry = WaiterRegistry(capabilities, tokens)
            pipe.on_push = self.registry.take_push

    def close(self) -> None:
        """Break the pipe. Each caller that still waits gets an error."""
        self.pipe.close()

    def forget(self) -> None:
        """In a forked child: close its copy of the socket. redis-py does not end the parent's session then."""
        self._connection.disconnect()


def address_of(connection: Any) -> tuple[Any, Any]:
    """The host and port of one of redis-py's connections; twice None for a unix socket."""
    return getattr(connection, "host", None), getattr(connection, "port", None)


def connecting_error(trouble: ConnectionBroken | NoReply, greets: bool) -> ConnectionError | TimeoutError:
    """redis-py's error for a connection that breaks, or whose server is silent, while it is opened."""
    text = f"while connecting: {trouble}"
    if isinstance(trouble, NoReply):
        return TimeoutError(text)
    return GreetingBroken(text) if greets else ConnectionError(text)


def open_connection(pool: redis.ConnectionPool, tokens: TokenSource, ends_at: float | None, greets: bool) -> Connection:
    """Connect to a pool's server, find out its capabilities, and tell it whose the connection is.

    Sends `COMMAND INFO`, `HELLO`, `CLIENT INFO` and `CLIENT SETINFO`, in one piece, and to a server before Redis 7.2
    `CLIENT SETNAME`.

    Args:
        pool: any of redis-py's connection pools.
        tokens: has the identifier of the connection.
        ends_at: when to give up, in the clock's seconds; None: the pool's own limits alone count.
        greets: whether the capabilities are asked for. Else the plain ones are assumed, and `PING` alone is sent.

    Raises:
        GreetingBroken: the connection broke while the capabilities were asked for.
        redis.exceptions.ConnectionError: and every other error of redis-py's own `connect()`.
        redis.exceptions.TimeoutError: the server did not answer in time.
        redis.exceptions.AuthenticationError: the server wants credentials that the pool does not have.
        NotExecuted: the server answers "later".
    """
    settings = settings_of(pool)
    settings["retry"] = Retry(NoBackoff(), 0)
    if ends_at is not None:
        limit_s = ends_at - clock()
        if limit_s <= 0:
            raise TimeoutError("no connection in time")
        for name in ("socket_timeout", "socket_connect_timeout"):
            own = settings.get(name)
            settings[name] = limit_s if own is None else min(own, limit_s)
    connection: Any = pool.connection_class(**settings)
    if isinstance(getattr(connection, "_command_packer", None), HiredisRespSerializer):
        connection._command_packer = _PACKER  # noqa: SLF001  # the parameter would replace a user's class, too
    if greets:
        leave_unnamed(connection)
    try:
        with redis_errors():
            connection.connect()
    except BaseException as error:
        connection.disconnect()  # redis-py does so after its own errors alone
        if error.__context__ is not None:  # it keeps redis-py's frame, which keeps it, and so all frames of our callers
            error.__context__.__traceback__ = None
        raise
    connection.redis_connect_func = None  # a cluster client's own method would keep the client alive
    pipe = _pipe_over(connection)
    timeout_s = settings.get("socket_timeout")
    timeout_s = -1.0 if timeout_s is None else float(timeout_s)
    if ends_at is not None:
        timeout_s = min(timeout_s, max(ends_at - clock(), 0.0))
    try:
        replies = pipe.call_many(first_requests(tokens, greets), timeout_s)
        if is_unauthenticated(replies[0]):
            raise redis_error(str(replies[0]))
        greeted = take_greeting(pipe, tokens, replies)
    except (ConnectionBroken, NoReply) as trouble:
        pipe.close()
        raise connecting_error(trouble, greets) from None
    except BaseException:
        pipe.close()
        raise
    return Connection(connection, pipe, tokens, *greeted)


def _pipe_over(connection: Any) -> Pipe:
    """A pipe that drives the socket of redis-py's connection."""
    sock = connection._sock  # noqa: SLF001  # redis-py has no public name for it before 8.0
    pipe: Pipe
    kind = type(sock).__module__, type(sock).__name__  # gevent and eventlet replace these classes by their own
    if compiled is None or kind not in _COMPILED_DRIVES or is_patched():
        pipe = threads_py.Pipe(connection, sock)
    else:
        pipe = compiled.Pipe(connection, sock.fileno(), SPIN_US, None if kind == _PLAIN else sock)
    # The garbage collector may come to the socket before its owner, and would warn of a socket that nobody has closed.
    weakref.finalize(pipe, connection.disconnect).atexit = False
    return pipe
