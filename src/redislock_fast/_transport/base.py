"""What the server transports of threads and event loops share: the connection, what goes wrong on it, and retries.

Nothing here waits, sends or receives. An `Attempts` belongs to the caller that executes the operation.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypeVar

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from redislock_fast._pipe.base import NOT_ASKED, Args, ConnectionBroken, Forked, NoReply, OnReply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import (
    NOAUTH,
    SUBSCRIBED,
    Exchange,
    FirstRequest,
    NotExecuted,
    Redirected,
    Refused,
)
from redislock_fast._queue.waiters import Waiter, WaiterRegistry
from redislock_fast._transport.pool_events import notice_credentials
from redislock_fast._util import fork
from redislock_fast._util.redis_py import BAD_CREDENTIALS, RetryPolicy, redis_error, redis_errors
from redislock_fast._util.times import FOREVER_S, GRACE_S, clock, reply_within_s
from redislock_fast._util.tokens import PLAIN, TokenSource

logger = logging.getLogger(__name__)

MOST_LOSSES = 2
"""After so many connections in a row that a server has closed for a request, the request is not sent any more."""

LATER_PAUSE_S = 0.01
"""At least so long, in seconds, before a server that has answered "later" is asked again, whatever the policy says."""

_PLAIN_S = 600.0
"""How long connections are made without the queue after such losses, in seconds."""


class _Pipe(Protocol):
    @property
    def broken(self) -> bool: ...

    @property
    def closed_by_peer(self) -> bool: ...

    @property
    def silence_s(self) -> float: ...

    def post(self, args: Args, on_reply: OnReply | None = None) -> None: ...


class _Cleanup(Protocol):
    endings: set[Args]

    def delete(self, entries: list[tuple[bytes, bytes]]) -> None: ...


class _Connection(Protocol):
    @property
    def pipe(self) -> _Pipe: ...

    capabilities: Capabilities
    ending: Args | None
    registry: WaiterRegistry | None
    address: Any

    def close(self) -> None: ...


ConnectionType = TypeVar("ConnectionType", bound=_Connection)


class Encoding:
    """Names and tokens as bytes.

    Args:
        encoder: redis-py's, of the client.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._utf8 = (encoder.encoding, encoder.encoding_errors) == ("utf-8", "strict")

    def encode(self, value: object) -> bytes:
        """A name or token as bytes."""
        if type(value) is bytes:
            return value
        if type(value) is str and self._utf8:  # as the encoder does, but faster
            return value.encode()
        with redis_errors():
            return bytes(self._encoder.encode(value))

    def key_of(self, name: object) -> bytes:
        """A lock's name as the key that the client's own commands use for it."""
        return self.encode(name)

    def keys_of(self, names: Sequence[Any]) -> tuple[list[bytes], bool]:
        """Many names as keys, and whether different names certainly have different keys."""
        if self._utf8:
            with contextlib.suppress(TypeError):  # one of them is no str
                return list(map(str.encode, names)), True
        return [self.key_of(name) for name in names], False


class BlockingEncoding(Encoding):
    """The encoding of a blocking client."""

    def key_of(self, name: object) -> bytes:
        """As UTF-8 whatever the client's encoding is: hiredis packs redis-py's own commands so."""
        return name.encode() if isinstance(name, str) else self.encode(name)


class KeptKeys(Protocol):
    """The keys that this process keeps on a server. The wing of lingering has the class."""

    def give_up(self) -> None:
        """Give up what lingers, in the background: the client is closed, or the loop ends."""

    def forget(self) -> None:
        """In a forked child: leave all keys to the parent."""

    def wake(self) -> object:
        """Wake the thread that listens, should it sleep; see `patching.adapt_later`."""

    def resume(self) -> None:
        """After a patch, where the former thread has ended: start another one if it listened."""


FINAL = (*BAD_CREDENTIALS, Refused, Redirected, Forked)
"""Errors that no further attempt at the same server can mend."""

TRANSIENT = (ConnectionBroken, NoReply, NotExecuted, ConnectionError, TimeoutError)
"""Errors after which an `Attempts` says whether to try again. Some of `FINAL` are subclasses: check those first."""


