"""One measured window: processes that contend for the locks of one contestant, from their start to their records.

The processes and the names of the locks are new for each window. The processes begin together, warm up under the load
that is measured, and end together.

The commands of clients are counted in the second half of the warm-up, as a server's MONITOR shows them: the counters of
INFO include the commands that scripts call. MONITOR costs time of the server and of this process, so nothing else is
measured meanwhile, and the lines are counted afterwards.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import redis

from bench.contention.figures import Span, Window
from bench.contention.worker import GRACE_S, Assignment, Report, sleep_until, work
from bench.contention.workload import Workload
from bench.contestants import CheckFailedError, Contestant, delete_keys, expect
from bench.measuring import report
from bench.measuring.costs import connections_of, server_cpu_s

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

Measure = Callable[[str, redis.Redis, Contestant, int, Workload, float], Window]
"""`open_window` or `open_idle`."""


def measure_windows(
    measure: Measure,
    url: str,
    witness: redis.Redis,
    lease_s: int,
    races: Sequence[tuple[Workload, Sequence[Contestant]]],
    rounds: int,
    seconds: float,
) -> Iterator[tuple[Workload, dict[Contestant, list[Window]]]]:
    """Measure the contestants of each workload in turn, round after round. Yields the windows of a workload.

    A `CheckFailedError` names the contestant.
    """
    with report.progress(rounds * sum(len(field) for _, field in races)) as step:
        for workload, field in races:
            windows: dict[Contestant, list[Window]] = {contestant: [] for contestant in field}
            for number in range(rounds):
                for contestant in field:
                    step(f"{workload.label}, round {number + 1} of {rounds}")
                    try:
                        window = measure(url, witness, contestant, lease_s, workload, seconds)
                    except CheckFailedError as error:
                        raise CheckFailedError(f"{contestant.name}, {workload.label}: {error}") from error
                    windows[contestant].append(window)
            yield workload, windows


def open_window(
    url: str, witness: redis.Redis, contestant: Contestant, lease_s: int, workload: Workload, seconds: float
) -> Window:
    """Measure workers that contend for locks, for these seconds after `WARM_UP_S`.

    The witness is a client of the server that no worker uses, and the lease is the timeout of the locks. Raises
    `CheckFailedError` when a process reports a failure, or does not report in time.
    """
    with _open_crew(url, witness, contestant, lease_s, workload) as crew:
        start_s, measured = crew.begin(seconds)
        watched = Span(start_s + _WATCH_FROM_S, start_s + _WATCH_TO_S)
        sleep_until(watched.begin_s)
        commands = commands_until(witness, watched.end_s)
        connections = connections_of(witness, crew.prefix)
        sleep_until(measured.begin_s)
        cpu_s = server_cpu_s(witness)
        sleep_until(measured.end_s)
        cpu_s = server_cpu_s(witness) - cpu_s
        records, client_cpu_s = crew.end()
    return Window(measured, watched, records, commands, client_cpu_s, cpu_s, connections)


def open_idle(
    url: str, witness: redis.Redis, contestant: Contestant, lease_s: int, workload: Workload, seconds: float
) -> Window:
    """Measure workers that wait all the time, for a lock that stays held; otherwise as `open_window`."""
    with _open_crew(url, witness, contestant, lease_s, workload) as crew, redis.Redis.from_url(url) as client:
        holders = [contestant.make(client, f"{crew.prefix}:0") for _ in range(contestant.limit)]
        expect(all(holder.acquire(blocking=False) for holder in holders), "a free lock could not be acquired")
        _, measured = crew.begin(seconds)
        sleep_until(measured.begin_s)
        cpu_s = server_cpu_s(witness)
        commands = commands_until(witness, measured.end_s)
        cpu_s = server_cpu_s(witness) - cpu_s
        connections = connections_of(witness, crew.prefix)
        for holder in holders:
            holder.release()
        records, client_cpu_s = crew.end()
    return Window(measured, measured, records, commands, client_cpu_s, cpu_s, connections)


class _Crew:
    """The processes of a window."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._members: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def enlist(self, assignment: Assignment) -> None:
        """Start a process."""
        ours, its = _processes.Pipe()
        process = _processes.Process(target=work, args=(its, assignment), daemon=True)
        process.start()
        its.close()
        self._members.append((process, ours))

    def begin(self, seconds: float) -> tuple[float, Span]:
        """Wait until all processes are ready, and tell them when to start and end. Returns the start, measured part."""
        for _, connection in self._members:
            self._read(connection, _CONNECTING_S)
        start_s = time.monotonic() + 0.05 + 0.001 * len(self._members)
        measured = Span(start_s + WARM_UP_S, start_s + WARM_UP_S + seconds)
        for _, connection in self._members:
            connection.send((start_s, measured.begin_s, measured.end_s))  # numbers: a process must not import now
        return start_s, measured

    def end(self) -> tuple[list[array[float]], float]:
        """Receive all reports: the records of all workers, and the CPU time of all processes."""
        reports: list[Report] = [self._read(connection, _REPORTING_S) for _, connection in self._members]
        return [records for report in reports for records in report.records], sum(report.cpu_s for report in reports)

    def close(self) -> None:
        """End all processes that are still running."""
        for process, connection in self._members:
            connection.close()
            process.terminate()
        for process, _ in self._members:
            process.join()

    def _read(self, connection: Connection, patience_s: float) -> Any:
        try:
            message = connection.recv() if connection.poll(patience_s) else f"no message within {patience_s:g} s"
        except EOFError:
            message = "a process ended without a report"
        if isinstance(message, str):
            raise CheckFailedError(message)
        return message


@contextmanager
def _open_crew(
    url: str, witness: redis.Redis, contestant: Contestant, lease_s: int, workload: Workload
) -> Iterator[_Crew]:
    """Start the processes; end them, and delete the keys of their locks, at the end."""
    crew = _Crew(f"bench:{secrets.token_hex(4)}")
    try:
        for process in range(workload.processes):
            crew.enlist(Assignment(url, crew.prefix, contestant.name_for(process), lease_s, workload, process))
        yield crew
    finally:
        crew.close()
        delete_keys(witness, crew.prefix)


def commands_until(client: redis.Redis, until_s: float) -> Counter[str] | None:
    """Count the commands that clients send from now until a moment of `time.monotonic`, with those of connecting.

    Sends MONITOR and RESET on a connection of its own. Returns the commands by name, in capitals; None when the server
    allows no MONITOR.
    """
    lines: list[bytes] = []
    try:
        with client.monitor() as monitor:  # type: ignore[no-untyped-call]
            connection: Any = monitor.connection
            while (left_s := until_s - time.monotonic()) > 0:
                if connection.can_read(left_s):
                    lines.append(connection.read_response())
            connection.send_command("RESET")
            while (line := connection.read_response()) != b"RESET":  # no line follows
                lines.append(line)
    except redis.ResponseError:
        return None
    return count_commands(lines)


def count_commands(lines: list[bytes]) -> Counter[str]:
    """Count lines like `1700000000.123456 [0 127.0.0.1:5000] "SET" "name"`; a script's have `lua` in the brackets."""
    found: Counter[str] = Counter()
    for line in lines:
        sender, bracket, rest = line.partition(b'] "')
        if bracket and not sender.endswith(b" lua"):
            found[rest.partition(b'"')[0].decode().upper()] += 1
    found.pop("RESET", None)
    return found
