"""Finds the node of a cluster for an operation: the part that threads and event loops share.

- MOVED names the node that has the slot now: the move is noted, and the next attempt goes to that node.
- ASK names the node to which the slot is being moved, for a key that is not at the old node: the next attempt alone
  goes there, with ASKING in front of each request. The two leave in one write, so that no request of another caller
  comes between them on the shared connection.
- TRYAGAIN (some keys of a request have moved, and some have not), CLUSTERDOWN (no node serves the slot) and a node
  that cannot be reached: the next attempt follows after a pause, for as long as the caller waits or the cluster
  client's retry policy says.

The rules are those of https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/, "Redirection and
resharding".

Nothing here waits, sends or receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import hiredis
from redis.cluster import PRIMARY
from redis.exceptions import AskError, ConnectionError, MovedError, RedisClusterException, TimeoutError

from redislock_fast._pipe.base import Args, Bulk, ConnectionBroken, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.keys import slot_of
from redislock_fast._protocol.operation import NOAUTH, Exchange, NotExecuted, Redirected
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._transport.base import LATER_PAUSE_S, Attempts
from redislock_fast._util.redis_py import RetryPolicy, redis_error
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._protocol.claims import Claim
    from redislock_fast._protocol.operation import FirstOutcome

ASKING: Args = (b"ASKING",)
"""Makes the next request valid for a slot that is being imported. It has no effect anywhere else."""

TROUBLES = (Redirected, NotExecuted, ConnectionError, TimeoutError, RedisClusterException)
"""Errors after which a `Route` says whether another attempt, or another node, may help."""

_REDIRECTIONS = 5  # after so many in a row without progress, the next attempt follows after a pause
_MOVING_PAUSE_S = 0.05
_MOVING_LIMIT_S = 5.0  # how long to wait for a slot that is being moved, where the caller sets no limit


class _Asking:
    """An operation in the form for the node that ASK has named."""

    is_pipeline = True
    uses_queue = False
    first_outcome: FirstOutcome | None = None
    claim: Claim | None = None  # late replies about a slot that moves are ignored: the key ends by its ttl

    def __init__(self, operation: Exchange) -> None:
        self._operation = operation

    @property
    def key(self) -> bytes:
        return self._operation.key

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:
        request = self._operation.request(capabilities, now)
        requests = (
            request.requests() if isinstance(request, Bulk) else request if self._operation.is_pipeline else [request]
        )
        return [part for one in requests for part in (ASKING, one)]

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:
        for reply in replies[::2]:
            if reply != b"OK" and not isinstance(reply, hiredis.ReplyError):
                raise Malformed(reply)
        answers = replies[1::2]
        return self._operation.feed(answers if self._operation.is_pipeline else answers[0], capabilities)

    def note_unanswered(self, sent: bool) -> None:
        self._operation.note_unanswered(sent)

    def takes(self) -> list[tuple[bytes, bytes]]:
        return self._operation.takes()


class Route(Attempts):
    """The attempts of one operation in a cluster, with the node that each one goes to.

    Args:
        operation: a state machine.
        limit_s: as for `ThreadServerTransport.execute`.
        retry: the cluster client's retry policy.

    Attributes:
        redirected: names the node for the next attempt; None: the node that has the slot.
        is_stale: whether the topology is to be read again before the next attempt.
    """

    def __init__(self, operation: Exchange, limit_s: float | None, retry: RetryPolicy) -> None:
        super().__init__(retry, limit_s)
        self._operation = operation
        self._redirections = 0
        self._unfinished = _unfinished(operation)
        self._moving_until = self.deadline
        self.redirected: AskError | None = None
        self.is_stale = False

    @property
    def key(self) -> bytes:
        """The lock whose slot decides to which node the operation goes."""
        return self._operation.key

    @property
    def asks(self) -> bool:
        """Whether the next attempt goes to the node that ASK has named: MovedError is a kind of AskError, too."""
        return self.redirected is not None and not isinstance(self.redirected, MovedError)

    @property
    def exchange(self) -> Exchange:
        """The operation in the form for that node."""
        return _Asking(self._operation) if self.asks else self._operation

    def pause_s(self, trouble: Exception) -> float | None:
        """Choose the next node. Returns how long to wait before the next attempt, in seconds; None to give up.

        Args:
            trouble: how the last attempt has failed: one of `TROUBLES`.
        """
        self.redirected = None
        if isinstance(trouble, Redirected) and self._is_to_follow():
            error = redis_error(str(trouble))
            assert isinstance(error, AskError)
            self.redirected = error
            self.is_stale = False
            return 0.0
        self.is_stale = not (isinstance(trouble, NotExecuted) and trouble.code == "TRYAGAIN")
        if not self.is_stale:
            self._moving_until = self._moving_until or clock() + _MOVING_LIMIT_S
            return self._if_allowed(-1, _MOVING_PAUSE_S, self._moving_until)
        self.failures += 1
        pause_s, retries = self._retry.delay_s(self.failures), self._retry.retries
        if isinstance(trouble, NotExecuted | Redirected | RedisClusterException):  # the answer was "later"
            pause_s = max(pause_s, LATER_PAUSE_S)
            if self.deadline is not None:  # such a cluster is asked until the caller's time ends
                retries = -1
        return self._if_allowed(retries, pause_s, self.deadline)

    def _is_to_follow(self) -> bool:
        unfinished = _unfinished(self._operation)
        self._redirections = self._redirections + 1 if unfinished == self._unfinished else 1
        self._unfinished = unfinished
        if self._redirections <= _REDIRECTIONS:
            return True
        self._redirections = 0
        return False


def _unfinished(operation: Exchange) -> int:
    """How many locks have no result yet: each node settles some locks of a pipeline."""
    return len(operation.unfinished) if isinstance(operation, Pipeline) else 1


def error_of(trouble: Exception) -> Exception:
    """The error that redis-py raises for it."""
    if isinstance(trouble, Redirected | NotExecuted):
        return redis_error(str(trouble))
    return trouble.with_traceback(None)  # redis-py's frames and its errors keep each other alive


class NodeAttempts(Attempts):
    """The attempts at one node of a cluster, between two decisions of a `Route`.

    A request is tried again at once where its failure shows that the connection was closed while idle, or is not
    authenticated any more. The `Route` decides on all other retries.
    """

    def note_failure(self, trouble: Exception, error: Exception) -> None:
        """Decide on another attempt; see `Attempts.note_failure`. A `Route` is told what the server has answered."""
        is_for_route = isinstance(trouble, NotExecuted) and trouble.code != NOAUTH
        super().note_failure(trouble, trouble if is_for_route else error)

    def pause_s(self, trouble: Exception) -> float | None:
        self.failures += 1
        is_of_connection = isinstance(trouble, ConnectionBroken) or (
            isinstance(trouble, NotExecuted) and trouble.code == NOAUTH
        )
        return 0.0 if self.failures == 1 and is_of_connection else None


def settings_of_cluster(client: Any) -> dict[str, Any]:
    """The settings of a cluster client for the transport of the whole cluster; those of its nodes are for theirs."""
    return {"retry": getattr(client, "retry", None)}  # redis-py 5 has none for clusters


def at_one_node(client: Any, keys: list[bytes]) -> Sequence[int]:
    """The indexes of those keys that are on the same node as the first key. Without a client, no node can be asked."""
    return range(len(keys)) if client is None else indexes_by_node(client, keys)[0]


def slot_node(client: Any, key: bytes) -> Any:
    """redis-py's node that has the key's slot, as far as is known; None where no node has it."""
    nodes = client.nodes_manager.slots_cache.get(slot_of(key))
    return nodes[0] if nodes else None


def indexes_by_node(client: Any, keys: list[bytes]) -> list[list[int]]:
    """The keys' indexes, grouped by the node that has their slots."""
    slots = client.nodes_manager.slots_cache
    parts: dict[object, list[int]] = {}
    for index, key in enumerate(keys):
        nodes = slots.get(slot_of(key))
        parts.setdefault(nodes and nodes[0].name, []).append(index)
    return list(parts.values())


