"""The bench of locks with options: each row is compared with the plain lock in the same workload.

Rules: on a real server, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.contestants import OURS
from bench.workloads import options_of_locks
from redislock_fast.server import Server


@pytest.mark.slow
def test_each_ratio_is_to_the_plain_lock_in_the_same_workload(
    valkey: Server, figures: Callable[..., dict[str, Any]]
) -> None:
    short = ["--rounds", 1, "--seconds", 0.01, "--server", valkey.url]
    rows = figures("throughput", "--mode", "options", *short)["results"]
    plain = {row["workload"]: row["median"] for row in rows if row["contestant"] == OURS}
    assert len(plain) == 3
    assert [row["contestant"] for row in rows if row["workload"] == "lock reused"] == list(options_of_locks.NAMES)
    assert [row["ratio_to_limit"] for row in rows] == [row["median"] / plain[row["workload"]] for row in rows]
    assert redis.Redis.from_url(valkey.url).keys() == []
