"""The server of a command: one that is started here and ends with the command, or a running one, by its URL."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from bench.measuring import report
from redislock_fast.server import Server

CHOICES = {"embedded": "valkey", "redis": "redis", "redis-6.2": "redis-6.2"}
"""The names that `--server` accepts beside a URL, and the kind of `redislock_fast.server` for each."""

_OPEN_FILES = 4096  # 1,000 connections of a client, as many of the server, and those of the other rows


@dataclass(frozen=True)
class RunningServer:
    """A running server.

    Attributes:
        url: for `redis.Redis.from_url`.
        name: kind and version, for example "valkey 9.1.0".
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
        FileNotFoundError: when the chosen server is not installed.
        ValueError: when the choice is neither known nor a URL.
        redis.ConnectionError: when no server answers at the URL.
    """
    if choice in CHOICES:
        with Server(CHOICES[choice]) as server:
            yield RunningServer(server.url, stated_name(server.url))
    else:
        yield RunningServer(choice, stated_name(choice))


def refuse(choice: str, error: Exception) -> int:
    """Say why nothing can be measured on the chosen server, without its URL, which may have a password.

    Returns the exit status.
    """
    report.say(f"cannot run on {choice if choice in CHOICES else 'the URL'}: {error}")
    return 2


def allow_open_files() -> None:
    """Raise the limit of open files of this process and of its children, among them the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _OPEN_FILES:
        allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def stated_name(url: str) -> str:
    """The kind and version of the server, for example "valkey 9.1.0"."""
    with redis.Redis.from_url(url) as client:
        facts = client.info("server")
    if "valkey_version" in facts:
        return f"valkey {facts['valkey_version']}"
    return f"redis {facts['redis_version']}"
