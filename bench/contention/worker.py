"""A process of a window: threads or tasks that acquire and release the locks until the time is over.

Every worker has connected, and has acquired a lock of its own, before the clock starts. All begin and end at times that
the bench sets, on the clock that the processes of a machine share. A worker that waits at the end of the time has
`GRACE_S` to acquire the lock; then the process ends. Recording a turn costs three readings of the clock and two appends
to an array.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import redis
import redis.asyncio

from bench.contention.workload import Workload
from bench.contestants import AnyAsyncLock, AnyLock, CheckFailedError, Contestant, Options, libraries

GRACE_S = 1.0
"""How long a worker that waits at the end of the time may still wait, in seconds."""

_NOT_HAD = "an acquire without a time limit returned without the lock"


@dataclass(frozen=True)
class Assignment:
    """The orders of a process.

    Attributes:
        url: of the server.
        prefix: of the names of all locks of the window; also the name of its clients.
        contestant: its name.
        terms: the options of the locks.
        workload: of the workers.
        process: the number of the process, from 0.
    """

    url: str
    prefix: str
    contestant: str
    terms: Options
    workload: Workload
    process: int

    @property
    def client_options(self) -> dict[str, Any]:
        """The options of the client: connections for all workers, and a socket timeout beyond the lease."""
        return {
            "client_name": self.prefix,
            "max_connections": 2 * self.workload.crew + 2,
            "socket_timeout": self.terms.lease_s + 10,
        }


@dataclass(frozen=True)
class Times:
    """The times of a window, by `time.monotonic`, in seconds.

    Attributes:
        start_s: all workers begin.
        measure_s: the measured part begins.
        end_s: no worker begins another acquire.
    """

    start_s: float
    measure_s: float
    end_s: float


@dataclass(frozen=True)
class Report:
    """The report of a process.

    Attributes:
        records: one array for each worker: of each turn the key, and when it was requested, acquired, and about to be
            released. The last turn lacks the latter two when the worker was still waiting or releasing.
        cpu_s: CPU time of the process in the measured part, in seconds.
    """

    records: list[array[float]]
    cpu_s: float


def work(connection: Connection, assignment: Assignment) -> None:
    """Carry out the orders: send None when ready, receive the times, send the report, or an error as a string."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends its processes itself

    def appointment() -> Times:
        connection.send(None)
        times = connection.recv()
        assert isinstance(times, Times)
        return times

    try:
        contestant = libraries.find(assignment.contestant, assignment.terms)
        if assignment.workload.tasks:
            # `asyncio.run` would wait for the tasks that wait for a lock.
            report = asyncio.new_event_loop().run_until_complete(_with_tasks(assignment, contestant, appointment))
        else:
            report = _with_threads(assignment, contestant, appointment)
    except Exception as error:  # any error of a contestant is its failure
        connection.send(str(error) if isinstance(error, CheckFailedError) else f"{type(error).__name__}: {error}")
    else:
        connection.send(report)
    os._exit(0)  # threads that wait for a lock end with the process alone


def _with_threads(assignment: Assignment, contestant: Contestant, appointment: Callable[[], Times]) -> Report:
    crew = assignment.workload.crew
    client = redis.Redis.from_url(assignment.url, **assignment.client_options)
    make = partial(contestant.make, client)
    own_locks = [make(name) for name in _own_names(assignment)]
    locks = [[make(name) for name in _names(assignment)] for _ in range(crew)]
    records = [array("d") for _ in range(crew)]

    def warm_up(lock: AnyLock) -> None:
        if not lock.acquire():
            raise CheckFailedError(_NOT_HAD)
        lock.release()

    pool = ThreadPoolExecutor(crew)
    list(pool.map(warm_up, own_locks))
    times = appointment()
    hold_s, think_s = assignment.workload.hold_ms / 1000, assignment.workload.think_ms / 1000
    jobs = [
        pool.submit(_thread, of_worker, picks, times, hold_s, think_s, into)
        for of_worker, picks, into in zip(locks, _picks(assignment), records, strict=True)
    ]
    # This thread sleeps while the workers run.
    _sleep_until(times.measure_s)
    cpu_s = time.process_time()
    _sleep_until(times.end_s)
    cpu_s = time.process_time() - cpu_s
    done, _ = wait(jobs, GRACE_S)
    for job in done:
        job.result()
    return Report([of_worker[:] for of_worker in records], cpu_s)


