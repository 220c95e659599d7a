"""Real clusters on loopback: three primaries and a replica of each, whose slots move and whose primaries fail.

Nothing changes without a test's command, because nodes call one another dead only after a minute; a test in which they
are to act by themselves says so. Slots that move in both directions may be disputed until the nodes know one another's
epochs: so a test uses slots that have never moved, all in one direction, or lets the cluster settle. A test that kills
a node restores it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ConnectionError

from redislock_fast.server import Server, free_port
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, Callers, Threads

__all__ = ["SOON", "Cluster", "Place", "connect", "remap_ports"]

SOON: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.02}
"""Settings of a lock with frequent health checks."""

_PRIMARIES = 3
_SLOTS = 16_384
_OPTIONS = {
    "cluster-enabled": "yes",
    "cluster-config-file": "nodes.conf",
    "cluster-node-timeout": "60000",
    "cluster-require-full-coverage": "no",
    "repl-diskless-sync": "yes",
    "repl-diskless-sync-delay": "0",
}
_PATIENCE_S = 60.0  # a replica whose first try to follow has failed, on a busy machine, tries again after a while


@dataclass(frozen=True)
class Place:
    """A name for a lock, and where its slot is.

    Attributes:
        home: the number of the node that has its slot.
        away: the number of another primary.
    """

    name: str
    cluster: Cluster
    slot: int
    home: int
    away: int

    def keys_at(self, number: int) -> int:
        """How many keys of the slot a node has."""
        count: int = self.cluster.admins[number].execute_command("CLUSTER", "COUNTKEYSINSLOT", self.slot)
        return count

    def begin_move(self) -> None:
        """Let the slot be on the move to the other node, with its keys at home."""
        self.cluster.begin_move(self.slot, self.home, self.away)

    def move_keys(self, only: str | bytes | None = None) -> None:
        """Let the keys of the slot arrive, or only this one."""
        self.cluster.move_keys(self.slot, self.home, self.away, only)

    def end_move(self) -> None:
        """Let the slot be the other node's, with its keys."""
        self.cluster.end_move(self.slot, self.home, self.away)

    def move(self) -> None:
        """Give the slot to the other node, with its keys."""
        self.cluster.move(self.slot, self.home, self.away)


def connect(callers: Callers, cluster: Cluster, **options: Any) -> Any:
    """A client of the cluster, for threads or for tasks."""
    kind: Any = redis.RedisCluster if isinstance(callers, Threads) else redis.asyncio.RedisCluster
    return callers.keep(kind(host="127.0.0.1", port=cluster.port, **options))


def remap_ports(ports: Mapping[int, int]) -> Callable[[tuple[str, int]], tuple[str, int]]:
    """An `address_remap` of redis-py's cluster clients that leads to these ports, given by the nodes' own."""
    return lambda address: (address[0], ports.get(address[1], address[1]))


