"""The synchronous transport: one connection per server and process, shared by all its threads.

A `Channel` drives operations over its link: it connects when there is none, sends again what was lost, gives up when
the pool's retry policy or the caller's time is used up, and then undoes what may have been done. `ClusterChannel` does
the same for a cluster: it finds the node and follows MOVED.

Who may touch what: `Channel.link` is replaced under `_connecting` and read without it (a stale link is broken, and says
so); `_undone` is added to by anybody, by `append`, and taken from under `_undoing`; `_inside` is used by atomic methods
of set alone.

A signal handler or a finalizer may run in the middle of anything and use a lock of the same client. Its thread is then
inside already, perhaps as the one that reads for all, so it gets a connection of its own for that one operation.

Must not know: the API of Lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from threading import get_ident
from typing import Any, Protocol

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    RedisError,
    TimeoutError,  # noqa: A004
)

from redislock_fast import _process
from redislock_fast._connect import Link, RetryPolicy, open_link, redis_error
from redislock_fast._protocol import Acquire, NotExecuted, Operation, Redirected, Refused, Release, undo_request
from redislock_fast._times import clock
from redislock_fast._wire import Lost, NoReply

__all__ = ["Channel", "Transport", "transport_of"]

_GRACE_S = 0.1
"""A request that is under way when the caller's time ends may still take so long: cut off sooner, no answer that a
far server gives could ever count."""

_FOREVER_S = 1e9
"""Longer than this is no limit: clocks and locks overflow beyond."""

_MAX_UNDONE = 10_000
_UNDO_ONE_S = 1.0
_UNDO_FIRST_S = 0.05
_UNDO_LAST_S = 600.0  # doubling: after about 20 minutes without a connection, the rest is left to the locks' own ttls
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
        self._utf8 = (self._encoder.encoding, self._encoder.encoding_errors) == ("utf-8", "strict")

    def encode(self, value: object) -> bytes:
        if type(value) is bytes:
            return value
        if type(value) is str and self._utf8:  # as the encoder does, in a tenth of the time
            return value.encode()
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
        self._undone: list[tuple[bytes, bytes]] = []
        self._undoing = threading.Lock()
        self._undoer: threading.Thread | None = None
        self._inside: set[int] = set()  # idents of the threads that drive an operation
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
        loose: list[Link] = []
        if self._undone and isinstance(operation, Acquire):
            self._spare(operation)
        try:
            self.run(operation, limit_s, loose)
        except BaseException as error:
            self.tidy(operation, loose)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        if operation.unsettled and not operation.result:
            self.tidy(operation, loose)  # an earlier attempt of an acquire may still be under way

    def run(self, operation: Operation, limit_s: float | None, loose: list[Link]) -> None:
        """`execute` without its undoing and without its translation of errors.

        Every link on which a request left without an answer is added to `loose`.
        """
        thread = get_ident()
        if thread in self._inside:
            self._run_apart(operation, limit_s, loose)
            return
        now = clock()
        deadline = None if limit_s is None or limit_s > _FOREVER_S else now + limit_s
        failures = 0
        while True:
            link = self.link
            try:
                self._inside.add(thread)
                if link is None:
                    link = self._connect(deadline)
                    now = clock()
                timeout_s = self._timeout_s if deadline is None else self._bounded_s(deadline - now)
                dialect = link.dialect
                while not operation.feed(link.pipe.call(operation.request(dialect, now), timeout_s), dialect):
                    now = clock()
            except (AuthenticationError, AuthorizationError, Refused, Redirected):
                raise
            except (Lost, NoReply, NotExecuted, ConnectionError, TimeoutError) as trouble:
                error = self._trouble(link, operation, trouble, loose)
                # A server that answers "later" is asked until the caller's time ends, if it has an end.
                retries = -1 if deadline is not None and isinstance(trouble, NotExecuted) else self._retry.retries
            except BaseException:  # an interrupt: the request may be under way
                operation.lost(True)
                loose += [link] if link is not None else []
                raise
            else:
                return
            finally:
                self._inside.discard(thread)
            failures += 1
            delay_s = self._retry.delay_s(failures)
            now = clock()
            if 0 <= retries < failures or (deadline is not None and now + delay_s >= deadline):
                try:
                    raise error
                finally:
                    del error  # or this frame and the error would keep each other, and the connection, alive
            del error
            if delay_s:
                time.sleep(delay_s)
                now = clock()

    def _run_apart(self, operation: Operation, limit_s: float | None, loose: list[Link]) -> None:
        apart = Channel(self._live_pool())
        try:
            apart.run(operation, limit_s, loose)
        finally:
            if not loose:
                apart._drop(apart.link)

    def _trouble(self, link: Link | None, operation: Operation, trouble: Exception, loose: list[Link]) -> Exception:
        """Note what happened, and leave the link if it is of no more use. Returns the error as redis-py has it."""
        if isinstance(trouble, Lost):
            operation.lost(trouble.sent)
            self._drop(link)
            return ConnectionError(f"connection lost: {trouble}")
        if isinstance(trouble, NoReply):
            operation.lost(True)
            if link is not None:
                loose.append(link)
                # The caller's own limit says nothing about the connection; silence for the pool's timeout does. It is
                # left, not closed: an undoing must go behind what it undoes, and the last to leave lets it close.
                if 0 <= self._timeout_s <= link.pipe.silence_s and self.link is link:
                    self.link = None
            return TimeoutError(str(trouble))
        if isinstance(trouble, NotExecuted):
            if trouble.code == "READONLY":  # a demoted primary: look for the new one
                self._drop(link)
            return redis_error(str(trouble))
        # Without its traceback: redis-py's frames and its errors keep each other alive, and this frame with them.
        return trouble.with_traceback(None)

    # ---- undoing ----

    def tidy(self, operation: Operation, loose: list[Link]) -> None:
        """Undo an acquire that failed although the server may have, or may yet, execute it.

        On each connection the undoing goes behind the attempt, so that in whatever order the connections are read, the
        last word on each is the undoing.
        """
        if not isinstance(operation, Acquire) or not operation.unsettled:
            return
        for link in loose:
            with contextlib.suppress(Lost):
                link.pipe.post(undo_request(link.dialect, operation.key, operation.token))
        self.undo(operation.key, operation.token)

    def undo(self, key: bytes, token: bytes) -> None:
        """Delete the lock if it holds this token, in the background and until the server has said that it is done."""
        self._undone.append((key, token))
        del self._undone[:-_MAX_UNDONE]
        if self._undoer is None or not self._undoer.is_alive():
            # Two at once, after a race, do no harm. The thread keeps no channel alive.
            self._undoer = threading.Thread(
                target=_undo_in_background, args=(weakref.ref(self),), name="redislock_fast-undo", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
                self._undoer.start()

    def undo_one(self) -> bool:
        """Undo the oldest attempt that waits for it. Returns False when the server could not be asked."""
        with self._undoing:
            if not self._undone:
                return True
            key, token = self._undone[0]
            try:
                self.run(Release(key, token, None), _UNDO_ONE_S, [])
            except (Refused, Redirected):
                pass  # no retry mends that: the lock's own ttl must do
            except (RedisError, OSError):
                return False
            if self._undone:
                del self._undone[0]
            return True

    def _spare(self, operation: Acquire) -> None:
        """A caller's own token may come back: what waits to be undone under it must not hit the new attempt.

        Only who comes back with such a token waits for an undoing that is under way.
        """
        mine = (operation.key, operation.token)
        if mine in self._undone:
            with self._undoing:
                self._undone[:] = [entry for entry in self._undone if entry != mine]

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be undone, or nothing can be, because the pool is gone."""
        return not self._undone or self._pool() is None

    def forget(self) -> None:
        """In a forked child: leave the parent's connection and unfinished business to the parent."""
        link, self.link = self.link, None
        self._connecting = threading.Lock()
        self._undoing = threading.Lock()
        self._undone.clear()
        self._inside.clear()
        if link is not None:
            link.forget()

    def _bounded_s(self, left_s: float) -> float:
        """How long to wait for a reply when the caller's time ends in so many seconds."""
        bounded_s = max(left_s, 0.0) + _GRACE_S
        return bounded_s if self._timeout_s < 0 else min(self._timeout_s, bounded_s)

    def _drop(self, link: Link | None) -> None:
        if link is not None:
            if self.link is link:
                self.link = None
            link.close()

    def _live_pool(self) -> redis.ConnectionPool:
        pool = self._pool()
        if pool is None:
            raise ConnectionError("the client's connection pool is gone")
        return pool

    def _connect(self, deadline: float | None) -> Link:
        limit_s = None if deadline is None else max(deadline - clock(), 0.0) + _GRACE_S
        if not self._connecting.acquire(timeout=-1 if limit_s is None else limit_s):
            raise TimeoutError("no connection in time")
        try:
            if self.link is None:
                link = open_link(self._live_pool(), limit_s)
                for key, token in list(self._undone):
                    link.pipe.post(undo_request(link.dialect, key, token))
                self.link = link
            return self.link
        finally:
            self._connecting.release()


