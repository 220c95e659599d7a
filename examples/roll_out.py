"""Roll-out beside redis-py: one process is changed, the other is not yet; they exclude each other.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/roll_out.py

In your fleet, `patch()` is called once, at the start of each changed process.
"""

from __future__ import annotations

import os

import redis

import redislock_fast

client = redis.Redis.from_url(os.environ["REDIS_URL"])


def work(name: str) -> bool:
    """What both processes do, with whichever lock `client.lock` gives: True where it got the lock."""
    lock = client.lock(name, timeout=10)
    if not lock.acquire(blocking=False):
        return False
    lock.release()
    return True


def main() -> None:
    """Hold the lock with one class, and try it with the other."""
    with client.lock("stock", timeout=10):
        redislock_fast.patch()
        print("ours beside redis-py's:", work("stock"))
    with client.lock("stock", timeout=10):
        redislock_fast.unpatch()
        print("redis-py's beside ours:", work("stock"))
    print("redis-py's alone:", work("stock"))
    redislock_fast.patch()
    print("ours alone:", work("stock"))


if __name__ == "__main__":
    main()
