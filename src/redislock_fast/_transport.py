"""The synchronous transport: one connection per server and process, shared by all its threads.

A `Channel` drives operations over its link: it connects when there is none, sends again what was lost, gives up when
the pool's retry policy or the caller's time is used up, and then undoes what may have been done. `ClusterChannel` does
the same for a cluster: it finds the node and follows MOVED.

Who may touch what: `Channel.link` is replaced under `_connecting` and read without it (a stale link is broken, and says
so); `_undone` is used by atomic deque methods alone.

Must not know: the API of Lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import Any, Protocol

import redis
from redis.exceptions import AuthenticationError, AuthorizationError, ConnectionError, TimeoutError  # noqa: A004

from redislock_fast import _process
from redislock_fast._connect import Link, RetryPolicy, open_link, redis_error
from redislock_fast._protocol import Acquire, NotExecuted, Operation, Redirected, Refused, undo_request
from redislock_fast._times import clock
from redislock_fast._wire import Lost, NoReply

__all__ = ["Channel", "Transport", "transport_of"]

_GRACE_S = 0.1
"""A request that is under way when the caller's time ends may still take so long: cut off sooner, no answer that a
far server gives could ever count."""

_MAX_UNDONE = 10_000
_MOVES = 5  # as redis-py: a slot that moves more often within one request is an error


class Transport(Protocol):
    """What the facade needs of a channel."""

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation to its end; see `Channel.execute`."""

    def undo(self, key: bytes, token: bytes) -> None:
        """Delete the lock if it holds this token, without waiting."""

    def encode(self, value: object) -> bytes:
        """A name or token as bytes, as the client's own encoder has it."""


class _Encoding:
    """The client's encoder."""

    def __init__(self, client_or_pool: Any) -> None:
        self._encoder = client_or_pool.get_encoder()

    def encode(self, value: object) -> bytes:
        if type(value) is bytes:
            return value
        return bytes(self._encoder.encode(value))


class Channel(_Encoding):
    """All that this process sends to one server.

    Args:
        pool: the connection pool whose server it is. Only a weak reference is kept, so a pool ends when its clients do.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        super().__init__(pool)
        self._pool = weakref.ref(pool)
        self._retry = RetryPolicy(pool.connection_kwargs.get("retry"))
        timeout_s = pool.connection_kwargs.get("socket_timeout")
        self._timeout_s = -1.0 if timeout_s is None else float(timeout_s)
        self.link: Link | None = None
        self._connecting = threading.Lock()
        self._undone: deque[tuple[bytes, bytes]] = deque(maxlen=_MAX_UNDONE)
        _process.forget_in_child(self)

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished.

        Args:
            operation: a fresh state machine.
            limit_s: give up after so many seconds, plus `_GRACE_S` for a request under way; None: the pool's
                `socket_timeout` and retry policy alone decide, as for any command of redis-py.

        Raises:
            redis.exceptions.ConnectionError: no connection, after all retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: or the class that redis-py has for the server's error.
        """
        try:
            self.run(operation, limit_s)
        except BaseException as error:
            if isinstance(operation, Acquire) and operation.unsettled:
                self.undo(operation.key, operation.token)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise

    def run(self, operation: Operation, limit_s: float | None) -> None:
        """`execute` without its undoing and without its translation of errors."""
        now = clock()
        deadline = None if limit_s is None else now + limit_s
        failures = 0
        while True:
            link = self.link
            try:
                if link is None:
                    link = self._connect(deadline)
                    now = clock()
                while not operation.feed(self._call(link, operation, now, deadline), link.dialect):
                    now = clock()
            except (AuthenticationError, AuthorizationError):
                raise
            except (Lost, NoReply, NotExecuted, ConnectionError, TimeoutError) as trouble:
                error = self._trouble(link, trouble)
            else:
                return
            failures += 1
            delay_s = self._retry.delay_s(failures)
            now = clock()
            if 0 <= self._retry.retries < failures or (deadline is not None and now + delay_s >= deadline):
                raise error
            if delay_s:
                time.sleep(delay_s)
                now = clock()

    def _trouble(self, link: Link | None, trouble: Exception) -> Exception:
        """Drop the link if it is of no more use. Returns the error as redis-py has it."""
        if isinstance(trouble, Lost):
            self._drop(link)
            return ConnectionError(f"connection lost: {trouble}")
        if isinstance(trouble, NoReply):
            # The caller's own limit says nothing about the connection; silence for the pool's timeout does.
            if link is not None and 0 <= self._timeout_s <= link.pipe.silence_s:
                self._drop(link)
            return TimeoutError(str(trouble))
        if isinstance(trouble, NotExecuted):
            if trouble.code == "READONLY":  # a demoted primary: look for the new one
                self._drop(link)
            return redis_error(str(trouble))
        return trouble

    def undo(self, key: bytes, token: bytes) -> None:
        """Delete the lock if it holds this token: behind all that was sent on this connection, or first on the next."""
        link = self.link
        try:
            if link is not None:
                link.pipe.post(undo_request(link.dialect, key, token))
                return
        except Lost:
            self._drop(link)
        self._undone.append((key, token))

    def forget(self) -> None:
        """In a forked child: leave the parent's connection and unfinished business to the parent."""
        link, self.link = self.link, None
        self._connecting = threading.Lock()
        self._undone.clear()
        if link is not None:
            link.forget()

    def _call(self, link: Link, operation: Operation, now: float, deadline: float | None) -> Any:
        timeout_s = self._timeout_s
        if deadline is not None:
            left_s = max(deadline - now, 0.0) + _GRACE_S
            timeout_s = left_s if timeout_s < 0 else min(timeout_s, left_s)
        request = operation.request(link.dialect, now)
        try:
            return link.pipe.call(request, timeout_s)
        except Lost as lost:
            operation.lost(lost.sent)
            raise
        except BaseException:
            operation.lost(True)
            raise

    def _drop(self, link: Link | None) -> None:
        if link is not None:
            if self.link is link:
                self.link = None
            link.close()

    def _connect(self, deadline: float | None) -> Link:
        limit_s = None if deadline is None else max(deadline - clock(), 0.0) + _GRACE_S
        if not self._connecting.acquire(timeout=-1 if limit_s is None else limit_s):
            raise TimeoutError("no connection in time")
        try:
            if self.link is None:
                pool = self._pool()
                if pool is None:
                    raise ConnectionError("the client's connection pool is gone")
                link = open_link(pool, limit_s)
                while self._undone:
                    link.pipe.post(undo_request(link.dialect, *self._undone.popleft()))
                self.link = link
            return self.link
        finally:
            self._connecting.release()


