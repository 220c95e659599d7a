"""The floor of a blocking lock: its two round trips in C, by `floor.c`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench import contestants
from bench.contestants import FLOOR, CheckFailedError
from bench.contestants.commands import BareLock, Commands, new_token
from bench.measuring.compiling import compiled
from bench.measuring.rounds import TWO_ROUND_TRIPS, Entrant, Sample, Scene

NAMES = {FLOOR: "blocking", "floor-spinning": "spinning"}
"""The two floors by their names in `--only`, and how each waits for a reply."""

_SOURCE = Path(__file__).with_name("floor.c")


def entrants_of(wanted: str, scene: Scene) -> list[Entrant]:
    """Make the one row of a floor.

    Args:
        wanted: a key of `NAMES`.
        scene: of the measurement.

    Raises:
        AbsentError: without a C compiler, or when the server needs more than plain TCP.
    """
    commands = Commands(scene.witness)
    program = compiled(_SOURCE, scene.folder)
    waiting = NAMES[wanted]
    holder, rival = BareLock(commands, scene.prefix), BareLock(commands, scene.prefix)
    entrant = Entrant(
        wanted,
        f"C floor ({waiting})",
        TWO_ROUND_TRIPS,
        lambda seconds: Sample(_run(program, commands, scene.prefix, seconds, waiting)),
        lambda: contestants.check(scene.prefix, holder, rival, scene.witness),
        limit=FLOOR,
    )
    return [entrant]


def _run(program: Path, commands: Commands, name: str, seconds: float, waiting: str) -> float:
    """Measure the pairs per second.

    Raises:
        CheckFailedError: when a reply of the server is not the correct one.
    """
    acquire, release = commands.exchanges(name, new_token())
    parts = (acquire.request, acquire.reply, release.request, release.reply)
    done = subprocess.run(
        [str(program), commands.host, str(commands.port), str(seconds), waiting] + [part.hex() for part in parts],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CheckFailedError(done.stderr.strip())
    return float(done.stdout)
