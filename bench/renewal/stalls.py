"""The third table of `python -m bench renewal`: a C call that keeps the GIL while a lock is held and renewed.

No Python code runs meanwhile, so no lease is renewed. Each stall begins at a random moment between two renewals. The
server tells whether the lock is still held. A lost lease without a call of `on_lost` is a failure.
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
from bench.measuring.rounds import Scene
from bench.measuring.tables import Column

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
    """Stall the interpreter several times, and count the locks that are still held.

    Args:
        kind: a key of `KINDS`.
        scene: of the measurement.
        share: how long the GIL is held, in ttls.
        ttl_s: the timeout of the locks, in seconds.
        times: how many stalls.

    Raises:
        CheckFailedError: when a lock was lost and `on_lost` was not called.
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
    """Sleep in C with the GIL held, and return when that ended: other threads may run before this one goes on."""
    began = time.perf_counter()
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))
    return began + seconds


def _moment_s(ttl_s: float) -> float:
    """The time until a random moment between two renewals, in seconds."""
    return random.uniform(1, 2) * ttl_s / 3


def _stall_thread(scene: Scene, name: str, ttl_s: float, stall_s: float) -> float | None:
    """Return how long after the stall `on_lost` was called, in seconds; None when the lock is still held."""
    told = threading.Event()
    told_at = 0.0

    def on_lost(*_: object) -> None:
        nonlocal told_at
        told_at = time.perf_counter()
        told.set()

    with redis.Redis.from_url(scene.url) as client:
        lock = redislock_fast.Lock(client, name, timeout=ttl_s, auto_renew=True, on_lost=on_lost)
        lock.acquire()  # a key that an earlier stall has left ends by its ttl
        token = lock.local.token
        time.sleep(_moment_s(ttl_s))
        ended = _hold_gil(stall_s)
        if scene.witness.get(name) != token and not told.wait(_PATIENCE_TTLS * ttl_s):
            raise CheckFailedError("a lock was lost, and on_lost was not called")
        with contextlib.suppress(LockNotOwnedError):
            lock.release()
    return told_at - ended if told_at else None


def _stall_loop(scene: Scene, name: str, ttl_s: float, stall_s: float) -> float | None:
    """As `_stall_thread`, in a task."""
    told_at = 0.0

    async def stall() -> float:
        told = asyncio.Event()

        def on_lost(*_: object) -> None:
            nonlocal told_at
            told_at = time.perf_counter()
            told.set()

        async with redis.asyncio.Redis.from_url(scene.url) as client:
            lock = redislock_fast.asyncio.Lock(client, name, timeout=ttl_s, auto_renew=True, on_lost=on_lost)
            await lock.acquire()  # a key that an earlier stall has left ends by its ttl
            token = lock.local.token
            await asyncio.sleep(_moment_s(ttl_s))
            ended = _hold_gil(stall_s)
            if scene.witness.get(name) != token:
                try:
                    await asyncio.wait_for(told.wait(), _PATIENCE_TTLS * ttl_s)
                except asyncio.TimeoutError:
                    raise CheckFailedError("a lock was lost, and on_lost was not called") from None
            with contextlib.suppress(LockNotOwnedError):
                await lock.release()
        return ended

    ended = asyncio.run(stall())
    return told_at - ended if told_at else None


KINDS: dict[str, Callable[[Scene, str, float, float], float | None]] = {
    "threads": _stall_thread,
    "asyncio": _stall_loop,
}
"""By the kind of owner of the locks."""
