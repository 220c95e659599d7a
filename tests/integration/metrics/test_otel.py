"""The metrics for OpenTelemetry, and for Prometheus in several processes: the same values, found without a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from redis.exceptions import LockNotOwnedError

import redislock_fast.otel
import redislock_fast.prometheus
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, run_script
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, LATE, until_queued
from tests.support.worlds import World

Points = dict[str, list[Any]]

REASONS = ("expired", "taken", "deleted", "server_gone", "stalled")


@pytest.fixture
def reader() -> InMemoryMetricReader:
    """Reads what the provider is told."""
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> MeterProvider:
    """A meter provider of the test's own."""
    return MeterProvider([reader])


@pytest.fixture
def recorded(reader: InMemoryMetricReader, provider: MeterProvider) -> Iterator[Callable[[], Points]]:
    """A function that returns what was recorded of the test's locks until now, by metric."""
    redislock_fast.otel.install(provider)

    def read() -> Points:
        data = reader.get_metrics_data()
        metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        return {metric.name: list(metric.data.data_points) for metric in metrics}

    yield read
    redislock_fast.otel.uninstall()
    provider.shutdown()


def test_a_contended_lock_is_recorded(
    recorded: Callable[[], Points], holders: Holders, valkey: Server, connect: Connect
) -> None:
    holder = holders.hold(valkey.port, "name:1", **LATE)
    answer = holders.make(valkey.port, "name:1", **LATE).acquire()
    until_queued(connect(valkey.port), "name:1", 1)
    gauges = recorded()
    assert [(point.value, point.attributes) for point in gauges["redislock.held"]] == [
        (1, {"name": "name", "kind": "lock"})
    ]
    assert [(point.value, point.attributes) for point in gauges["redislock.waiting"]] == [
        (1, {"name": "name", "kind": "lock"})
    ]
    holder.release()
    assert answer.result(PATIENCE_S) is True
    points = recorded()
    assert [point.value for point in points["redislock.waiting"]] == [0]
    assert [point.value for point in points["redislock.handovers"]] == [1]
    assert [point.attributes for point in points["redislock.waits"]] == [
        {"name": "name", "kind": "lock", "mode": "queue"}
    ]
    (acquired,) = points["redislock.acquire.duration"]
    assert (acquired.count, acquired.attributes) == (2, {"name": "name", "kind": "lock", "result": "acquired"})
    assert acquired.explicit_bounds[0] == 0.0005
    assert [point.count for point in points["redislock.hold.duration"]] == [1]
    assert {point.attributes["reason"]: point.value for point in points["redislock.lost"]} == dict.fromkeys(REASONS, 0)
    assert [point.value for point in points["redislock.renewal.failures"]] == [0]


def test_both_outputs_may_be_used_at_once(recorded: Callable[[], Points], holders: Holders, valkey: Server) -> None:
    registry = CollectorRegistry()
    redislock_fast.prometheus.install(registry)
    holders.hold(valkey.port, timeout=FAR_S)
    redislock_fast.prometheus.uninstall()
    assert [point.value for point in recorded()["redislock.held"]] == [1]
    assert registry.get_sample_value("redislock_held", {"name": "name", "kind": "lock"}) is None


def test_what_is_installed_again_records_by_the_new_names(
    recorded: Callable[[], Points], provider: MeterProvider, world: World, valkey: Server, connect: Connect
) -> None:
    """The first lock may have found the provider before the program chooses the names."""
    admin = connect(valkey.port)

    def held_by_name() -> dict[str, int]:
        return {point.attributes["name"]: point.value for point in recorded()["redislock.held"]}

    def lose(lock: Any) -> None:
        admin.delete(lock.name)
        with pytest.raises(LockNotOwnedError):
            lock.release()

    before = world.lock(world.connect(valkey.port), "name:1", timeout=FAR_S)
    before.acquire()
    redislock_fast.otel.install(provider, lambda name: name)
    after = [world.lock(world.connect(valkey.port), name, timeout=FAR_S) for name in ("name", "name:2")]
    for lock in after:
        lock.acquire()
    assert held_by_name() == {"name": 2, "name:2": 1}
    for lock in (before, *after):
        lose(lock)
    assert held_by_name() == {"name": 0, "name:2": 0}
    points = recorded()
    assert {(point.attributes["name"], point.value) for point in points["redislock.lost"] if point.value} == {
        ("name", 2),
        ("name:2", 1),
    }
    assert {point.attributes["name"]: point.count for point in points["redislock.hold.duration"]} == {
        "name": 2,
        "name:2": 1,
    }


