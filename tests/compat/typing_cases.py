"""Checked by mypy and pyright alone: our Lock stands wherever redis-py's is expected, and wrong uses are type errors.

Rules: nothing here runs, and no test imports it. A case that mypy refuses is a bug of the types, and so is a wrong use
that it accepts: then its `type: ignore` is unused, which is an error.
"""

from __future__ import annotations

import redis
import redis.asyncio
from redis.lock import Lock as RedisLock

import redislock_fast.asyncio
from redislock_fast import Lock, Locker, LossReason, Metrics, once
from redislock_fast.fencing import AsyncGuard, Guard
from redislock_fast.testing import lose


def takes_redis_pys_lock(lock: RedisLock) -> bool:
    """As a caller's function is annotated."""
    with lock as entered:
        return entered.locked() and lock.owned()


def passes_ours(client: redis.Redis) -> bool:
    """Ours is accepted, and stays ours in the body of `with`."""
    lock = Lock(client, "name", timeout=1.5, sleep=0.1, blocking_timeout=2, thread_local=False)
    with lock as entered:
        ours: Lock = entered
    acquired: bool = lock.acquire(blocking=False, token="token")
    extended: bool = lock.extend(1.5, replace_ttl=True)
    reacquired: bool = lock.reacquire()
    lock.release()
    return all([takes_redis_pys_lock(ours), acquired, extended, reacquired])


def chooses_a_class(fast: bool) -> type[RedisLock]:
    """Either class, as a setting."""
    return Lock if fast else RedisLock


class Subclass(Lock):
    """Overrides redis-py's hooks with redis-py's own types."""

    def do_release(self, expected_token: str) -> None:
        """As redis-py declares it."""
        super().do_release(expected_token)

    def do_acquire(self, token: str) -> bool:
        """As redis-py declares it."""
        return super().do_acquire(token)


locks: list[RedisLock] = []
locks.append(Lock(redis.Redis(), "name"))


class Watcher:
    """Watches locks without deriving from anything."""

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """As `Metrics` declares it."""

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """As `Metrics` declares it."""


watcher: Metrics = Watcher()


def notes_a_loss(lock: Lock, reason: LossReason) -> None:
    """As `on_lost` is called."""
    print(lock.name, reason)


async def notes_a_loss_of_a_task(lock: redislock_fast.asyncio.Lock, reason: LossReason) -> None:
    """As `on_lost` of an asyncio lock may be."""
    print(lock.name, reason)


def right_uses(client: redis.Redis, cluster: redis.RedisCluster, tasks: redis.asyncio.Redis) -> None:
    """Accepted."""
    Lock(client, b"name", 10, on_lost=notes_a_loss, metrics=watcher, auto_renew=True)
    Lock(cluster, "name", wait="poll")
    Locker(client).lock("name", timeout=1, on_lost=notes_a_loss)
    redislock_fast.asyncio.Lock(tasks, "name", on_lost=notes_a_loss_of_a_task)


async def writes_with_fences(client: redis.Redis, tasks: redis.asyncio.Redis) -> None:
    """A guard takes the fence of a lock as it is. The None of a lock without one is an error at run time."""
    with Lock(client, "name", fencing=True) as lock:
        Guard(client).set("key", "value", lock.fence, ttl=1.5)
        Guard(client).eval("return 1", ["key"], [], lock.fence)
    async with redislock_fast.asyncio.Lock(tasks, "name", fencing=True) as async_lock:
        await AsyncGuard(tasks).set("key", "value", async_lock.fence)
        await AsyncGuard(tasks).eval("return 1", [b"key"], [1], async_lock.fence)


def wrong_uses(client: redis.Redis, tasks: redis.asyncio.Redis) -> None:
    """Refused, each of them."""
    Lock(tasks, "name")  # type: ignore[arg-type]
    redislock_fast.asyncio.Lock(client, "name")  # type: ignore[arg-type]
    Locker(tasks)  # type: ignore[arg-type]
    Lock(client, 3)  # type: ignore[arg-type]
    Lock(client, "name", timout=3)  # type: ignore[call-arg]
    Lock(client, "name", timeout="3")  # type: ignore[arg-type]
    Lock(client, "name", wait="pull")  # type: ignore[arg-type]
    Lock(client, "name", metrics=3)  # type: ignore[arg-type]
    Lock(client, "name", on_lost=notes_a_loss_of_a_task)  # type: ignore[arg-type]


@once(redis.Redis(), "job", timeout=60)
def job(number: int) -> int:
    """A job of threads."""
    return number


@once(redis.Redis(), "job", timeout=60, on_skip=str)
def told_job(number: int) -> int:
    """A job whose skips have a result."""
    return number


@redislock_fast.asyncio.once(redis.asyncio.Redis(), "job", timeout=60)
async def async_job(number: int) -> int:
    """A job of tasks."""
    return number


async def runs_jobs() -> int | None:
    """A skip is None or what `on_skip` returns, the decorated function is of its own kind, and a block has a lock."""
    told: int | str = told_job(1)
    job("one")  # type: ignore[arg-type]
    ran: int = job(1)  # type: ignore[assignment]
    with once(redis.Redis(), "job", timeout=60) as held:
        lose(held)
        ours: Lock = held
    async with redislock_fast.asyncio.once(redis.asyncio.Redis(), "job", timeout=60) as run:
        await lose(run)
    return await async_job(1) if run.lost or ours.lost or told or ran else job(1)
