"""The server of a command: one that is started here and ends with the command, or a running one, by its URL."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import redis

from bench.contestants import AbsentError
from redislock_fast.server import Server

CHOICES = {"embedded": "valkey", "redis": "redis", "redis-6.2": "redis-6.2"}
"""The names that `--server` accepts beside a URL, and the kind of `redislock_fast.server` for each."""

_OPEN_FILES = 4096  # 1,000 connections of a client, as many of the server, and those of the other rows


@dataclass(frozen=True)
class RunningServer:
    """A running server: its URL, and its kind and version, for example "valkey 9.1.0"."""

    url: str
    name: str


@contextmanager
def open_server(choice: str) -> Iterator[RunningServer]:
    """Start the server of a key of `CHOICES`, which ends with the context, or connect to the one at the URL.

    Raises `AbsentError` when there is none; the message has no URL, which may have a password.
    """
    with ExitStack() as closing:
        try:
            url = closing.enter_context(Server(CHOICES[choice])).url if choice in CHOICES else choice
            server = RunningServer(url, stated_name(url))
        except (FileNotFoundError, ValueError, redis.ConnectionError) as error:
            raise AbsentError(f"{choice if choice in CHOICES else 'the server at the URL'}: {error}") from error
        yield server


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
