"""The bench of batches over a cluster: what is measured is a batch's, near and delayed, and what bounds it.

Rules: on real servers, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.contestants import CheckFailedError
from bench.topology import DELAYS_S, NAMES, _Crew, open_cluster
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
        crew = _Crew(nodes, delay_s, closing)
        crew.check()
        sample = crew.measure(0.01)
        crew.check()
    assert (len(sample.latencies_s) % 2, len(crew.node_cpu_us)) == (0, 1)
    assert min(sample.pairs_per_s, sample.client_cpu_us or 0, *crew.node_cpu_us[0]) > 0


def test_a_key_that_was_left_fails_the_check(nodes: list[Any]) -> None:
    with ExitStack() as closing:
        crew = _Crew(nodes, 0.0, closing)
        slots = ((nodes[0].execute_command("CLUSTER", "KEYSLOT", name), name) for name in map(str, range(100)))
        _, name = min(slots)  # of the first node
        nodes[0].set(name, "x")
        with pytest.raises(CheckFailedError, match="left behind"):
            crew.check()
        nodes[0].delete(name)


@pytest.mark.parametrize(
    ("client_cpu_us", "node_cpu_us", "delay_s", "expected"),
    [
        (2.0, [0.5, 0.5], 0.0, (500_000, "client")),
        (0.5, [2.0, 0.5], 0.0, (500_000, "a node")),
        (1.0, [1.0, 1.0, 1.0], 0.0, (500_000, "2 CPUs")),
        (1.0, [1.0, 1.0], NAMES * 2e-6 / 4, (500_000, "network")),
    ],
)
def test_what_takes_longest_bounds_the_rate(
    nodes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    client_cpu_us: float,
    node_cpu_us: list[float],
    delay_s: float,
    expected: tuple[float, str],
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with ExitStack() as closing:
        bound = _Crew(nodes, delay_s, closing).bound(client_cpu_us, node_cpu_us)
    assert (round(bound.pairs_per_s), bound.what) == expected
