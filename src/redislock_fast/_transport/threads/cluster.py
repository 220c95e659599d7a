"""The transport of a cluster for threads: one server transport for each node, found by the lock's slot.

A `ClusterChannel` sends nothing by itself. It keeps what is to be cleaned up, so that the cleanup goes to the node that
has the slot by then.

Who may touch what: as in `_transport/threads/server.py`; a cluster and its nodes share one `inside`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError, RedisClusterException, RedisError

from redislock_fast._pipe.base import Args, Lost, Mailbox, NoReply, OnReply
from redislock_fast._procedures.waiters import BROKEN, Seat
from redislock_fast._protocol.commands import Look
from redislock_fast._protocol.operation import Exchange, Redirected, Refused
from redislock_fast._protocol.pipeline import Many
from redislock_fast._transport.base import Registry
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
from redislock_fast._transport.threads.connect import Link
from redislock_fast._transport.threads.server import ThreadChannel
from redislock_fast._util.redis_py import redis_error
from redislock_fast._util.times import clock

__all__ = ["ClusterChannel"]

_Result = TypeVar("_Result")

_STALE_AFTER_S = 0.001


class _Node(NodeRules[Link], ThreadChannel):
    """All that this process sends to one node.

    Args:
        owner: redis-py's connection pool for the node.
        cluster: whose node it is; None for a dedicated connection to it.
    """

    def __init__(self, owner: Any, cluster: ClusterChannel | None = None) -> None:
        super().__init__(owner)
        if cluster is not None:
            self.inside = cluster.inside
            self._cluster = weakref.ref(cluster)

    def begin(self, errand: _Errand) -> None:
        """Send the first request of a node request, where there is a connection. The caller is not inside."""
        link = self.link
        if link is None:
            return
        mailbox = link.pipe.mailbox()
        if link.pipe.silence_s > _STALE_AFTER_S and self.hear(mailbox, 0.0) is BROKEN:  # closed while idle
            return
        thread = get_ident()
        self.inside.add(thread)
        errand.begun = (self, link, mailbox)
        try:
            link.pipe.post_many(errand.operation.request(link.dialect, clock()), mailbox.tell)
        except Lost as lost:
            errand.operation.lost(lost.sent)
            errand.begun = None
        finally:
            self.inside.discard(thread)

    def finish(self, errand: _Errand, link: Link, mailbox: Mailbox) -> bool:
        """Wait for the replies to the first request of a node request. Returns whether they settle it; see `run`."""
        operation = errand.operation
        attempts = self._attempts(errand.route.left_s())
        try:
            replies: Any = self.hear(mailbox, attempts.timeout_s(clock()))
            if replies is None:
                raise NoReply("no reply in time")
            if replies is BROKEN:
                raise Lost(True, "the connection broke")
            return operation.feed(replies, link.dialect)
        except BaseException as trouble:
            if not self._note_trouble(attempts, link, operation, trouble, errand.loose):
                raise
        finally:
            errand.begun = None
        attempts.next_pause_s()
        return False


_nodes: Registry[_Node] = Registry()  # by redis-py's connection pool


class _Errand:
    """One of several operations that are driven at the same time.

    Args:
        operation: on the locks of one node.
        route: its attempts.

    Attributes:
        loose: the connections on which a request left without an answer.
        begun: where the first request is under way, and the mailbox for its replies.
    """

    def __init__(self, operation: Many, route: Route) -> None:
        self.operation = operation
        self.route = route
        self.loose: list[Link] = []
        self.begun: tuple[_Node, Link, Mailbox] | None = None

    def visit(self, node: ThreadChannel) -> None:
        """Drive the operation on, at the node where it was begun, or else at this node."""
        if self.begun is not None:
            at, link, mailbox = self.begun
            if at.finish(self, link, mailbox):
                return
        node.run(self.route.exchange, self.route.left_s(), self.loose)

    def give_up(self) -> None:
        """The caller does not wait any more."""
        if self.begun is not None:
            self.operation.lost(True)
            self.loose.append(self.begun[1])


class ClusterChannel(ClusterRules[Link], ThreadChannel):
    """All that this process sends to one cluster.

    Args:
        owner: redis-py's cluster client, which holds the topology.
    """

    def execute_all(self, operations: Sequence[Many], limit_s: float | None = None) -> None:
        """Drive operations, each on the locks of one node, until all are finished.

        Where there are connections, all first requests leave before any reply is waited for. The operations that these
        do not finish are driven on one after the other.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises: the first error, once all have ended.
        """
        errands = [_Errand(one, Route(one, limit_s, self._retry)) for one in operations]
        errors: list[Exception] = []
        try:
            for errand in errands:
                self._begin(errand)
            for errand in errands:
                try:
                    self._follow(errand.route, errand.visit)
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]
        except BaseException as error:
            for errand in errands:
                errand.give_up()
                self.tidy(errand.operation, errand.loose, failed=True)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        finally:
            errors.clear()  # or this frame and the errors would keep each other alive
        for errand in errands:
            if errand.operation.unsettled:
                self.tidy(errand.operation, errand.loose, failed=False)

    def _begin(self, errand: _Errand) -> None:
        """Send an operation's first request, where that takes no waiting."""
        if self._undone:
            self._undo_before(errand.operation, errand.route)
        node = self._node_of(errand.operation.key)
        if node is not None and not self.is_entered:
            node.begin(errand)

    def run(
        self,
        operation: Exchange,
        limit_s: float | None,
        loose: list[Link],
    ) -> None:
        """Drive an operation at the node that has its slot; see `ThreadChannel.run`."""
        route = Route(operation, limit_s, self._retry)
        if self._undone:
            self._undo_before(operation, route)
        self._follow(route, lambda node: node.run(route.exchange, route.left_s(), loose))

    def run_beside(self, operation: Exchange, limit_s: float | None, loose: list[Link], slow_s: float = 0.0) -> None:
        """`run` on a dedicated connection; see `ThreadChannel.run_beside`."""
        route = Route(operation, limit_s, self._retry)
        self._follow(route, lambda node: node.run_beside(route.exchange, route.left_s(), loose, slow_s))

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """Listen for messages about a lock, at the node that has its slot; see `ThreadChannel.enter`."""
        route = Route(Look(key), limit_s, self._retry)
        return self._follow(route, lambda node: node.enter(key, token, route.left_s()))

    def post(self, link: Link, args: Args, on_reply: OnReply | None = None) -> None:  # noqa: ARG002  # of a cleanup
        """Send a request for whose reply the caller does not wait, to the node that ASK may have named."""
        thread = get_ident()
        was_inside = thread in self.inside
        self.inside.add(thread)
        try:
            with contextlib.suppress(NoReply):
                link.pipe.call_many([ASKING, args], 0.0)
        finally:
            if not was_inside:
                self.inside.discard(thread)

    def split(self, keys: list[bytes]) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by node."""
        return indexes_by_node(self._live_owner(), keys)

    def _follow(self, route: Route, visit: Callable[[ThreadChannel], _Result]) -> _Result:
        """Visit one node after the other, as the route says, until a visit succeeds."""
        while True:
            try:
                return visit(self._next_node(route))
            except (AuthenticationError, AuthorizationError):
                raise
            except TROUBLES as trouble:
                route.note_failure(trouble, error_of(trouble))
            pause_s = route.next_pause_s()
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

    def _node_of(self, key: bytes) -> _Node | None:
        client = self._live_owner()
        node = slot_node(client, key)
        return None if node is None else self._channel_to(client, node)

    def _channel_to(self, client: Any, node: Any) -> _Node:
        pool = client.get_redis_connection(node).connection_pool
        return _nodes.get(id(pool)) or _nodes.add(pool, lambda pool: _Node(pool, self))