class ClusterChannel(_Encoding):
    """All that this process sends to one cluster: a channel per node, found by the lock's slot.

    Args:
        client: redis-py's cluster client, which keeps the topology.
    """

    def __init__(self, client: redis.RedisCluster) -> None:
        super().__init__(client)
        self._client = weakref.ref(client)

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished, at whichever node has its slot; see `Channel.execute`."""
        deadline = None if limit_s is None else clock() + limit_s
        moves = 0
        channel = self._channel(operation.key)
        while True:
            try:
                channel.run(operation, None if deadline is None else max(deadline - clock(), 0.0))
            except (Redirected, ConnectionError, TimeoutError) as error:
                moves += 1
                if moves < _MOVES and (deadline is None or clock() < deadline):
                    self._live_client().nodes_manager.initialize()
                    fresh = self._channel(operation.key)
                    if fresh is not channel or isinstance(error, Redirected):
                        channel = fresh
                        continue
                self._undo_at(channel, operation)
                if isinstance(error, Redirected):
                    raise redis_error(str(error)) from None
                raise
            except Refused as error:
                self._undo_at(channel, operation)
                raise redis_error(str(error)) from None
            except BaseException:
                self._undo_at(channel, operation)
                raise
            else:
                return

    def undo(self, key: bytes, token: bytes) -> None:
        """Delete the lock if it holds this token, without waiting."""
        self._channel(key).undo(key, token)

    @staticmethod
    def _undo_at(channel: Channel, operation: Operation) -> None:
        if isinstance(operation, Acquire) and operation.unsettled:
            channel.undo(operation.key, operation.token)

    def _live_client(self) -> redis.RedisCluster:
        client = self._client()
        if client is None:
            raise ConnectionError("the client is gone")
        return client

    def _channel(self, key: bytes) -> Channel:
        client = self._live_client()
        node = client.get_node_from_key(key)  # type: ignore[no-untyped-call]
        if node is None:
            raise ConnectionError("the cluster has no node for this lock's slot")
        return _channel_of(client.get_redis_connection(node).connection_pool)


# One channel per pool, one per cluster client. Filled under the lock; read under it too, as a WeakKeyDictionary needs.
_registry: weakref.WeakKeyDictionary[object, Channel | ClusterChannel] = weakref.WeakKeyDictionary()
_registry_lock = threading.Lock()


def _new_registry_lock() -> None:
    global _registry_lock  # noqa: PLW0603  # another thread may have held it at the fork
    _registry_lock = threading.Lock()


_process.on_fork(_new_registry_lock)


def _channel_of(pool: Any) -> Channel:
    with _registry_lock:
        channel = _registry.get(pool)
        if channel is None:
            channel = _registry[pool] = Channel(pool)
    assert isinstance(channel, Channel)
    return channel


def transport_of(client: Any) -> Transport:
    """The one transport of a client in this process.

    Args:
        client: redis-py's `Redis` or `RedisCluster`, of any kind.

    Raises:
        TypeError: for a pipeline or an asyncio client: neither can hold a lock by blocking calls.
    """
    kind = _kinds.get(type(client)) or _kind_of(client)
    if kind == "cluster":
        with _registry_lock:
            transport = _registry.get(client)
            if transport is None:
                transport = _registry[client] = ClusterChannel(client)
        return transport
    return _channel_of(client.connection_pool)


_kinds: dict[type, str] = {}


def _kind_of(client: Any) -> str:
    kind = type(client)
    names = {f"{base.__module__}.{base.__name__}" for base in kind.__mro__}
    if names & {"redis.client.Pipeline", "redis.cluster.ClusterPipeline"}:
        raise TypeError("a pipeline cannot take a lock: its commands are executed later. Use the client itself")
    if any(name.startswith("redis.asyncio.") for name in names):
        raise TypeError("an asyncio client needs an asyncio lock: this Lock blocks")
    if "redis.cluster.RedisCluster" in names:
        _kinds[kind] = "cluster"
    elif hasattr(client, "connection_pool"):
        _kinds[kind] = "single"
    else:
        raise TypeError(f"a lock needs a redis.Redis or redis.RedisCluster, not {kind.__name__}")
    return _kinds[kind]
