"""The bench of batches over a cluster: what is measured is a batch's, near and delayed.

Rules: on real servers, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.cluster import DELAYS_S, entrant, open_cluster
from bench.contestants import CheckFailedError
from bench.measuring import rounds
from redislock_fast.server import find_binary
from tests.conftest import absent


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Any]]:
    """A client of each node of a cluster without replicas."""
    if find_binary("valkey") is None:
        absent("no valkey server here")
    with open_cluster("valkey", 2) as admins:
        yield admins


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", DELAYS_S)
def test_a_batch_is_measured_on_every_node(nodes: list[Any], delay_s: float) -> None:
    with ExitStack() as closing:
        row = entrant(nodes, delay_s, closing)
        sample = rounds.sample(row, 0.01)
    assert row.count == len(nodes)
    assert len(sample.latencies_s) % 2 == 0
    assert min(sample.pairs_per_s, sample.client_cpu_us or 0, sample.server_cpu_us or 0) > 0


def test_a_key_that_was_left_fails_the_check(nodes: list[Any]) -> None:
    with ExitStack() as closing:
        row = entrant(nodes, 0.0, closing)
        slots = ((nodes[0].execute_command("CLUSTER", "KEYSLOT", name), name) for name in map(str, range(100)))
        _, name = min(slots)  # of the first node
        nodes[0].set(name, "x")
        with pytest.raises(CheckFailedError, match="left behind"):
            row.check()
        nodes[0].delete(name)
