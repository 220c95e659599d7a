"""From pottery: its Redlock and ours exclude each other, since they use the same keys.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/from_pottery.py

Give the URLs of all servers, with spaces between them.
"""

from __future__ import annotations

import os

import pottery
import redis

from redislock_fast import Redlock

clients = [redis.Redis.from_url(url) for url in os.environ["REDIS_URL"].split()]


def before() -> pottery.Redlock:
    """The lock as it was."""
    return pottery.Redlock(key="stock", masters=set(clients), auto_release_time=10)


def after() -> Redlock:
    """The lock as it will be: pottery puts "redlock:" before the key."""
    return Redlock(clients, "redlock:stock", timeout=10, auto_renew=True)


def main() -> None:
    """Hold the lock with one package, and try it with the other."""
    with before():
        print("new beside old:", after().acquire(blocking=False))
    with after():
        print("old beside new:", before().acquire(blocking=False))
    with after() as lock:
        print("new alone:", lock.valid)


if __name__ == "__main__":
    main()
