"""From python-redis-lock: the same key, so both exclude each other while the change is rolled out.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/from_python_redis_lock.py

Waiters of the other kind are told of in docs/how-to/migrate.md.
"""

from __future__ import annotations

import os

import redis
import redis_lock

from redislock_fast import Lock

client = redis.Redis.from_url(os.environ["REDIS_URL"])


def before() -> redis_lock.Lock:
    """The lock as it was."""
    return redis_lock.Lock(client, "stock", expire=60, auto_renewal=True)


def after() -> Lock:
    """The lock as it will be: python-redis-lock puts "lock:" before the name."""
    return Lock(client, "lock:stock", timeout=60, auto_renew=True)


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