def next_node(client: Any, route: Route, is_fresh: bool) -> Any:
    """redis-py's node for the next attempt; None where the topology must be read again to know.

    The move of a slot is noted: the node that redis-py asks for the topology may not know of it. The client's
    `address_remap` says where to reach the node that a server has named.

    Args:
        client: redis-py's cluster client.
        route: the attempts.
        is_fresh: whether the topology has just been read.

    Raises:
        redis.exceptions.SlotNotCoveredError: the topology is fresh, and no node has the slot.
        redis.exceptions.ConnectionError: the topology is fresh, and ASK has named an unknown node.
    """
    redirected = route.redirected
    if redirected is not None:
        node = client.get_node(*client.nodes_manager.remap_host_port(redirected.host, redirected.port))
        if node is not None and (route.asks or is_fresh or node.server_type == PRIMARY):
            if not route.asks:
                slots = client.nodes_manager.slots_cache
                if slots.get(redirected.slot_id, [None])[0] is not node:
                    slots[redirected.slot_id] = [node]
            return node
        if route.asks and is_fresh:
            raise ConnectionError(f"no node of the cluster is known at {redirected.host}:{redirected.port}")
    if is_fresh:
        return client.get_node_from_key(route.key)
    return slot_node(client, route.key) if redirected is None else None
