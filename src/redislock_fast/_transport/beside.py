"""The server of an asyncio client, for a thread: on a connection of its own, with the client's settings.

redis-py has a connection class for threads beside each one for event loops, with the same parameters. Where a client
has another class, or a setting that only an event loop can use, there is nothing for threads: `beside` returns None.

Thread safety: one thread at a time sends, and makes what it needs for that. Any thread calls `note_closing` and `stop`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from redis.exceptions import ConnectionError, TimeoutError

from redislock_fast._protocol.operation import Operation
from redislock_fast._transport.pool_events import notice_closing
from redislock_fast._transport.threads.cluster import ThreadClusterTransport
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._transport.threads.starting import Task
from redislock_fast._util import patching

_CONNECTIONS = (
    "connection.Connection",
    "connection.SSLConnection",
    "connection.UnixDomainSocketConnection",
    "sentinel.SentinelManagedConnection",
    "sentinel.SentinelManagedSSLConnection",
)
"""The classes for event loops beside which there is one for threads."""

_OF_LOOPS = ("connection_pool", "encoder_class", "himport_registry", "parser_class", "redis_connect_func", "retry")
"""Settings whose values are for event loops. What a thread needs in their place, it makes by itself."""

_OF_POOLS = ("connection_class", "max_connections", "response_callbacks", "maint_notifications_pool_handler")

_FOREIGN = ("encoder_class", "parser_class", "redis_connect_func")
"""Those in whose place there is nothing for threads where a user has set them."""

_DROPPED = ("ssl_ciphers", "ssl_min_version")
"""Settings that redis-py's cluster client for threads leaves out without a word: it would connect less safely."""


def _thread_class(connection_class: type) -> Any:
    """The connection class for threads beside this one; None where there is none."""
    library, _, name = connection_class.__module__.partition(".asyncio.")
    if f"{name}.{connection_class.__name__}" not in _CONNECTIONS or library not in ("redis", "valkey"):
        return None
    return getattr(sys.modules.get(f"{library}.{name}"), connection_class.__name__, None)


@lru_cache
def _parameters(connection_class: Any) -> frozenset[str]:
    """The settings that a connection class takes."""
    return frozenset(
        name
        for base in connection_class.__mro__
        if "__init__" in vars(base) and base is not object
        for name in inspect.signature(base.__init__).parameters
    )


def _is_for_threads(connection_class: Any, settings: dict[str, Any]) -> bool:
    """Whether a thread can connect with the settings of an asyncio client."""
    set_ = {name for name, value in settings.items() if value is not None}
    if not set_.isdisjoint(_FOREIGN) or not set_ <= {*_parameters(connection_class), *_OF_LOOPS, *_OF_POOLS}:
        return False
    provider = settings.get("credential_provider")
    own = getattr(type(provider), "get_credentials", None)  # for threads; redis-py's own only raises
    return provider is None or not (
        own is None or inspect.iscoroutinefunction(own) or own.__qualname__.startswith("CredentialProvider.")
    )


