"""A program whose instructions are counted: `python -m bench.guard.counted URL NAME PAIRS`.

It takes and releases locks with the package that it finds, one after the other, and ends. It runs on one processor, so
that the package does not spin while it waits for a reply: a spin takes another number of instructions each time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import redis
import redis.asyncio

NAME = "bench:counted"
LEASE_S = 10
TASKS = 100


def _meter_provider() -> Any:
    """A provider with a reader: without one, it would drop what it gets."""
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - optional
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: PLC0415

    return MeterProvider([InMemoryMetricReader()])


def _registry() -> Any:
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 - optional

    return CollectorRegistry()


METRICS: Mapping[str, Callable[[], Any]] = {"otel": _meter_provider, "prometheus": _registry}
"""Where the metrics of locks go, by the module of ours that gives them."""


def _threads(settings: Mapping[str, Any], url: str, pairs: int) -> None:
    from redislock_fast import Lock  # noqa: PLC0415 - once the processors are chosen

    lock = Lock(redis.Redis.from_url(url), NAME, timeout=LEASE_S, **settings)
    for _ in range(pairs):
        if not lock.acquire():
            raise RuntimeError("a free lock was not acquired")
        lock.release()


def _tasks(count: int, settings: Mapping[str, Any], url: str, pairs: int) -> None:
    from redislock_fast.asyncio import Lock  # noqa: PLC0415 - as above

    async def work(lock: Lock) -> None:
        for _ in range(pairs // count):
            if not await lock.acquire():
                raise RuntimeError("a free lock was not acquired")
            await lock.release()

    async def all_of_them() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            locks = [Lock(client, f"{NAME}:{index}", timeout=LEASE_S, **settings) for index in range(count)]
            await asyncio.gather(*map(work, locks))

    asyncio.run(all_of_them())


def _observed(metrics: str, work: Callable[[str, int], None], url: str, pairs: int) -> None:
    """Do the work with our metrics for that library."""
    module = import_module(f"redislock_fast.{metrics}")
    module.install(METRICS[metrics]())
    work(url, pairs)


_LIMIT: Mapping[str, Any] = {"blocking_timeout": 5}
WORKLOADS: Mapping[str, tuple[str, Callable[[str, int], None]]] = {
    "reused": ("1 thread", partial(_threads, {})),
    "limit": ("1 thread, blocking_timeout", partial(_threads, _LIMIT)),
    "renewed": ("1 thread, auto_renew", partial(_threads, {"auto_renew": True})),
    "linger": ("1 thread, linger", partial(_threads, {"linger": 1.0})),
    "task": ("1 task", partial(_tasks, 1, {})),
    "tasks": (f"{TASKS} tasks", partial(_tasks, TASKS, {})),
    "tasks-limit": (f"{TASKS} tasks, blocking_timeout", partial(_tasks, TASKS, _LIMIT)),
    "otel": ("1 thread, OpenTelemetry", partial(_observed, "otel", partial(_threads, {}))),
    "prometheus": ("1 thread, Prometheus", partial(_observed, "prometheus", partial(_threads, {}))),
    "tasks-otel": (f"{TASKS} tasks, OpenTelemetry", partial(_observed, "otel", partial(_tasks, TASKS, {}))),
    "tasks-prometheus": (f"{TASKS} tasks, Prometheus", partial(_observed, "prometheus", partial(_tasks, TASKS, {}))),
}
"""The title and the program of each, by the name that `--only` has for it."""


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    WORKLOADS[sys.argv[2]][1](sys.argv[1], int(sys.argv[3]))
