"""The workload of `python -m bench throughput --mode options`: the package's locks with an option, beside plain ones.

One thread with each option, 16 threads and 100 tasks with `auto_renew`.
"""

from __future__ import annotations

import redis

from bench.contestants import AUTO_RENEW, OURS, Contestant
from bench.measuring.rounds import REUSED, Entrant, Scene
from bench.workloads import single, tasks, threads


def entrants_of(contestant: Contestant, scene: Scene) -> list[Entrant]:
    """Make the rows of a contestant. Their ratios are taken to the plain lock in the same workload."""
    entrants = [entrant for entrant in single.entrants_of(contestant, scene) if entrant.workload == REUSED]
    if contestant.name in (OURS, AUTO_RENEW):
        entrants += threads.entrants_of(contestant, scene, counts=(16,))
        entrants += tasks.entrants_of(contestant, scene, "asyncio", counts=(100,))
    for entrant in entrants:
        entrant.limit = OURS
    scene.closing.callback(_forget, scene.witness, scene.prefix)
    return entrants


def _forget(witness: redis.Redis, name: str) -> None:
    """Delete the other keys of the locks, such as the fencing numbers."""
    left = witness.keys(f"*{{{name}}}*")
    if left:
        witness.delete(*left)
