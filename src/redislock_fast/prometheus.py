"""`install`: the metrics of all locks of the process for Prometheus, by `prometheus_client`.

See https://redislock-fast.github.io/redislock_fast/reference/metrics.html

import redislock_fast.prometheus
redislock_fast.prometheus.install()
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily

from redislock_fast._lease import metrics
from redislock_fast._observe.libraries import call_library
from redislock_fast._observe.recorder import BOUNDS_S, METRICS, Durations, Metric, Recorder, prefix_of
from redislock_fast._util import fork

__all__ = ["install", "uninstall"]

_installed: list[tuple[Recorder, _Output]] = []
_BOUNDS = (*map(str, BOUNDS_S), "+Inf")


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


class _Histogram:
    """A histogram of `Durations`: a lock adds to it in a third of the time that one of `prometheus_client` takes."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._of: dict[tuple[str, ...], tuple[Durations, float]] = {}
        fork.forget_in_child(self)

    def forget(self) -> None:
        """In a forked child: leave what was just observed to the parent."""
        for durations, _ in list(self._of.values()):
            durations.forget()

    def labels(self, *labels: str) -> Durations:
        return self._of.setdefault(labels, (Durations(), time.time()))[0]

    def describe(self) -> list[Any]:
        return [HistogramMetricFamily(self._metric.prometheus_name, self._metric.text, labels=self._metric.labels)]

    def collect(self) -> list[Any]:
        (family,) = families = self.describe()
        with_created = _exposes_created()
        for labels, (durations, created_at) in list(self._of.items()):
            numbers, sum_s = durations.read()
            family.add_metric(labels, list(zip(_BOUNDS, accumulate(numbers), strict=True)), sum_s)
            if with_created:
                of = dict(zip(self._metric.labels, labels, strict=True))
                family.add_sample(f"{self._metric.prometheus_name}_created", of, created_at)
        return families


def _exposes_created() -> bool:
    """Whether the program has `prometheus_client` expose when each of its metrics was made."""
    return any(
        sample.name == "any_created"
        for family in Counter("any", "", registry=None).collect()
        for sample in family.samples
    )


class _Output:
    """The metrics in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.sets_gauges = _is_multiprocess()
        self.refreshing = _Refreshing()
        self._metrics: dict[Metric, Any] = {}
        registry.register(self.refreshing)
        try:
            for metric in METRICS:
                self._metrics[metric] = _made(metric, registry)
        except BaseException:
            self.end()
            raise

    def observer(self, metric: Metric, labels: tuple[str, ...]) -> Callable[[float], object]:
        histogram = self._metrics[metric]
        if isinstance(histogram, _Histogram):  # it has no mutex
            return histogram.labels(*labels).observe
        return partial(call_library, self._observe, metric, labels)

    def _observe(self, metric: Metric, labels: tuple[str, ...], seconds: float) -> None:
        self._metrics[metric].labels(*labels).observe(seconds)

    def count(self, metric: Metric, labels: tuple[str, ...], number: int = 1) -> None:
        call_library(self._increase, metric, labels, number)

    def _increase(self, metric: Metric, labels: tuple[str, ...], number: int) -> None:
        self._metrics[metric].labels(*labels).inc(number)

    def set(self, metric: Metric, labels: tuple[str, ...], value: int) -> None:
        self._metrics[metric].labels(*labels).set(value)

    def end(self) -> None:
        """Remove the metrics from the registry."""
        for collector in (self.refreshing, *self._metrics.values()):
            self._registry.unregister(collector)


def _is_multiprocess() -> bool:
    """Whether another process reads the values of this one, from files of `prometheus_client`."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ


def _made(metric: Metric, registry: CollectorRegistry) -> Any:
    name = metric.prometheus_name
    if metric.kind == "histogram" and _is_multiprocess():
        return Histogram(name, metric.text, metric.labels, registry=registry, buckets=BOUNDS_S)
    if metric.kind == "histogram":
        histogram = _Histogram(metric)
        registry.register(histogram)
        return histogram
    if metric.kind == "counter":
        return Counter(name, metric.text, metric.labels, registry=registry)
    return Gauge(name, metric.text, metric.labels, registry=registry, multiprocess_mode="livesum")


def install(registry: CollectorRegistry | None = None, name_template: Callable[[str], str] = prefix_of) -> None:
    """Have all locks that are made from now on recorded for Prometheus. Called again, it replaces what it installed.

    Sends nothing, and starts no thread: the program exposes the registry, as its other metrics.

    Args:
        registry: where the metrics are registered; None: `prometheus_client.REGISTRY`.
        name_template: maps the name of a lock to the label `name`. By default, it is the part before the first `:` or
            `{`. A name for each lock would never end: after 100 values, the label is "other".

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
