"""The synchronous channel to a cluster: a channel to each of its nodes, found by the lock's slot.

A `ClusterChannel` sends nothing by itself. What must be undone waits in it, not in a node's channel, so the undoing
goes to whichever node has the slot by then.

Who may touch what: as in `_thread_channel.py`; `_inside` is one for a cluster and its nodes.

Must not know: the API of Lock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    RedisClusterException,
    RedisError,
)

from redislock_fast._channel import Registry
from redislock_fast._connect import Link
from redislock_fast._protocol import Exchange, Look
from redislock_fast._room import Seat
from redislock_fast._routing import ASKING, TROUBLES, NodeRules, Route, error_of, indexes_by_node, next_node, slot_node
from redislock_fast._thread_channel import ThreadChannel
from redislock_fast._wire import Args, NoReply, OnReply

__all__ = ["ClusterChannel"]

_Result = TypeVar("_Result")


class _Node(NodeRules[Link], ThreadChannel):
    """All that this process sends to one node.

    Args:
        owner: redis-py's connection pool for the node.
        inside: the threads that are inside of any channel of the cluster.
    """

    def __init__(self, owner: Any, inside: set[int] | None = None) -> None:
        super().__init__(owner)
        if inside is not None:
            self._inside = inside


_nodes: Registry[_Node] = Registry()  # by redis-py's connection pool


class ClusterChannel(ThreadChannel):
    """All that this process sends to one cluster.

    Args:
        owner: redis-py's cluster client, which keeps the topology.
    """

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:
        return {"retry": owner.retry}

    def run(self, operation: Exchange, limit_s: float | None, loose: list[Link]) -> None:
        """Drive an operation at whichever node has its slot; see `ThreadChannel.run`."""
        if self._undone:
            self._undo_before(operation, limit_s)
        route = Route(operation, limit_s, self._retry)
        self._follow(route, lambda node: node.run(route.exchange, route.left_s(), loose))

    def run_beside(self, operation: Exchange, limit_s: float | None, loose: list[Link], slow_s: float = 0.0) -> None:
        """The same on a connection of its own; see `ThreadChannel.run_beside`."""
        route = Route(operation, limit_s, self._retry)
        self._follow(route, lambda node: node.run_beside(route.exchange, route.left_s(), loose, slow_s))

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """Listen for messages about a lock, at whichever node has its slot; see `ThreadChannel.enter`."""
        route = Route(Look(key), limit_s, self._retry)
        seat = self._follow(route, lambda node: node.enter(key, token, route.left_s()))
        if seat is not None:
            seat.home = self
        return seat

    def is_awaited(self, key: bytes) -> bool:
        """Whether somebody in this process is known to wait for this lock."""
        node = self._node_of(key)
        return node is not None and node.is_awaited(key)

    def is_current(self, seat: Seat) -> bool:
        """Whether requests for the seat's lock still leave on its connection."""
        node = self._node_of(seat.key)
        return node is not None and node.is_current(seat)

    def listen(self, seat: Seat, timeout_s: float) -> object:
        """The next message for a seat; see `ThreadChannel.listen`."""
        node: Any = seat.base
        return node.listen(seat, timeout_s)

    def post(self, link: Link, args: Args, on_reply: OnReply | None = None) -> None:  # noqa: ARG002  # of an undoing
        """Send a request for whose reply nobody waits, to where ASK may have led."""
        thread = get_ident()
        was_inside = thread in self._inside
        self._inside.add(thread)
        try:
            with contextlib.suppress(NoReply):
                link.pipe.call_many([ASKING, args], 0.0)
        finally:
            if not was_inside:
                self._inside.discard(thread)

    def split(self, keys: list[bytes]) -> list[list[int]]:
        """The keys' indexes, those together that one node has."""
        return indexes_by_node(self._live_owner(), keys)

    def _follow(self, route: Route, visit: Callable[[ThreadChannel], _Result]) -> _Result:
        """Go where the route leads until a visit succeeds."""
        while True:
            try:
                return visit(self._next_node(route))
            except (AuthenticationError, AuthorizationError):
                raise
            except TROUBLES as trouble:
                pause_s = route.pause_s(trouble)
                if pause_s is None:
                    raise error_of(trouble) from None
            if pause_s:
                time.sleep(pause_s)

    def _next_node(self, route: Route) -> ThreadChannel:
        client = self._live_owner()
        node = None if route.is_stale else next_node(client, route, is_fresh=False)
        if node is None:
            with contextlib.suppress(RedisError, RedisClusterException, OSError):  # what is known must do
                client.nodes_manager.initialize()
            node = next_node(client, route, is_fresh=True)
        return self._channel_to(client, node)

    def _node_of(self, key: bytes) -> ThreadChannel | None:
        client = self._live_owner()
        node = slot_node(client, key)
        return None if node is None else self._channel_to(client, node)

    def _channel_to(self, client: Any, node: Any) -> ThreadChannel:
        pool = client.get_redis_connection(node).connection_pool
        return _nodes.get(id(pool)) or _nodes.add(pool, lambda pool: _Node(pool, self._inside))
