"""A process full of threads and tasks that use the same locks until the history ends.

The main thread is one of the callers, since it is the one that interrupts reach. Event loops end in the middle: in
order, with their tasks cancelled, or closed over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.retry
import redis.sentinel
import uvloop
from redis.backoff import ConstantBackoff

import redislock_fast
import redislock_fast.asyncio
from tests.support.clusters import remap_ports
from tests.support.sentinels import SERVICE
from tests.torture.faults import PASSWORD
from tests.torture.history import SECOND, Log, now_ns
from tests.torture.resource import Resource
from tests.torture.ways import TROUBLES, Caller, OthersCaller, Process, World, run_in_thread

__all__ = ["Plan", "client_of", "run"]

PATIENCE_S = 15.0
"""All callers end so soon after the history: no lease and no wait of theirs is longer than that."""

LEFT_S = 4.0
"""So long may threads of the library's own outlive what they serve."""

TICK_S = 0.02
STALL_S = 0.004

_HOST = "127.0.0.1"
_TIMES: dict[str, Any] = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}


class _Sentinel(redis.sentinel.Sentinel):
    """Names the proxy to the primary."""

    reached: Mapping[int, int]

    def discover_master(self, service_name: str) -> tuple[str, int]:
        host, port = super().discover_master(service_name)  # type: ignore[no-untyped-call]  # redis-py's is not typed
        return host, self.reached.get(port, port)


class _AsyncSentinel(redis.asyncio.sentinel.Sentinel):
    """The same for tasks."""

    reached: Mapping[int, int]

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        host, port = await super().discover_master(service_name)
        return host, self.reached.get(port, port)


_NOWHERE_ELSE: Mapping[int, int] = MappingProxyType({})


def client_of(port: int, topology: str, reached: Mapping[int, int] = _NOWHERE_ELSE, in_loop: bool = False) -> Any:
    """A client of the server on this port, of its cluster, or of the primary that this sentinel knows.

    Args:
        port: where to connect.
        topology: as in `Setting`.
        reached: as in `Plan`.
        in_loop: whether it is a client for tasks.
    """
    library: Any = redis.asyncio if in_loop else redis
    settings: dict[str, Any] = {"retry": library.retry.Retry(ConstantBackoff(0.05), 3), **_TIMES}
    if topology == "sentinel":
        watches: Any = (_AsyncSentinel if in_loop else _Sentinel)([(_HOST, port)], **_TIMES)
        watches.reached = reached
        return watches.master_for(SERVICE, **settings)
    if topology == "cluster":
        return library.RedisCluster(host=_HOST, port=port, address_remap=remap_ports(reached), **settings)
    return library.Redis(host=_HOST, port=port, password=PASSWORD, **settings)


@dataclass(frozen=True)
class Plan:
    """What a process is to do.

    Attributes:
        folder: of the history.
        name: of the process.
        seed: of its choices.
        ports: of the server, of a node of the cluster, of a sentinel, or of five servers for Redlocks.
        reached: the ports of proxies through which the process reaches servers, by the servers' own ports.
        resource_port: of the server with what fenced locks protect.
        names: of the locks that all use.
        ends_at: when its callers begin no further use, by the clock of leases in nanoseconds.
        topology: as in `Setting`.
        threads: how many threads call, beside the main one.
        tasks: how many tasks call.
        is_calm: whether no event loop is closed over its tasks.
        is_redis_py: whether it uses redis-py's own lock, in threads alone.
    """

    folder: Path
    name: str
    seed: int
    ports: tuple[int, ...]
    reached: Mapping[int, int]
    resource_port: int
    names: tuple[str, ...]
    ends_at: int
    topology: str = "single"
    threads: int = 3
    tasks: int = 6
    is_calm: bool = False
    is_redis_py: bool = False


def _clients_of(plan: Plan, in_loop: bool = False) -> list[Any]:
    reached = plan.reached
    while True:
        try:
            return [client_of(reached.get(port, port), plan.topology, reached, in_loop) for port in plan.ports]
        except TROUBLES:  # a cluster client connects at once
            time.sleep(0.1)


