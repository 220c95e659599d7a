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
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Protocol

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import redislock_fast
from bench.contestants import LEASE_S, OURS, REDIS_PY, CheckFailedError
from bench.contestants.packing import pack
from bench.measuring import arguments, report, rounds, servers
from bench.measuring.rounds import REUSED, Entrant
from bench.measuring.tables import REDLOCK_COLUMNS, print_rows
from bench.workloads.single import pairs_reused
from redislock_fast import Redlock
from redislock_fast.server import Server

HELP = "one lock over independent servers: pairs per second, and the cost of a frozen server"

_BARE = "bare sockets"
_POTTERY = "pottery"
_LIMIT_S = 0.25  # for a server that does not answer: the `limit` of the package, the `socket_timeout` of the others
_LATER = 30


class _Lock(Protocol):
    """The calls that all contestants share."""

    def acquire(self) -> bool:
        """Acquire the lock of a majority, or return False."""

    def release(self) -> None:
        """Release the lock on all servers."""


class _Loop:
    """Locks of redis-py on one server after the other, as a service without a Redlock library would do it."""

    def __init__(self, clients: Sequence[redis.Redis], name: str) -> None:
        self._locks = [client.lock(name, timeout=LEASE_S, blocking=False) for client in clients]
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


class _Bare:
    """The requests of the package on plain sockets, with all replies awaited: the upper limit."""

    def __init__(self, running: Sequence[Server], name: str) -> None:
        native = running[0].kind == "valkey"
        self._sockets = [socket.create_connection(("127.0.0.1", server.port)) for server in running]
        token = b"t" * 32
        self._set = pack("SET", name, token, "NX", "PX", LEASE_S * 1000, "GET")
        self._delete = pack("DELIFEQ", name, token) if native else pack("DEL", name)
        for connected in self._sockets:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _ask(self, request: bytes) -> list[bytes]:
        for connected in self._sockets:
            connected.send(request)
        return [connected.recv(4096) for connected in self._sockets]

    def acquire(self) -> bool:
        return all(reply[:1] in (b"$", b"_") for reply in self._ask(self._set))

    def release(self) -> None:
        self._ask(self._delete)

    def close(self) -> None:
        """Close the sockets."""
        for connected in self._sockets:
            connected.close()


@dataclass(frozen=True)
class _Fleet:
    """The servers, and the resources that are closed after the race."""

    servers: list[Server]
    closing: ExitStack

    def clients(self) -> list[redis.Redis]:
        """Make a client for each server, with the time limit that all contestants have."""
        return [
            self.closing.enter_context(
                redis.Redis(port=server.port, socket_timeout=_LIMIT_S, retry=Retry(NoBackoff(), 0))
            )
            for server in self.servers
        ]


def _ours(fleet: _Fleet, name: str) -> _Lock:
    return Redlock(fleet.clients(), name, timeout=LEASE_S, blocking=False, limit=_LIMIT_S)


def _pottery(fleet: _Fleet, name: str) -> _Lock:
    from pottery import Redlock as Pottery  # noqa: PLC0415  # optional

    lock = Pottery(key=name, masters=set(fleet.clients()), auto_release_time=LEASE_S)

    class Try:
        """It without waiting, and without its error for a minority that cannot be reached."""

        def acquire(self) -> bool:
            return bool(lock.acquire(blocking=False))

        def release(self) -> None:
            lock.release()

    return Try()


def _loop(fleet: _Fleet, name: str) -> _Lock:
    return _Loop(fleet.clients(), name)


def _bare(fleet: _Fleet, name: str) -> _Lock:
    bare = _Bare(fleet.servers, name)
    fleet.closing.callback(bare.close)
    return bare


_MAKERS: dict[str, Callable[[_Fleet, str], _Lock]] = {REDIS_PY: _loop, OURS: _ours, _POTTERY: _pottery, _BARE: _bare}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--server", choices=servers.CHOICES, default="embedded", help="default: %(default)s, a Valkey")
    parser.add_argument("--count", type=int, default=5, choices=range(3, 10, 2), help="servers (default: %(default)s)")
    parser.add_argument("--rounds", type=arguments.positive(int), default=20, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=arguments.positive(float), default=0.3, help="for each contestant (default: %(default)s)"
    )
    arguments.add_wide(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the tables."""
    try:
        with _start(options.server, options.count) as fleet:
            result = _run_on(fleet, options)
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except FileNotFoundError as error:
        return servers.refuse(options.server, error)
    if options.json:
        report.save_json(options.json, result)
    return 0


@contextmanager
def _start(choice: str, count: int) -> Iterator[_Fleet]:
    with ExitStack() as closing:
        started = [closing.enter_context(Server(servers.CHOICES[choice])) for _ in range(count)]
        with ExitStack() as inner:  # clients before servers
            yield _Fleet(started, inner)


def _run_on(fleet: _Fleet, options: argparse.Namespace) -> dict[str, Any]:
    names = [name for name in _MAKERS if name != _POTTERY or find_spec(_POTTERY)]
    entrants = [entrant(name, _make(fleet, name)) for name in names]
    rounds.race(entrants, options.rounds, options.seconds)
    rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    about = f"{options.count} x {servers.CHOICES[options.server]}; {OURS} is {redislock_fast.implementation}"
    print_rows(f"{about}; {options.rounds} rounds of {options.seconds} s", REDLOCK_COLUMNS, rows, {}, options.wide)
    by_name = {entrant.contestant: entrant.rates for entrant in entrants}
    if _POTTERY in by_name:
        ratios = [own / other for own, other in zip(by_name[OURS], by_name[_POTTERY], strict=True)]
        print(f"{OURS} : {_POTTERY} {statistics.median(ratios):.1f} ({version(_POTTERY)})")
    frozen = {name: _freeze(fleet, name) for name in names if name != _BARE}
    cells = [[name, *(f"{figure:.2f}" for figure in figures.values())] for name, figures in frozen.items()]
    report.table("one server frozen: time of an acquire, ms", ["contestant", *next(iter(frozen.values()))], cells, 1)
    return {"command": "redlock", **report.environment(), "results": rows, "frozen_ms": frozen}


def _make(fleet: _Fleet, contestant: str) -> _Lock:
    return _MAKERS[contestant](fleet, f"bench-{secrets.token_hex(4)}")


def entrant(name: str, lock: _Lock) -> Entrant:
    """Make the row of a contestant.

    Args:
        name: of the contestant.
        lock: its lock.
    """
    title = f"{name}, one by one" if name == REDIS_PY else name
    return Entrant(
        name,
        title,
        REUSED,
        lambda seconds: pairs_reused(lock.acquire, lock.release, seconds),
        lambda: _check(lock),
        limit=_BARE,
    )


def _check(lock: _Lock) -> None:
    if not lock.acquire():
        raise CheckFailedError("a free lock was not acquired")
    lock.release()


def _freeze(fleet: _Fleet, contestant: str) -> dict[str, float]:
    """Freeze each server in turn, each with a new lock: not every contestant cleans up on a server that was frozen."""
    before_ms: list[float] = []
    first_ms: list[float] = []
    later_ms: list[float] = []
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


def _acquire_ms(lock: _Lock) -> float:
    began = time.perf_counter()
    acquired = lock.acquire()
    took_ms = 1000 * (time.perf_counter() - began)
    if acquired:
        lock.release()
    return took_ms if acquired else math.inf
