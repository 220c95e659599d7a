"""`python -m bench throughput`: how many uncontended acquire+release pairs one thread reaches.

Rules: rounds interleave the contestants (A B C A B C ...), so that the machine's noise hits all
alike; ratios are taken within a round and only then reduced to their median; one warm-up is not
counted; each contestant is checked in each round, outside the timed part. Must not know: how a
contestant works.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

import redislock_fast
from bench import contestants, floor, report, servers
from bench.contestants import OURS, REDIS_PY, AnyLock, CheckFailedError, Contestant
from bench.import_cost import import_costs_ms

HELP = "uncontended acquire+release pairs per second, one thread"

REUSED = "lock reused"
ANEW = "made anew"
_FLOOR_WORKLOAD = "two round trips"

_PAIRS_PER_LOOK = 10  # pairs between two looks at the clock
_IMPORTS = 15


@dataclass
class Entrant:
    """A row of the table: one contestant in one workload.

    Attributes:
        contestant: its name in `--only` and in the JSON file.
        title: its name in the table.
        workload: what it does.
        measure: given seconds, answers pairs per second.
        check: raises `CheckFailedError` unless its lock is one.
        rates: pairs per second, one figure per counted round.
    """

    contestant: str
    title: str
    workload: str
    measure: Callable[[float], float]
    check: Callable[[], None]
    rates: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    names = (REDIS_PY, OURS, *floor.NAMES, *contestants.PEERS)

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
    parser.add_argument("--rounds", type=_positive(int), default=24, help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=_positive(float),
        default=0.12,
        help="for each contestant and round (default: %(default)s)",
    )
    parser.add_argument("--only", type=some_of, default=list(names), metavar="NAME,...", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every figure here")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
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
        entrants, versions, absent = _enter(server.url, name, options.only, Path(folder))
        _race(entrants, options.rounds, options.seconds)
    costs_ms = import_costs_ms(_IMPORTS)
    cost_ms = statistics.median(costs_ms)
    rows = [_summary(entrant, entrants) for entrant in entrants]
    _print(server, rows, absent, options)
    print(f"import redislock_fast over import redis: {cost_ms:+.1f} ms (median of {_IMPORTS} fresh interpreters)")
    return {
        "command": "throughput",
        "server": server.name,
        **report.environment(),
        "redislock_fast.implementation": redislock_fast.implementation,
        "versions": versions,
        "not_measured": absent,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "lease_s": contestants.LEASE_S,
        "results": rows,
        "import_cost_ms": cost_ms,
        "import_costs_ms": costs_ms,
    }


def _positive(number: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be positive: {text}")
        return value

    return parse


@contextmanager
def _lock_name(url: str) -> Iterator[str]:
    """A lock name that nobody uses on the server, and no keys of it left behind."""
    name = f"bench:{secrets.token_hex(4)}"
    with redis.Redis.from_url(url) as client:
        try:
            yield name
        finally:
            client.delete(name, f"lock:{name}", f"lock-signal:{name}", f"redlock:{name}")


def _enter(url: str, name: str, only: list[str], folder: Path) -> tuple[list[Entrant], dict[str, str], dict[str, str]]:
    """The rows to measure, the contestants' versions, and why others are not among them."""
    entrants: list[Entrant] = []
    versions: dict[str, str] = {}
    absent: dict[str, str] = {}
    witness = redis.Redis.from_url(url)
    for wanted in only:
        if wanted in floor.NAMES:
            try:
                entrants.append(_floor_entrant(wanted, name, witness, folder))
            except floor.NoFloorError as reason:
                absent[wanted] = str(reason)
        elif (contestant := contestants.find(wanted)) is None:
            absent[wanted] = "not installed"
        else:
            versions[wanted] = contestant.version
            entrants += _entrants_of(contestant, url, name, witness)
    # Those whose ratios are taken are measured soon after one another.
    entrants.sort(key=lambda entrant: entrant.workload == ANEW)
    return entrants, versions, absent


