"""The workload of `python -m bench throughput --mode options`: the package's locks with an option, beside plain ones.

One thread with each option; 16 threads and 100 tasks with `auto_renew`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from bench.contestants import LEASE_S, OURS, AbsentError, Contestant, libraries
from bench.measuring.rounds import Entrant, Scene
from bench.workloads import callers, single
from redislock_fast import AdaptiveTTL


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
    OURS: dict,
    "auto_renew": lambda: {"auto_renew": True},
    "reentrant": lambda: {"reentrant": True},
    "fencing": lambda: {"fencing": True},
    "on_lost": lambda: {"on_lost": lambda *_: None},
    "AdaptiveTTL": lambda: {"timeout": AdaptiveTTL(LEASE_S)},
    "metrics": lambda: {"metrics": _Counts()},
    "breaker": lambda: {"breaker": _breaker()},
}
NAMES = tuple(_SETTINGS)
"""A lock without options, and every option."""

_BY_MANY = (OURS, "auto_renew")


def find(name: str) -> Contestant:
    """Make the contestant of an option; raises `AbsentError` when a library that it needs is not installed."""
    return libraries.ours(name, _SETTINGS[name]())


def entrants_of(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the rows of a contestant."""
    entrants = [single.reused_by(contestant, scene)]
    if contestant.name in _BY_MANY:
        entrants += callers.of_threads(contestant, scene, (16,))
        entrants += callers.of_tasks(contestant, scene, "asyncio", (100,))
    return entrants
