"""Which server a command measures on: one started here, or one that the user names by its URL.

Rules: a server that we start ends with the command.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from redislock_fast.server import Server

CHOICES = {"embedded": "valkey", "redis": "redis", "redis-6.2": "redis-6.2"}
"""What `--server` accepts beside a URL, and the kind of `redislock_fast.server` that it means."""

_OPEN_FILES = 4096  # 1,000 connections of a client and as many of the server, and those of the other rows


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: for `redis.Redis.from_url`.
        name: its kind and version as it states them, as "valkey 9.1.0".
    """

    url: str
    name: str


@contextmanager
def open_server(choice: str) -> Iterator[RunningServer]:
    """Start the chosen server, or connect to the one at the URL.

    Args:
        choice: a key of `CHOICES`, or a URL.

    Yields:
        The server; one that was started here ends with the context.

    Raises:
        FileNotFoundError: where the chosen server is not installed.
        ValueError: where the choice is neither known nor a URL.
        redis.ConnectionError: where nothing answers at the URL.
    """
    if choice in CHOICES:
        with Server(CHOICES[choice]) as server:
            yield RunningServer(server.url, stated_name(server.url))
    else:
        yield RunningServer(choice, stated_name(choice))


def allow_open_files() -> None:
    """Let this process, and those that it starts, the server among them, have the connections of all the rows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def stated_name(url: str) -> str:
    """The kind and version of the server, as it states them."""
    with redis.Redis.from_url(url) as client:
        facts = client.info("server")
    if "valkey_version" in facts:
        return f"valkey {facts['valkey_version']}"
    return f"redis {facts['redis_version']}"
