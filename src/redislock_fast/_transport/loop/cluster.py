"""All that one event loop sends to one cluster: a channel to each of its nodes, found by the lock's slot.

A `LoopClusterChannel` does for a loop what `_transport.threads.cluster.ClusterChannel` does for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    RedisClusterException,
    RedisError,
)

from redislock_fast._pipe.base import Args, OnReply
from redislock_fast._procedures.waiters import Seat
from redislock_fast._protocol.commands import Look, Operation, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Many
from redislock_fast._transport.loop.connect import AsyncLink
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.loop.server import LoopChannel
from redislock_fast._transport.routing import (
    ASKING,
    TROUBLES,
    ClusterRules,
    NodeRules,
    Route,
    error_of,
    indexes_by_node,
    next_node,
    slot_node,
)
from redislock_fast._util.redis_py import redis_error

__all__ = ["LoopClusterChannel"]

_Result = TypeVar("_Result")


class _Pool:
    """A node as a channel looks at a connection pool: redis-py's asyncio client has none for it.

    It keeps no client alive, as the settings of a node do.
    """

    def __init__(self, client: Any, name: str) -> None:
        self._client = weakref.ref(client)
        self._name = name

    @property
    def _node(self) -> Any:
        client = self._client()
        node = None if client is None else client.get_node(node_name=self._name)
        if node is None:
            raise ConnectionError(f"the cluster has no node {self._name} any more")
        return node

    @property
    def connection_class(self) -> Any:
        return self._node.connection_class

    @property
    def connection_kwargs(self) -> Any:
        return self._node.connection_kwargs

    def get_encoder(self) -> Any:
        client = self._client()
        assert client is not None  # who makes a channel has it
        return client.get_encoder()


class _Node(NodeRules[AsyncLink], LoopChannel):
    """All that the loop sends to one node."""

    def __init__(self, pool: _Pool, end: LoopEnd) -> None:
        super().__init__(pool, end)
        self._pool = pool  # lives as long as the channel does


class LoopClusterChannel(ClusterRules[AsyncLink], LoopChannel):
    """All that one event loop sends to one cluster.

    Args:
        owner: redis-py's asyncio cluster client, which keeps the topology.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._nodes: dict[str, _Node] = {}  # by address

    async def execute(
        self,
        operation: Operation,
        limit_s: float | None = None,
        loose: list[AsyncLink] | None = None,
    ) -> None:
        """Drive an operation until it is finished, at whichever node has its slot; see `LoopChannel.execute`."""
        tidies = loose is None
        if tidies and isinstance(operation, AcquireOwn):
            self.claims.begin(operation)
        left: list[AsyncLink] = [] if loose is None else loose
        try:
            route = Route(operation, limit_s, self._retry)
            if self._undone:
                await self._undo_before(operation, route.left_s())
            await self._follow(route, lambda node: node.execute(_operation_of(route), route.left_s(), left))
        except GeneratorExit:  # as in LoopChannel
            if tidies and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.tidy, operation, left, True)
            raise
        except BaseException as error:
            if tidies:
                self.tidy(operation, left, failed=True)
                if isinstance(error, Refused):
                    raise redis_error(str(error)) from None
            raise
        if tidies and (operation.unsettled or operation.claim is not None):
            self.tidy(operation, left, failed=False)

    async def execute_all(self, operations: Sequence[Many], limit_s: float | None = None) -> None:
        """Drive operations, each on locks of another node, to their ends, in a task for each.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises: the first error, after the last end.
            asyncio.CancelledError: the caller was cancelled, and so was each operation: all have ended.
        """
        ends = asyncio.gather(*(self.execute(one, limit_s) for one in operations), return_exceptions=True)
        try:
            errors = [end for end in await ends if end is not None]
        except GeneratorExit:  # as in LoopChannel
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(ends.cancel)
            raise
        if errors:
            try:
                raise errors[0]
            finally:
                del ends, errors  # or this frame and the errors would keep each other alive

    async def run_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a connection of its own; see `LoopChannel.run_beside`."""
        route = Route(operation, limit_s, self._retry)
        await self._follow(route, lambda node: node.run_beside(_operation_of(route), route.left_s(), slow_s))

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """A seat for a waiter, at whichever node has the lock's slot; see `LoopChannel.enter`."""
        route = Route(Look(key), limit_s, self._retry)
        seat = await self._follow(route, lambda node: node.enter(key, token, route.left_s()))
        if seat is not None:
            seat.home = self
        return seat

    def seat(self, key: bytes, token: bytes) -> Seat | None:
        """A seat for a waiter, where it can be had at once; see `LoopChannel.seat`."""
        node = self._node_of(key)
        seat = None if node is None else node.seat(key, token)
        if seat is not None:
            seat.home = self
        return seat

    def is_current(self, seat: Seat) -> bool:
        """Whether requests for the seat's lock still leave on its connection."""
        node = self._node_of(seat.key)
        return node is not None and node.is_current(seat)

    def post(self, link: AsyncLink, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply nobody waits, to where ASK may have led. Nothing comes between two posts."""
        super().post(link, ASKING)
        super().post(link, args, on_reply)

    async def split(self, keys: list[bytes]) -> Sequence[Sequence[int]]:
        """The keys' indexes, those together that one node has."""
        return indexes_by_node(await self._informed_owner(), keys)

    def abandon(self) -> None:
        """In a forked child: close our copies of the sockets, and nothing else of the parent's."""
        for node in self._nodes.values():
            node.abandon()

    async def _follow(self, route: Route, visit: Callable[[LoopChannel], Awaitable[_Result]]) -> _Result:
        """Go where the route leads until a visit succeeds."""
        while True:
            try:
                return await visit(await self._next_node(route))
            except (AuthenticationError, AuthorizationError):
                raise
            except TROUBLES as trouble:
                pause_s = route.pause_s(trouble)
                if pause_s is None:
                    raise error_of(trouble) from None
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _next_node(self, route: Route) -> LoopChannel:
        client = await self._informed_owner()
        node = None if route.is_stale else next_node(client, route, is_fresh=False)
        if node is None:
            with contextlib.suppress(RedisError, RedisClusterException, OSError):  # what is known must do
                await _read_topology(client)
            node = next_node(client, route, is_fresh=True)
        return self._channel_to(client, node)

    async def _informed_owner(self) -> Any:
        """The client, which has read the topology once: what its user has closed since is not opened again."""
        client = self._live_owner()
        if not client.nodes_manager.nodes_cache:
            await client.initialize()
        return client

    def _node_of(self, key: bytes) -> LoopChannel | None:
        client = self._live_owner()
        node = slot_node(client, key)
        return None if node is None else self._channel_to(client, node)

    def _channel_to(self, client: Any, node: Any) -> LoopChannel:
        channel = self._nodes.get(node.name)
        if channel is None:
            channel = self._nodes[node.name] = _Node(_Pool(client, node.name), self._end)
        return channel


async def _read_topology(client: Any) -> None:
    """Read it anew. A client that its user has closed is left with no connection, for nobody closes it again."""
    nodes_manager = client.nodes_manager
    try:
        await nodes_manager.initialize()
    finally:
        if client._initialize:  # noqa: SLF001  # redis-py's word for it: closed, or never opened
            for node in nodes_manager.startup_nodes.values():
                for connection in list(node._free):  # noqa: SLF001  # those that nobody uses, as redis-py has it
                    await connection.disconnect(nowait=True)


def _operation_of(route: Route) -> Operation:
    """What a node's channel executes: undoing nothing, it asks no more of that than an exchange has."""
    return cast("Operation", route.exchange)
