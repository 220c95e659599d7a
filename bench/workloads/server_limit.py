"""The limit of the server: the two commands of a lock, pipelined by the load generator of the server.

The commands are those of redislock_fast, all for one name. All but the first acquire find the lock held, and all but
the first release find it gone. Both cost the server less than a pair does, so this is an upper limit.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

from bench import contestants
from bench.contestants import SERVER_LIMIT, AbsentError, CheckFailedError
from bench.contestants.commands import BareLock, Commands, new_token
from bench.measuring.rounds import Entrant, Sample, Scene
from redislock_fast.server import find_binary

_DEPTH = 64  # requests under way on each connection
_CONNECTIONS = 50  # the default of the load generator
_REQUESTS_PER_S = 400_000  # how many are sent of each command, per second to measure
_PROGRAMS = ("valkey-benchmark", "redis-benchmark")
_TIMEOUT_S = 60


def entrants_of(scene: Scene) -> list[Entrant]:
    """Make the one row of the limit.

    Raises:
        AbsentError: without a load generator, or when the server needs more than plain TCP.
    """
    program = _find_program()
    commands = Commands(scene.witness)
    name = f"{scene.prefix}:limit"
    scene.closing.callback(scene.witness.delete, name)
    holder, rival = BareLock(commands, name), BareLock(commands, name)
    entrant = Entrant(
        SERVER_LIMIT,
        f"{program.name} -P {_DEPTH}",
        "SET, then release",
        lambda seconds: _measure(program, commands, name, scene, seconds),
        lambda: contestants.check(name, holder, rival, scene.witness),
        _CONNECTIONS * _DEPTH,
        limit=SERVER_LIMIT,
    )
    return [entrant]


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


def _measure(program: Path, commands: Commands, name: str, scene: Scene, seconds: float) -> Sample:
    """Measure both commands one after the other, and return the rate of pairs that they allow."""
    token = new_token()
    requests = max(1, int(seconds * _REQUESTS_PER_S))
    acquires_per_s = _run(program, commands, requests, commands.acquire(name, token))
    if scene.witness.get(name) != token.encode():
        raise CheckFailedError("no request took the lock")
    releases_per_s = _run(program, commands, requests, commands.release(name, token))
    if scene.witness.exists(name):
        raise CheckFailedError("no request released the lock")
    return Sample(1 / (1 / acquires_per_s + 1 / releases_per_s))


def _run(program: Path, commands: Commands, requests: int, words: tuple[str, ...]) -> float:
    """Measure requests per second."""
    where = ["-h", commands.host, "-p", str(commands.port)]
    load = ["-c", str(_CONNECTIONS), "-P", str(_DEPTH), "-n", str(requests), "--csv"]
    done = subprocess.run(
        [str(program), *where, *load, *words], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    rows = list(csv.reader(done.stdout.splitlines()))
    if done.returncode or not rows:
        raise CheckFailedError(f"{program.name}: {done.stderr.strip() or done.stdout.strip()}")
    return float(rows[-1][1])
