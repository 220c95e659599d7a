"""The yardsticks of the workloads of one thread and of batches: what a lock costs without a library in Python.

The floor of a blocking lock is its two round trips in C, by `floor.c`. The limit of the server is the two commands of a
lock, pipelined by its own load generator, all for one name: all but the first acquire find the lock held, and all but
the first release find it gone. Both cost the server less than a pair does, so this is an upper limit.

The requests are those of redislock_fast: native commands where the server has them, else the release script.
"""

from __future__ import annotations

import csv
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import redis

from bench.contestants import LEASE_S, AbsentError, CheckFailedError, address_of, expect, pack
from bench.measuring.delay import compiled
from bench.measuring.rounds import TWO_ROUND_TRIPS, Entrant, Sample, Scene
from redislock_fast._protocol.scripts import RELEASE
from redislock_fast.server import find_binary

FLOOR = "floor"
FLOORS = {FLOOR: "blocking", "floor-spinning": "spinning"}
"""The two floors by their names in `--only`, and how each waits for a reply."""

SERVER_LIMIT = "redis-benchmark"

_TOKEN_BYTES = 36
_RELEASED = b":1\r\n"  # the owner's reply
_SOURCE = Path(__file__).with_name("floor.c")
_DEPTH = 64  # requests of the load generator under way on each connection
_CONNECTIONS = 50  # its default
_REQUESTS_PER_S = 400_000  # how many are sent of each command, per second to measure
_PROGRAMS = ("valkey-benchmark", "redis-benchmark")
_TIMEOUT_S = 60


def floor(wanted: str, scene: Scene) -> list[Entrant]:
    """Make the one row of a floor, a key of `FLOORS`.

    Raises `AbsentError` without a C compiler, or when the server needs more than plain TCP.
    """
    host, port = address_of(scene.witness)
    commands = _Commands(scene.witness, scene.prefix)
    program = compiled(_SOURCE, Path(scene.closing.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))))
    waiting = FLOORS[wanted]
    parts = (pack(*commands.acquire), commands.acquired, pack(*commands.release), _RELEASED)

    def measure(seconds: float) -> Sample:
        words = [str(program), host, str(port), str(seconds), waiting, *(part.hex() for part in parts)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:  # a reply was not the one that an acquire of a free lock, or a release, has
            raise CheckFailedError(done.stderr.strip())
        return Sample(float(done.stdout))

    return [Entrant(wanted, TWO_ROUND_TRIPS, measure, title=f"C floor ({waiting})")]


def server_limit(scene: Scene) -> list[Entrant]:
    """Make the one row of the limit.

    Raises `AbsentError` without a load generator, or when the server needs more than plain TCP.
    """
    program = _find_program()
    host, port = address_of(scene.witness)
    name = f"{scene.prefix}:limit"
    commands = _Commands(scene.witness, name)

    def measure(seconds: float) -> Sample:
        """Measure both commands one after the other: the rate of pairs that they allow."""
        load = ["-c", str(_CONNECTIONS), "-P", str(_DEPTH), "-n", str(max(1, int(seconds * _REQUESTS_PER_S))), "--csv"]
        command = [str(program), "-h", host, "-p", str(port), *load]
        acquires_per_s = _run([*command, *commands.acquire])
        expect(scene.witness.get(name) == commands.token.encode(), "no request took the lock")
        releases_per_s = _run([*command, *commands.release])
        expect(not scene.witness.exists(name), "no request released the lock")
        return Sample(1 / (1 / acquires_per_s + 1 / releases_per_s))

    title = f"{program.name} -P {_DEPTH}"
    count = _CONNECTIONS * _DEPTH
    return [Entrant(SERVER_LIMIT, "SET, then release", measure, count=count, title=title)]


def _find_program() -> Path:
    """Find the load generator on the PATH, or beside a server binary that a Python package brings."""
    for name in _PROGRAMS:
        if on_path := shutil.which(name):
            return Path(on_path)
        for kind in ("valkey", "redis-6.2"):
            server = find_binary(kind)
            if server and (beside := server.with_name(name)).exists():
                return beside
    raise AbsentError("not installed")


def _run(command: Sequence[str]) -> float:
    """Measure requests per second."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    rows = list(csv.reader(done.stdout.splitlines()))
    if done.returncode or not rows:
        raise CheckFailedError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return float(rows[-1][1])


class _Commands:
    """The two requests for one name, as words that suit the server of a client, with a token of their own."""

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.acquire = ["SET", name, self.token, "NX", "PX", str(LEASE_S * 1000)]
        self.acquired = b"+OK\r\n"  # the reply for a free lock
        if int(client.info("server")["redis_version"].partition(".")[0]) >= 7:  # they accept NX and GET together
            self.acquire.append("GET")
            self.acquired = b"$-1\r\n"
        delifeq, delex = client.execute_command("COMMAND INFO", "DELIFEQ", "DELEX")  # type: ignore[no-untyped-call]
        if delifeq:
            self.release = ["DELIFEQ", name, self.token]
        elif delex:
            self.release = ["DELEX", name, "IFEQ", self.token]
        else:
            self.release = ["EVALSHA", client.script_load(RELEASE.text), "1", name, self.token]
