"""`python -m bench renewal`: the cost of holding locks, and the effect of a stalled interpreter on held locks.

The first table has many locks that are held and renewed, by the package, and as a service with redis-py can do it. Each
lock is renewed about every third of its ttl. redis-py renews no lock by itself, so `reacquire()` is called on one lock
after the other: 10,000 locks are too many for a thread each. Acquires and releases are not counted, and neither is the
search for the lease that comes closest to its end.

The second table has a C call that keeps the GIL while a lock is held. No Python code runs meanwhile, so no lease is
renewed. Each stall begins at a random moment between two renewals. A lost lease without a call of `on_lost` is a
failure.

The third table has locks of tasks whose event loop is busy: half of the time, or once for two ttls. They are renewed by
a thread, or by the loop itself (`auto_renew="loop"`). It has the acquire-release pairs of such a lock, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import inspect
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from bench.contestants import OURS, REDIS_PY, CheckFailedError, expect
from bench.measuring import arguments, report, rounds, servers
from bench.measuring.costs import Meter
from bench.measuring.report import Column
from bench.measuring.rounds import Scene
from bench.workloads.callers import take_turns_in_tasks

HELP = "the cost of holding: many renewed locks, and a stalled interpreter"

_MOST_CPU_PERCENT = 5
_RENEWAL_COMMANDS = ("set", "evalsha", "eval")
_SEARCHES = 40  # in a ttl, for the lease with the shortest rest
_LEAST_TTL = Path(__file__).with_name("least_ttl.lua").read_text()
_PATIENCE_TTLS = 3

SHARES = (0.5, 0.9, 3.0)
"""How long the GIL is held, in ttls."""

KINDS: dict[str, tuple[Any, Any]] = {
    "threads": (redis.Redis, redislock_fast.Lock),
    "asyncio": (redis.asyncio.Redis, redislock_fast.asyncio.Lock),
}
"""The client and our lock, by the kind of owner of the locks."""

_KEPT_COLUMNS = (
    Column("contestant", str, ("contestant",)),
    Column("locks of", str, ("kind",)),
    Column("client\n% of a core", "{:.1f}".format, ("client_cpu_percent",)),
    Column("client us\na renewal", "{:.1f}".format, ("client_cpu_us",)),
    Column("server\n% of a core", "{:.1f}".format, ("server_cpu_percent",)),
    Column("renewals/s", "{:,.0f}".format, ("renewals_per_s",)),
    Column("least left\n% of the ttl", "{:.0f}".format, ("least_left_percent",)),
    Column("lost", str, ("lost",)),
)
_STALL_COLUMNS = (
    Column("locks of", str, ("kind",)),
    Column("GIL held\nfor ttls", str, ("stall_ttls",)),
    Column("still held", "{} of {}".format, ("kept", "times")),
    Column("on_lost after\nms p50", "{:.1f}".format, ("on_lost_p50_ms",)),
    Column("max", "{:.1f}".format, ("on_lost_max_ms",)),
)

_BUSY_COLUMNS = (
    Column("renewed", str, ("renewed",)),
    Column("pairs/s", "{:,.0f}".format, ("pairs_per_s",)),
    Column("lost: busy\nhalf of the time", "{} of {}".format, ("lost_half", "locks")),
    Column("lost: blocked\nfor two ttls", "{} of {}".format, ("lost_blocked", "locks")),
)

_RENEWED: dict[str, Any] = {"by a thread": True, "by the loop": "loop"}
"""The values of `auto_renew`, by who renews."""

_BUSY_LOCKS = 100
_PAIR_ROUNDS = 5
_BUSY_S = 0.05  # how long the loop is busy, and then not

Rows = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    number, seconds = arguments.positive(int), arguments.positive(float)
    arguments.add_server(parser)
    parser.add_argument("--locks", type=number, default=10_000, help="that are renewed (default: %(default)s)")
    parser.add_argument("--ttl", type=seconds, default=10, help="theirs, in seconds (default: %(default)s)")
    parser.add_argument("--seconds", type=seconds, default=10, help="counted (default: %(default)s)")
    parser.add_argument("--stalls", type=number, default=6, help="of each length (default: %(default)s)")
    parser.add_argument("--stall-ttl", type=seconds, default=1, help="the ttl then (default: %(default)s)")
    arguments.add_names(parser, "--only", _TABLES)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, and return the figures."""
    with servers.open_server(options.server) as server, rounds.open_scene(server.url) as scene:
        return {"server": server.name, **{name: _TABLES[name](server.name, scene, options) for name in options.only}}


