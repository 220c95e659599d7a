"""A child process of `python -m bench guard`: measures workloads with the package of one tree.

`python -m bench.guard.child URL...` writes to standard output which package it has imported. Then it reads requests
from standard input, a name and seconds each, and writes the rate or the error; it ends with its standard input. Each
message is a line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import redislock_fast
from bench.guard.workloads import LOCKS, WORKLOADS, Site
from bench.measuring import rounds
from bench.measuring.rounds import Entrant


def main() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends its children
    urls = sys.argv[1:]
    _say(file=redislock_fast.__file__, implementation=redislock_fast.implementation)
    entrants: dict[str, Entrant] = {}
    with rounds.open_scene(urls[0], LOCKS) as scene:
        for line in sys.stdin:
            name, seconds = json.loads(line)
            try:
                if name not in entrants:
                    entrants[name] = WORKLOADS[name].entrant(Site(scene, urls))
                sample = rounds.sample(entrants[name], seconds)
            except Exception as error:  # the tree lacks the workload, or fails in it
                _say(error=str(error) or repr(error))
            else:
                _say(rate=sample.pairs_per_s)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
