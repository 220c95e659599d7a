"""Batches over the nodes of a cluster: each lock is asked for once, at its own node, and slots may move meanwhile.

Rules: those of `clusters.py`; each test runs for threads and for tasks. Must not know: how the client finds the nodes.
"""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast import Locker, asyncio
from tests.clusters import Cluster, connect
from tests.helpers import PATIENCE_S
from tests.waiting_helpers import FAR_S, Callers, Threads


@pytest.fixture
def fast(callers: Callers, cluster: Cluster) -> Any:
    """A client of the cluster, for threads and tasks in turn."""
    return connect(callers, cluster)


def acquire_many(callers: Callers, client: Any, names: list[str]) -> Any:
    """A batch that holds all these locks."""
    locker: Any = Locker(client) if isinstance(callers, Threads) else asyncio.Locker(client)
    batch = locker.acquire_many(names, timeout=FAR_S)
    if not isinstance(callers, Threads):
        batch = callers.submit(_awaited(batch)).result(PATIENCE_S)  # type: ignore[attr-defined]
    assert batch.acquired == names
    return batch


def call(callers: Callers, batch: Any, verb: str, *args: Any) -> Any:
    """What a method of the batch returns or raises."""
    result = getattr(batch, verb)(*args)
    return result if isinstance(callers, Threads) else callers.submit(_awaited(result)).result(PATIENCE_S)  # type: ignore[attr-defined]


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


def test_each_lock_is_asked_for_once_and_at_its_own_node(callers: Callers, fast: Any, cluster: Cluster) -> None:
    names = [cluster.name() for _ in range(300)]
    call(callers, acquire_many(callers, fast, names), "release")  # connects
    admins = [cluster.admins[number] for number in cluster.primaries()]
    for admin in admins:
        admin.config_resetstat()
    batch = acquire_many(callers, fast, names)
    held = [sum(key.decode() in names for key in admin.keys("name-*")) for admin in admins]
    assert (sum(held), min(held) > 0) == (len(names), True)
    assert held == [admin.info("commandstats")["cmdstat_set"]["calls"] for admin in admins]
    assert call(callers, batch, "release") == dict.fromkeys(names, True)
    for admin, count in zip(admins, held, strict=True):
        sent = {name.removeprefix("cmdstat_"): row["calls"] for name, row in admin.info("commandstats").items()}
        assert count == sum(sent.get(name, 0) for name in ("delifeq", "delex", "evalsha", "eval"))
        assert not admin.info("errorstats")


def test_batches_are_taken_and_given_back_while_slots_move(callers: Callers, fast: Any, cluster: Cluster) -> None:
    leaving, arriving, moved = ([cluster.place() for _ in range(3)] for _ in range(3))
    places = [*leaving, *arriving, *moved]
    names = [*(place.name for place in places), *(cluster.name() for _ in range(20))]
    for place in [*leaving, *arriving]:
        place.begin_move()
    batch = acquire_many(callers, fast, names)
    for place in arriving:
        place.end_move()
    for place in moved:
        place.move()
    assert call(callers, batch, "extend", 10) == dict.fromkeys(names, True)
    for place in leaving:
        place.end_move()
    assert call(callers, batch, "release") == dict.fromkeys(names, True)
    assert not any(cluster.admins[place.away].exists(place.name) for place in places)