def _keeping(server: str, scene: Scene, options: argparse.Namespace) -> Rows:
    rows = []
    with report.progress(len(HOLDERS)) as step:
        for (contestant, kind), holder in HOLDERS.items():
            step(f"{contestant}, {kind}")
            figures = asyncio.run(cost_of_keeping(holder, scene, options.locks, options.ttl, options.seconds))
            rows.append({"contestant": contestant, "kind": kind, **figures})
    title = f"{server}; {options.locks:,} locks with a ttl of {options.ttl:g} s; {options.seconds:g} s"
    report.print_rows(title, _KEPT_COLUMNS, rows)
    for row in rows:
        if row["contestant"] == OURS:
            percent = row["client_cpu_percent"]
            verdict = "met" if percent < _MOST_CPU_PERCENT else "MISSED"
            print(f"{row['kind']}: CPU of the client, % of a core: {percent:.1f} < {_MOST_CPU_PERCENT}: {verdict}")
            if row["lost"]:
                raise CheckFailedError(f"{OURS}, {row['kind']}: {row['lost']} of {options.locks} locks were lost")
    return rows


def _stalls(server: str, scene: Scene, options: argparse.Namespace) -> Rows:
    rows = []
    with report.progress(len(KINDS) * len(SHARES)) as step:
        for kind in KINDS:
            for share in SHARES:
                step(f"{kind}, {share} ttl")
                rows.append(effect_of_stalls(kind, scene, share, options.stall_ttl, options.stalls))
    report.print_rows(f"{server}; a renewed lock with a ttl of {options.stall_ttl:g} s", _STALL_COLUMNS, rows)
    return rows


def _busy(server: str, scene: Scene, options: argparse.Namespace) -> Rows:
    rows = []
    with report.progress(len(_RENEWED) + 1) as step:
        for renewed in _RENEWED:
            step(renewed)
            rows.append(asyncio.run(effect_of_a_busy_loop(renewed, scene, options.stall_ttl, options.seconds)))
        step("pairs")
        pairs_per_s = asyncio.run(renewed_pairs_per_s(scene, options.seconds))
    for row in rows:
        row["pairs_per_s"] = pairs_per_s[row["renewed"]]
    report.print_rows(f"{server}; locks of tasks with a ttl of {options.stall_ttl:g} s", _BUSY_COLUMNS, rows)
    return rows


_TABLES = {"keeping": _keeping, "stalls": _stalls, "busy": _busy}


# ---- many locks ----

Holder = Callable[[str, Sequence[str], float], AbstractAsyncContextManager[None]]
"""Holds and renews locks: called with the URL of the server, the names of the locks and their ttl in seconds."""


@asynccontextmanager
async def _held(contestant: str, kind: str, url: str, names: Sequence[str], ttl_s: float) -> AsyncIterator[None]:
    """Hold the locks, of either kind, in the running loop."""
    client_class, lock_class = KINDS[kind]
    client = client_class.from_url(url)
    terms: dict[str, Any] = {"timeout": ttl_s, "thread_local": False}
    make = partial(lock_class, client, auto_renew=True) if contestant == OURS else client.lock
    locks = [make(name, **terms) for name in names]
    for lock in locks:
        expect(await _done(lock.acquire(blocking=False)), "a free lock was not acquired")
    ended = asyncio.Event()
    renewing = asyncio.create_task(_renew(locks, ttl_s, ended)) if contestant == REDIS_PY else None
    try:
        yield
    finally:
        ended.set()
        if renewing is not None:
            await renewing
        for lock in locks:
            with contextlib.suppress(LockNotOwnedError):
                await _done(lock.release())
        await _done(_close(client))