PROGRAM = """
import sys

import redis
import redislock_fast

client = redis.Redis(port=int(sys.argv[1]))
early = redislock_fast.Lock(client, "early")

from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

unset = redislock_fast.Lock(client, "unset")
reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
{chosen}
for lock in (early, unset, redislock_fast.Lock(client, "name:1", timeout=10)):
    with lock:
        pass
data = reader.get_metrics_data()
points = [
    (metric.name, point.attributes["name"])
    for of_resource in (data.resource_metrics if data else [])
    for of_scope in of_resource.scope_metrics
    for metric in of_scope.metrics
    for point in metric.data.data_points
]
print(sorted(set(points)))
"""


def _printed(port: int, chosen: str = "") -> str:
    result = run_script(PROGRAM.format(chosen=chosen), port)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


RECORDED = [
    ("redislock.acquire.duration", "name"),
    ("redislock.held", "name"),
    ("redislock.hold.duration", "name"),
    ("redislock.lost", "name"),
    ("redislock.renewal.failures", "name"),
]


def test_locks_that_are_made_once_a_provider_is_set_are_recorded(valkey: Server) -> None:
    assert _printed(valkey.port) == str(RECORDED)


def test_a_program_may_choose_the_names(valkey: Server) -> None:
    chosen = "import redislock_fast.otel; redislock_fast.otel.install(name_template=lambda name: name[:2])"
    assert _printed(valkey.port, chosen) == str([(metric, "na") for metric, _ in RECORDED])


def test_a_program_may_choose_the_names_once_a_lock_is_recorded(valkey: Server) -> None:
    chosen = "redislock_fast.Lock(client, 'first')\nimport redislock_fast.otel\n"
    chosen += "redislock_fast.otel.install(name_template=lambda name: name[:2])"
    assert _printed(valkey.port, chosen) == str([(metric, "na") for metric, _ in RECORDED])


PROGRAM_THAT_INSTALLS_FIRST = """
import sys

import redis
import redislock_fast
import redislock_fast.otel
from opentelemetry.metrics import get_meter_provider, set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

client = redis.Redis(port=int(sys.argv[1]))


def take(name):
    lock = redislock_fast.Lock(client, name, timeout=10)
    lock.acquire()
    return lock


redislock_fast.otel.install()
held = [take("before")]
reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
redislock_fast.otel.install()
held.append(take("after"))
redislock_fast.otel.install(get_meter_provider())
held.append(take("last"))
(of_scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
(gauge,) = [metric for metric in of_scope.metrics if metric.name == "redislock.held"]
print([(point.attributes["name"], point.value) for point in gauge.data.data_points])
for lock in held:
    lock.release()
"""


def test_what_is_installed_before_and_after_a_provider_is_set_records_all(valkey: Server) -> None:
    result = run_script(PROGRAM_THAT_INSTALLS_FIRST, valkey.port)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.strip() == str([("before", 1), ("after", 1), ("last", 1)])


def test_a_program_may_switch_the_metrics_off(valkey: Server) -> None:
    off = "import redislock_fast.otel; redislock_fast.otel.uninstall()"
    assert _printed(valkey.port, off) == "[]"


# Several processes: the files of prometheus_client have each value at once


PROGRAM_OF_PROCESSES = """
import os
import sys

os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[2]

import redis
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

import redislock_fast
import redislock_fast.prometheus


def show():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    of = {"name": "name", "kind": "lock"}
    print(
        registry.get_sample_value("redislock_held", of),
        registry.get_sample_value("redislock_acquire_duration_seconds_count", {**of, "result": "acquired"}),
        registry.get_sample_value("redislock_hold_duration_seconds_bucket", {**of, "le": "300.0"}),
        registry.get_sample_value("redislock_lost_total", {**of, "reason": "expired"}),
    )


redislock_fast.prometheus.install(CollectorRegistry())
client = redis.Redis(port=int(sys.argv[1]))
first, second = (redislock_fast.Lock(client, f"name:{number}", timeout=10) for number in range(2))
first.acquire()
second.acquire()
show()
first.release()
show()
second.release()
show()
"""


def test_the_files_have_each_value_at_once(valkey: Server, tmp_path: Path) -> None:
    result = run_script(PROGRAM_OF_PROCESSES, valkey.port, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["2.0 2.0 None 0.0", "1.0 2.0 1.0 0.0", "0.0 2.0 2.0 0.0"]
