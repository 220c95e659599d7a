"""APScheduler on every host: each tick of a job runs on one of them.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/apscheduler_app.py

Two schedulers of this program stand for those of two hosts.
"""

from __future__ import annotations

import os
import threading
from datetime import datetime, timedelta, timezone

import redis
from apscheduler.schedulers.background import BackgroundScheduler

from redislock_fast import Skipped, once

client = redis.Redis.from_url(os.environ["REDIS_URL"])
runs: list[str] = []
skips = threading.Semaphore(0)


def skipped(_: Skipped) -> None:
    """Note that the other host has the job."""
    skips.release()


@once(client, "nightly", timeout=60, at_least=55, on_skip=skipped)
def nightly() -> None:
    """The job. For 55 seconds after its start no other host begins it, however soon it ends."""
    runs.append("nightly")


def main() -> None:
    """Let the job of two hosts come due at about the same time."""
    soon = datetime.now(timezone.utc) + timedelta(seconds=0.2)
    hosts = [BackgroundScheduler(timezone=timezone.utc) for _ in range(2)]
    for number, host in enumerate(hosts):
        host.add_job(nightly, "date", run_date=soon + timedelta(seconds=0.1 * number), misfire_grace_time=60)
        host.start()
    skips.acquire(timeout=60)
    for host in hosts:
        host.shutdown()
    print("runs:", runs)


if __name__ == "__main__":
    main()
