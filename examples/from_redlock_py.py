"""From redlock-py: its locks and ours exclude each other, since they use the same keys.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/from_redlock_py.py

Give the URLs of all servers, with spaces between them.
"""

from __future__ import annotations

import os

import redis
import redlock

from redislock_fast import Redlock

urls = os.environ["REDIS_URL"].split()
clients = [redis.Redis.from_url(url) for url in urls]


def main() -> None:
    """Hold the lock with one package, and try it with the other."""
    before = redlock.Redlock(urls, retry_count=1)
    after = Redlock(clients, "stock", timeout=10)  # seconds, where redlock-py took milliseconds

    old = before.lock("stock", 10_000)
    print("new beside old:", after.acquire(blocking=False))
    before.unlock(old)

    with after:
        print("old beside new:", before.lock("stock", 10_000))
    with after as lock:
        print("new alone:", lock.valid)


if __name__ == "__main__":
    main()