class Attempts:
    """The attempts of one operation: how much time is left for them, and when the next one starts.

    Args:
        retry: the retry policy of the connection pool or of the cluster client.
        limit_s: how long the caller waits at most, in seconds, from now on; below 0: its time ended so long ago; None:
            `retry` and `reply_s` alone count.
        reply_s: how long the server may take for a reply, in seconds; below 0: forever.

    Attributes:
        deadline: when the caller's time ends, in the clock's seconds; None: never.
        failures: how many attempts have failed.
    """

    failures = 0
    _pause_s: float | None = None
    _error: Exception | None = None

    def __init__(self, retry: RetryPolicy, limit_s: float | None, reply_s: float = -1.0) -> None:
        self._retry = retry
        self._reply_s = reply_s
        self.deadline = None if limit_s is None or limit_s > FOREVER_S else clock() + limit_s

    def left_s(self) -> float | None:
        """How much of the caller's time is left, in seconds; below 0 when it is up, None forever."""
        return None if self.deadline is None else self.deadline - clock()

    @property
    def ends_at(self) -> float | None:
        """When the caller stops waiting for what is under way, in the clock's seconds; None: never."""
        return None if self.deadline is None else self.deadline + GRACE_S

    def bounded_s(self) -> float | None:
        """How long the caller waits for what is under way, in seconds from 0; None forever."""
        return None if self.deadline is None else max(self.deadline + GRACE_S - clock(), 0.0)

    def timeout_s(self, now: float) -> float:
        """How long to wait for the reply to a request that leaves now, in seconds; below 0 forever."""
        deadline = self.deadline
        if deadline is None:
            return self._reply_s
        return max(reply_within_s(deadline - now, self._reply_s), 0.0)

    def note_failure(self, trouble: Exception, error: Exception) -> None:
        """Decide after a failed attempt whether there is another one.

        Args:
            trouble: the error; one of `TRANSIENT`.
            error: what the caller gets if there is no other attempt.
        """
        self._pause_s = self.pause_s(trouble)
        self._error = error

    def go_on(self) -> None:
        """Try again at once after a failure that does not count."""
        self._pause_s, self._error = 0.0, None

    def next_pause_s(self) -> float:
        """How long to wait before the next attempt, in seconds.

        Raises:
            Exception: the error of the last failure, where there is no other attempt. Call this outside of the `except`
                clause, so that the error has no context.
        """
        error, self._error = self._error, None
        if self._pause_s is None and error is not None:
            try:
                raise error
            finally:
                del error  # or this frame and the error would keep each other, and the connection, alive
        return self._pause_s or 0.0

    def pause_s(self, trouble: Exception) -> float | None:
        """Count a failure. Returns how long to wait before the next attempt, in seconds; None to give up."""
        self.failures += 1
        pause_s, retries = self._retry.delay_s(self.failures), self._retry.retries
        if isinstance(trouble, NotExecuted):
            if trouble.code == NOAUTH:  # one new connection is worth a try
                retries = 1
            else:
                pause_s = max(pause_s, LATER_PAUSE_S)
                if self.deadline is not None:  # a server that answers "later" is asked until the caller's time ends
                    retries = -1
        return self._if_allowed(retries, pause_s, self.ends_at)

    def _if_allowed(self, retries: int, pause_s: float, ends_at: float | None) -> float | None:
        """The pause; None if the retries are used up, or the time is up before the pause is over."""
        if 0 <= retries < self.failures or (ends_at is not None and clock() + pause_s >= ends_at):
            return None
        return pause_s


def is_settled_by(operation: Exchange, capabilities: Capabilities, came: list[Any]) -> bool:
    """Take the outcome of a first request that the caller has sent itself. Returns whether the operation is finished.

    Args:
        operation: whose request it was.
        capabilities: of the connection on which it left.
        came: the reply and the error, one of them None. The list is emptied.

    Raises:
        BaseException: the error; and whatever `Exchange.feed` raises.
    """
    reply, interruption = came
    came.clear()  # an error keeps the frames that it came through: none of them may keep the error
    if interruption is not None:
        try:
            raise interruption
        finally:
            del interruption
    return reply is not NOT_ASKED and operation.feed(reply, capabilities)


