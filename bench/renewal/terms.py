"""The second table of `python -m bench renewal`: the cost of each option of a lock for an uncontended pair."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import redis

from bench import contestants
from bench.contestants import LEASE_S, AbsentError
from bench.measuring.costs import Meter
from bench.measuring.rounds import REUSED, Entrant, Sample, Scene
from bench.measuring.tables import TERM_COLUMNS as COLUMNS
from bench.workloads.single import pairs_reused
from redislock_fast import AdaptiveTTL, Lock

__all__ = ["COLUMNS", "NAMES", "PLAIN", "ROUND_S", "entrant"]

PLAIN = "plain"

ROUND_S = 0.25


class _Counts:
    """Metrics that cost little."""

    acquisitions = releases = 0

    def record_acquisition(self, *_: object) -> None:
        self.acquisitions += 1

    def record_release(self, *_: object) -> None:
        self.releases += 1


def _breaker() -> Any:
    if not find_spec("pybreaker"):
        raise AbsentError("pybreaker is not installed")
    import pybreaker  # noqa: PLC0415 - optional

    return pybreaker.CircuitBreaker()


_SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    PLAIN: dict,
    "auto_renew": lambda: {"auto_renew": True},
    "on_lost": lambda: {"on_lost": lambda *_: None},
    "fencing": lambda: {"fencing": True},
    "reentrant": lambda: {"reentrant": True},
    "AdaptiveTTL": lambda: {"timeout": AdaptiveTTL(LEASE_S)},
    "metrics": lambda: {"metrics": _Counts()},
    "breaker": lambda: {"breaker": _breaker()},
}
NAMES = tuple(_SETTINGS)
"""Every option, and a lock without options."""


def entrant(name: str, scene: Scene) -> Entrant:
    """Make the row of an option.

    Raises:
        AbsentError: when a library that it needs is not installed.
    """
    settings: dict[str, Any] = {"timeout": LEASE_S, **_SETTINGS[name]()}
    key = f"{scene.prefix}:{name}"
    lock, rival = (Lock(redis.Redis.from_url(scene.url), key, **settings) for _ in range(2))
    scene.closing.callback(_forget, scene.witness, key)
    return Entrant(
        name,
        name,
        REUSED,
        partial(_measure, lock, Meter(scene.witness)),
        lambda: contestants.check(key, lock, rival, scene.witness),
        limit=PLAIN,
    )


def _measure(lock: Lock, meter: Meter, seconds: float) -> Sample:
    """Acquire and release the lock, and measure the CPU time."""
    meter.start()
    began = time.perf_counter()
    sample = pairs_reused(lock.acquire, lock.release, seconds)
    pairs = round(sample.pairs_per_s * (time.perf_counter() - began))
    client_us, server_us = meter.read(pairs)
    return replace(sample, client_cpu_us=client_us, server_cpu_us=server_us)


def _forget(witness: redis.Redis, key: str) -> None:
    """Delete the lock and its other keys."""
    witness.delete(key, *witness.keys(f"*{{{key}}}*"))
