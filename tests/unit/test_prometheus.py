"""Histograms of ours are exposed as those of `prometheus_client` are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

import redislock_fast.prometheus
from redislock_fast._observe.recorder import ACQUIRE, BOUNDS_S
from redislock_fast.prometheus import _Histogram

switch: Any = prometheus_client
VALUES = (0.0, 0.0005, 0.00051, 0.3, 299.5, 300.0, 301.0)


@pytest.fixture(params=[True, False], ids=["created", "not created"])
def exposes_created(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether the program has it expose when metrics were made."""
    if not request.param:
        switch.disable_created_metrics()
    yield
    switch.enable_created_metrics()


@pytest.mark.usefixtures("exposes_created")
@pytest.mark.parametrize("generate", [generate_latest, generate_openmetrics])
def test_a_histogram_is_exposed_as_one_of_prometheus_client(
    monkeypatch: pytest.MonkeyPatch, generate: Callable[[CollectorRegistry], bytes]
) -> None:
    monkeypatch.setattr("time.time", lambda: 1234.5)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = _Histogram(ACQUIRE)
    ours.register(histogram)
    reference = Histogram(ACQUIRE.prometheus_name, ACQUIRE.text, ACQUIRE.labels, registry=theirs, buckets=BOUNDS_S)
    assert generate(ours) == generate(theirs)
    for made in (histogram, reference):
        made.labels("a", "lock", "acquired")
        for value in VALUES:
            made.labels("b", "lock", "error").observe(value)
    assert generate(ours) == generate(theirs)
    with pytest.raises(ValueError, match="Duplicated"):
        ours.register(_Histogram(ACQUIRE))


def test_an_install_that_fails_leaves_nothing_in_the_registry() -> None:
    registry = CollectorRegistry()
    theirs = Gauge("redislock_held", "of the program", registry=registry)
    with pytest.raises(ValueError, match="redislock_held"):
        redislock_fast.prometheus.install(registry)
    assert [family.name for family in registry.collect()] == ["redislock_held"]
    registry.unregister(theirs)
    redislock_fast.prometheus.install(registry)
    redislock_fast.prometheus.uninstall()
