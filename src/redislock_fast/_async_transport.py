"""The asyncio transport: one connection per server and event loop, shared by all tasks of the loop.

A `LoopChannel` does for a loop what `_transport.ThreadChannel` does for threads. An `AsyncTransport` gives each loop
its own; `AsyncClusterTransport` does the same for a cluster.

- Cancelling a caller detaches it: its request stays under way. A cancelled acquire is undone behind itself.
- Connecting is a task of its own that all callers wait for, each as long as it likes.
- A link ends with its loop: an asynchronous generator is suspended for each, which `asyncio.run`, and every other
  runner that shuts its generators down, closes at the end. So it ends with its pool, when the generator is collected.

Who may touch what: a channel, its link and its tasks belong to the loop's thread. `AsyncTransport._channels` is used by
atomic methods of dict alone, each entry by its own loop's thread, and closed loops' entries by anybody.

Must not know: the API of Lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterable
from copy import copy
from typing import Any, Protocol, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    RedisError,
    TimeoutError,  # noqa: A004
)

from redislock_fast import _process, _protocol
from redislock_fast._async_pipe import Pipe, new_pipe
from redislock_fast._channel import (
    FOREVER_S,
    GRACE_S,
    MOVES,
    UNDO_FIRST_S,
    UNDO_LAST_S,
    UNDO_LIMIT_S,
    Channel,
    Encoding,
    Registry,
    is_cluster,
)
from redislock_fast._connect import redis_error, settings_of
from redislock_fast._protocol import NotExecuted, Operation, Redirected, Refused
from redislock_fast._times import clock
from redislock_fast._wire import Lost, NoReply

__all__ = ["AsyncClusterTransport", "AsyncTransport", "Transport", "transport_of"]

_CLOSE_LIMIT_S = 1.0

_Result = TypeVar("_Result")


class Transport(Protocol):
    """What the facade needs of a transport."""

    def execute(self, operation: Operation, limit_s: float | None = None) -> Coroutine[Any, Any, None]:
        """Drive an operation to its end; see `LoopChannel.execute`."""

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""

    async def split(self, keys: list[bytes]) -> list[list[int]]:
        """The keys' indexes, those together that one server has."""

    def encode(self, value: object) -> bytes:
        """A token as bytes, as the client's own encoder has it."""

    def key_of(self, name: object) -> bytes:
        """A lock's name as its key, as the client's own commands have it."""

    def keys_of(self, names: Iterable[object]) -> list[bytes]:
        """Many names as keys."""


class AsyncLink:
    """A connected pipe with what its server understands. Never reused once broken.

    Attributes:
        pipe: drives the transport.
        dialect: what the server understands.
    """

    __slots__ = ("_end", "dialect", "pipe")

    def __init__(self, pipe: Pipe, dialect: _protocol.Dialect, end: AsyncGenerator[None]) -> None:
        self.pipe = pipe
        self.dialect = dialect
        self._end = end

    def close(self) -> None:
        """Break the pipe; whoever still waits is told."""
        self.pipe.close()


async def _close_at_the_end(pipe: Pipe) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        pipe.close()
        await pipe.wait_closed(_CLOSE_LIMIT_S)


async def _cancel_at_the_end(tasks: set[asyncio.Task[Any]]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_LIMIT_S)


def _attend(end: AsyncGenerator[None]) -> AsyncGenerator[None]:
    """Suspend the generator, to be closed when the running loop ends or nobody keeps it any more."""
    with contextlib.suppress(StopIteration):
        end.__anext__().__await__().send(None)  # it yields without awaiting anything
    return end


async def _open_link(pool: Any) -> AsyncLink:
    """Connect to a pool's server, by redis-py and within the pool's own limits, and take its transport over."""
    settings = settings_of(pool)
    settings["retry"] = Retry(NoBackoff(), 0)
    connection = pool.connection_class(**settings)
    try:
        await connection.connect()
    except BaseException:  # redis-py itself cleans up after errors, not after a cancel
        await connection.disconnect(nowait=True)
        raise
    # redis-py has no public names for them. Without them, it leaves the transport alone.
    reader, writer = connection._reader, connection._writer  # noqa: SLF001
    connection._reader = connection._writer = None  # noqa: SLF001
    if reader.at_eof():
        writer.close()
        raise ConnectionError("the server closed the connection")
    pipe: Pipe = new_pipe(writer.transport, writer, bytes(reader._buffer))  # noqa: SLF001
    end = _attend(_close_at_the_end(pipe))
    timeout_s = settings.get("socket_timeout")
    try:
        reply = await pipe.call(_protocol.PROBE, -1.0 if timeout_s is None else timeout_s)
    except BaseException:
        pipe.close()
        raise
    try:
        return AsyncLink(pipe, _protocol.Dialect(reply), end)
    finally:
        del connection, reader, writer, pipe, end  # see LoopChannel._open


