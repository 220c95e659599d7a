"""In a cluster, the rules of the page "The smallest ACL" with its row for clusters are enough, and each is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import RedisClusterException, RedisError

from tests.integration.security.test_smallest_acl import (
    NAME,
    OF_CLUSTERS,
    RULES,
    SERVERS,
    USER,
    Uses,
    denied,
    grant,
    is_of,
    use_batch,
    use_fencing,
    use_foreign,
    use_handle,
    use_linger,
    use_lock,
    use_once,
    use_own_token,
    use_queue,
    use_queue_where_many_were,
    use_renewal,
)
from tests.support.clusters import Cluster
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("world"),
    pytest.mark.parametrize("cluster", SERVERS, indirect=True),
]


class Admins:
    """A client of the cluster with all rights. Its lists are those of all nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.nodes: list[Any] = cluster.admins
        self._client = redis.RedisCluster(host="127.0.0.1", port=cluster.port)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def client_list(self) -> list[Any]:
        """The connections to all nodes."""
        return [row for node in self.nodes for row in node.client_list()]

    def acl_log(self) -> list[Any]:
        """The denials by all nodes."""
        return [row for node in self.nodes for row in node.acl_log()]


class ClusterUses(Uses):
    """The features of locks, used by one user in a cluster."""

    def __init__(self, world: World, cluster: Cluster, admins: Any) -> None:
        self.cluster = cluster
        super().__init__(world, cluster.nodes[0], admins)

    def connect(self, port: int = 0) -> Any:
        kind: Any = redis.RedisCluster if self.world.in_threads else redis.asyncio.RedisCluster
        settings = {"username": USER.username, "password": USER.password}
        client = self.world.keep(kind(host="127.0.0.1", port=port or self.cluster.port, **settings))
        if not self.world.in_threads:
            waited(client.initialize())
        return client


def use_slot_on_the_move(uses: ClusterUses) -> None:
    cluster = uses.cluster
    slot: int = cluster.admins[0].execute_command("CLUSTER", "KEYSLOT", NAME)
    home, away, *_ = sorted(cluster.primaries(), key=lambda number: not cluster.has(number, slot))
    cluster.begin_move(slot, home, away)
    try:
        use_lock(uses)
    finally:
        cluster.end_move(slot, home, away)
        cluster.settle()


FEATURES: list[Callable[[Any], None]] = [
    use_lock, use_queue, use_queue_where_many_were, use_own_token, use_foreign, use_renewal, use_batch, use_fencing,
    use_linger, use_once, use_handle, use_slot_on_the_move,
]  # fmt: skip


@pytest.fixture
def admins(cluster: Cluster) -> Iterator[Admins]:
    """A client with all rights. The user is deleted behind the test."""
    made = Admins(cluster)
    yield made
    for node in made.nodes:
        node.acl_deluser(USER.username)
    made.close()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_the_rules_are_enough_in_a_cluster(
    world: World, cluster: Cluster, admins: Admins, feature: Callable[[Any], None]
) -> None:
    for node in admins.nodes:
        grant(node, [*RULES, *OF_CLUSTERS])
    feature(ClusterUses(world, cluster, admins))
    assert set() == denied(admins)


@IN_THREADS
@pytest.mark.parametrize("rule", OF_CLUSTERS)
def test_each_rule_for_clusters_is_needed(world: World, cluster: Cluster, admins: Admins, rule: str) -> None:
    for node in admins.nodes:
        grant(node, [other for other in (*RULES, *OF_CLUSTERS) if other != rule])
    for feature in FEATURES:
        with contextlib.suppress(RedisError, RedisClusterException, AssertionError):  # a lesser mode, or an error
            feature(ClusterUses(world, cluster, admins))
        if any(is_of(rule, *what) for what in denied(admins)):
            return
    pytest.fail("no feature has asked for it")