def _for_threads(connection_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an asyncio client as a thread needs them."""
    known = _parameters(connection_class).difference(_OF_LOOPS)
    return {name: value for name, value in settings.items() if name in known}


class _Pool:
    """A connection pool of an asyncio client in the form of one for threads. It does not keep that pool alive.

    Args:
        pool: that pool.
        connection_class: for threads.
    """

    def __init__(self, pool: Any, connection_class: Any) -> None:
        self._pool = weakref.ref(pool)
        self.connection_class = connection_class

    def _live_pool(self) -> Any:
        pool = self._pool()
        if pool is None:
            raise ConnectionError("the client is gone")
        return pool

    @property
    def connection_kwargs(self) -> dict[str, Any]:
        """The settings, with a policy of retries that only says how often and when."""
        settings = self._live_pool().connection_kwargs
        return {**_for_threads(self.connection_class, settings), "retry": settings.get("retry")}

    def get_encoder(self) -> Any:
        return self._live_pool().get_encoder()


def _sentinel_pool(pool: Any, connection_class: Any) -> Any:
    """A pool of redis-py's for threads that asks the same sentinels as this one."""
    library = sys.modules[connection_class.__module__]
    manager = pool.sentinel_manager
    ours = library.Sentinel([], manager.min_other_sentinels, manager.sentinel_kwargs)
    ours.sentinels = [_client_of(sentinel.connection_pool) for sentinel in manager.sentinels]
    return library.SentinelConnectionPool(
        pool.service_name,
        ours,
        is_master=pool.is_master,
        check_connection=pool.check_connection,
        connection_class=connection_class,
        **_for_threads(connection_class, pool.connection_kwargs),
    )


def _client_of(pool: Any) -> Any:
    """A client for threads of the server of this pool."""
    connection_class = _thread_class(pool.connection_class)
    library = sys.modules[connection_class.__module__.partition(".")[0]]
    settings = _for_threads(connection_class, pool.connection_kwargs)
    return library.Redis(connection_pool=library.ConnectionPool(connection_class=connection_class, **settings))


def _new_cluster(client: Any, connection_class: Any) -> Any:
    """A cluster client for threads of the same cluster. It connects."""
    from redis.cluster import ClusterNode, RedisCluster  # noqa: PLC0415  # for the few that need it

    manager = client.nodes_manager
    nodes = list((manager.nodes_cache or manager.startup_nodes).values())
    settings = {
        name: value
        for name, value in _for_threads(connection_class, client.connection_kwargs).items()
        if value is not None
    }
    ours = RedisCluster(
        startup_nodes=[ClusterNode(node.host, node.port) for node in nodes],  # type: ignore[no-untyped-call]
        require_full_coverage=False,
        address_remap=getattr(manager, "address_remap", None),
        ssl=connection_class.__name__ == "SSLConnection",
        **settings,
    )
    _disconnect(ours)
    return ours


def _disconnect(cluster: Any) -> None:
    """Close the connections to the nodes of a cluster that are not in use."""
    for node in list(cluster.nodes_manager.nodes_cache.values()):
        if node.redis_connection is not None:
            node.redis_connection.connection_pool.disconnect(inuse_connections=False)


class Beside:
    """A server or cluster of an asyncio client, for the thread that renews locks there.

    Args:
        owner: the asyncio connection pool or cluster client. It is not kept alive.
        kind: of the transport for threads.
        make: makes the owner of that.
        closing: which method of the asyncio owner says that its user closes it.

    Attributes:
        has_connected: whether the thread has ever got a reply.
    """

    lingering = None
    has_connected = False

    def __init__(self, owner: Any, kind: type[ThreadServerTransport], make: Callable[[Any], Any], closing: str) -> None:
        self._asyncio_owner = weakref.ref(owner)
        self._kind = kind
        self._make = make
        self._made: tuple[Any, ThreadServerTransport] | None = None  # with the owner, which it refers to weakly
        self._is_closing = False
        notice_closing(owner, self, closing)

    def _server(self, limit_s: float | None) -> ThreadServerTransport:  # noqa: ARG002  # nothing is waited for here
        return (self._made or self._make_server())[1]

    def _make_server(self) -> tuple[Any, ThreadServerTransport]:
        owner = self._asyncio_owner()
        if owner is None:
            raise ConnectionError("the client is gone")
        made = self._make(owner)
        self._made = (made, self._kind(made))
        return self._made

    # ---- what a renewal needs ----

    def split(self, keys: list[bytes], limit_s: float | None = None) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by server.

        Args:
            keys: the keys.
            limit_s: how long to wait at most until nodes can be asked, in seconds; None: without a limit.

        Raises:
            redis.exceptions.TimeoutError: none can be asked yet.
        """
        return self._server(limit_s).split(keys)

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished; see `ThreadServerTransport.execute`."""
        self._server(limit_s).execute(operation, limit_s)
        self.has_connected = True

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, in the background. Where nothing was sent, nothing is left."""
        if self._made is not None:
            self._made[1].clean_up(entries)

    # ---- the end of the client, and of its loops ----

    def note_closing(self) -> None:
        """The client is being closed, or its loop ends: close the connection once nothing goes on there."""
        self._is_closing = True
        if self._made is not None:
            self._made[1].note_closing()

    def rest(self) -> None:
        """Nothing is renewed: close the connection if the client was closed."""
        if self._is_closing:
            self.note_closing()

    @property
    def cleanup(self) -> Beside:
        """As for `LoopEnd.attend`: the loop need not wait for anything."""
        return self

    def cleaning_up(self) -> None:
        """There is no task."""

    def stop(self) -> Iterable[Any]:
        """At the end of a loop, close the connection once nothing goes on there. Returns no tasks."""
        with contextlib.suppress(OSError):
            self.note_closing()
        return ()


class _BesideCluster(Beside):
    """A cluster. To make redis-py's client of it may take long: that asks nodes, and waits for those that are silent.

    So a thread of its own makes the client, which goes on where the renewal does not wait any longer.
    """

    _making: Task | None = None
    _trouble: Exception | None = None

    def _server(self, limit_s: float | None) -> ThreadServerTransport:
        if self._made is None:
            making = self._making
            if making is None or making.is_over:
                self._trouble = None
                self._making = making = Task("connect", patching.own_thread(self._try_to_make))
            making.wait(limit_s)
        if self._made is None:
            raise self._trouble or TimeoutError("no connection in time")
        return self._made[1]

    def _try_to_make(self) -> None:
        try:
            self._make_server()
        except Exception as error:
            self._trouble = error.with_traceback(None)

    def note_closing(self) -> None:
        super().note_closing()
        if self._made is not None:
            _disconnect(self._made[0])


def beside_pool(pool: Any) -> Beside | None:
    """The server of an asyncio connection pool, for a thread; None where no thread can connect with its settings."""
    connection_class = _thread_class(pool.connection_class)
    if connection_class is None or not _is_for_threads(connection_class, pool.connection_kwargs):
        return None
    make = partial(_Pool, connection_class=connection_class)
    if hasattr(pool, "sentinel_manager"):
        if not all(_thread_class(one.connection_pool.connection_class) for one in pool.sentinel_manager.sentinels):
            return None
        make = partial(_sentinel_pool, connection_class=connection_class)
    return Beside(pool, ThreadServerTransport, make, "disconnect")


def beside_cluster(client: Any) -> Beside | None:
    """The cluster of an asyncio client, for a thread; None where no thread can connect with its settings."""
    own = dict.fromkeys(("parser_class", "redis_connect_func"))  # redis-py's, which no user can replace
    settings = {**client.connection_kwargs, **own}
    connection_class = _thread_class(settings["connection_class"])
    drops = any(settings.get(name) is not None for name in _DROPPED)
    if drops or connection_class is None or not _is_for_threads(connection_class, settings):
        return None
    make = partial(_new_cluster, connection_class=connection_class)
    return _BesideCluster(client, ThreadClusterTransport, make, "aclose")
