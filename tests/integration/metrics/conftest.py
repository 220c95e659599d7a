"""Fixtures of the tests of metrics: a registry in which the metrics are, and its values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

import redislock_fast.prometheus
from tests.support.helpers import wait_until


class Exposed:
    """The values of a registry.

    Attributes:
        registry: the registry.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def value(self, metric: str, name: str = "name", **labels: str) -> float:
        """The value of a metric, of locks without the label `kind`; 0 where it has not been recorded."""
        return self.registry.get_sample_value(f"redislock_{metric}", {"name": name, "kind": "lock", **labels}) or 0.0

    def acquired(self, result: str = "acquired", **labels: str) -> float:
        """How many acquires had this result."""
        return self.value("acquire_duration_seconds_count", result=result, **labels)

    @property
    def held(self) -> float:
        """How many locks are held."""
        return self.value("held")

    def until(self, metric: str, value: float, name: str = "name", **labels: str) -> None:
        """Return once the metric has the value."""
        wait_until(lambda: self.value(metric, name, **labels) == value, f"{metric} is {value}")


@pytest.fixture
def exposed() -> Iterator[Exposed]:
    """The metrics of locks that the test makes, in a registry of its own."""
    made = Exposed()
    redislock_fast.prometheus.install(made.registry)
    yield made
    redislock_fast.prometheus.uninstall()