def _thread(
    locks: Sequence[AnyLock], picks: Sequence[int], times: Times, hold_s: float, think_s: float, into: array[float]
) -> None:
    record, now, sleep, end_s = into.extend, time.monotonic, time.sleep, times.end_s
    _sleep_until(times.start_s)
    for key in cycle(picks):
        lock = locks[key]
        asked_s = now()
        if asked_s >= end_s:
            return
        record((key, asked_s))
        if not lock.acquire():
            raise CheckFailedError(_NOT_HAD)
        acquired_s = now()
        if hold_s:
            sleep(hold_s)
        released_s = now()
        lock.release()
        record((acquired_s, released_s))
        if think_s:
            sleep(think_s)


async def _with_tasks(assignment: Assignment, contestant: Contestant, appointment: Callable[[], Times]) -> Report:
    crew = assignment.workload.crew
    assert contestant.make_async
    client = redis.asyncio.Redis.from_url(assignment.url, **assignment.client_options)
    make = partial(contestant.make_async, client)
    own_locks = [make(name) for name in _own_names(assignment)]
    locks = [[make(name) for name in _names(assignment)] for _ in range(crew)]
    records = [array("d") for _ in range(crew)]

    async def warm_up(lock: AnyAsyncLock) -> None:
        if not await lock.acquire():
            raise CheckFailedError(_NOT_HAD)
        await lock.release()

    await asyncio.gather(*map(warm_up, own_locks))
    times = appointment()
    hold_s, think_s = assignment.workload.hold_ms / 1000, assignment.workload.think_ms / 1000
    jobs = [
        asyncio.ensure_future(_task(of_worker, picks, times, hold_s, think_s, into))
        for of_worker, picks, into in zip(locks, _picks(assignment), records, strict=True)
    ]
    await asyncio.sleep(times.measure_s - time.monotonic())
    cpu_s = time.process_time()
    await asyncio.sleep(times.end_s - time.monotonic())
    cpu_s = time.process_time() - cpu_s
    done, _ = await asyncio.wait(jobs, timeout=GRACE_S)
    for job in done:
        job.result()
    return Report(records, cpu_s)


async def _task(
    locks: Sequence[AnyAsyncLock], picks: Sequence[int], times: Times, hold_s: float, think_s: float, into: array[float]
) -> None:
    record, now, sleep, end_s = into.extend, time.monotonic, asyncio.sleep, times.end_s
    await sleep(max(0.0, times.start_s - now()))
    for key in cycle(picks):
        lock = locks[key]
        asked_s = now()
        if asked_s >= end_s:
            return
        record((key, asked_s))
        if not await lock.acquire():
            raise CheckFailedError(_NOT_HAD)
        acquired_s = now()
        if hold_s:
            await sleep(hold_s)
        released_s = now()
        await lock.release()
        record((acquired_s, released_s))
        if think_s:
            await sleep(think_s)


def _names(assignment: Assignment) -> list[str]:
    return [f"{assignment.prefix}:{key}" for key in range(assignment.workload.keys)]


def _own_names(assignment: Assignment) -> list[str]:
    return [f"{assignment.prefix}:own:{assignment.process}:{index}" for index in range(assignment.workload.crew)]


def _picks(assignment: Assignment) -> list[list[int]]:
    first = assignment.process * assignment.workload.crew
    return [assignment.workload.picks(first + index) for index in range(assignment.workload.crew)]


def _sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))