async def _renew(locks: Sequence[Any], ttl_s: float, ended: asyncio.Event) -> None:
    """Renew locks of redis-py, one after the other."""
    pause_s = ttl_s / 3
    while not ended.is_set():
        await asyncio.sleep(pause_s)
        began = time.monotonic()
        for lock in locks:
            with contextlib.suppress(LockNotOwnedError):  # the measurement counts it
                await _done(lock.reacquire())
        pause_s = max(began + ttl_s / 3 - time.monotonic(), 0.0)


async def _done(result: Any) -> Any:
    """The result of a call of either kind."""
    return await result if inspect.isawaitable(result) else result


def _close(client: Any) -> Any:
    return client.aclose() if isinstance(client, redis.asyncio.Redis) else client.close()


HOLDERS: dict[tuple[str, str], Holder] = {
    (contestant, kind): partial(_held, contestant, kind) for kind in KINDS for contestant in (OURS, REDIS_PY)
}
"""By contestant and by the kind of owner of the locks."""


async def cost_of_keeping(holder: Holder, scene: Scene, locks: int, ttl_s: float, seconds: float) -> dict[str, Any]:
    """Measure for some seconds the cost of so many locks that are held and renewed."""
    async with holder(scene.url, [f"{scene.prefix}:{number}" for number in range(locks)], ttl_s):
        return await asyncio.to_thread(_costs, scene, locks, ttl_s, seconds)


def _costs(scene: Scene, locks: int, ttl_s: float, seconds: float) -> dict[str, Any]:
    witness = scene.witness
    time.sleep(ttl_s / 3)  # until the first renewal of each lock
    gc.collect()
    renewals, began, meter = _renewals(witness), time.perf_counter(), Meter([witness])
    time.sleep(seconds)
    (client_s, server_s), elapsed_s = meter.read(), time.perf_counter() - began
    renewals = _renewals(witness) - renewals
    least_left_ms, lost = _least_left_ms(scene, locks, ttl_s)
    return {
        "locks": locks,
        "ttl_s": ttl_s,
        "client_cpu_percent": 100 * client_s / elapsed_s,
        "client_cpu_us": 1e6 * client_s / renewals if renewals else None,
        "server_cpu_percent": 100 * server_s / elapsed_s,
        "renewals_per_s": renewals / elapsed_s,
        "least_left_percent": least_left_ms / ttl_s / 10,
        "lost": lost,
    }


def _renewals(witness: redis.Redis) -> int:
    """The number of renewal commands that the server has executed."""
    calls = witness.info("commandstats")
    return sum(calls.get(f"cmdstat_{command}", {"calls": 0})["calls"] for command in _RENEWAL_COMMANDS)


def _least_left_ms(scene: Scene, locks: int, ttl_s: float) -> tuple[float, int]:
    """The shortest rest of a lease within one ttl, and how many leases were lost."""
    rests_ms = []
    lost = 0
    for _ in range(_SEARCHES):
        least_ms, missing = scene.witness.eval(_LEAST_TTL, 0, f"{scene.prefix}:", locks)
        rests_ms.append(0 if missing else least_ms)
        lost = max(lost, missing)
        time.sleep(ttl_s / _SEARCHES)
    return float(min(rests_ms)), lost


# ---- stalls ----


def effect_of_stalls(kind: str, scene: Scene, share: float, ttl_s: float, times: int) -> dict[str, Any]:
    """Stall the interpreter several times for this share of a ttl, and count the locks that are still held.

    Raises `CheckFailedError` when a lock was lost and `on_lost` was not called.
    """
    after_s = [asyncio.run(_stall(kind, scene, ttl_s, share * ttl_s)) for _ in range(times)]
    lost_s = [after for after in after_s if after is not None]
    return {
        "kind": kind,
        "stall_ttls": share,
        "ttl_s": ttl_s,
        "times": times,
        "kept": times - len(lost_s),
        "on_lost_p50_ms": 1000 * statistics.median(lost_s) if lost_s else None,
        "on_lost_max_ms": 1000 * max(lost_s) if lost_s else None,
    }


