"""The first table of `python -m bench renewal`: the cost of keeping many locks renewed.

Acquires and releases are not counted, and neither is the search for the lease that comes closest to its end.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import redis

from bench.measuring.costs import server_cpu_s
from bench.measuring.rounds import Scene
from bench.measuring.tables import Column
from bench.renewal.holders import Holder

_RENEWAL_COMMANDS = ("set", "evalsha", "eval")
_SEARCHES = 40  # in a ttl, for the lease with the shortest rest
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


def measure(holder: Holder, scene: Scene, locks: int, ttl_s: float, seconds: float) -> dict[str, Any]:
    """Measure the cost of locks that are held and renewed.

    Args:
        holder: holds and renews the locks.
        scene: of the measurement.
        locks: their number.
        ttl_s: their timeout, in seconds.
        seconds: how long to measure.
    """
    names = [f"{scene.prefix}:{number}" for number in range(locks)]
    witness = scene.witness
    with holder(scene.url, names, ttl_s):
        time.sleep(ttl_s / 3)  # until the first renewal of each lock
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
    """The number of renewal commands that the server has executed."""
    calls = witness.info("commandstats")
    return sum(calls.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in _RENEWAL_COMMANDS)


def _least_left_ms(scene: Scene, locks: int, ttl_s: float) -> tuple[float, int]:
    """The shortest rest of a lease within one ttl, and how many leases were lost."""
    rests_ms = []
    lost = 0
    for _ in range(_SEARCHES):
        least_ms, missing = scene.witness.eval(_LEAST_TTL, 0, f"{scene.prefix}:", locks)
        rests_ms.append(0 if missing else least_ms)
        lost = max(lost, missing)
        time.sleep(ttl_s / _SEARCHES)
    return float(min(rests_ms)), lost