class _Loops:
    """One event loop after the other, each with its own client and tasks."""

    def __init__(self, plan: Plan, process: Process) -> None:
        self._plan = plan
        self._process = process
        self._chance = random.Random(f"{plan.seed} {plan.name} loops")
        self._numbers = plan.threads + 1
        self._is_closing = False

    def run_all(self) -> None:
        """Use locks in event loops until the history ends."""
        while now_ns() < self._process.ends_at:
            loop = uvloop.new_event_loop() if self._chance.random() < 0.5 else asyncio.new_event_loop()
            life_s = 0.3 + 4 * self._chance.random()
            ends_at = min(now_ns() + int(life_s * SECOND), self._process.ends_at)
            is_orderly = self._chance.random() < 0.5 or self._plan.is_calm or ends_at == self._process.ends_at
            self._is_closing = False
            try:
                loop.run_until_complete(self._live(ends_at, is_orderly))
                if is_orderly:
                    loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                loop.close()
            del loop
            gc.collect()  # its tasks end now
            kind = "loop ended" if is_orderly else "loop closed"
            self._process.log.note("fault", ends_at, kind=kind, until=now_ns(), processes=[self._plan.name])

    async def _live(self, ends_at: int, is_orderly: bool) -> None:
        clients = _clients_of(self._plan, in_loop=True)
        world = World(clients, redislock_fast.asyncio, asyncio.sleep, False)
        ticker = asyncio.create_task(self._tick())
        tasks = []
        for _ in range(self._plan.tasks):
            tasks.append(asyncio.create_task(self._call(Caller(self._process, world, self._numbers))))
            self._numbers += 1
        await asyncio.sleep((ends_at - now_ns()) / SECOND)
        if ends_at == self._process.ends_at:
            await asyncio.wait(tasks, timeout=PATIENCE_S)
        self._is_closing = True
        if not is_orderly:
            return
        for task in (ticker, *tasks):
            task.cancel()
        await asyncio.wait((ticker, *tasks), timeout=PATIENCE_S)
        for client in clients:
            await client.aclose()
        give_up = time.monotonic() + LEFT_S
        while len(asyncio.all_tasks()) > 1 and time.monotonic() < give_up:
            await asyncio.sleep(0.01)
        for left in asyncio.all_tasks() - {asyncio.current_task()}:
            self._process.log.note("left", rule="left task", text=f"a task of {self._plan.name}: {left!r}")

    async def _tick(self) -> None:
        """Note when the loop has no turn for a task."""
        while True:
            before = now_ns()
            await asyncio.sleep(TICK_S)
            _note_stall(self._process.log, before)

    async def _call(self, caller: Caller) -> None:
        while caller.goes_on and not self._is_closing:
            using = asyncio.create_task(caller.use_one())
            if caller.chance.random() < 0.1:
                await asyncio.sleep(0.02 * caller.chance.random() ** 2)
                using.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await using


def _note_stall(log: Log, before: int) -> None:
    due, now = before + int(TICK_S * SECOND), now_ns()
    if now - due > STALL_S * SECOND:
        log.note("stall", due, until=now, of=log.process)


def _tick(log: Log, ends: threading.Event) -> None:
    """Note when the process has no turn for a thread."""
    before = now_ns()
    while not ends.wait(TICK_S):
        _note_stall(log, before)
        before = now_ns()


def _call(caller: Caller) -> None:
    while caller.goes_on:
        run_in_thread(caller.use_one())


def _call_in_main(caller: Caller) -> None:
    """As `_call`, and goes on after an interrupt. Before and afterwards, interrupts are ignored."""
    while True:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _call(caller)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            continue
        return


def _note_left(log: Log, before: set[threading.Thread]) -> None:
    """Note the threads that are left."""
    gc.collect()
    give_up = time.monotonic() + LEFT_S
    while set(threading.enumerate()) - before and time.monotonic() < give_up:
        time.sleep(0.02)
    for thread in set(threading.enumerate()) - before:
        log.note("left", text=f"a thread of {log.process}: {thread!r}")


def _warm_up(world: World, log: Log) -> None:
    """Import what a first use imports, so that it is not timed."""
    with contextlib.suppress(*TROUBLES):
        lock = world.lock(f"own:{log.process}", timeout=0.5)
        if lock.acquire(blocking_timeout=1):
            lock.release()


def _use_locks(plan: Plan, log: Log) -> None:
    process = Process(log, plan.seed, plan.names, plan.ends_at, Resource(plan.resource_port))
    clients = _clients_of(plan)
    world = World(clients, redislock_fast, time.sleep, True)
    _warm_up(world, log)
    kind = OthersCaller if plan.is_redis_py else Caller
    callers = [kind(process, world, number) for number in range(plan.threads + 1)]
    ends = threading.Event()
    ticker = threading.Thread(target=_tick, args=(log, ends), name="ticker", daemon=True)
    ticker.start()
    threads = [threading.Thread(target=_call, args=(caller,), daemon=True) for caller in callers[1:]]
    if not plan.is_redis_py:
        threads.append(threading.Thread(target=_Loops(plan, process).run_all, name="loops", daemon=True))
    for thread in threads:
        thread.start()
    _call_in_main(callers[0])
    give_up = time.monotonic() + PATIENCE_S + 2 * LEFT_S
    for thread in threads:
        thread.join(max(give_up - time.monotonic(), 0))
        if thread.is_alive():
            log.note("error", text=f"{thread!r} does not end")
            faulthandler.dump_traceback(all_threads=True)
    ends.set()
    ticker.join()
    for client in clients:
        client.close()
    log.note("served", count=process.served)


def run(plan: Plan) -> None:
    """Be the process of this plan. It ends without the interpreter's own end, as a program that is killed would."""
    errors = os.open(plan.folder / f"{plan.name}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = Log(plan.folder, plan.name)
    before = set(threading.enumerate())
    log.note("begun", pid=os.getpid())
    _use_locks(plan, log)
    _note_left(log, before)
    log.note("ended")
