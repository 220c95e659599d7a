"""`python -m bench election`: how long nobody leads, when a leader resigns and when its process is killed."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from contextlib import ExitStack
from threading import Event, Thread
from typing import Any

import redis

from bench.measuring import arguments, report, servers
from bench.measuring.rounds import open_scene, percentile
from redislock_fast import Election
from redislock_fast._protocol.keys import queue_keys

HELP = "the time from a leader's resign() to the next lead(term), and after the end of a killed leader's lease"

_GOAL_MS = 10
_PATIENCE_S = 60.0
_KILLED_LEASE_S = 1


class _Candidate:
    """An election that runs in a thread of its own."""

    def __init__(self, url: str, name: str, closing: ExitStack) -> None:
        self.leads = Event()  # while it leads
        self.led_at = 0.0  # when its last term began
        self.election = Election(closing.enter_context(redis.Redis.from_url(url)), name, sleep=0.1)
        thread = Thread(target=self.election.run, args=(self._lead,))
        thread.start()
        closing.callback(thread.join)
        closing.callback(self.election.stop)

    def _lead(self, term: Any) -> None:
        self.led_at = time.perf_counter()
        self.leads.set()
        term.stopping.wait()
        self.leads.clear()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_server(parser)
    arguments.add_rounds(parser, 5, 1.0, of="kind")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    resigned: list[float] = []
    killed: list[float] = []
    with servers.open_server(options.server) as server, open_scene(server.url) as scene:
        for number in range(options.rounds):
            resigned += _resigned_ms(scene.url, scene.witness, f"{scene.prefix}:{number}", options.seconds)
            killed.append(_killed_ms(scene.url, scene.witness, f"{scene.prefix}:killed:{number}"))
    rows = [
        [what, str(len(gaps)), *(report.three_digits(percentile(sorted(gaps), part)) for part in (0.5, 0.99))]
        for what, gaps in (("resign() to lead(term)", resigned), ("killed one's end to lead(term)", killed))
    ]
    report.table(report.title(server.name, options.rounds, options.seconds), ["", "times", "p50 ms", "p99 ms"], rows, 1)
    print(f"The goal of a resigned one's p99: {_GOAL_MS} ms.")
    return {"resigned_ms": resigned, "killed_ms": killed}


def _until_waiting(witness: Any, name: str) -> None:
    """Return once a candidate waits in line."""
    until = time.monotonic() + _PATIENCE_S
    while not witness.zcard(queue_keys(name.encode())[0]) and time.monotonic() < until:
        time.sleep(0.0005)


def _resigned_ms(url: str, witness: Any, name: str, seconds: float) -> list[float]:
    """How long nobody has led, each time that one of two has resigned, in milliseconds."""
    gaps: list[float] = []
    with ExitStack() as closing:
        leader, other = _Candidate(url, name, closing), _Candidate(url, name, closing)
        until = time.monotonic() + seconds
        while time.monotonic() < until or not gaps:
            _until_waiting(witness, name)
            if not leader.leads.is_set():
                leader, other = other, leader
            if leader.leads.wait(_PATIENCE_S):
                began = time.perf_counter()
                leader.election.resign()
                other.leads.wait(_PATIENCE_S)
                gaps.append(1000 * (other.led_at - began))
    return gaps


def _killed_ms(url: str, witness: Any, name: str) -> float:
    """How long after the end of its lease a leader is followed whose process was killed, in milliseconds."""
    spawn = multiprocessing.get_context("spawn")
    leads = spawn.Event()
    leader = spawn.Process(target=_lead_until_killed, args=(url, name, leads), daemon=True)
    leader.start()
    leads.wait(_PATIENCE_S)
    with ExitStack() as closing:
        follower = _Candidate(url, name, closing)
        _until_waiting(witness, name)
        leader.kill()
        end: float = time.perf_counter() + witness.pttl(name) / 1000
        follower.leads.wait(_PATIENCE_S)
        return 1000 * (follower.led_at - end)


def _lead_until_killed(url: str, name: str, leads: Any) -> None:
    with Election(redis.Redis.from_url(url), name, timeout=_KILLED_LEASE_S).term():
        leads.set()
        time.sleep(_PATIENCE_S)