class LoopChannel(Channel[AsyncLink]):
    """All that one event loop sends to one server.

    Args:
        pool: the connection pool whose server it is.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._loop = asyncio.get_running_loop()
        self._opening: asyncio.Task[None] | None = None
        self._undoer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._end = _attend(_cancel_at_the_end(self._tasks))

    async def execute(  # noqa: PLR0912, PLR0915  # one coroutine, where ThreadChannel has two methods: 0.3 us each
        self, operation: Operation, limit_s: float | None = None, loose: list[AsyncLink] | None = None
    ) -> None:
        """Drive an operation until it is finished.

        Args:
            operation: a fresh state machine.
            limit_s: as for `ThreadChannel.execute`.
            loose: given by who undoes and translates errors himself; every link on which a request left without an
                answer is added to it.

        Raises:
            redis.exceptions.ConnectionError: no connection, after all retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: or the class that redis-py has for the server's error.
            asyncio.CancelledError: the caller was cancelled. An acquire is undone.
        """
        tidies = loose is None
        if self._undone:
            self._spare(operation)
        now = clock()
        deadline = None if limit_s is None or limit_s > FOREVER_S else now + limit_s
        failures = 0
        try:
            while True:
                link = self.link
                try:
                    if link is None:
                        link = await self._connect(deadline)
                        now = clock()
                    timeout_s = self._timeout_s if deadline is None else self._bounded_s(deadline - now)
                    dialect = link.dialect
                    call: Any = link.pipe.call_many if operation.many else link.pipe.call
                    while not operation.feed(await call(operation.request(dialect, now), timeout_s), dialect):
                        now = clock()
                    break
                except (AuthenticationError, AuthorizationError, Refused, Redirected):
                    raise
                except (Lost, NoReply, NotExecuted, ConnectionError, TimeoutError) as trouble:
                    if loose is None:
                        loose = []
                    error = self._trouble(link, operation, trouble, loose)
                    failures += 1
                    now = clock()
                    pause_s = self._pause_s(trouble, failures, now, deadline)
                except BaseException:  # cancelled: the request may be under way
                    if loose is None:
                        loose = []
                    if link is not None:
                        operation.lost(True)
                        loose.append(link)
                    raise
                if pause_s is None:
                    try:
                        raise error
                    finally:
                        del error  # or this frame and the error would keep each other, and the connection, alive
                del error
                await asyncio.sleep(pause_s)
                now = clock()
        except GeneratorExit:  # the task was dropped, and whoever collects garbage runs this, in any thread
            if tidies and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.tidy, operation, loose or [], True)
            raise
        except BaseException as error:
            if tidies:
                self.tidy(operation, loose or [], failed=True)
                if isinstance(error, Redirected | Refused):
                    raise redis_error(str(error)) from None
            # Errors keep this frame, often in a cycle: it must not keep a connection that was left to be closed.
            link = loose = call = None
            raise
        if tidies and operation.unsettled:
            self.tidy(operation, loose or [], failed=False)

    async def _connect(self, deadline: float | None) -> AsyncLink:
        """Wait for the one task that connects. It goes on without who stops waiting."""
        opening = self._opening
        if opening is None or opening.done():
            opening = self._opening = self._start(self._open())
            opening.add_done_callback(self._opened)
        limit_s = None if deadline is None else max(deadline - clock(), 0.0) + GRACE_S
        await asyncio.wait([opening], timeout=limit_s)
        if not opening.done():
            raise TimeoutError("no connection in time")
        if opening.cancelled():  # the loop ends
            raise ConnectionError("connecting was cancelled")
        error = opening.exception()
        if error is not None:
            # Each who waits gets an error of his own: a shared one would keep the frames of all alive, and their links.
            raise copy(error).with_traceback(None)
        if self.link is None:
            raise ConnectionError("the connection was lost at once")
        return self.link

    async def _open(self) -> None:
        # redis-py's errors and timeouts keep the task and its frames alive in cycles: no link may stand in either.
        self.link = await _open_link(self._live_pool())
        self._post_undone(self.link)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        if self._opening is opening:
            self._opening = None
        if not opening.cancelled():
            opening.exception()  # counts as noticed, even where nobody waits any more

    def _start_undoing(self) -> None:
        if self._undoer is None or self._undoer.done():
            # The task keeps no channel alive.
            self._undoer = self._start(_undo_in_background(weakref.ref(self)))

    def _start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop_undoing(self, taken: set[tuple[bytes, bytes]]) -> None:
        if self._undoer is not None:  # which would try again what it has begun
            self._undoer.cancel()
            self._undoer = None
        self._undone[:] = [entry for entry in self._undone if entry not in taken]
        if self._undone:
            self._start_undoing()

    async def undo_some(self) -> bool:
        """Undo the oldest attempts that wait for it. Returns False when the server could not be asked."""
        if not self._undone:
            return True
        undoing = self._next_undoing()
        entries = self._undone[: len(undoing)]
        try:
            await self.execute(undoing, UNDO_LIMIT_S, [])
        except (Refused, Redirected):
            pass  # no retry mends that: the lock's own ttl must do
        except (RedisError, OSError):
            return False
        gone = set(entries)
        self._undone[:] = [entry for entry in self._undone if entry not in gone]
        return True

    def abandon(self) -> None:
        """In a forked child: close our copy of the socket, and nothing else of the parent's."""
        if self.link is not None:
            self.link.pipe.abandon()


