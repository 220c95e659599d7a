"""Keys that linger on a real cluster: the nodes' connections keep them, and hear that they are wanted.

Rules: those of `support/clusters.py`. Redis 6.2 has no sharded messages: there no key lingers.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from redislock_fast import holders
from tests.integration.cli.conftest import Command, redislock
from tests.integration.cluster.test_waiting import has_messages
from tests.support.clusters import Cluster, Place, connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import FAR_S, Callers

__all__ = ["redislock"]

LINGERS: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S, "linger": FAR_S}


def test_a_key_lingers_until_another_process_wants_it(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, place: Place
) -> None:
    keeper, other = (callers.contender(connect(callers, cluster), place.name, **LINGERS) for _ in range(2))
    assert keeper.call("acquire") is True
    token = cluster_client.get(place.name)
    keeper.release()
    assert cluster_client.exists(place.name) == has_messages(cluster)
    assert keeper.call("acquire") is True
    assert (cluster_client.get(place.name) == token) is has_messages(cluster)
    keeper.release()
    assert other.call("acquire") is True
    other.release()


def test_a_key_that_moves_with_its_slot_is_given_back(
    callers: Callers, cluster_client: redis.RedisCluster, cluster: Cluster, place: Place
) -> None:
    if not has_messages(cluster):
        pytest.skip("no key lingers there")
    keeper = callers.contender(connect(callers, cluster), place.name, timeout=FAR_S, linger=0.3)
    assert keeper.call("acquire") is True
    keeper.release()
    place.move()
    wait_until(lambda: cluster_client.exists(place.name) == 0, "it is given back")


@pytest.mark.parametrize("is_held", [False, True], ids=["lingers", "held"])
def test_a_key_is_given_up_before_the_command_says_that_it_is_broken(
    callers: Callers,
    cluster_client: redis.RedisCluster,
    cluster: Cluster,
    place: Place,
    redislock: Command,
    is_held: bool,
) -> None:
    if not has_messages(cluster):
        pytest.skip("no key lingers there")
    keeper, other = (callers.contender(connect(callers, cluster), place.name, **LINGERS) for _ in range(2))
    assert keeper.call("acquire") is True
    if not is_held:
        keeper.release()
    holder = holders(cluster_client, place.name).holder
    assert holder is not None
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    outcome = redislock("break", place.name, "--token-id", holder.token_id, "--yes", "--json", "--url", url)
    assert (0, "") == (outcome.code, outcome.err)
    assert [(False, 0)] == [(one["handed_over"], one["remains_s"]) for one in outcome.objects]
    assert other.call("acquire", blocking=False) is True
    assert keeper.call("acquire", blocking=False) is False
    other.release()
    assert keeper.call("acquire", blocking_timeout=PATIENCE_S) is True
    keeper.release()
