"""A program with the tracer of a vendor: prints what it has recorded of a lock of redis-py's and of one of ours.

Its arguments: "sentry_sdk", "ddtrace" or "redis.observability" (redis-py's own metrics), the port of the server,
"threads" or "asyncio". None of them can be taken out again as it was, so this is a program of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio

Record = tuple[str, dict[str, Any]]


def sentry() -> Callable[[Callable[[], None]], list[Record]]:
    """Start it. Returns a function that gives what is recorded while another one runs."""
    import sentry_sdk
    from sentry_sdk.integrations.redis import RedisIntegration

    transactions: list[Any] = []
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        traces_sample_rate=1.0,
        integrations=[RedisIntegration()],
        default_integrations=False,
        before_send_transaction=lambda event, _: transactions.append(event),
    )

    def record(work: Callable[[], None]) -> list[Record]:
        transactions.clear()
        with sentry_sdk.start_transaction(name="test"):
            work()
        keys = ("db.system", "db.name", "server.address", "server.port")
        return [
            (span["description"].split()[0], {"op": span["op"], **{key: span["data"].get(key) for key in keys}})
            for span in transactions[0]["spans"]
        ]

    return record


def datadog() -> Callable[[Callable[[], None]], list[Record]]:
    """Start it, as `sentry` does."""
    import ddtrace
    from ddtrace.trace import TraceFilter, tracer

    recorded: list[Any] = []

    class Keep(TraceFilter):
        def process_trace(self, trace: list[Any]) -> None:
            recorded.extend(trace)

    tracer.configure(trace_processors=[Keep()])
    ddtrace.patch(redis=True)

    def record(work: Callable[[], None]) -> list[Record]:
        recorded.clear()
        work()
        keys = ("out.host", "db.system", "component")
        spans = sorted(recorded, key=lambda span: span.start_ns)
        return [(span.resource.split()[0], {key: span.get_tag(key) for key in keys}) for span in spans]

    return record


def redis_pys_metrics() -> Callable[[Callable[[], None]], list[Record]]:
    """Start them, as `sentry` does."""
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
    from redis.observability.config import MetricGroup, OTelConfig
    from redis.observability.providers import get_observability_instance

    reader = InMemoryMetricReader(preferred_temporality={Histogram: AggregationTemporality.DELTA})
    metrics.set_meter_provider(MeterProvider([reader]))
    get_observability_instance().init(OTelConfig(metric_groups=[MetricGroup.COMMAND]))

    def record(work: Callable[[], None]) -> list[Record]:
        reader.get_metrics_data()
        work()
        recorded: Any = reader.get_metrics_data()
        points = [
            dict(point.attributes)
            for resource in recorded.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == "db.client.operation.duration"
            for point in metric.data.data_points
            for _ in range(point.count)
        ]
        return [(point.pop("db.operation.name"), point) for point in points]

    return record


VENDORS = {"sentry_sdk": sentry, "ddtrace": datadog, "redis.observability": redis_pys_metrics}


def main() -> None:
    """Print the records of both locks, as JSON."""
    vendor, port, kind = sys.argv[1:]
    record = VENDORS[vendor]()
    import redislock_fast
    import redislock_fast.asyncio

    def in_threads(lock_class: Any) -> None:
        with redis.Redis(port=int(port)) as client, client.lock("name", timeout=10, lock_class=lock_class):
            pass

    async def in_a_task(lock_class: Any) -> None:
        client = redis.asyncio.Redis(port=int(port))
        async with client.lock("name", timeout=10, lock_class=lock_class):
            pass
        await client.aclose()

    classes = (redis.lock.Lock, redislock_fast.Lock)
    works: list[Callable[[], None]] = [lambda class_=class_: in_threads(class_) for class_ in classes]  # type: ignore[misc]
    if kind == "asyncio":
        async_classes = (redis.asyncio.lock.Lock, redislock_fast.asyncio.Lock)
        works = [lambda class_=class_: asyncio.run(in_a_task(class_)) for class_ in async_classes]  # type: ignore[misc]
    works[0]()  # redis-py loads its script
    print(json.dumps([record(work) for work in works]))


if __name__ == "__main__":
    main()
