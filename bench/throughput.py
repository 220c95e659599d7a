"""`python -m bench throughput`: how many uncontended acquire+release pairs a process reaches.

Two modes: one thread, where the C floor and the other libraries take part, and many threads, where
only redis-py and the package do. Must not know: how a contestant works.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

import redislock_fast
from bench import contestants, floor, report, rounds, servers, threads
from bench.contestants import OURS, REDIS_PY, AnyLock, CheckFailedError, Contestant
from bench.import_cost import import_costs_ms
from bench.rounds import ANEW, REUSED, TWO_ROUND_TRIPS, Entrant, Sample

HELP = "uncontended acquire+release pairs per second, in one thread or many"

_PAIRS_PER_LOOK = 10  # pairs between two looks at the clock
_IMPORTS = 15


@dataclass(frozen=True)
class _Mode:
    """What `--mode` chooses.

    Attributes:
        names: who takes part.
        rounds: how many, unless the user says otherwise.
        seconds: how long each is, unless the user says otherwise.
    """

    names: tuple[str, ...]
    rounds: int
    seconds: float


_MODES = {
    "single": _Mode((REDIS_PY, OURS, *floor.NAMES, *contestants.PEERS), 24, 0.12),
    "threads": _Mode((REDIS_PY, OURS), 10, 0.5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    names = _MODES["single"].names

    def some_of(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen).difference(names):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return chosen

    parser.add_argument(
        "--server",
        default="embedded",
        metavar=f"{{{','.join(servers.CHOICES)},URL}}",
        help="the server to start, or the URL of a running one (default: %(default)s, a Valkey)",
    )
    parser.add_argument(
        "--mode",
        choices=_MODES,
        default="single",
        help=f"one thread, or {', '.join(map(str, threads.COUNTS))} threads on one client (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=_positive(int), help=f"default: {_defaults('rounds')}")
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        help=f"for each contestant and round (default: {_defaults('seconds')})",
    )
    parser.add_argument("--only", type=some_of, metavar="NAME,...", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every figure here")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
    mode = _MODES[options.mode]
    options.rounds = options.rounds or mode.rounds
    options.seconds = options.seconds or mode.seconds
    options.only = options.only or list(mode.names)
    try:
        with servers.open_server(options.server) as server, _lock_name(server.url) as name:
            result = _run_on(server, name, options)
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (FileNotFoundError, ValueError, redis.ConnectionError) as error:
        report.say(f"cannot run on {options.server!r}: {error}")
        return 2
    if options.json:
        report.save_json(options.json, result)
    return 0


def _run_on(server: servers.RunningServer, name: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        entrants, versions, absent = _enter(server.url, name, options, Path(folder))
        rounds.race(entrants, options.rounds, options.seconds)
    rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    title = f"{server.name}; {options.rounds} rounds of {options.seconds} s; {OURS} is {redislock_fast.implementation}"
    costs: dict[str, Any] = {}
    if options.mode == "threads":
        rows = [row | threads.extra_summary(entrant) for row, entrant in zip(rows, entrants, strict=True)]
        _print_threads(title, rows, absent)
    else:
        costs_ms = import_costs_ms(_IMPORTS)
        cost_ms = statistics.median(costs_ms)
        costs = {"import_cost_ms": cost_ms, "import_costs_ms": costs_ms}
        _print_single(title, rows, absent)
        print(f"import redislock_fast over import redis: {cost_ms:+.1f} ms (median of {_IMPORTS} fresh interpreters)")
    return {
        "command": "throughput",
        "mode": options.mode,
        "server": server.name,
        **report.environment(),
        "redislock_fast.implementation": redislock_fast.implementation,
        "versions": versions,
        "not_measured": absent,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "lease_s": contestants.LEASE_S,
        "results": rows,
        **costs,
    }


def _defaults(setting: str) -> str:
    return ", ".join(f"{getattr(mode, setting)} in mode {name}" for name, mode in _MODES.items())


def _positive(number: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be positive: {text}")
        return value

    return parse


@contextmanager
def _lock_name(url: str) -> Iterator[str]:
    """A lock name that nobody uses on the server, and no keys of it left behind, nor of those that it begins."""
    name = f"bench:{secrets.token_hex(4)}"
    with redis.Redis.from_url(url) as client:
        try:
            yield name
        finally:
            client.delete(name, f"lock:{name}", f"lock-signal:{name}", f"redlock:{name}", *threads.lock_names(name))


def _enter(
    url: str, name: str, options: argparse.Namespace, folder: Path
) -> tuple[list[Entrant], dict[str, str], dict[str, str]]:
    """The rows to measure, the contestants' versions, and why others are not among them."""
    entrants: list[Entrant] = []
    versions: dict[str, str] = {}
    absent: dict[str, str] = {}
    witness = redis.Redis.from_url(url)
    entrants_of = threads.entrants_of if options.mode == "threads" else _entrants_of
    for wanted in options.only:
        if wanted not in _MODES[options.mode].names:
            absent[wanted] = "one thread only"
        elif wanted in floor.NAMES:
            try:
                entrants.append(_floor_entrant(wanted, name, witness, folder))
            except floor.NoFloorError as reason:
                absent[wanted] = str(reason)
        elif (contestant := contestants.find(wanted)) is None:
            absent[wanted] = "not installed"
        else:
            versions[wanted] = contestant.version
            entrants += entrants_of(contestant, url, name, witness)
    # Those whose ratios are taken are measured soon after one another.
    entrants.sort(key=lambda entrant: (entrant.workload == ANEW, entrant.threads))
    return entrants, versions, absent