class ServerTransport(Generic[ConnectionType]):
    """The transport of one server: the part of it that does not wait.

    Args:
        owner: the connection pool of the server. Only a weak reference is kept, so that the transport ends with its
            clients.

    Attributes:
        owner: the weak reference.
        encoding: makes bytes of names and tokens.
        cleanup: deletes what failed acquires may have left on the server.
        lingering: keeps keys for locks with `linger`; None before it is needed. Any thread sets it, always to the same.
        connection: the connection; None where there is none yet.
        tokens: makes tokens with the identifier of the connection, or of the next one.
        kept_by_wings: what wings keep for the server, by its class; used by atomic methods of dict alone.
    """

    is_observable = True
    """Whether tracers do not see the requests otherwise."""

    connects = True
    """Whether the requests leave on a connection of its own."""

    sends_wait = True
    """Whether `WAIT` can follow a request on its connection."""

    _kind_of_attempts: type[Attempts] = Attempts

    is_routed = False
    """Whether a `Route` follows redirections. Else they are errors of the server, for the caller."""

    _cluster: weakref.ref[ServerTransport[Any]] | None = None
    """The transport of the cluster, where this is that of a node; not where it is a dedicated connection to one."""

    _giving_up: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    """Has one caller at a time take the connection away. Threads have a mutex: nothing is called under it."""

    cleanup: _Cleanup
    lingering: KeptKeys | None = None

    renewer: Any = None
    """The renewer of the leases here; None before it is needed. Any thread may set it, always to the same one."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.encoding = self.encoding_of(owner)
        settings = self._settings_of(owner)
        self._retry = RetryPolicy(settings.get("retry"))
        timeout_s = settings.get("socket_timeout")
        self.timeout_s = -1.0 if timeout_s is None else float(timeout_s)
        self.connection: ConnectionType | None = None
        self.tokens = TokenSource(self.connects)
        # The connections in a row that were lost by a request of the queue. Any thread adds the identifier of one, so
        # that a loss which several find counts once.
        self._lost: set[bytes] = set()
        self._plain_until = 0.0  # in the clock's seconds
        self.kept_by_wings: dict[type, Any] = {}
        notice_credentials(owner, self)

    @staticmethod
    def encoding_of(owner: Any) -> Encoding:
        """The encoding of the names and tokens of this owner's locks."""
        return Encoding(owner.get_encoder())

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:
        settings: dict[str, Any] = owner.connection_kwargs
        return settings

    def _live_owner(self) -> Any:
        owner = self.owner()
        if owner is None:
            raise ConnectionError("the client is gone")
        return owner

    def server_of(self, key: bytes) -> ServerTransport[ConnectionType]:  # noqa: ARG002  # here, all keys have one server
        """The transport of the server that has this lock: here, this one.

        In a cluster it is that of a node; where no node is known, that of the cluster, which has no connection.
        """
        return self

    def pool(self) -> Any:
        """The connection pool. That of a cluster is empty: its nodes have pools."""
        return self._live_owner() if self.connects else SimpleNamespace(connection_kwargs={})

    # ---- what is to be cleaned up ----

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, in the background; see `Cleanup.delete`.

        A node leaves that to its cluster: the cleanup goes to the nodes that have the slots by then.
        """
        cluster = None if self._cluster is None else self._cluster()
        (self if cluster is None else cluster).cleanup.delete(entries)

    def post_cleanup(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Post the cleanup where there is a connection: nothing will run in the background."""

    def at_one_server(self, keys: list[bytes]) -> Sequence[int]:
        """The indexes of those keys that are on the same server as the first key."""
        return range(len(keys))

    def post(self, connection: ConnectionType, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply the caller does not wait; see `_pipe.base.Pipe.post`."""
        connection.pipe.post(args, on_reply)

    # ---- a client that is closed ----

    _closes = False
    """Whether the client was closed while the connection was in use. Any thread sets it; a missed note costs nothing
    more than an open connection."""

    def note_closing(self) -> None:
        """The client is being closed: give up what lingers, and close the connection once nothing goes on there.

        The lock may be used again, on a new connection. What is held needs none, and renewals make one.

        A pool that asks sentinels does the same when it has found another primary: then whoever comes next connects to
        that, and those that wait at the former one follow with their next health check.
        """
        if self.lingering is not None:
            self.lingering.give_up()
        self._closes = True
        self.close_if_idle()
        connection, primary = self.connection, getattr(self.owner(), "master_address", None)
        if connection is not None and primary not in (None, connection.address):
            self._give_up(connection)

    def close_if_idle(self) -> None:
        """Close the connection of a closed client if no reply is to come there, and nobody waits."""
        connection = self.connection
        if not self._closes or connection is None or (connection.registry and connection.registry.has_waiters):
            return
        if self._close_idle(connection):
            self._closes = False
            connection.ending = None  # it has ended
            self._give_up(connection)

    @abstractmethod
    def _close_idle(self, connection: ConnectionType) -> bool:
        """Close the connection if no reply is to come on it. Returns whether it was so."""

    @abstractmethod
    def begin(self, call: FirstRequest) -> Any:
        """Send the first request of an acquire or a release, where there is a connection."""

    def new_token(self, key: bytes | None = None, kind: bytes = PLAIN) -> bytes:
        """A new token, with the identifier of the connection on which a request for this lock would leave.

        Args:
            key: the lock; None for several locks, which may have several servers.
            kind: as for `TokenSource.new_token`.
        """
        server = self if key is None else self.server_of(key)
        return server.tokens.new_token(kind)

    # ---- whether other callers wait ----

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt to take this lock would probably fail; see `WaiterRegistry.is_contended`."""
        connection = self.server_of(key).connection
        return (
            connection is not None
            and connection.registry is not None
            and connection.registry.is_contended(key, is_patient)
        )

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """Note the release of a lock here: a waiter has it now, or no waiter was in the queue."""
        connection = self.server_of(key).connection
        if connection is not None and connection.registry is not None:
            connection.registry.note_hand_over(key, handed_over)

    def is_current(self, waiter: Waiter) -> bool:
        """Whether requests for the waiter's lock still leave on the waiter's connection."""
        connection, node_of = self.connection, self._cluster
        if connection is None or connection.registry is not waiter.registry or connection.pipe.broken:
            return False
        cluster = None if node_of is None else node_of()
        return node_of is None or (cluster is not None and cluster.server_of(waiter.key) is self)

    # ---- the connection, and what goes wrong on it ----

    def _drop(self, connection: ConnectionType | None) -> None:
        if connection is not None:
            self._give_up(connection)
            connection.close()

    def _give_up(self, connection: ConnectionType) -> None:
        """Have the next caller connect. All callers that a lost connection fails may come at the same time."""
        if self.connection is not connection or not self.connects:  # else it is the client
            return
        if connection.ending is not None:
            self.cleanup.endings.add(connection.ending)
        tokens = self.tokens  # kept until the end: no finalizer runs under the mutex
        successor = tokens.successor()
        with self._giving_up:
            if self.connection is connection:  # still: others may have connected meanwhile
                self.tokens = successor  # first: who finds no connection makes the next one with these
                self.connection = None

    # ---- servers that close the connection for what they do not know ----

    @property
    def greets(self) -> bool:
        """Whether the next connection asks for the server's capabilities. Else it is a plain one, without a queue."""
        return clock() >= self._plain_until

    def _note_queue_trouble(self, trouble: Exception, connection: ConnectionType | None, operation: Exchange) -> bool:
        """Note a failure. Returns whether it may come of a request of the queue: the next connection may do without."""
        if connection is None or connection.registry is None:
            return False
        if isinstance(trouble, ConnectionBroken):
            return self._note_loss(connection, connection.registry, operation)
        return isinstance(trouble, NotExecuted) and trouble.code == SUBSCRIBED

    def _note_loss(self, connection: ConnectionType, registry: WaiterRegistry, operation: Exchange) -> bool:
        """Note a lost connection. Returns whether the server may have closed it for a request of the queue."""
        if not connection.pipe.closed_by_peer:
            return False
        if registry.is_proven or not (registry.is_tried or operation.uses_queue):
            if registry.is_proven:
                self._lost.clear()
            return False
        self._lost.add(registry.identifier)
        if len(self._lost) >= MOST_LOSSES:
            self._do_without_queue()
        return True

    def _do_without_queue(self) -> None:
        self._plain_until = clock() + _PLAIN_S

    @staticmethod
    def _note_plain() -> None:
        """Log that a connection was made without the queue."""
        logger.info("the server closes connections for requests of locks, or has no pushes: locks wait by polling")

    def _refuse_silent(self, connection: ConnectionType) -> None:
        """Give up a connection whose server has no pushes, although it says so."""
        self._do_without_queue()
        self._drop(connection)

    def leave_if_silent(self, connection: ConnectionType) -> None:
        """Send nothing more on a connection on which nothing has come for the pool's `socket_timeout`.

        The end of a caller's own limit says nothing about the connection. The connection is not closed, since a cleanup
        must be sent after the request that it cleans up. It closes when nothing refers to it any more.
        """
        if 0 <= self.timeout_s <= connection.pipe.silence_s:
            self._give_up(connection)

    def leave_if_broken(self) -> None:
        """Have the next caller connect again."""
        connection = self.connection
        if connection is not None and connection.pipe.broken:
            self._drop(connection)

    def _attempts(self, limit_s: float | None) -> Attempts:
        """The attempts of an operation that begins now."""
        return self._kind_of_attempts(self._retry, limit_s, self.timeout_s)

    def _note_trouble(
        self,
        attempts: Attempts,
        connection: ConnectionType | None,
        operation: Exchange,
        trouble: BaseException,
        unanswered: list[ConnectionType],
    ) -> bool:
        """Note what an attempt has raised. Returns False for an error after which no further attempt can help.

        Args:
            attempts: of the operation.
            connection: on which the request left; None where there was no connection.
            operation: whose request it was.
            trouble: the error.
            unanswered: the connection is added to it if the request may still be executed.
        """
        if not self.connects:  # its client has made all attempts. A cleanup cannot follow on the same connection
            if not isinstance(trouble, ResponseError):
                operation.note_unanswered(True)
            return False
        if isinstance(trouble, FINAL):
            return False
        if isinstance(trouble, TRANSIENT):
            error = self._trouble(connection, operation, trouble, unanswered)
            if self._note_queue_trouble(trouble, connection, operation):
                attempts.go_on()
            else:
                attempts.note_failure(trouble, error)
            return True
        if connection is not None:  # an interrupt or a cancel: the request may be under way
            operation.note_unanswered(True)
            unanswered.append(connection)
        return False

    def _trouble(
        self,
        connection: ConnectionType | None,
        operation: Exchange,
        trouble: Exception,
        unanswered: list[ConnectionType],
    ) -> Exception:
        """Give up the connection if it cannot be used any more. Returns redis-py's error for one of `TRANSIENT`."""
        if isinstance(trouble, ConnectionBroken):
            operation.note_unanswered(trouble.sent)
            self._drop(connection)
            return ConnectionError(f"connection broken: {trouble}")
        if isinstance(trouble, NoReply):
            operation.note_unanswered(True)
            if connection is not None:
                unanswered.append(connection)
                self.leave_if_silent(connection)
            return TimeoutError(str(trouble))
        if isinstance(trouble, NotExecuted):
            if trouble.code in ("READONLY", NOAUTH):  # a demoted primary: look for the new one; or authenticate anew
                self._drop(connection)
            elif trouble.code == SUBSCRIBED and connection is not None:
                self._refuse_silent(connection)
            return redis_error(str(trouble))
        # Without its traceback: redis-py's frames and its errors keep each other alive, and this frame with them.
        return trouble.with_traceback(None)

    def authenticate(self, request: Args) -> None:
        """Send new credentials on the connection, in order with all other requests. From any thread.

        No caller waits for the reply: a connection whose credentials the server stops accepting is replaced then.
        """
        connection = self.connection
        if connection is not None:
            with contextlib.suppress(ConnectionBroken):
                self.post(connection, request)


ServerType = TypeVar("ServerType", bound="ServerTransport[Any]")


class Part(Generic[ServerType]):
    """A part of a server transport. It does not keep the transport alive, which ends as soon as its last client does.

    Who calls a method of a part refers to the transport. So does what the method has called later: by a thread, a timer
    or a callback that gets the transport and not the part.

    Args:
        server: the transport that has the part.
    """

    def __init__(self, server: ServerType) -> None:
        self._server = weakref.ref(server)

    @property
    def server(self) -> ServerType:
        """The transport."""
        server = self._server()
        assert server is not None
        return server


Transport = TypeVar("Transport")


class _OrNone(dict[Any, Any]):
    """Has None for each key that is not there."""

    def __missing__(self, key: object) -> None: ...


class Registry(Generic[Transport]):
    """One transport per owner: a connection pool, or a cluster client.

    The key is the owner's id: a WeakKeyDictionary is much slower, and each new lock looks its transport up.
    An entry is removed with its owner.

    Thread safety: any thread uses it, by atomic methods of dict: without a mutex, which a thread could have while its
    signal handler waits for another thread. `get` takes no lock of the dict either, as `dict.get` does without the GIL
    (CPython 3.13): threads would contend for it, and in a forked child it might stay taken.
    """

    def __init__(self) -> None:
        self._transports: dict[int, Transport] = _OrNone()
        self.get: Callable[[int], Transport | None] = self._transports.__getitem__

    def add(self, owner: Any, make: Callable[[Any], Transport]) -> Transport:
        """The owner's transport. It is made now unless another thread has just made it."""
        fork.generation()  # has the parent's transports forgotten in a child
        transport = make(owner)
        # Before: an entry that outlived its owner could be taken for that of another one with the same id.
        weakref.finalize(owner, self._transports.pop, id(owner), None).atexit = False
        return self._transports.setdefault(id(owner), transport)
