"""The transport of a cluster for one event loop: one server transport for each node, found by the lock's slot.

A `LoopClusterTransport` does for a loop what `_transport.threads.cluster.ThreadClusterTransport` does for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from redis.exceptions import ConnectionError, RedisClusterException, RedisError

from redislock_fast._pipe.base import Args, OnReply, Reply
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.operation import FirstRequest, Operation, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._queue.waiters import Waiter
from redislock_fast._transport.loop.connect import AsyncConnection
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.loop.server import LoopServerTransport
from redislock_fast._transport.pool_events import notice_closing
from redislock_fast._transport.routing import (
    ASKING,
    TROUBLES,
    NodeAttempts,
    Route,
    at_one_node,
    error_of,
    indexes_by_node,
    next_node,
    settings_of_cluster,
    slot_node,
)
from redislock_fast._util.redis_py import BAD_CREDENTIALS, redis_error

_Result = TypeVar("_Result")


class _Pool:
    """A node in the form of a connection pool: redis-py's asyncio client has no pool for a node.

    It refers to the client weakly; the settings of a node refer to it strongly.
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
        assert client is not None  # the caller has it, as it makes a server transport
        return client.get_encoder()


class _Node(LoopServerTransport):
    """All that the loop sends to one node.

    Args:
        pool: the node.
        end: the end of the loop.
        cluster: whose node it is; None for a dedicated connection to it.
    """

    _kind_of_attempts = NodeAttempts
    is_routed = True

    def __init__(self, pool: _Pool, end: LoopEnd, cluster: LoopClusterTransport | None = None) -> None:
        super().__init__(pool, end)
        self._pool = pool  # lives as long as this object does
        if cluster is not None:
            self._cluster = weakref.ref(cluster)


