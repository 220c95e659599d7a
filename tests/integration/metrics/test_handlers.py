"""A signal handler that uses a lock while its thread is inside of a metrics library, which has mutexes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from redislock_fast.server import Server
from tests.support.helpers import run_script

PROGRAM = """
import os
import sys

if sys.argv[2] == "files":
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[3]

import prometheus_client.metrics
import prometheus_client.values
import redis
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics._internal import _view_instrument_match, aggregation
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

import redislock_fast.otel
import redislock_fast.prometheus
from redislock_fast import Lock, LockNotOwnedError
from tests.support.interrupts import handled_at

if sys.argv[2] == "otel":
    reader = InMemoryMetricReader()
    redislock_fast.otel.install(MeterProvider([reader]))
    files = _view_instrument_match.__file__, aggregation.__file__
else:
    registry = CollectorRegistry()
    redislock_fast.prometheus.install(registry)
    files = prometheus_client.metrics.__file__, prometheus_client.values.__file__
client = redis.Redis(port=int(sys.argv[1]))


def lose(name):
    lock = Lock(client, name, timeout=60)
    lock.acquire()
    client.delete(name)
    try:
        lock.release()
    except LockNotOwnedError:
        pass


def values():
    of = {"name": "name", "kind": "lock"}
    if sys.argv[2] == "otel":
        metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        points = {metric.name: metric.data.data_points for metric in metrics}
        return points["redislock.held"][0].value, points["redislock.hold.duration"][0].count
    read = registry
    if sys.argv[2] == "files":
        read = CollectorRegistry()
        MultiProcessCollector(read)
    held = read.get_sample_value("redislock_held", of)
    return held, read.get_sample_value("redislock_lost_total", {**of, "reason": "deleted"})


number = 1
while handled_at(number, lambda: lose("name:1"), lambda: lose("name:2"), *files):
    number += 1
held, lost = values()
print(number > 10, held, lost - 2 * number)
"""


@pytest.mark.slow
@pytest.mark.parametrize("output", ["otel", "registry", "files"])
def test_a_handler_at_any_place_of_a_library_waits_for_nothing(valkey: Server, tmp_path: Path, output: str) -> None:
    result = run_script(PROGRAM, valkey.port, output, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.replace(".0", "").split() == ["True", "0", "-1"]
