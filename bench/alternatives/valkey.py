"""Locks on Valkey: on one server, with each way to keep its data, and on five servers, by a majority."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import redis

import redislock_fast
from bench.alternatives.locks import Alternative, MakeLock
from bench.contestants import LEASE_S, OURS, REDIS_PY, libraries
from bench.measuring import servers
from redislock_fast.server import Server

_MEMORY = "appendonly no"
_WAYS: dict[str, tuple[dict[str, str], str]] = {
    _MEMORY: ({}, "memory"),
    "appendfsync everysec": ({"appendonly": "yes", "appendfsync": "everysec"}, "file cache; disk within 1 s"),
    "appendfsync always": ({"appendonly": "yes", "appendfsync": "always"}, "disk"),
}
"""Each way to keep data: its options, and where an acquired lock is kept when the server has replied."""

_SERVERS = 5  # of Redlock: two may fail
_LIMIT_S = 5.0  # long enough for a slow vote on a busy machine


@contextmanager
def open_single() -> Iterator[list[Alternative]]:
    """Start one server for each way to keep data; the first alternative is the package on a server that keeps none.

    Yields:
        The alternatives; the servers end with the context.
    """
    with ExitStack() as closing:
        urls = {way: closing.enter_context(Server(options=options)).url for way, (options, _) in _WAYS.items()}
        server = servers.stated_name(urls[_MEMORY])
        yield [
            Alternative(f"{name}, {way}", kept, server, partial(_client, name, urls[way]))
            for way, (_, kept) in _WAYS.items()
            for name in (OURS, REDIS_PY)
        ]


@contextmanager
def open_redlock() -> Iterator[list[Alternative]]:
    """Start five servers that keep no data.

    Yields:
        The one alternative; the servers end with the context.
    """
    with ExitStack() as closing:
        urls = [closing.enter_context(Server()).url for _ in range(_SERVERS)]

        def new_client() -> MakeLock:
            clients = [redis.Redis.from_url(url) for url in urls]
            return lambda name: redislock_fast.Redlock(clients, name, timeout=LEASE_S, limit=_LIMIT_S)

        name, kept = f"Redlock, {_SERVERS} servers, {_MEMORY}", f"memory of most of {_SERVERS}"
        yield [Alternative(name, kept, servers.stated_name(urls[0]), new_client)]


def _client(name: str, url: str) -> MakeLock:
    return partial(libraries.find(name).make, redis.Redis.from_url(url))