def _undo_in_background(channel_ref: weakref.ref[Channel]) -> None:
    delay_s = _UNDO_FIRST_S
    while delay_s < _UNDO_LAST_S:
        channel = channel_ref()
        if channel is None or channel.idle:
            return
        if channel.undo_one():
            delay_s = _UNDO_FIRST_S
        else:
            del channel
            time.sleep(delay_s)
            delay_s *= 2


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
        loose: list[Link] = []
        channel = self._channel(operation.key)
        while True:
            try:
                channel.run(operation, None if deadline is None else max(deadline - clock(), 0.0), loose)
            except (Redirected, ConnectionError, TimeoutError) as error:
                moves += 1
                if moves < _MOVES and (deadline is None or clock() < deadline):
                    self._live_client().nodes_manager.initialize()
                    fresh = self._channel(operation.key)
                    if fresh is not channel or isinstance(error, Redirected):
                        channel = fresh
                        continue
                channel.tidy(operation, loose)
                if isinstance(error, Redirected):
                    raise redis_error(str(error)) from None
                raise
            except Refused as error:
                channel.tidy(operation, loose)
                raise redis_error(str(error)) from None
            except BaseException:
                channel.tidy(operation, loose)
                raise
            else:
                if operation.unsettled and not operation.result:
                    channel.tidy(operation, loose)
                return

    def undo(self, key: bytes, token: bytes) -> None:
        """Delete the lock if it holds this token, without waiting."""
        self._channel(key).undo(key, token)

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
        pool = client.get_redis_connection(node).connection_pool
        channel = _registry.get(id(pool)) or _register(pool, Channel)
        assert isinstance(channel, Channel)
        return channel