def _entrants_of(contestant: Contestant, url: str, name: str, witness: redis.Redis) -> list[Entrant]:
    client, rival_client = redis.Redis.from_url(url), redis.Redis.from_url(url)
    reused, rival = contestant.make(client, name), contestant.make(rival_client, name)
    key = contestant.key_of(name)

    def anew() -> AnyLock:
        return contestant.make(client, name)

    def entrant(workload: str, measure: Callable[[float], Sample], holder: Callable[[], AnyLock]) -> Entrant:
        return Entrant(
            contestant.name,
            contestant.name,
            workload,
            measure,
            lambda: contestants.check(key, holder(), rival, witness),
        )

    return [
        entrant(REUSED, lambda seconds: _pairs_reused(reused, seconds), lambda: reused),
        entrant(ANEW, lambda seconds: _pairs_anew(anew, seconds), anew),
    ]


def _floor_entrant(wanted: str, name: str, witness: redis.Redis, folder: Path) -> Entrant:
    program = floor.Floor(witness, name, folder)
    waiting = floor.NAMES[wanted]
    holder, rival = floor.FloorLock(program), floor.FloorLock(program)
    return Entrant(
        wanted,
        f"C floor ({waiting})",
        TWO_ROUND_TRIPS,
        lambda seconds: Sample(program.run(seconds, waiting)),
        lambda: contestants.check(name, holder, rival, witness),
    )


def _pairs_reused(lock: AnyLock, seconds: float) -> Sample:
    acquire, release = lock.acquire, lock.release
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            if not acquire():
                raise CheckFailedError("a free lock was not acquired")
            release()
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return Sample(pairs / (now - began))


def _pairs_anew(make: Callable[[], AnyLock], seconds: float) -> Sample:
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            with make():
                pass
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return Sample(pairs / (now - began))


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rate_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['median']:,.0f}", f"{row['min']:,.0f} - {row['max']:,.0f}", _ratio(row["ratio_to_redis_py"])


def _print_single(title: str, rows: list[dict[str, Any]], absent: dict[str, str]) -> None:
    cells = [(row["title"], row["workload"], *_rate_cells(row), _ratio(row["ratio_to_floor"])) for row in rows]
    cells += [(name, reason, "-", "-", "-", "-") for name, reason in absent.items()]
    report.table(title, ("contestant", "workload", "pairs/s", "min - max", ": redis-py", ": floor"), cells, words=2)


def _print_threads(title: str, rows: list[dict[str, Any]], absent: dict[str, str]) -> None:
    cells = [
        (
            row["title"],
            str(row["threads"]),
            *_rate_cells(row),
            f"{row['latency_p50_ms']:.2f}",
            f"{row['latency_p99_ms']:.2f}",
            str(row["connections"]),
        )
        for row in rows
    ]
    cells += [(name, reason, "-", "-", "-", "-", "-", "-") for name, reason in absent.items()]
    headings = ("contestant", "threads", "pairs/s", "min - max", ": redis-py", "p50 ms", "p99 ms", "connections")
    report.table(title, headings, cells, words=1)
