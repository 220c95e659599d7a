"""The synchronous channel to a cluster: a channel to each of its nodes, found by the lock's slot.

Must not know: the API of Lock.
"""

from __future__ import annotations

import weakref

import redis
from redis.exceptions import (
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    TimeoutError,  # noqa: A004
)

from redislock_fast._channel import MOVES, Registry
from redislock_fast._connect import Link, redis_error
from redislock_fast._protocol import Operation, Redirected, Refused
from redislock_fast._room import Seat
from redislock_fast._thread_channel import BlockingEncoding, ThreadChannel
from redislock_fast._times import clock

__all__ = ["ClusterChannel"]

_nodes: Registry[ThreadChannel] = Registry()


class ClusterChannel(BlockingEncoding):
    """All that this process sends to one cluster: a channel per node, found by the lock's slot.

    Args:
        client: redis-py's cluster client, which keeps the topology.
    """

    def __init__(self, client: redis.RedisCluster) -> None:
        super().__init__(client)
        self._client = weakref.ref(client)

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished, at whichever node has its slot; see `ThreadChannel.execute`."""
        deadline = None if limit_s is None else clock() + limit_s
        moves = 0
        loose: list[Link] = []
        channel = self._channel(operation.key)
        try:
            while True:
                try:
                    channel.run(operation, None if deadline is None else max(deadline - clock(), 0.0), loose)
                    break
                except (Redirected, ConnectionError, TimeoutError) as error:
                    moves += 1
                    if moves >= MOVES or (deadline is not None and clock() >= deadline):
                        raise
                    self._live_client().nodes_manager.initialize()
                    fresh = self._channel(operation.key)
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

    def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a connection of its own; see `ThreadChannel.execute_beside`."""
        self._channel(operation.key).execute_beside(operation, limit_s, slow_s)

    def is_awaited(self, key: bytes) -> bool:
        """Whether somebody in this process is known to wait for this lock."""
        return self._channel(key).is_awaited(key)

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """Listen for messages about a lock, at whichever node has its slot; see `ThreadChannel.enter`."""
        for _ in range(MOVES):
            channel = self._channel(key)
            try:
                seat = channel.enter(key, token, limit_s)
            except (Redirected, ConnectionError, TimeoutError):
                self._live_client().nodes_manager.initialize()
            else:
                if seat is not None:
                    seat.home = self
                return seat
        return None

    def is_current(self, seat: Seat) -> bool:
        """Whether requests for the seat's lock still leave on its connection."""
        return self._channel(seat.key).is_current(seat)

    def listen(self, seat: Seat, timeout_s: float) -> object:
        """The next message for a seat; see `ThreadChannel.listen`."""
        return self._channel(seat.key).listen(seat, timeout_s)

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""
        for key, token in entries:
            self._channel(key).undo([(key, token)])

    def split(self, keys: list[bytes]) -> list[list[int]]:
        """The keys' indexes, those together that one node has."""
        parts: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            parts.setdefault(id(self._channel(key)), []).append(index)
        return list(parts.values())

    def _live_client(self) -> redis.RedisCluster:
        client = self._client()
        if client is None:
            raise ConnectionError("the client is gone")
        return client

    def _channel(self, key: bytes) -> ThreadChannel:
        client = self._live_client()
        node = client.get_node_from_key(key)  # type: ignore[no-untyped-call]
        if node is None:
            raise ConnectionError("the cluster has no node for this lock's slot")
        pool = client.get_redis_connection(node).connection_pool
        return _nodes.get(id(pool)) or _nodes.add(pool, ThreadChannel)
