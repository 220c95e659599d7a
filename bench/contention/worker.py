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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import redis
import redis.asyncio

from bench.contention.workload import Workload
from bench.contestants import CheckFailedError, Contestant, expect, libraries

GRACE_S = 1.0
"""How long a worker that waits at the end of the time may still wait, in seconds."""

_NOT_HAD = "an acquire without a time limit returned without the lock"


@dataclass(frozen=True)
class Assignment:
    """The orders of a process."""

    url: str  # of the server
    prefix: str  # of the names of all locks of the window; also the name of its clients
    contestant: str  # its name
    lease_s: int  # the timeout of the locks, in seconds
    workload: Workload  # of the workers
    process: int  # the number of the process, from 0

    @property
    def client_options(self) -> dict[str, Any]:
        """The options of the client: connections for all workers, and a socket timeout beyond the lease."""
        return {
            "client_name": self.prefix,
            "max_connections": 2 * self.workload.crew + 2,
            "socket_timeout": self.lease_s + 10,
        }

    def workers(self, make: Callable[[str], Any]) -> list[_Worker]:
        """The workers of the process, with the locks that this makes of names."""
        workload = self.workload
        first = self.process * workload.crew
        return [
            _Worker(
                make(f"{self.prefix}:own:{number}"),
                make(f"{self.prefix}:{number % workload.keys}"),
                number % workload.keys,
                array("d"),
                workload.hold_ms / 1000,
                workload.think_ms / 1000,
            )
            for number in range(first, first + workload.crew)
        ]


class Report(NamedTuple):
    """The report of a process."""

    # one array for each worker: of each turn the key, and when it was requested, acquired, and about to be released.
    # The last turn lacks the latter two when the worker was still waiting or releasing.
    records: list[array[float]]
    cpu_s: float  # CPU time of the process in the measured part, in seconds


class _Worker(NamedTuple):
    """A thread or a task."""

    own: Any  # a lock of its own, for connecting
    lock: Any  # that it wants again and again
    key: int  # the number of this lock
    records: array[float]  # of its turns, as in `Report`
    hold_s: float  # how long it holds a lock, in seconds
    think_s: float  # how long it waits after a release, in seconds


def work(connection: Connection, assignment: Assignment) -> None:
    """Carry out the orders: send None when ready, receive when to start, to measure and to end, send the report.

    An error is sent as a string. From the end on, no worker begins another acquire.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the bench ends its processes itself

    def appointment() -> Any:
        connection.send(None)
        return connection.recv()

    try:
        contestant = libraries.find(assignment.contestant, assignment.lease_s)
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


def _with_threads(assignment: Assignment, contestant: Contestant, appointment: Callable[[], Any]) -> Report:
    client = redis.Redis.from_url(assignment.url, **assignment.client_options)
    workers = assignment.workers(partial(contestant.make, client))

    def warm_up(worker: _Worker) -> None:
        expect(worker.own.acquire(), _NOT_HAD)
        worker.own.release()

    pool = ThreadPoolExecutor(len(workers))
    list(pool.map(warm_up, workers))
    start_s, measure_s, end_s = appointment()
    jobs = [pool.submit(_thread, worker, start_s, end_s) for worker in workers]
    # This thread sleeps while the workers run.
    sleep_until(measure_s)
    cpu_s = time.process_time()
    sleep_until(end_s)
    cpu_s = time.process_time() - cpu_s
    done, _ = wait(jobs, GRACE_S)
    for job in done:
        job.result()
    return Report([worker.records[:] for worker in workers], cpu_s)


def _thread(worker: _Worker, start_s: float, end_s: float) -> None:
    _, lock, key, records, hold_s, think_s = worker
    record, now, sleep = records.extend, time.monotonic, time.sleep
    sleep_until(start_s)
    while (asked_s := now()) < end_s:
        record((key, asked_s))
        expect(lock.acquire(), _NOT_HAD)
        acquired_s = now()
        if hold_s:
            sleep(hold_s)
        released_s = now()
        lock.release()
        record((acquired_s, released_s))
        if think_s:
            sleep(think_s)


async def _with_tasks(assignment: Assignment, contestant: Contestant, appointment: Callable[[], Any]) -> Report:
    client = redis.asyncio.Redis.from_url(assignment.url, **assignment.client_options)
    workers = assignment.workers(partial(contestant.maker(for_asyncio=True), client))

    async def warm_up(worker: _Worker) -> None:
        expect(await worker.own.acquire(), _NOT_HAD)
        await worker.own.release()

    await asyncio.gather(*map(warm_up, workers))
    start_s, measure_s, end_s = appointment()
    jobs = [asyncio.ensure_future(_task(worker, start_s, end_s)) for worker in workers]
    await asyncio.sleep(measure_s - time.monotonic())
    cpu_s = time.process_time()
    await asyncio.sleep(end_s - time.monotonic())
    cpu_s = time.process_time() - cpu_s
    done, _ = await asyncio.wait(jobs, timeout=GRACE_S)
    for job in done:
        job.result()
    return Report([worker.records for worker in workers], cpu_s)


async def _task(worker: _Worker, start_s: float, end_s: float) -> None:
    _, lock, key, records, hold_s, think_s = worker
    record, now, sleep = records.extend, time.monotonic, asyncio.sleep
    await sleep(max(0.0, start_s - now()))
    while (asked_s := now()) < end_s:
        record((key, asked_s))
        expect(await lock.acquire(), _NOT_HAD)
        acquired_s = now()
        if hold_s:
            await sleep(hold_s)
        released_s = now()
        await lock.release()
        record((acquired_s, released_s))
        if think_s:
            await sleep(think_s)


def sleep_until(when_s: float) -> None:
    """Sleep until a moment of `time.monotonic`."""
    time.sleep(max(0.0, when_s - time.monotonic()))
