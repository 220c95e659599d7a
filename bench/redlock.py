"""`python -m bench redlock`: one lock over independent servers, granted by a majority of them.

The first table has uncontended acquire+release pairs in one thread: of the package, of pottery's Redlock, and of
redis-py's locks, one server after the other. The same requests on plain sockets show the upper limit. The second table
has the time that one frozen server adds to an acquire: to the first one, and to later ones.
"""

from __future__ import annotations

import argparse
import math
import secrets
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.contestants import LEASE_S, OURS, POTTERY, REDIS_PY, expect, pack
from bench.contestants.bare import connected_to
from bench.measuring import arguments, columns, report, rounds, servers
from bench.measuring.rounds import REUSED, Entrant
from bench.workloads.single import pairs_of
from redislock_fast import Redlock
from redislock_fast.server import Server

HELP = "one lock over independent servers: pairs per second, and the cost of a frozen server"

_BARE = "bare sockets"
_LIMIT_S = 0.25  # for a server that does not answer: the `limit` of the package, the `socket_timeout` of the others
_LATER = 30


@dataclass(frozen=True)
class Fleet:
    """The servers, and the resources that are closed after the race."""

    servers: list[Server]
    closing: ExitStack

    def clients(self) -> list[redis.Redis]:
        """Make a client for each server, with the time limit that all contestants have."""
        retry = Retry(NoBackoff(), 0)
        clients = [redis.Redis(port=server.port, socket_timeout=_LIMIT_S, retry=retry) for server in self.servers]
        return [self.closing.enter_context(client) for client in clients]


class _Loop:
    """Locks of redis-py on one server after the other, as a service without a Redlock library would do it."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._locks = [client.lock(name, timeout=LEASE_S, blocking=False) for client in fleet.clients()]
        self._held: list[Any] = []

    def acquire(self) -> bool:
        self._held = [lock for lock in self._locks if _or_false(lock.acquire)]
        return len(self._held) > len(self._locks) // 2

    def release(self) -> None:
        for lock in self._held:
            _or_false(lock.release)


def _or_false(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except redis.RedisError:
        return False


def _pottery(fleet: Fleet, name: str) -> Any:
    """Pottery's Redlock, without waiting."""
    from pottery import Redlock as Pottery  # noqa: PLC0415  # optional

    lock = Pottery(key=name, masters=set(fleet.clients()), auto_release_time=LEASE_S)
    return SimpleNamespace(acquire=partial(lock.acquire, blocking=False), release=lock.release)


class _Bare:
    """The requests of the package on plain sockets, with all replies awaited: the upper limit."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._sockets = list(map(connected_to, fleet.clients()))
        token = b"t" * 32
        self._set = pack("SET", name, token, "NX", "PX", LEASE_S * 1000, "GET")
        self._delete = pack("DELIFEQ", name, token) if fleet.servers[0].kind == "valkey" else pack("DEL", name)
        for connected in self._sockets:
            fleet.closing.callback(connected.close)

    def _ask(self, request: bytes) -> list[bytes]:
        for connected in self._sockets:
            connected.send(request)
        return [connected.recv(4096) for connected in self._sockets]

    def acquire(self) -> bool:
        return all(reply[:1] in (b"$", b"_") for reply in self._ask(self._set))

    def release(self) -> None:
        self._ask(self._delete)


def _ours(fleet: Fleet, name: str) -> Any:
    return Redlock(fleet.clients(), name, timeout=LEASE_S, blocking=False, limit=_LIMIT_S)


MAKERS: dict[str, Callable[[Fleet, str], Any]] = {REDIS_PY: _Loop, OURS: _ours, POTTERY: _pottery, _BARE: _Bare}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_kind(parser)
    parser.add_argument("--count", type=int, default=5, choices=range(3, 10, 2), help="servers (default: %(default)s)")
    arguments.add_rounds(parser, 20, 0.3)
    arguments.add_wide(parser)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, and return the figures."""
    kind = servers.CHOICES[options.server]
    names = [name for name in MAKERS if name != POTTERY or find_spec(POTTERY)]
    with ExitStack() as closing:
        fleet = Fleet([closing.enter_context(Server(kind)) for _ in range(options.count)], closing)
        entrants = [entrant(name, _make(fleet, name)) for name in names]
        rounds.race(entrants, options.rounds, options.seconds)
        rows = [rounds.summary(entrant, entrants) for entrant in entrants]
        title = report.title(f"{options.count} x {kind}", options.rounds, options.seconds)
        report.print_rows(title, columns.REDLOCK, rows, is_wide=options.wide)
        by_name = {entrant.contestant: entrant.rates for entrant in entrants}
        if POTTERY in by_name:
            ratios = [own / other for own, other in zip(by_name[OURS], by_name[POTTERY], strict=True)]
            print(f"{OURS} : {POTTERY} {statistics.median(ratios):.1f} ({version(POTTERY)})")
        frozen = {name: freeze(fleet, name) for name in names if name != _BARE}
    cells = [[name, *(f"{figure:.2f}" for figure in figures.values())] for name, figures in frozen.items()]
    report.table("one server frozen: time of an acquire, ms", ["contestant", *next(iter(frozen.values()))], cells, 1)
    return {"results": rows, "frozen_ms": frozen}


def _make(fleet: Fleet, contestant: str) -> Any:
    return MAKERS[contestant](fleet, f"bench-{secrets.token_hex(4)}")


def entrant(name: str, lock: Any) -> Entrant:
    """Make the row of a contestant with this lock."""

    def check() -> None:
        expect(lock.acquire(), "a free lock was not acquired")
        lock.release()

    title = f"{name}, one by one" if name == REDIS_PY else None
    return Entrant(name, REUSED, partial(pairs_of, lock.acquire, lock.release), check, limit=_BARE, title=title)


def freeze(fleet: Fleet, contestant: str) -> dict[str, float]:
    """Freeze each server in turn, each with a new lock: not every contestant cleans up on a server that was frozen."""
    before_ms, first_ms, later_ms = list[float](), list[float](), list[float]()
    for server in fleet.servers:
        lock = _make(fleet, contestant)
        before_ms += [_acquire_ms(lock) for _ in range(_LATER)]
        server.signal(signal.SIGSTOP)
        try:
            first_ms.append(_acquire_ms(lock))
            later_ms += [_acquire_ms(lock) for _ in range(_LATER)]
        finally:
            server.signal(signal.SIGCONT)
    return {
        "before": statistics.median(before_ms),
        "first": statistics.median(first_ms),
        "worst first": max(first_ms),
        "later": statistics.median(later_ms),
        "worst later": max(later_ms),
        "failed": (first_ms + later_ms).count(math.inf),
    }


def _acquire_ms(lock: Any) -> float:
    began = time.perf_counter()
    acquired = lock.acquire()
    took_ms = 1000 * (time.perf_counter() - began)
    if acquired:
        lock.release()
    return took_ms if acquired else math.inf
