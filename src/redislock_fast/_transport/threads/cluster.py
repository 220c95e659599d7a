"""The transport of a cluster for threads: one server transport for each node, found by the lock's slot.

A `ThreadClusterTransport` sends nothing by itself. It keeps the list of what is to be cleaned up, so that the cleanup
goes to the node that has the slot by then.

Thread safety: as in `_transport/threads/server.py`; a cluster and its nodes share one `inside`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import RedisClusterException, RedisError

from redislock_fast._pipe.base import NOT_ASKED, Args, ConnectionBroken, Mailbox, NoReply, OnReply
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.operation import Exchange, FirstRequest, Redirected, Refused
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._queue.waiters import BROKEN, Waiter
from redislock_fast._transport.base import Registry
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
from redislock_fast._transport.threads.connect import Connection
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._transport.threads.starting import Task
from redislock_fast._util import patching
from redislock_fast._util.redis_py import BAD_CREDENTIALS, redis_error
from redislock_fast._util.times import clock

_Result = TypeVar("_Result")

_STALE_AFTER_S = 0.001


class _Node(ThreadServerTransport):
    """All that this process sends to one node.

    Args:
        owner: redis-py's connection pool for the node.
        cluster: whose node it is; None for a dedicated connection to it.
    """

    _kind_of_attempts = NodeAttempts
    is_routed = True

    def __init__(self, owner: Any, cluster: ThreadClusterTransport | None = None) -> None:
        super().__init__(owner)
        if cluster is not None:
            self.inside = cluster.inside
            self._cluster = weakref.ref(cluster)

    def forget_inside(self) -> None:
        """In a forked child: share the set of the cluster again, whichever of the two forgets first."""
        cluster: Any = None if self._cluster is None else self._cluster()
        if cluster is None:
            super().forget_inside()
        else:
            cluster.forget_inside()
            self.inside = cluster.inside

    def begin_part(self, node_request: _NodeRequest) -> None:
        """Send the first request of a node request, where there is a connection. The caller is not inside."""
        connection = self.connection
        if connection is None:
            return
        mailbox = connection.pipe.mailbox()
        is_stale = connection.pipe.silence_s > _STALE_AFTER_S
        if is_stale and self.wait_for_message(mailbox, 0.0) is BROKEN:  # closed while idle
            return
        thread = threading.get_ident()
        self.inside.add(thread)
        node_request.under_way = (self, connection, mailbox)
        try:
            connection.pipe.post_many(node_request.operation.request(connection.capabilities, clock()), mailbox.put)
        except ConnectionBroken as error:
            node_request.operation.note_unanswered(error.sent)
            node_request.under_way = None
        finally:
            self.inside.discard(thread)

    def finish(self, node_request: _NodeRequest, connection: Connection, mailbox: Mailbox) -> bool:
        """Wait for the replies to the first request of a node request. Returns whether they settle it; see `run`."""
        operation = node_request.operation
        attempts = self._attempts(node_request.route.left_s())
        try:
            replies: Any = self.wait_for_message(mailbox, attempts.timeout_s(clock()))
            if replies is None:
                raise NoReply("no reply in time")
            if replies is BROKEN:
                raise ConnectionBroken(True, "the connection broke")
            return operation.feed(replies, connection.capabilities)
        except BaseException as trouble:
            if not self._note_trouble(attempts, connection, operation, trouble, node_request.unanswered):
                raise
        finally:
            node_request.under_way = None
        attempts.next_pause_s()
        return False


_nodes: Registry[_Node] = Registry()  # by redis-py's connection pool


class _NodeRequest:
    """One of several operations that are driven at the same time.

    Args:
        operation: on the locks of one node.
        route: its attempts.

    Attributes:
        unanswered: the connections on which a request left without an answer.
        under_way: where the first request is under way, and the mailbox for its replies.
    """

    def __init__(self, operation: Pipeline, route: Route) -> None:
        self.operation = operation
        self.route = route
        self.unanswered: list[Connection] = []
        self.under_way: tuple[_Node, Connection, Mailbox] | None = None

    def visit(self, node: ThreadServerTransport) -> None:
        """Drive the operation on, at the node where it was begun, or else at this node."""
        if self.under_way is not None:
            at, connection, mailbox = self.under_way
            if at.finish(self, connection, mailbox):
                return
        node.run(self.route.exchange, self.route.left_s(), self.unanswered)

    def give_up(self) -> None:
        """Note that the caller stops waiting."""
        if self.under_way is not None:
            self.operation.note_unanswered(True)
            self.unanswered.append(self.under_way[1])


class ThreadClusterTransport(ThreadServerTransport):
    """All that this process sends to one cluster.

    Args:
        owner: redis-py's cluster client, which holds the topology.
    """

    _reading: Task | None = None
    connects = False

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:
        return settings_of_cluster(owner)

    def begin(self, call: FirstRequest) -> object:
        """Send the first request of an acquire or a release to the node that has the lock's slot, if one is known."""
        node = self._node_of(call.key)
        return NOT_ASKED if node is None else node.begin(call)

    def server_of(self, key: bytes) -> ThreadServerTransport:
        return self._node_of(key) or self

    def at_one_server(self, keys: list[bytes]) -> Sequence[int]:
        return at_one_node(self.owner(), keys)

    def execute_all(self, operations: Sequence[Pipeline], limit_s: float | None = None) -> None:
        """Drive operations, each on the locks of one node, until all are finished.

        Where there are connections, all first requests leave before any reply is waited for. The operations that these
        do not finish are driven on one after the other.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises: the first error, once all have ended.
        """
        node_requests = [_NodeRequest(one, Route(one, limit_s, self._retry)) for one in operations]
        errors: list[Exception] = []
        try:
            for node_request in node_requests:
                self._begin(node_request)
            for node_request in node_requests:
                try:
                    self._follow(node_request.route, node_request.visit)
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
        except BaseException as error:
            for node_request in node_requests:
                node_request.give_up()
                self.cleanup.tidy(node_request.operation, node_request.unanswered, failed=True)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        finally:
            errors.clear()  # or this frame and the errors would keep each other alive
        for node_request in node_requests:
            if node_request.operation.unsettled:
                self.cleanup.tidy(node_request.operation, node_request.unanswered, failed=False)

    def _begin(self, node_request: _NodeRequest) -> None:
        """Send an operation's first request, where that takes no waiting."""
        if self.cleanup.pending:
            self.cleanup.before(node_request.operation, node_request.route)
        node = self._node_of(node_request.operation.key)
        if node is not None and not self.is_entered:
            node.begin_part(node_request)

    def run(self, operation: Exchange, limit_s: float | None, unanswered: list[Connection]) -> None:
        """Drive an operation at the node that has its slot; see `ThreadServerTransport.run`."""
        route = Route(operation, limit_s, self._retry)
        if self.cleanup.pending:
            self.cleanup.before(operation, route)
        self._follow(route, lambda node: node.run(route.exchange, route.left_s(), unanswered))

    def run_dedicated(
        self, operation: Exchange, limit_s: float | None, unanswered: list[Connection], slow_s: float = 0.0
    ) -> None:
        """`run` on a dedicated connection; see `ThreadServerTransport.run_dedicated`."""
        route = Route(operation, limit_s, self._retry)
        self._follow(route, lambda node: node.run_dedicated(route.exchange, route.left_s(), unanswered, slow_s))

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Waiter | None:
        """Listen for messages about a lock, at the node that has its slot; see `ThreadServerTransport.enter`."""
        route = Route(ReadHolder(key), limit_s, self._retry)
        return self._follow(route, lambda node: node.enter(key, token, route.left_s()))

    def post(self, connection: Connection, args: Args, on_reply: OnReply | None = None) -> None:  # noqa: ARG002  # of a cleanup
        """Send a request for whose reply the caller does not wait, to the node that ASK may have named."""
        thread = threading.get_ident()
        was_inside = thread in self.inside
        self.inside.add(thread)
        try:
            with contextlib.suppress(NoReply):
                connection.pipe.call_many([ASKING, args], 0.0)
        finally:
            if not was_inside:
                self.inside.discard(thread)

    def post_cleanup(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Post the cleanup on the connections of the nodes that have the slots now, as far as there are any."""
        for entry in entries:
            with contextlib.suppress(RedisError):  # the client is gone, or knows of no node
                node = self._node_of(entry[0])
                if node is not None:
                    node.post_cleanup([entry])

    def split(self, keys: list[bytes], _: float | None = None) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by node. Nothing is waited for."""
        return indexes_by_node(self._live_owner(), keys)

    def _follow(self, route: Route, visit: Callable[[ThreadServerTransport], _Result]) -> _Result:
        """Visit one node after the other, as the route says, until a visit succeeds."""
        while True:
            try:
                return visit(self._next_node(route))
            except BAD_CREDENTIALS:
                raise
            except TROUBLES as trouble:
                route.note_failure(trouble, error_of(trouble))
            pause_s = route.next_pause_s()
            if pause_s:
                time.sleep(pause_s)

    def _next_node(self, route: Route) -> ThreadServerTransport:
        client = self._live_owner()
        node = None if route.is_stale else next_node(client, route, is_fresh=False)
        if node is None:
            self._read_topology(client, route.bounded_s())
            node = next_node(client, route, is_fresh=True)
        return self._server_to(client, node)

    def _read_topology(self, client: Any, limit_s: float | None) -> None:
        """Wait for a thread in which redis-py reads the topology. It goes on when the caller stops waiting.

        redis-py asks one node after the other, and waits for each by the client's `socket_timeout`. Where no thread can
        be started, the caller reads, and waits as long.
        """
        reading = self._reading
        if reading is None or reading.is_over:  # two threads at once, after a race, do no harm
            try:
                self._reading = reading = Task("topology", patching.own_thread(_read), client)
            except RuntimeError:
                _read(client)
                return
        reading.wait(limit_s)

    def _node_of(self, key: bytes) -> _Node | None:
        client = self._live_owner()
        node = slot_node(client, key)
        return None if node is None else self._server_to(client, node)

    def _server_to(self, client: Any, node: Any) -> _Node:
        of_node = node.redis_connection
        if of_node is None:  # hot path: to ask whether a client is true takes 300 instructions
            of_node = client.get_redis_connection(node)
        pool = of_node.connection_pool
        server = _nodes.get(id(pool))
        return _nodes.add(pool, partial(_Node, cluster=self)) if server is None else server


def _read(client: Any) -> None:
    with contextlib.suppress(RedisError, RedisClusterException, OSError):  # then the known topology is used
        client.nodes_manager.initialize()
