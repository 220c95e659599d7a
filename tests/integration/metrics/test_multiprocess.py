"""The metrics where `prometheus_client` works for several processes: its files have each value at once."""

from __future__ import annotations

from pathlib import Path

from redislock_fast.server import Server
from tests.support.helpers import run_script

PROGRAM = """
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
    result = run_script(PROGRAM, valkey.port, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["2.0 2.0 None 0.0", "1.0 2.0 1.0 0.0", "0.0 2.0 2.0 0.0"]