def _entrants_of(contestant: Contestant, url: str, name: str, witness: redis.Redis) -> list[Entrant]:
    client, rival_client = redis.Redis.from_url(url), redis.Redis.from_url(url)
    reused, rival = contestant.make(client, name), contestant.make(rival_client, name)
    key = contestant.key_of(name)

    def anew() -> AnyLock:
        return contestant.make(client, name)

    def entrant(workload: str, measure: Callable[[float], float], holder: Callable[[], AnyLock]) -> Entrant:
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
        _FLOOR_WORKLOAD,
        lambda seconds: program.run(seconds, waiting),
        lambda: contestants.check(name, holder, rival, witness),
    )


def _pairs_reused(lock: AnyLock, seconds: float) -> float:
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
    return pairs / (now - began)


def _pairs_anew(make: Callable[[], AnyLock], seconds: float) -> float:
    pairs = 0
    began = now = time.perf_counter()
    while now < began + seconds:
        for _ in range(_PAIRS_PER_LOOK):
            with make():
                pass
        pairs += _PAIRS_PER_LOOK
        now = time.perf_counter()
    return pairs / (now - began)


def _race(entrants: list[Entrant], rounds: int, seconds: float) -> None:
    with report.progress(len(entrants) * (rounds + 1)) as step:
        for counted_round in range(rounds + 1):
            stage = f"round {counted_round} of {rounds}" if counted_round else "warm-up"
            for entrant in entrants:
                step(stage)
                rate = _sample(entrant, seconds)
                if counted_round:
                    entrant.rates.append(rate)


def _sample(entrant: Entrant, seconds: float) -> float:
    """One measurement between two checks; whatever a contestant raises is its failure."""
    try:
        entrant.check()
        gc.collect()  # nobody pays for another's garbage
        rate = entrant.measure(seconds)
        entrant.check()
    except Exception as error:
        reason = str(error) if isinstance(error, CheckFailedError) else repr(error)
        raise CheckFailedError(f"{entrant.title}, {entrant.workload}: {reason}") from error
    return rate


def _ratios(entrant: Entrant, base: Entrant | None) -> list[float] | None:
    if base is None:
        return None
    return [rate / other for rate, other in zip(entrant.rates, base.rates, strict=True)]


def _summary(entrant: Entrant, entrants: list[Entrant]) -> dict[str, Any]:
    """Everything there is to say about a row, as it is saved."""

    def find(name: str, workload: str) -> Entrant | None:
        return next((e for e in entrants if (e.contestant, e.workload) == (name, workload)), None)

    workload = REUSED if entrant.workload == _FLOOR_WORKLOAD else entrant.workload
    to_redis_py = _ratios(entrant, find(REDIS_PY, workload))
    to_floor = _ratios(entrant, find("floor", _FLOOR_WORKLOAD))
    return {
        "contestant": entrant.contestant,
        "title": entrant.title,
        "workload": entrant.workload,
        "pairs_per_s": entrant.rates,
        "median": statistics.median(entrant.rates),
        "min": min(entrant.rates),
        "max": max(entrant.rates),
        "ratios_to_redis_py": to_redis_py,
        "ratio_to_redis_py": to_redis_py and statistics.median(to_redis_py),
        "ratios_to_floor": to_floor,
        "ratio_to_floor": to_floor and statistics.median(to_floor),
    }


def _print(
    server: servers.RunningServer,
    rows: list[dict[str, Any]],
    absent: dict[str, str],
    options: argparse.Namespace,
) -> None:
    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = [
        (
            row["title"],
            row["workload"],
            f"{row['median']:,.0f}",
            f"{row['min']:,.0f} - {row['max']:,.0f}",
            ratio(row["ratio_to_redis_py"]),
            ratio(row["ratio_to_floor"]),
        )
        for row in rows
    ]
    cells += [(name, reason, "-", "-", "-", "-") for name, reason in absent.items()]
    report.table(
        f"{server.name}; {options.rounds} rounds of {options.seconds} s; {OURS} is {redislock_fast.implementation}",
        ("contestant", "workload", "pairs/s", "min - max", ": redis-py", ": floor"),
        cells,
        words=2,
    )