class Cluster:
    """Six nodes; of those with the numbers n and n + 3, one is the other's replica.

    Args:
        kind: of server.
        options: of each node, besides those of a cluster.

    Attributes:
        nodes: the servers.
        admins: a client of each.
    """

    def __init__(self, kind: str, options: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._names = itertools.count()
        self._used: set[int] = set()
        self.nodes: list[Server] = []
        try:
            with ThreadPoolExecutor() as pool:
                ports = [free_port() for _ in range(2 * _PRIMARIES)]
                for node in pool.map(lambda port: Server(kind, _OPTIONS | (options or {}), port), ports):
                    self.nodes.append(node)
            self.admins: list[Any] = [redis.Redis(port=node.port) for node in self.nodes]
            self._ids: list[str] = [admin.execute_command("CLUSTER", "MYID").decode() for admin in self.admins]
            self._form()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.close()

    def _form(self) -> None:
        for number, admin in enumerate(self.admins):
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < _PRIMARIES:
                bounds = [_SLOTS * number // _PRIMARIES, _SLOTS * (number + 1) // _PRIMARIES]
                admin.execute_command("CLUSTER", "ADDSLOTS", *range(*bounds))  # Redis 6.2 has no ADDSLOTSRANGE
            for other in self.nodes[:number]:
                admin.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        wait_until(lambda: all(map(self._knows_all, self.admins)), "the nodes have met", _PATIENCE_S)
        for number in range(_PRIMARIES, 2 * _PRIMARIES):
            self.admins[number].execute_command("CLUSTER", "REPLICATE", self._ids[number - _PRIMARIES])
        wait_until(self._is_whole, "the cluster is whole", _PATIENCE_S)

    @staticmethod
    def _knows_all(admin: Any) -> bool:
        nodes: bytes = admin.execute_command("CLUSTER", "INFO")
        return b"cluster_state:ok" in nodes and b"cluster_known_nodes:6" in nodes

    def _is_whole(self) -> bool:
        """Whether every node is up, every slot is served, and every replica follows its primary."""
        try:
            facts = [admin.info("replication") for admin in self.admins]
            shards = [self._primaries_seen_by(admin) for admin in self.admins]
        except ConnectionError:
            return False
        followers = [fact for fact in facts if fact["role"] == "slave" and fact["master_link_status"] == "up"]
        primaries = {node.port for node, fact in zip(self.nodes, facts, strict=True) if fact["role"] == "master"}
        return len(followers) == _PRIMARIES and all(seen == primaries for seen in shards)

    @staticmethod
    def _primaries_seen_by(admin: Any) -> set[int]:
        return {primary[1] for _, _, primary, *_ in admin.execute_command("CLUSTER", "SLOTS")}

    # ---- nodes, slots and names ----

    @property
    def port(self) -> int:
        """A node's that runs."""
        return next(node.port for node in self.nodes if node.process is not None)

    def name(self) -> str:
        """A name that no test has used, in any slot."""
        return f"name-{next(self._names)}"

    def place(self) -> Place:
        """A name that no test has used, in a slot that has never moved, of the first primary."""
        home, away, _ = self.primaries()
        while True:
            name = self.name()
            slot: int = self.admins[home].execute_command("CLUSTER", "KEYSLOT", name)
            if slot not in self._used and self.has(home, slot):
                self._used.add(slot)
                return Place(name, self, slot, home, away)

    def primaries(self) -> list[int]:
        """The numbers of the nodes that are primaries now."""
        return [number for number in range(len(self.nodes)) if self._is_primary(number)]

    def flush(self) -> None:
        """Remove all keys."""
        for number in self.primaries():
            self.admins[number].flushall()

    def _is_primary(self, number: int) -> bool:
        return self.nodes[number].process is not None and self.admins[number].info("replication")["role"] == "master"

    def replica_of(self, primary: int) -> int:
        """The number of a primary's replica."""
        return (primary + _PRIMARIES) % (2 * _PRIMARIES)

    def has(self, number: int, slot: int) -> bool:
        """Whether a node says that it has a slot."""
        port = self.nodes[number].port
        shards: Any = self.admins[number].execute_command("CLUSTER", "SLOTS")
        return any(first <= slot <= last and primary[1] == port for first, last, primary, *_ in shards)

    # ---- slots that move ----

    def begin_move(self, slot: int, source: int, target: int) -> None:
        """Let a slot be on the move, with all its keys where they were."""
        self.admins[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[source])
        self.admins[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[target])

    def move_keys(self, slot: int, source: int, target: int, only: str | bytes | None = None) -> None:
        """Let the keys of a slot that is on the move arrive, or only this one."""
        keys = [only] if only else self.admins[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        for key in keys:
            self.admins[source].execute_command("MIGRATE", "127.0.0.1", self.nodes[target].port, key, 0, 5000)

    def end_move(self, slot: int, source: int, target: int) -> None:
        """Let a slot be the target's at all primaries: else it may be disputed."""
        self.move_keys(slot, source, target)
        others = set(self.primaries()).difference((source, target))
        for number in (target, source, *others):
            self.admins[number].execute_command("CLUSTER", "SETSLOT", slot, "NODE", self._ids[target])

    def move(self, slot: int, source: int, target: int) -> None:
        """Give a slot to another node, with the keys in it, as `redis-cli --cluster reshard` does, but all at once."""
        self.begin_move(slot, source, target)
        self.end_move(slot, source, target)

    def settle(self) -> None:
        """Return once all nodes know each other's epochs: a slot that has moved may move again without a dispute."""
        wait_until(lambda: len({self._epochs_seen_by(admin) for admin in self.admins}) == 1, "all know all epochs")

    @staticmethod
    def _epochs_seen_by(admin: Any) -> frozenset[tuple[str, str]]:
        lines = [
            line.split() for line in admin.execute_command("CLUSTER", "NODES", NEVER_DECODE=True).decode().splitlines()
        ]
        return frozenset((line[0], line[6]) for line in lines)

    @contextmanager
    def unserved(self, slot: int, owner: int) -> Iterator[None]:
        """Within the block, no node has this slot."""
        self.admins[owner].execute_command("CLUSTER", "DELSLOTS", slot)
        try:
            yield
        finally:
            self.admins[owner].execute_command("CLUSTER", "ADDSLOTS", slot)

    @contextmanager
    def proxied(self) -> Iterator[dict[int, Proxy]]:
        """Within the block, there is a proxy to each node. Yields them by the nodes' ports."""
        with ExitStack() as opened:
            yield {node.port: opened.enter_context(Proxy(node.port)) for node in self.nodes}

    # ---- primaries that fail ----

    def until_replicated(self, primary: int) -> None:
        """Return once a primary's replica has all that it has."""
        offset = self.admins[primary].info("replication")["master_repl_offset"]
        replica = self.admins[self.replica_of(primary)]
        wait_until(lambda: replica.info("replication")["slave_repl_offset"] >= offset, "all is replicated")

    def take_over(self, primary: int) -> int:
        """Let a primary's replica take its place, without asking it. Returns the replica's number."""
        self.admins[self.replica_of(primary)].execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        return self.until_taken_over(primary)

    def until_taken_over(self, primary: int) -> int:
        """Return once a primary's replica has taken its place. Returns the replica's number."""
        replica = self.replica_of(primary)
        wait_until(lambda: self._is_primary(replica), "the replica is a primary")
        return replica

    @contextmanager
    def watchful(self) -> Iterator[None]:
        """Within the block, nodes call one another dead after a second, and vote for a dead primary's replica."""
        self._set_node_timeout("1000")
        try:
            yield
        finally:
            self._set_node_timeout(_OPTIONS["cluster-node-timeout"])

    def _set_node_timeout(self, milliseconds: str) -> None:
        for node, admin in zip(self.nodes, self.admins, strict=True):
            if node.process is not None:
                admin.config_set("cluster-node-timeout", milliseconds)

    def kill_replicated(self, primary: int) -> None:
        """End a primary as a crash would, with nothing that is not replicated."""
        self._stop_writing(primary)
        self.until_replicated(primary)
        self.nodes[primary].kill()

    def _stop_writing(self, primary: int) -> None:
        self.admins[primary].execute_command("CLIENT", "PAUSE", int(1000 * PATIENCE_S), "WRITE")

    def swap(self, primary: int) -> int:
        """Let a primary and its replica change places and lose nothing. Returns the new primary's number.

        As `CLUSTER FAILOVER` does it, but that needs votes, which no node gives twice within two node timeouts.
        """
        self._stop_writing(primary)
        try:
            self.until_replicated(primary)
            replica = self.take_over(primary)
            wait_until(lambda: not self._is_primary(primary), "they have changed places")
        finally:
            self.admins[primary].execute_command("CLIENT", "UNPAUSE")
        return replica

    def restore(self) -> None:
        """Bring dead nodes back, as replicas where others have taken their places."""
        for node in self.nodes:
            if node.process is None:
                node.start()
        wait_until(self._is_whole, "the cluster is whole again", _PATIENCE_S)