class LoopClusterTransport(LoopServerTransport):
    """All that one event loop sends to one cluster.

    Args:
        owner: redis-py's asyncio cluster client, which holds the topology.
    """

    connects = False

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._nodes: dict[str, _Node] = {}  # by address
        notice_closing(owner, self, "aclose")

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:
        return settings_of_cluster(owner)

    def begin(self, call: FirstRequest) -> Awaitable[Reply] | None:
        """Send the first request of an acquire or a release to the node that has the lock's slot, if one is known."""
        node = self._node_of(call.key)
        return None if node is None else node.begin(call)

    def server_of(self, key: bytes) -> LoopServerTransport:
        return self._node_of(key) or self

    def at_one_server(self, keys: list[bytes]) -> Sequence[int]:
        return at_one_node(self.owner(), keys)

    def note_closing(self) -> None:
        for node in list(self._nodes.values()):
            node.note_closing()

    async def execute(
        self, operation: Operation, limit_s: float | None = None, unanswered: list[AsyncConnection] | None = None
    ) -> None:
        """Drive an operation until it is finished, at the node that has its slot; see `LoopServerTransport.execute`."""
        tidies = unanswered is None
        if tidies and isinstance(operation, AcquireOwn):
            self.cleanup.claims.begin(operation)
        left: list[AsyncConnection] = [] if unanswered is None else unanswered
        try:
            route = Route(operation, limit_s, self._retry)
            if self.cleanup.pending:
                await self.cleanup.before(operation, route)
            await self._follow(route, lambda node: node.execute(_operation_of(route), route.left_s(), left))
        except BaseException as error:
            if tidies:
                self.cleanup.tidy_failed(operation, left, error)
                if isinstance(error, Refused):
                    raise redis_error(str(error)) from None
            raise
        if tidies and (operation.unsettled or operation.claim is not None):
            self.cleanup.tidy(operation, left, failed=False)

    async def execute_all(self, operations: Sequence[Pipeline], limit_s: float | None = None) -> None:
        """Drive operations, each on the locks of one node, until all are finished, in a task for each.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises: the first error, once all have ended.
            asyncio.CancelledError: the caller was cancelled, and so was each operation; all have ended.
        """
        ends = asyncio.gather(*(self.execute(one, limit_s) for one in operations), return_exceptions=True)
        try:
            errors = [end for end in await ends if end is not None]
        except GeneratorExit:  # the task was dropped: see `LoopCleanup.tidy_failed`
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(ends.cancel)
            raise
        if errors:
            try:
                raise errors[0]
            finally:
                del ends, errors  # or this frame and the errors would keep each other alive

    async def run_dedicated(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a dedicated connection; see `LoopServerTransport.run_dedicated`."""
        route = Route(operation, limit_s, self._retry)
        await self._follow(route, lambda node: node.run_dedicated(_operation_of(route), route.left_s(), slow_s))

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Waiter | None:
        """A waiter, at the node that has the lock's slot; see `LoopServerTransport.enter`."""
        waiter = self.waiter(key, token)
        if waiter is not None:  # as in most cases
            return waiter
        route = Route(ReadHolder(key), limit_s, self._retry)
        return await self._follow(route, lambda node: node.enter(key, token, route.left_s()))

    def waiter(self, key: bytes, token: bytes) -> Waiter | None:
        """A waiter, where none of its steps needs a request; see `LoopServerTransport.waiter`."""
        node = self._node_of(key)
        return None if node is None else node.waiter(key, token)

    def post(self, connection: AsyncConnection, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply the caller does not wait, to the node that ASK may have named."""
        super().post(connection, ASKING)  # no other request of the loop comes between the two
        super().post(connection, args, on_reply)

    async def split(self, keys: list[bytes], limit_s: float | None = None) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by node. Waits at most `limit_s` seconds for the topology; None: without limit."""
        return indexes_by_node(await self._informed_owner(limit_s), keys)

    def abandon(self) -> None:
        """In a forked child: close our copies of the sockets, and nothing else of the parent's."""
        for node in self._nodes.values():
            node.abandon()

    async def _follow(self, route: Route, visit: Callable[[LoopServerTransport], Awaitable[_Result]]) -> _Result:
        """Visit one node after the other, as the route says, until a visit succeeds."""
        while True:
            try:
                return await visit(await self._next_node(route))
            except BAD_CREDENTIALS:
                raise
            except TROUBLES as trouble:
                route.note_failure(trouble, error_of(trouble))
            pause_s = route.next_pause_s()
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _next_node(self, route: Route) -> LoopServerTransport:
        client = await self._informed_owner(route.bounded_s())
        node = None if route.is_stale else next_node(client, route, is_fresh=False)
        if node is None:
            with contextlib.suppress(RedisError, RedisClusterException, OSError):  # then the known topology is used
                await self._opened_within(route.bounded_s())
            node = next_node(client, route, is_fresh=True)
        return self._server_to(client, node)

    async def _informed_owner(self, limit_s: float | None) -> Any:
        """The client, once it has read the topology. A client that its user has closed since is not opened again."""
        client = self._live_owner()
        if not client.nodes_manager.nodes_cache:
            await self._opened_within(limit_s)
        return client

    async def _open(self) -> None:
        """Have the client read the topology."""
        client = self._live_owner()
        if client.nodes_manager.nodes_cache:
            await _read_topology(client)
        else:
            await client.initialize()

    def _node_of(self, key: bytes) -> LoopServerTransport | None:
        client = self._live_owner()
        node = slot_node(client, key)
        return None if node is None else self._server_to(client, node)

    def _server_to(self, client: Any, node: Any) -> LoopServerTransport:
        server = self._nodes.get(node.name)
        if server is None:
            server = self._nodes[node.name] = _Node(_Pool(client, node.name), self.end, self)
        return server


async def _read_topology(client: Any) -> None:
    """Read the topology again. A client that its user has closed keeps no connection: it is not closed again."""
    nodes_manager = client.nodes_manager
    try:
        await nodes_manager.initialize()
    finally:
        if client._initialize:  # noqa: SLF001  # then it is closed, or was never opened
            for node in nodes_manager.startup_nodes.values():
                for connection in list(node._free):  # noqa: SLF001  # the connections that are not in use
                    await connection.disconnect(nowait=True)


def _operation_of(route: Route) -> Operation:
    """The operation for a node's transport: with `unanswered` given, that needs only the methods of an `Exchange`."""
    return cast("Operation", route.exchange)
