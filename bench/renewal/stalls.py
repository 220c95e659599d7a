"""The third table of `python -m bench renewal`: a C call that keeps the GIL while a lock is held and renewed.

Nothing in Python runs meanwhile, so nothing renews. Rules: each stall begins at some moment between two renewals; the
server says whether the lock is still held, and a loss that is not told is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from bench.contestants import CheckFailedError
from bench.rounds import Scene
from bench.tables import Column

SHARES = (0.5, 0.9, 3.0)
"""How long the GIL is held, in ttls."""

COLUMNS = (
    Column("locks of", str, ("kind",)),
    Column("GIL held\nfor ttls", str, ("stall_ttls",)),
    Column("still held", "{} of {}".format, ("kept", "times")),
    Column("told after\nms p50", "{:.1f}".format, ("told_p50_ms",)),
    Column("max", "{:.1f}".format, ("told_max_ms",)),
)

_PATIENCE_TTLS = 3


def measure(kind: str, scene: Scene, share: float, ttl_s: float, times: int) -> dict[str, Any]:
    """Stall so often, and say what became of the locks.

    Args:
        kind: of `KINDS`.
        scene: where.
        share: how long the GIL is held, in ttls.
        ttl_s: the locks' timeout.
        times: how often.

    Raises:
        CheckFailedError: a lock was lost, and nobody was told.
    """
    told_s = [KINDS[kind](scene, f"{scene.prefix}:stall", ttl_s, share * ttl_s) for _ in range(times)]
    late_s = [told for told in told_s if told is not None]
    return {
        "kind": kind,
        "stall_ttls": share,
        "ttl_s": ttl_s,
        "times": times,
        "kept": times - len(late_s),
        "told_p50_ms": 1000 * statistics.median(late_s) if late_s else None,
        "told_max_ms": 1000 * max(late_s) if late_s else None,
    }


def _hold_gil(seconds: float) -> float:
    """Sleep in C, and answer when that ended: others may run before this line goes on."""
    began = time.perf_counter()
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))
    return began + seconds


def _moment_s(ttl_s: float) -> float:
    """Until some moment between two renewals."""
    return random.uniform(1, 2) * ttl_s / 3


def _stall_thread(scene: Scene, name: str, ttl_s: float, stall_s: float) -> float | None:
    """How long after the stall the loss was told; None where the lock is still held."""
    told = threading.Event()
    told_at = 0.0

    def on_lost(*_: object) -> None:
        nonlocal told_at
        told_at = time.perf_counter()
        told.set()

    with redis.Redis.from_url(scene.url) as client:
        lock = redislock_fast.Lock(client, name, timeout=ttl_s, auto_renew=True, on_lost=on_lost)
        lock.acquire(blocking=False)
        token = lock.local.token
        time.sleep(_moment_s(ttl_s))
        ended = _hold_gil(stall_s)
        if scene.witness.get(name) != token and not told.wait(_PATIENCE_TTLS * ttl_s):
            raise CheckFailedError("a lock was lost, and nobody was told")
        with contextlib.suppress(LockNotOwnedError):
            lock.release()
    return told_at - ended if told_at else None


def _stall_loop(scene: Scene, name: str, ttl_s: float, stall_s: float) -> float | None:
    """The same in a task."""
    told_at = 0.0

    async def stall() -> float:
        told = asyncio.Event()

        def on_lost(*_: object) -> None:
            nonlocal told_at
            told_at = time.perf_counter()
            told.set()

        async with redis.asyncio.Redis.from_url(scene.url) as client:
            lock = redislock_fast.asyncio.Lock(client, name, timeout=ttl_s, auto_renew=True, on_lost=on_lost)
            await lock.acquire(blocking=False)
            token = lock.local.token
            await asyncio.sleep(_moment_s(ttl_s))
            ended = _hold_gil(stall_s)
            if scene.witness.get(name) != token:
                try:
                    await asyncio.wait_for(told.wait(), _PATIENCE_TTLS * ttl_s)
                except asyncio.TimeoutError:
                    raise CheckFailedError("a lock was lost, and nobody was told") from None
            with contextlib.suppress(LockNotOwnedError):
                await lock.release()
        return ended

    ended = asyncio.run(stall())
    return told_at - ended if told_at else None


KINDS: dict[str, Callable[[Scene, str, float, float], float | None]] = {
    "threads": _stall_thread,
    "asyncio": _stall_loop,
}
"""Whose locks they are."""
