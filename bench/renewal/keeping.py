"""The first table of `python -m bench renewal`: what it costs to keep many locks renewed.

Rules: acquiring and releasing lie outside what is counted, and so does looking for the lease that came closest to its
end, which costs the server something.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import redis

from bench.costs import server_cpu_s
from bench.renewal.keepers import Keeper
from bench.rounds import Scene
from bench.tables import Column

_RENEWAL_COMMANDS = ("set", "evalsha", "eval")
_LOOKS = 40  # in a ttl, for the lease that has least left
_LEAST_TTL = Path(__file__).with_name("least_ttl.lua").read_text()

COLUMNS = (
    Column("contestant", str, ("contestant",)),
    Column("locks of", str, ("kind",)),
    Column("client\n% of a core", "{:.1f}".format, ("client_cpu_percent",)),
    Column("client us\na renewal", "{:.1f}".format, ("client_cpu_us",)),
    Column("server\n% of a core", "{:.1f}".format, ("server_cpu_percent",)),
    Column("renewals/s", "{:,.0f}".format, ("renewals_per_s",)),
    Column("least left\n% of the ttl", "{:.0f}".format, ("least_left_percent",)),
    Column("lost", str, ("lost",)),
)


def measure(keeper: Keeper, scene: Scene, locks: int, ttl_s: float, seconds: float) -> dict[str, Any]:
    """Hold so many locks, and say what that costs.

    Args:
        keeper: who renews them.
        scene: where.
        locks: how many.
        ttl_s: their timeout.
        seconds: for how long to count.
    """
    names = [f"{scene.prefix}:{number}" for number in range(locks)]
    witness = scene.witness
    with keeper(scene.url, names, ttl_s):
        time.sleep(ttl_s / 3)  # until they are renewed for the first time
        gc.collect()
        renewals, server_s = _renewals(witness), server_cpu_s(witness)
        client_s, began = time.process_time(), time.perf_counter()
        time.sleep(seconds)
        client_s, elapsed_s = time.process_time() - client_s, time.perf_counter() - began
        renewals, server_s = _renewals(witness) - renewals, server_cpu_s(witness) - server_s
        least_left_ms, lost = _least_left_ms(scene, locks, ttl_s)
    return {
        "locks": locks,
        "ttl_s": ttl_s,
        "client_cpu_percent": 100 * client_s / elapsed_s,
        "client_cpu_us": 1e6 * client_s / renewals if renewals else None,
        "server_cpu_percent": 100 * server_s / elapsed_s,
        "renewals_per_s": renewals / elapsed_s,
        "least_left_percent": least_left_ms / ttl_s / 10,
        "lost": lost,
    }


def _renewals(witness: redis.Redis) -> int:
    """How many commands by which locks are renewed the server has executed."""
    calls = witness.info("commandstats")
    return sum(calls.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in _RENEWAL_COMMANDS)


def _least_left_ms(scene: Scene, locks: int, ttl_s: float) -> tuple[float, int]:
    """What was left, within one ttl, of the lease that came closest to its end, and how many were lost."""
    looks = []
    lost = 0
    for _ in range(_LOOKS):
        least_ms, missing = scene.witness.eval(_LEAST_TTL, 0, f"{scene.prefix}:", locks)
        looks.append(0 if missing else least_ms)
        lost = max(lost, missing)
        time.sleep(ttl_s / _LOOKS)
    return float(min(looks)), lost
