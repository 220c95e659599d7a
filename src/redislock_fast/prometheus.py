"""`install`: the metrics of all locks of the process for Prometheus, by `prometheus_client`.

See https://redislock-fast.github.io/redislock_fast/reference/metrics.html

import redislock_fast.prometheus
redislock_fast.prometheus.install()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from redislock_fast._lease import metrics
from redislock_fast._lease.recorder import BOUNDS_S, METRICS, Metric, Recorder, prefix_of

__all__ = ["install", "uninstall"]

_installed: list[tuple[Recorder, _Output]] = []


class _Refreshing:
    """Has the gauges set whenever the registry is read. It is registered before them, and has no metric itself."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> list[Any]:
        if self.recorder is not None:
            self.recorder.refresh()
        return []


class _Output:
    """The metrics in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.refreshing = _Refreshing()
        registry.register(self.refreshing)
        self._metrics: dict[Metric, Any] = {metric: _made(metric, registry) for metric in METRICS}

    def observe(self, metric: Metric, labels: Sequence[str], value: float) -> None:
        self._metrics[metric].labels(*labels).observe(value)

    def count(self, metric: Metric, labels: Sequence[str], number: int = 1) -> None:
        self._metrics[metric].labels(*labels).inc(number)

    def set(self, metric: Metric, labels: Sequence[str], value: int) -> None:
        self._metrics[metric].labels(*labels).set(value)

    def end(self) -> None:
        """Remove the metrics from the registry."""
        for collector in (self.refreshing, *self._metrics.values()):
            self._registry.unregister(collector)


def _made(metric: Metric, registry: CollectorRegistry) -> Any:
    name = metric.prometheus_name
    if metric.kind == "histogram":
        return Histogram(name, metric.text, metric.labels, registry=registry, buckets=BOUNDS_S)
    if metric.kind == "counter":
        return Counter(name, metric.text, metric.labels, registry=registry)
    return Gauge(name, metric.text, metric.labels, registry=registry, multiprocess_mode="livesum")


def install(registry: CollectorRegistry | None = None, name_template: Callable[[str], str] = prefix_of) -> None:
    """Have all locks that are made from now on recorded for Prometheus. Called again, it replaces what it installed.

    Sends nothing, and starts no thread: the program exposes the registry, as its other metrics.

    Args:
        registry: where the metrics are registered; None: `prometheus_client.REGISTRY`.
        name_template: makes the label `name` of a lock's name. By default, it is the part before the first `:` or `{`.
            A name for each lock would never end: after 100 values, the label is "other".

    Raises:
        ValueError: the registry has metrics of these names, which are not of this module.
    """
    uninstall()
    output = _Output(prometheus_client.REGISTRY if registry is None else registry)
    output.refreshing.recorder = recorder = Recorder(output, name_template)
    _installed.append((recorder, output))
    metrics.install(recorder)


def uninstall() -> None:
    """Remove the metrics from their registry. Locks that are made from now on are not recorded."""
    while _installed:
        recorder, output = _installed.pop()
        metrics.uninstall(recorder)
        output.end()
