"""`python -m bench scripts`: for how long each script of the key queue holds up the server, with a long queue.

A queue of waiters is made on the server. Then one script is sent again and again, and the server's slow log says how
long each execution took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import redis

from bench.contestants import expect
from bench.measuring import arguments, report, servers
from bench.measuring.report import Column
from bench.measuring.rounds import percentile
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.scripts import LEAVE, PASS_ON, WAIT, Script
from redislock_fast._util.tokens import CONTENDED_FLAG, new_token

HELP = "for how long a script holds up the server, with 100,000 waiters"

_KEY = b"bench:queue"
_QUEUE, _WAITERS = queue_keys(_KEY)
_CHANNEL = b"bench:here"
_PIECE = 1000
_FAR_MS = 3_600_000
_GOAL_US = 1000
_PARTS = {"p50": 0.5, "p99": 0.99, "max": 1.0}

_COLUMNS = (
    Column("script", str, ("script",)),
    Column("queue", str, ("queue",)),
    Column("p50 us", str, ("p50_us",)),
    Column("p99 us", str, ("p99_us",)),
    Column("max us", str, ("max_us",)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_kind(parser)
    number = arguments.positive(int)
    parser.add_argument("--waiters", type=number, default=100_000, help="in the queue (default: %(default)s)")
    parser.add_argument("--count", type=number, default=1000, help="executions of each (default: %(default)s)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    with servers.open_server(options.server) as server, redis.Redis.from_url(server.url) as client:
        rows = list(_measure(client, options.waiters, options.count))
    report.print_rows(f"{server.name}; {options.waiters:,} waiters", _COLUMNS, rows)
    slowest_us = max(row["p99_us"] for row in rows)
    print(f"p99 of the slowest, us: {slowest_us} < {_GOAL_US}: {'met' if slowest_us < _GOAL_US else 'missed'}")
    return {"server": server.name, "results": rows}


_Send = Callable[[redis.Redis], Any]
"""Sends a script once."""


def stories(waiters: int) -> list[tuple[str, str, int, _Send]]:
    """All rows, with so many waiters: the script, what the queue is like, how many channels it has, what sends it.

    With 0 channels, all waiters are on the channel that has a listener.
    """
    dead = {"gone, of one process": 1, "gone, of a process each": waiters}
    all_kinds = {**dead, "there": 0}
    scripts: list[tuple[str, dict[str, int], _Send]] = [
        ("release", all_kinds, lambda client: _eval(client, PASS_ON, _held(client))),
        ("wait, lock is free", dead, _wait_for_free),
        ("wait, lock is held", all_kinds, _wait),
        ("leave", all_kinds, lambda client: _eval(client, LEAVE, _held(client), b"pass on")),
    ]
    return [(script, queue, channels, send) for script, kinds, send in scripts for queue, channels in kinds.items()]


def _measure(client: redis.Redis, waiters: int, count: int) -> Iterator[dict[str, Any]]:
    client.config_set("slowlog-log-slower-than", 0)
    rows = stories(waiters)
    with client.pubsub() as listener, report.progress(len(rows)) as step:  # type: ignore[no-untyped-call]
        listener.subscribe(_CHANNEL)
        listener.get_message(timeout=1)
        for script, queue, channels, send in rows:
            step(f"{script}, {queue}")
            client.flushall()
            _queue_up(client, waiters, channels)
            times_us = sorted(_time_us(client, send) for _ in range(count))
            figures = {f"{name}_us": percentile(times_us, part) for name, part in _PARTS.items()}
            yield {"script": script, "queue": queue, **figures}
            while listener.get_message(timeout=0) is not None:  # else the server drops a client that reads too slowly
                pass


def _time_us(client: redis.Redis, send: _Send) -> int:
    send(client)
    last = client.slowlog_get(1)[0]  # that of the script stands after those of its commands
    expect(last["command"].startswith(b"EVAL"), "the slow log does not have the script")
    return int(last["duration"])


def _queue_up(client: redis.Redis, waiters: int, channels: int) -> None:
    for start in range(0, waiters, _PIECE):
        numbers = range(start, min(start + _PIECE, waiters))
        tokens = {number: new_token() for number in numbers}
        channel = {number: b"bench:gone%d" % (number % channels) if channels else _CHANNEL for number in numbers}
        awake_until_ms = int(time.time() * 1000) + (0 if channels == 1 else _FAR_MS)
        fields: dict[Any, Any] = {b"t" + tokens[number]: b"60000 publish " + channel[number] for number in numbers}
        fields.update({b"c" + channel[number]: awake_until_ms for number in numbers})
        client.zadd(_QUEUE, {tokens[number]: number for number in numbers})
        client.hset(_WAITERS, mapping=fields)


def _eval(client: redis.Redis, script: Script, *words: Any) -> Any:
    return client.eval(script.text.decode(), 3, _KEY, _QUEUE, _WAITERS, *words)


def _held(client: redis.Redis) -> bytes:
    """The token of the lock's holder; a new one where it is free."""
    value: Any = client.get(_KEY)
    if value is None:
        value = new_token() + CONTENDED_FLAG
        client.set(_KEY, value)
    return bytes(value[:-1])


def _join(client: redis.Redis) -> None:
    token = new_token()
    _eval(client, WAIT, token, 60_000, b"publish", _CHANNEL, _FAR_MS, _FAR_MS, token)


def _wait(client: redis.Redis) -> None:
    _held(client)
    _join(client)


def _wait_for_free(client: redis.Redis) -> None:
    client.delete(_KEY)
    _join(client)