async def _undo_in_background(channel_ref: weakref.ref[LoopChannel]) -> None:
    delay_s = UNDO_FIRST_S
    while delay_s < UNDO_LAST_S:
        channel = channel_ref()
        if channel is None or channel.idle:
            return
        if await channel.undo_some():
            delay_s = UNDO_FIRST_S
        else:
            del channel
            await asyncio.sleep(delay_s)
            delay_s *= 2


class AsyncTransport(Encoding):
    """All that this process sends to one server from event loops: a channel for each loop.

    Args:
        pool: the connection pool whose server it is. Only a weak reference is kept.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._pool = weakref.ref(pool)
        self._channels: dict[asyncio.AbstractEventLoop, LoopChannel] = {}
        _process.forget_in_child(self)

    def channel(self) -> LoopChannel:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            for other in list(self._channels):
                if other.is_closed():
                    self._channels.pop(other, None)
            pool = self._pool()
            if pool is None:
                raise ConnectionError("the client's connection pool is gone")
            channel = self._channels[loop] = LoopChannel(pool)
        return channel

    def execute(self, operation: Operation, limit_s: float | None = None) -> Coroutine[Any, Any, None]:
        """Drive an operation until it is finished; see `LoopChannel.execute`."""
        return self.channel().execute(operation, limit_s)

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""
        self.channel().undo(entries)

    async def split(self, keys: list[bytes]) -> list[list[int]]:
        """The keys' indexes, those together that one server has: here, all."""
        return [list(range(len(keys)))]

    def forget(self) -> None:
        """In a forked child: leave the parent's loops, connections and unfinished business to the parent."""
        for channel in self._channels.values():
            channel.abandon()
        # Never collected: that would have the parent's loops, whose selectors the child shares, close what they hold.
        _parents.append(self._channels)
        self._channels = {}


_parents: list[object] = []


class _Node:
    """A node of a cluster, as far as a channel looks at a pool."""

    def __init__(self, client: Any, node: Any) -> None:
        self.connection_class = node.connection_class
        self.connection_kwargs = node.connection_kwargs
        self.get_encoder = client.get_encoder


class AsyncClusterTransport(Encoding):
    """All that this process sends to one cluster from event loops.

    Args:
        client: redis-py's asyncio cluster client, which keeps the topology.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._client = weakref.ref(client)
        self._nodes: dict[str, tuple[_Node, AsyncTransport]] = {}  # by address

    async def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished, at whichever node has its slot; see `LoopChannel.execute`."""
        deadline = None if limit_s is None else clock() + limit_s
        moves = 0
        loose: list[AsyncLink] = []
        client = self._live_client()
        await client.initialize()
        channel = self._channel(client, operation.key)
        try:
            while True:
                try:
                    limit_s = None if deadline is None else max(deadline - clock(), 0.0)
                    await channel.execute(operation, limit_s, loose)
                    break
                except (Redirected, ConnectionError, TimeoutError) as error:
                    moves += 1
                    if moves >= MOVES or (deadline is not None and clock() >= deadline):
                        raise
                    await client.nodes_manager.initialize()
                    fresh = self._channel(client, operation.key)
                    if fresh is channel and not isinstance(error, Redirected):
                        raise
                    channel = fresh
        except BaseException as error:
            channel.tidy(operation, loose, failed=True)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        if operation.unsettled:
            channel.tidy(operation, loose, failed=False)

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""
        client = self._live_client()
        for key, token in entries:
            self._channel(client, key).undo([(key, token)])

    async def split(self, keys: list[bytes]) -> list[list[int]]:
        """The keys' indexes, those together that one node has."""
        client = self._live_client()
        await client.initialize()
        parts: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            parts.setdefault(id(self._channel(client, key)), []).append(index)
        return list(parts.values())

    def _live_client(self) -> Any:
        client = self._client()
        if client is None:
            raise ConnectionError("the client is gone")
        return client

    def _channel(self, client: Any, key: bytes) -> LoopChannel:
        node = client.get_node_from_key(key)
        if node is None:
            raise ConnectionError("the cluster has no node for this lock's slot")
        if node.name not in self._nodes:
            stand_in = _Node(client, node)
            self._nodes[node.name] = (stand_in, AsyncTransport(stand_in))
        return self._nodes[node.name][1].channel()


_transports: Registry[AsyncTransport | AsyncClusterTransport] = Registry()
_kinds: dict[type, type[AsyncTransport | AsyncClusterTransport]] = {}


def transport_of(client: Any) -> Transport:
    """The one transport of an asyncio client in this process.

    Args:
        client: redis-py's asyncio `Redis` or `RedisCluster`.

    Raises:
        TypeError: for a pipeline or a client that blocks.
    """
    kind = _kinds.get(type(client))
    if kind is None:
        kind = AsyncClusterTransport if is_cluster(client, for_asyncio=True) else AsyncTransport
        _kinds[type(client)] = kind
    owner = client.connection_pool if kind is AsyncTransport else client
    return _transports.get(id(owner)) or _transports.add(owner, kind)