async def _stall(kind: str, scene: Scene, ttl_s: float, stall_s: float) -> float | None:
    """Return how long after the stall `on_lost` was called, in seconds; None when the lock is still held."""
    called = threading.Event()
    called_at = 0.0

    def on_lost(*_: object) -> None:
        nonlocal called_at
        called_at = time.perf_counter()
        called.set()

    client_class, lock_class = KINDS[kind]
    client = client_class.from_url(scene.url)
    name = f"{scene.prefix}:stall"
    lock = lock_class(client, name, timeout=ttl_s, auto_renew=True, on_lost=on_lost)
    await _done(lock.acquire())  # a key that an earlier stall has left ends by its ttl
    token = lock.local.token
    await asyncio.sleep(random.uniform(1, 2) * ttl_s / 3)  # a random moment between two renewals
    ended = time.perf_counter() + stall_s  # other threads may run before this one goes on
    ctypes.PyDLL(None).usleep(int(1e6 * stall_s))
    if scene.witness.get(name) != token:
        was_called = await asyncio.to_thread(called.wait, _PATIENCE_TTLS * ttl_s)
        expect(was_called, "a lock was lost, and on_lost was not called")
    with contextlib.suppress(LockNotOwnedError):
        await _done(lock.release())
    await _done(_close(client))
    return called_at - ended if called_at else None


# ---- a busy loop ----


async def effect_of_a_busy_loop(renewed: str, scene: Scene, ttl_s: float, seconds: float) -> dict[str, Any]:
    """Count the locks that are lost while the running loop is busy, half of so many seconds, or for two ttls.

    Raises `CheckFailedError` where a thread renews and a lock is lost.
    """
    client = redis.asyncio.Redis.from_url(scene.url)
    make = partial(redislock_fast.asyncio.Lock, client, auto_renew=_RENEWED[renewed])
    lost_half = await _lost(scene, make, ttl_s, partial(_be_busy_half, seconds))
    lost_blocked = await _lost(scene, make, ttl_s, partial(_block, 2 * ttl_s))
    await client.aclose()
    if _RENEWED[renewed] is True:
        expect(not lost_half and not lost_blocked, "a lock was lost that a thread has renewed")
    return {
        "renewed": renewed,
        "locks": _BUSY_LOCKS,
        "ttl_s": ttl_s,
        "lost_half": lost_half,
        "lost_blocked": lost_blocked,
    }


async def renewed_pairs_per_s(scene: Scene, seconds: float) -> dict[str, float]:
    """Acquire-release pairs of one task per second, by who renews: the best of several rounds, in turn."""
    client = redis.asyncio.Redis.from_url(scene.url)
    best = dict.fromkeys(_RENEWED, 0.0)
    for _ in range(_PAIR_ROUNDS):
        for renewed, auto_renew in _RENEWED.items():
            lock = redislock_fast.asyncio.Lock(client, f"{scene.prefix}:pair", timeout=10, auto_renew=auto_renew)
            sample = await take_turns_in_tasks([lock], seconds / _PAIR_ROUNDS)
            best[renewed] = max(best[renewed], sample.pairs_per_s)
    await client.aclose()
    return best


async def _lost(
    scene: Scene, make: Callable[..., redislock_fast.asyncio.Lock], ttl_s: float, work: Callable[[], Any]
) -> int:
    """How many of the held locks are lost when the work is done."""
    locks = [make(f"{scene.prefix}:busy:{number}", timeout=ttl_s) for number in range(_BUSY_LOCKS)]
    for lock in locks:
        expect(await lock.acquire(blocking=False), "a free lock was not acquired")
    await work()
    lost = 0
    for lock in locks:
        try:
            await lock.release()
        except LockNotOwnedError:
            lost += 1
    return lost


async def _be_busy_half(seconds: float) -> None:
    """Be busy every other moment, for so many seconds: nothing else runs in the loop then."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        busy_until = time.perf_counter() + _BUSY_S
        while time.perf_counter() < busy_until:
            pass
        await asyncio.sleep(_BUSY_S)


async def _block(seconds: float) -> None:
    """Let nothing run in the loop for so many seconds."""
    time.sleep(seconds)  # as a handler does that calls what blocks
