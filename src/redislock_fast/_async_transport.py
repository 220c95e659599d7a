"""The asyncio transport: a channel of its own for each event loop and server.

An `AsyncTransport` serves one server, an `AsyncClusterTransport` each node of a cluster.

Who may touch what: `AsyncTransport._channels` is used by atomic methods of dict alone, each entry by its own loop's
thread, and closed loops' entries by anybody.

Must not know: the API of Lock.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from redis.exceptions import (
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    TimeoutError,  # noqa: A004
)

from redislock_fast import _process
from redislock_fast._channel import MOVES, Encoding, Registry, is_cluster
from redislock_fast._connect import redis_error
from redislock_fast._loop_channel import AsyncLink, LoopChannel
from redislock_fast._protocol import Operation, Redirected, Refused
from redislock_fast._room import Seat
from redislock_fast._steps import Enter, Execute, ExecuteBeside, Listen, Post, Sleep, Split, Steps
from redislock_fast._times import clock

__all__ = ["AsyncClusterTransport", "AsyncTransport", "Transport", "drive", "transport_of"]


class Transport(Protocol):
    """What the facade needs of a transport."""

    def execute(self, operation: Operation, limit_s: float | None = None) -> Coroutine[Any, Any, None]:
        """Drive an operation to its end; see `LoopChannel.execute`."""

    def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> Coroutine[Any, Any, None]:
        """Drive an operation on a connection of its own; see `ThreadChannel.execute_beside`."""

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""

    async def split(self, keys: list[bytes]) -> list[list[int]]:
        """The keys' indexes, those together that one server has."""

    def is_awaited(self, key: bytes) -> bool:
        """Whether some task of the loop is known to wait for this lock."""

    def seat(self, key: bytes, token: bytes) -> Seat | None:
        """A seat for a waiter, where it can be had at once; else see `enter`."""

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """A seat for a waiter; see `LoopChannel.enter`."""

    def encode(self, value: object) -> bytes:
        """A token as bytes, as the client's own encoder has it."""

    def key_of(self, name: object) -> bytes:
        """A lock's name as its key, as the client's own commands have it."""

    def keys_of(self, names: Iterable[object]) -> list[bytes]:
        """Many names as keys."""


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

    def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> Coroutine[Any, Any, None]:
        """Drive an operation on a connection of its own; see `ThreadChannel.execute_beside`."""
        return self.channel().execute_beside(operation, limit_s, slow_s)

    def is_awaited(self, key: bytes) -> bool:
        """Whether some task of the loop is known to wait for this lock."""
        return self.channel().is_awaited(key)

    def seat(self, key: bytes, token: bytes) -> Seat | None:
        """A seat for a waiter, where it can be had at once; see `LoopChannel.seat`."""
        return self.channel().seat(key, token)

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """A seat for a waiter; see `LoopChannel.enter`."""
        return await self.channel().enter(key, token, limit_s)

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

    async def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a connection of its own; see `LoopChannel.execute_beside`."""
        await self._channel(self._live_client(), operation.key).execute_beside(operation, limit_s, slow_s)

    def is_awaited(self, key: bytes) -> bool:
        """Whether some task of the loop is known to wait for this lock. Not known before the topology is."""
        if not self._nodes:
            return False
        node = self._live_client().get_node_from_key(key)
        return node is not None and node.name in self._nodes and self._nodes[node.name][1].is_awaited(key)

    def seat(self, key: bytes, token: bytes) -> Seat | None:  # noqa: ARG002  # the topology may have to be read first
        """Never at once."""
        return None

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """A seat for a waiter, at whichever node has the lock's slot; see `LoopChannel.enter`."""
        client = self._live_client()
        await client.initialize()
        for _ in range(MOVES):
            channel = self._channel(client, key)
            try:
                seat = await channel.enter(key, token, limit_s)
            except (Redirected, ConnectionError, TimeoutError):
                await client.nodes_manager.initialize()
            else:
                if seat is not None:
                    seat.home = self
                return seat
        return None

    def is_current(self, seat: Seat) -> bool:
        """Whether requests for the seat's lock still leave on its connection."""
        return self._channel(self._live_client(), seat.key).is_current(seat)

    def listen(self, seat: Seat, timeout_s: float) -> Coroutine[Any, Any, object]:
        """The next message for a seat; see `LoopChannel.listen`."""
        return self._channel(self._live_client(), seat.key).listen(seat, timeout_s)

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


async def drive(transport: Transport, steps: Steps) -> Any:
    """Do what the steps say. Returns what they return."""
    try:
        step = next(steps)
        while True:
            answer: Any = None
            try:
                if type(step) is Post:
                    answer = step.seat.post(step.operation)
                elif type(step) is Listen:
                    home: Any = step.seat.home
                    answer = await home.listen(step.seat, step.timeout_s)
                elif type(step) is Execute:
                    await transport.execute(step.operation, step.limit_s)
                elif type(step) is Enter:
                    answer = transport.seat(step.key, step.token)
                    if answer is None:
                        answer = await transport.enter(step.key, step.token, step.limit_s)
                elif type(step) is ExecuteBeside:
                    await transport.execute_beside(step.operation, step.limit_s, step.slow_s)
                elif type(step) is Sleep:
                    await asyncio.sleep(step.seconds)
                elif type(step) is Split:
                    answer = await transport.split(step.keys)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value
