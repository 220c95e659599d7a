"""Processes with redis-py's class beside processes with ours on a lock that is always wanted, as during a roll-out."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

import redislock_fast
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S

SECONDS = 3.0
PAUSE_S = 0.001
KINDS = ["redis-py", "redis-py", "ours", "ours"]


def contend(port: int, kind: str, wait: str) -> int:
    """Acquire and release as often as can be. Returns how often."""
    with redis.Redis(port=port) as client:
        if kind == "ours":
            lock: redis.lock.Lock = redislock_fast.Lock(client, "name", timeout=10, sleep=0.01, wait=wait)  # type: ignore[arg-type]
        else:
            lock = redis.lock.Lock(client, "name", timeout=10, sleep=0.01)
        count = 0
        ends_at = time.monotonic() + SECONDS
        while (left_s := ends_at - time.monotonic()) > 0 and lock.acquire(blocking_timeout=left_s):
            time.sleep(PAUSE_S)
            lock.release()
            count += 1
            time.sleep(PAUSE_S)
    return count


@pytest.mark.parametrize("wait", ["poll", "push"])
def test_old_processes_have_half_of_their_share_at_least_where_the_new_ones_poll(valkey: Server, wait: str) -> None:
    program = [sys.executable, "-m", "tests.slow.test_rollout", str(valkey.port)]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen([*program, kind, wait], stdout=subprocess.PIPE, text=True, cwd=root) for kind in KINDS]
    counts = [int(one.communicate(timeout=SECONDS + 2 * PATIENCE_S)[0]) for one in running]
    old, all_ = sum(counts[:2]), sum(counts)
    assert (old >= all_ * 0.25) is (wait == "poll"), counts


if __name__ == "__main__":
    print(contend(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
