"""Finding locks and semaphores on servers: by SCAN, with a budget, in bounded memory. No value leaves this module."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from redis.exceptions import NoPermissionError, ResponseError

from redislock_fast._cli.exits import say
from redislock_fast._protocol.keys import lock_of_queue, permit_keys, queue_keys
from redislock_fast._protocol.report import Connections, Participant
from redislock_fast._util.tokens import TOKEN_BYTES, is_ours, is_permit, without_flag

if TYPE_CHECKING:
    import redis

__all__ = ["Row", "Scan", "add_budget", "positive_int"]

_AT_ONCE = 1000

_BEGIN = {"string": 0, "zset": 0}
"""The cursors of a walk that begins, by the types of the keys of locks and of semaphores."""

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
        argparse.ArgumentTypeError: it is no number above 0, or beyond what a server's scripts can count.
    """
    if not text.isdecimal() or not 1 <= int(text) < 1 << 53:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and below 2**53")
    return int(text)


@dataclass(frozen=True)
class Row:
    """A lock or a semaphore that was found.

    Attributes:
        name: its key.
        kind: which of them it is.
        holder: a lock's holder, as in a `LockReport`; None for a semaphore.
        ttl_s: for how much longer a lock is held, in seconds; None: without end. Of a semaphore: its first permit.
        contended: whether it has the contended flag, or waiters.
        waiting: how many are in its queue; None where that is not known.
        held: how many permits of a semaphore are held.
        limit: how many may be held, as an operator has set it; None where none has.
    """

    name: bytes
    kind: Literal["lock", "semaphore"]
    holder: Participant | None
    ttl_s: float | None
    contended: bool
    waiting: int | None
    held: int | None = None
    limit: int | None = None


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
        self._pattern = None if pattern is None else os.fsencode(pattern)
        self._left: list[redis.Redis] = []
        self._cursors = dict(_BEGIN)
        self.denied = 0
        self.passed_over = 0

    @property
    def is_complete(self) -> bool:
        """Whether all keys have been looked at: the walk begins again."""
        return not self._left

    def rows(self, budget: int) -> Iterator[tuple[redis.Redis, list[Row]]]:
        """Look at so many keys at most, and yield the locks and semaphores among them, with a client of their server.

        Sends `SCAN`, once for each type of key, `GETRANGE`, `PTTL`, `TIME`, `ZRANGE`, `ZCOUNT`, `GET`, `ZCARD` and
        `CLIENT LIST`. A lock may come twice, as of `SCAN`.
        """
        if not self._left:
            self._left = list(self._servers)
            self.passed_over = 0
        while self._left and budget > 0:
            server, count = self._left[-1], min(budget, _AT_ONCE)
            budget -= count
            names: dict[str, list[bytes]] = {}
            for kind, cursor in list(self._cursors.items()):
                reply: Any = server.scan(cursor, self._pattern, count, _type=kind)
                self._cursors[kind], names[kind] = reply
                if not self._cursors[kind]:
                    del self._cursors[kind]
            yield server, self.read(server, names.get("string", []), names.get("zset", []))
            if not self._cursors:
                self._left.pop()
                self._cursors = dict(_BEGIN)

    def read(self, server: redis.Redis, strings: list[bytes], sets: list[bytes]) -> list[Row]:
        """The locks and the semaphores among these keys of a server, which are strings and sorted sets."""
        return self._locks(server, strings) + self._semaphores(server, sets)

    def _semaphores(self, server: redis.Redis, names: list[bytes]) -> list[Row]:
        names = [name for name in names if lock_of_queue(name) is None]
        if not names:
            return []
        pipeline = server.pipeline(transaction=False)
        pipeline.time()
        for name in names:
            pipeline.zrange(name, 0, 0)  # by the token, it is one of ours
        time, *firsts = pipeline.execute(raise_on_error=False)
        self.denied += sum(isinstance(reply, NoPermissionError) for reply in firsts)
        found = [name for name, first in zip(names, firsts, strict=True) if _is_of_permits(first)]
        if isinstance(time, ResponseError):  # which of the permits have ended is not known
            self.denied += len(found)
            return []
        now_ms = time[0] * 1000 + time[1] // 1000
        for name in found:
            queue, _, limit = permit_keys(name)
            pipeline.zcount(name, f"({now_ms}", "+inf")
            pipeline.zrange(name, f"({now_ms}", "+inf", byscore=True, withscores=True, offset=0, num=1)
            pipeline.get(limit)
            pipeline.zcard(queue)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        rows = [_row_of_permits(name, now_ms, *replies[4 * at : 4 * at + 4]) for at, name in enumerate(found)]
        return [row for row in rows if row.held != 0]

    def _locks(self, server: redis.Redis, names: list[bytes]) -> list[Row]:
        if not names:
            return []
        pipeline = server.pipeline(transaction=False)
        for name in names:
            pipeline.getrange(name, 0, TOKEN_BYTES + 1)  # a longer value is no lock's
            pipeline.pttl(name)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        pairs = zip(replies[::2], replies[1::2], strict=True)
        self.denied += sum(any(isinstance(reply, NoPermissionError) for reply in pair) for pair in pairs)
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
        kind="lock",
        holder=connections.participant(token),
        ttl_s=None if ttl_ms < 0 else ttl_ms / 1000,
        contended=token != value or bool(waiting),
        waiting=waiting,
    )


def _is_of_permits(members: Any) -> bool:
    """Whether these are members of a semaphore."""
    return isinstance(members, list) and len(members) > 0 and is_permit(members[0])


def _row_of_permits(name: bytes, now_ms: int, held: Any, first: Any, limit: Any, length: Any) -> Row:
    waiting = length if isinstance(length, int) else None
    return Row(
        name=name,
        kind="semaphore",
        holder=None,
        ttl_s=(float(first[0][1]) - now_ms) / 1000 if isinstance(first, list) and first else None,
        contended=bool(waiting),
        waiting=waiting,
        held=held if isinstance(held, int) else None,
        limit=int(limit) if isinstance(limit, bytes) and limit.isdigit() else None,
    )


def _listing(server: redis.Redis) -> bytes | None:
    """The reply of `CLIENT LIST`; None where it is not allowed."""
    try:
        listing: Any = server.execute_command("CLIENT", "LIST")  # type: ignore[no-untyped-call]
    except ResponseError:
        return None
    return listing if isinstance(listing, bytes) else None
