"""Finding the locks on servers: by SCAN, with a budget, in bounded memory. No value leaves this module."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoPermissionError, ResponseError

from redislock_fast._cli.exits import say
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.report import Connections, Participant
from redislock_fast._util.tokens import TOKEN_BYTES, is_ours, without_flag

if TYPE_CHECKING:
    import redis

__all__ = ["Row", "Scan", "add_budget", "positive_int"]

_AT_ONCE = 1000

_LIKE_A_TOKEN = re.compile(rb"[0-9a-f]{32}")
"""The tokens of redis-py's locks and of Redlocks."""


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Give a command the options that say which keys it looks at."""
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="only names like this, as of the command SCAN; also those of locks of redis-py: '*' lists all",
    )
    parser.add_argument(
        "--budget",
        type=positive_int,
        default=100_000,
        metavar="KEYS",
        help="look at so many keys at most (default: %(default)s)",
    )


def positive_int(text: str) -> int:
    """The number of an option.

    Raises:
        argparse.ArgumentTypeError: it is no number above 0.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


@dataclass(frozen=True)
class Row:
    """A lock that was found.

    Attributes:
        name: its key.
        holder: its holder, as in a `LockReport`.
        ttl_s: for how much longer it is held, in seconds; None: without end.
        contended: whether it has the contended flag, or waiters.
        waiting: how many are in its queue; None where that is not known.
    """

    name: bytes
    holder: Participant
    ttl_s: float | None
    contended: bool
    waiting: int | None


class Scan:
    """A walk over the keys of servers, which goes on where it has stopped.

    Args:
        servers: clients, one of each server.
        pattern: which names to look at; None: all.

    Attributes:
        denied: how many keys could not be read.
        passed_over: how many keys of the present walk, or of the last one, look like locks of redis-py and were left
            out, since there is no pattern.
    """

    def __init__(self, servers: list[redis.Redis], pattern: str | None) -> None:
        self._servers = servers
        self._pattern = pattern
        self._left: list[redis.Redis] = []
        self._cursor = 0
        self.denied = 0
        self.passed_over = 0

    @property
    def is_complete(self) -> bool:
        """Whether all keys have been looked at: the walk begins again."""
        return not self._left

    def rows(self, budget: int) -> Iterator[tuple[redis.Redis, list[Row]]]:
        """Look at so many keys at most, and yield the locks among them, with a client of their server.

        Sends `SCAN`, `GETRANGE`, `PTTL`, `ZCARD` and `CLIENT LIST`. A lock may come twice, as of `SCAN`.
        """
        if not self._left:
            self._left = list(self._servers)
            self.passed_over = 0
        while self._left and budget > 0:
            server, count = self._left[-1], min(budget, _AT_ONCE)
            budget -= count
            reply: Any = server.scan(self._cursor, self._pattern, count, _type="string")
            self._cursor, names = reply
            yield server, self.read(server, names)
            if not self._cursor:
                self._left.pop()

    def read(self, server: redis.Redis, names: list[bytes]) -> list[Row]:
        """The locks among these keys of a server."""
        pipeline = server.pipeline(transaction=False)
        for name in names:
            pipeline.getrange(name, 0, TOKEN_BYTES + 1)  # a longer value is no lock's
            pipeline.pttl(name)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        self.denied += sum(isinstance(reply, NoPermissionError) for reply in replies[::2])
        found = [
            (name, value, ttl_ms)
            for name, value, ttl_ms in zip(names, replies[::2], replies[1::2], strict=True)
            if isinstance(value, bytes) and isinstance(ttl_ms, int) and ttl_ms != -2 and self._is_lock(value)
        ]
        if not found:
            return []
        for name, _, _ in found:
            pipeline.zcard(queue_keys(name)[0])
        lengths: list[Any] = pipeline.execute(raise_on_error=False)
        connections = Connections(_listing(server))
        return [_row(*lock, length, connections) for lock, length in zip(found, lengths, strict=True)]

    def _is_lock(self, value: bytes) -> bool:
        token = without_flag(value)
        if is_ours(token) or _LIKE_A_TOKEN.fullmatch(token) is None:
            return is_ours(token)
        if self._pattern is None:
            self.passed_over += 1
        return self._pattern is not None

    def hint(self) -> str:
        """What the user may do to see the keys that were left out; empty where there are none."""
        if not self.passed_over:
            return ""
        return f"left out, like locks of redis-py and of a Redlock: {self.passed_over} keys (PATTERN '*' shows them)"

    def warn(self) -> None:
        """Tell the user which keys were left out, or could not be looked at."""
        if self.denied:
            say(f"{self.denied} keys could not be read: this user may not")
        if self.passed_over:
            say(self.hint())


def _row(name: bytes, value: bytes, ttl_ms: int, length: Any, connections: Connections) -> Row:
    token = without_flag(value)
    waiting = length if isinstance(length, int) else None
    return Row(
        name=name,
        holder=connections.participant(token),
        ttl_s=None if ttl_ms < 0 else ttl_ms / 1000,
        contended=token != value or bool(waiting),
        waiting=waiting,
    )


def _listing(server: redis.Redis) -> bytes | None:
    """The reply of `CLIENT LIST`; None where it is not allowed."""
    try:
        listing: Any = server.execute_command("CLIENT", "LIST")  # type: ignore[no-untyped-call]
    except ResponseError:
        return None
    return listing if isinstance(listing, bytes) else None