# One channel per pool, one per cluster client, by the owner's id: a tenth of the time of a WeakKeyDictionary, which
# every lock that is made would pay. An entry goes when its owner does. Read by dict.get, which is atomic; filled under
# the lock, which a finalizer may enter again.
_registry: dict[int, Channel | ClusterChannel] = {}
_registry_lock = threading.RLock()


def _new_registry_lock() -> None:
    global _registry_lock  # noqa: PLW0603  # another thread may have held it at the fork
    _registry_lock = threading.RLock()


_process.on_fork(_new_registry_lock)


def _register(owner: Any, make: type[Channel | ClusterChannel]) -> Any:
    with _registry_lock:
        channel = _registry.get(id(owner))
        if channel is None:
            channel = _registry[id(owner)] = make(owner)
            weakref.finalize(owner, _registry.pop, id(owner), None).atexit = False
    return channel


def transport_of(client: Any) -> Transport:
    """The one transport of a client in this process.

    Args:
        client: redis-py's `Redis` or `RedisCluster`, of any kind.

    Raises:
        TypeError: for a pipeline or an asyncio client: neither can hold a lock by blocking calls.
    """
    kind = _kinds.get(type(client)) or _kind_of(client)
    owner = client.connection_pool if kind is Channel else client
    return _registry.get(id(owner)) or _register(owner, kind)


_kinds: dict[type, type[Channel | ClusterChannel]] = {}


def _kind_of(client: Any) -> type[Channel | ClusterChannel]:
    kind = type(client)
    names = {f"{base.__module__}.{base.__name__}" for base in kind.__mro__}
    if names & {"redis.client.Pipeline", "redis.cluster.ClusterPipeline"}:
        raise TypeError("a pipeline cannot take a lock: its commands are executed later. Use the client itself")
    if any(name.startswith("redis.asyncio.") for name in names):
        raise TypeError("an asyncio client needs an asyncio lock: this Lock blocks")
    if "redis.cluster.RedisCluster" in names:
        _kinds[kind] = ClusterChannel
    elif hasattr(client, "connection_pool"):
        _kinds[kind] = Channel
    else:
        raise TypeError(f"a lock needs a redis.Redis or redis.RedisCluster, not {kind.__name__}")
    return _kinds[kind]
