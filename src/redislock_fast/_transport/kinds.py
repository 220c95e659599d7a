"""Which transport serves a client: that of a server, that of a cluster, or one that calls the client's own methods.

A client with methods of its own in place of redis-py's may change what they do, as a prefix for keys does; a connection
that is none of redis-py's may have no socket; a pool with methods of its own may choose the server or the database.
Locks of these clients use the client's methods as redis-py's locks do.
So do asyncio locks in an event loop whose transports may keep their first protocol forever, as rloop's do.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from redislock_fast._transport.base import Registry, Transport
from redislock_fast._util.tracing import has_method_of_its_own

logger = logging.getLogger(__name__)

_CLIENTS = ("client.Redis", "client.Valkey", "cluster.RedisCluster")

Kind: TypeAlias = Literal["server", "cluster", "client"]

_LIBRARIES = ("redis", "valkey")
_LOOPS = ("uvloop", "winloop")
_METHODS = ("execute_command", "set", "get", "evalsha", "script_load", "register_script")
_CONNECTION_METHODS = ("send_command", "send_packed_command", "pack_command", "read_response")
_POOL_METHODS = ("make_connection", "get_connection", "get_available_connection", "ensure_connection")


def kind_of(client: Any, for_asyncio: bool) -> Kind:
    """The kind of transport for a client: "client" where the locks must call the client's own methods.

    Args:
        client: what a lock was given.
        for_asyncio: whether the lock is an asyncio lock.

    Raises:
        TypeError: for a pipeline, for a client of the other kind (blocking or asyncio), and for any other object.
    """
    class_ = client.__class__  # of a mock: the class that it stands for
    names = {_name_in_library(base) for base in class_.__mro__}
    plain = {name.removeprefix("asyncio.") for name in names}
    if plain & {"client.Pipeline", "cluster.ClusterPipeline"}:
        raise TypeError("a pipeline cannot take a lock: its commands are executed later. Use the client itself")
    is_asyncio = any(name.startswith("asyncio.") for name in names)
    if "cluster.ValkeyCluster" in plain:
        raise TypeError("a lock takes no cluster client of valkey-py: use redis.RedisCluster, which any Valkey serves")
    is_client = not plain.isdisjoint(_CLIENTS)
    if not is_client and not all(callable(getattr(client, name, None)) for name in ("set", "get", "register_script")):
        where = "redis.asyncio" if for_asyncio else "redis"
        hint = f": {where}.Redis(connection_pool=pool) is one" if "connection.ConnectionPool" in plain else ""
        raise TypeError(f"a lock needs a {where}.Redis or {where}.RedisCluster, not {class_.__name__}{hint}")
    if is_asyncio and not for_asyncio:
        raise TypeError(
            "this is an asyncio client: it needs the class or function of the same name in redislock_fast.asyncio, "
            "such as redislock_fast.asyncio.Lock, or redislock_fast.asyncio.holders"
        )
    if for_asyncio and not is_asyncio and is_client:
        raise TypeError(
            "this client blocks: it needs the class or function of the same name in redislock_fast, such as "
            "redislock_fast.Lock, or redislock_fast.holders. Those of redislock_fast.asyncio need a redis.asyncio.Redis"
        )
    if is_mock(client) or not is_client or _overrides(class_, _METHODS):
        _log_once(f"{class_.__module__}.{class_.__qualname__}", "has methods of its own")
        return "client"
    return "cluster" if "cluster.RedisCluster" in plain else "server"


def is_mock(client: Any) -> bool:
    """Whether an object says that it is of another class than its own, as mocks do."""
    return client.__class__ is not type(client)


def sends_by_itself(client: Any) -> bool:
    """Whether requests must go through this client's methods: one is its own, or its connections are not redis-py's."""
    if has_method_of_its_own(client):
        _log_once(f"{client!r}", "has methods of its own")
        return True
    pool = getattr(client, "connection_pool", None)
    pool_class: Any = type(pool)
    if pool is None:  # of a cluster
        pool_class = getattr(getattr(client, "nodes_manager", None), "connection_pool_class", None)
        return pool_class is not None and _connects_by_itself(pool_class)
    if _connects_by_itself(pool_class):
        return True
    if not vars(pool).keys().isdisjoint(_POOL_METHODS):
        _log_once(f"{pool!r}", "has methods of its own")
        return True
    connection_class = pool.connection_class
    own = not any(map(_is_of_library, connection_class.__mro__)) or _overrides(connection_class, _CONNECTION_METHODS)
    if own:
        _log_once(f"{connection_class.__module__}.{connection_class.__qualname__}", "sends and reads in its own way")
    return own


class Transports(Registry[Transport]):
    """The one transport of each client in this process: those for threads, or those for tasks.

    Args:
        for_asyncio: whether they are for tasks.
        makers: by kind, what makes a transport of its owner: the connection pool of a server, or else the client.
    """

    def __init__(self, for_asyncio: bool, makers: dict[Kind, Callable[[Any], Transport]]) -> None:
        super().__init__()
        self._for_asyncio = for_asyncio
        self._makers = makers
        self._kinds: dict[type, Kind] = {}

    def of(self, client: Any) -> Transport:
        """The transport of a client.

        Raises:
            TypeError: as for `kind_of`.
        """
        kind = self._kinds.get(type(client))
        if kind is None:
            kind = kind_of(client, self._for_asyncio)
            if not is_mock(client):  # each mock has a class of its own
                self._kinds[type(client)] = kind
        if kind == "server" and "execute_command" not in client.__dict__:
            transport = self.get(id(client.connection_pool))
            if transport is not None:
                return transport
        if kind != "client" and sends_by_itself(client):
            kind = "client"
        owner = client.connection_pool if kind == "server" else client
        return self.get(id(owner)) or self.add(owner, self._makers[kind])


@lru_cache  # of a cluster, each new lock asks
def _connects_by_itself(pool_class: type) -> bool:
    """Whether a connection of such a pool may be to another server or database than its settings say."""
    own = not any(map(_is_of_library, pool_class.__mro__)) or _overrides(pool_class, _POOL_METHODS)
    if own:
        _log_once(f"{pool_class.__module__}.{pool_class.__qualname__}", "makes connections in its own way")
    return own


def changes_protocols(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the transports of a loop give their bytes to another protocol when asked to, as far as is known."""
    class_ = type(loop)
    changes = isinstance(loop, asyncio.BaseEventLoop) or any(_root(base) in _LOOPS for base in class_.__mro__)
    if not changes:
        _log_once(f"{class_.__module__}.{class_.__qualname__}", "may have transports that keep their first protocol")
    return changes


def client_of(pool: Any) -> Any:
    """An asyncio client of this pool, of the pool's own library."""
    library = _root(next(filter(_is_of_library, type(pool).__mro__)))
    return sys.modules[f"{library}.asyncio"].Redis(connection_pool=pool)


def _root(class_: type) -> str:
    """The package of a class."""
    return class_.__module__.partition(".")[0]


def _name_in_library(class_: type) -> str:
    """A class's module and name, without the name of the library."""
    library, _, module = class_.__module__.partition(".")
    return f"{module if library in _LIBRARIES else class_.__module__}.{class_.__qualname__}"


def _is_of_library(class_: type) -> bool:
    return _root(class_) in _LIBRARIES


def _overrides(class_: type, methods: Iterable[str]) -> bool:
    """Whether a class outside of redis-py defines one of the methods. A tracer replaces those of redis-py's classes."""
    return any(not _is_of_library(base) and not vars(base).keys().isdisjoint(methods) for base in class_.__mro__)


@lru_cache
def _log_once(name: str, reason: str) -> None:
    """Log it, once for each class."""
    logger.info("%s %s: locks call the client's own methods, as redis-py's locks do, and poll", name, reason)
