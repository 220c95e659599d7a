"""One measured window: processes that contend for the locks of one contestant, from their start to their records.

The processes and the names of the locks are new for each window. The processes begin together, warm up under the load
that is measured, and end together. The commands of clients are counted in the second half of the warm-up.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import redis

from bench.contention import watch
from bench.contention.records import Span, Window
from bench.contention.worker import GRACE_S, Assignment, Report, Times, work
from bench.contention.workload import Workload
from bench.contestants import CheckFailedError, Contestant, Options
from bench.measuring.costs import server_cpu_s

WARM_UP_S = 1.0
_WATCH_FROM_S = 0.4  # of the warm-up: all workers wait in turn from then on
_WATCH_TO_S = 0.9  # of the warm-up: counting commands ends before the measured part begins
_CONNECTING_S = 60.0  # at most, for a thousand connections on a busy machine
_REPORTING_S = 30.0 + GRACE_S  # at most

# Forked from a new process that has only imported the libraries, so that many processes start quickly.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["bench.contention.worker", "redislock_fast", "redislock_fast.asyncio", "redis_lock", "pottery"]
)


def open_window(
    url: str, witness: redis.Redis, contestant: Contestant, terms: Options, workload: Workload, seconds: float
) -> Window:
    """Measure workers that contend for locks.

    Args:
        url: of the server.
        witness: a client of the server that no worker uses.
        contestant: whose locks are measured.
        terms: the options of the locks.
        workload: of the workers.
        seconds: how long the measured part is, after `WARM_UP_S`.

    Raises:
        CheckFailedError: when a process reports a failure, or does not report in time.
    """
    with _crew(url, witness, contestant, terms, workload) as crew:
        start_s = crew.start_s()
        measured = Span(start_s + WARM_UP_S, start_s + WARM_UP_S + seconds)
        watched = Span(start_s + _WATCH_FROM_S, start_s + _WATCH_TO_S)
        crew.begin(Times(start_s, measured.begin_s, measured.end_s))
        _sleep_until(watched.begin_s)
        commands = watch.commands_until(witness, watched.end_s)
        connections = crew.connections()
        _sleep_until(measured.begin_s)
        cpu_s = server_cpu_s(witness)
        _sleep_until(measured.end_s)
        cpu_s = server_cpu_s(witness) - cpu_s
        records, client_cpu_s = crew.end()
    return Window(measured, watched, records, commands, client_cpu_s, cpu_s, connections)


def open_idle(
    url: str, witness: redis.Redis, contestant: Contestant, terms: Options, workload: Workload, seconds: float
) -> Window:
    """Measure workers that wait all the time, for a lock that stays held.

    The arguments and errors are those of `open_window`.
    """
    with _crew(url, witness, contestant, terms, workload) as crew, redis.Redis.from_url(url) as client:
        holder = contestant.make(client, f"{crew.prefix}:0")
        if not holder.acquire(blocking=False):
            raise CheckFailedError("a free lock could not be acquired")
        start_s = crew.start_s()
        measured = Span(start_s + WARM_UP_S, start_s + WARM_UP_S + seconds)
        crew.begin(Times(start_s, measured.begin_s, measured.end_s))
        _sleep_until(measured.begin_s)
        cpu_s = server_cpu_s(witness)
        commands = watch.commands_until(witness, measured.end_s)
        cpu_s = server_cpu_s(witness) - cpu_s
        connections = crew.connections()
        holder.release()
        records, client_cpu_s = crew.end()
    return Window(measured, measured, records, commands, client_cpu_s, cpu_s, connections)


class _Crew:
    """The processes of a window."""

    def __init__(self, witness: redis.Redis, prefix: str) -> None:
        self.prefix = prefix
        self._witness = witness
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def enlist(self, assignment: Assignment) -> None:
        """Start a process."""
        ours, its = _processes.Pipe()
        process = _processes.Process(target=work, args=(its, assignment), daemon=True)
        process.start()
        its.close()
        self._members.append((process, ours))

    def start_s(self) -> float:
        """Wait until all processes are ready, and return when they can start."""
        for _, connection in self._members:
            self._hear(connection, _CONNECTING_S)
        return time.monotonic() + 0.05 + 0.001 * len(self._members)

    def begin(self, times: Times) -> None:
        """Send the times to all processes."""
        for _, connection in self._members:
            connection.send(times)

    def connections(self) -> int:
        """The number of connections of the processes to the server."""
        return sum(client["name"] == self.prefix for client in self._witness.client_list())

    def end(self) -> tuple[list[array[float]], float]:
        """Receive all reports: the records of all workers, and the CPU time of all processes."""
        reports = [self._hear(connection, _REPORTING_S) for _, connection in self._members]
        known = [report for report in reports if isinstance(report, Report)]
        return [records for report in known for records in report.records], sum(report.cpu_s for report in known)

    def close(self) -> None:
        """End all processes that are still running."""
        for process, connection in self._members:
            connection.close()
            process.terminate()
        for process, _ in self._members:
            process.join()

    def _hear(self, connection: Connection, patience_s: float) -> object:
        try:
            said = connection.recv() if connection.poll(patience_s) else f"no message within {patience_s:g} s"
        except EOFError:
            said = "a process ended without a report"
        if isinstance(said, str):
            raise CheckFailedError(said)
        return said


@contextmanager
def _crew(
    url: str, witness: redis.Redis, contestant: Contestant, terms: Options, workload: Workload
) -> Iterator[_Crew]:
    """Start the processes; end them, and delete the keys of their locks, at the end."""
    prefix = f"bench:{secrets.token_hex(4)}"
    crew = _Crew(witness, prefix)
    try:
        for process in range(workload.processes):
            crew.enlist(Assignment(url, prefix, contestant.name_for(process), terms, workload, process))
        yield crew
    finally:
        crew.close()
        for key in witness.scan_iter(f"*{prefix}*", count=1000):
            witness.delete(key)


def _sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))
