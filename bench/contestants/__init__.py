"""The contestants of the bench: the calls that all lock libraries share, their names, and the check of a lock.

`bench.contestants.libraries` makes the contestants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hiredis
import redis

LEASE_S = 10
"""The timeout of every lock: whole seconds, as python-redis-lock accepts nothing finer."""

LINGER_S = 0.05
"""The option `linger` of `OURS_LINGERING`."""

REDIS_PY = "redis-py"
OURS = "redislock_fast"
OURS_POLLING = "redislock_fast-poll"
OURS_LINGERING = "redislock_fast-linger"
HALF_LINGERING = "redislock_fast-half"
"""Each other process is of `OURS_LINGERING`, the rest of `OURS`."""

PYTHON_REDIS_LOCK = "python-redis-lock"
POTTERY = "pottery"
PEERS = (PYTHON_REDIS_LOCK, POTTERY)

BARE_SOCKETS = "bare-sockets"
"""The requests of a lock on plain sockets, and nothing else: `bench.contestants.bare`."""


class AbsentError(Exception):
    """A contestant, a server or a tool is not available here; the message says why."""


class CheckFailedError(Exception):
    """A contestant is not a correct lock, so its figures mean nothing."""


@dataclass(frozen=True)
class Contestant:
    """One library.

    Its locks have the calls of redis-py's: `acquire`, which returns whether the lock was acquired, and does not wait
    with `blocking=False`, and `release`. Those of its batches are `acquire(names)`, which acquires all locks that are
    free and returns their number, and `release()`, which returns how many were still held.
    """

    name: str  # in the table and in `--only`
    version: str  # the installed one
    make: Callable[[Any, str], Any]  # makes a lock of a client and a name, as the documentation of the library proposes
    key_of: Callable[[str], str] = str  # the key of a lock on the server, from its name
    make_async: Callable[[Any, str], Any] | None = None  # as `make`, for asyncio; None when the bench measures none
    make_batch: Callable[[Any], Any] | None = None  # makes a batch of a client; None when the bench measures none
    limit: int = 1  # how many may hold one
    linger_s: float = 0.0  # how long a key may stay on the server after the release of its lock, in seconds
    of_processes: tuple[str, ...] = ()  # the contestants that processes are of, in turn; empty: all are of this one

    def maker(self, for_asyncio: bool) -> Callable[[Any, str], Any]:
        """What makes locks, for asyncio or not; raises `AbsentError` where there are none."""
        make = self.make_async if for_asyncio else self.make
        if make is None:
            raise AbsentError("no locks for asyncio")
        return make

    def name_for(self, process: int) -> str:
        """The contestant of a process, by the number of the process."""
        return self.of_processes[process % len(self.of_processes)] if self.of_processes else self.name


_CONTENDED = b"+"  # after the value of a key that another lock with linger wants
_LOOK_S = 0.002  # between two looks whether a key is gone
_GIVING_BACK_S = 2.0  # at most, after a key has lingered, on a busy machine


def expect(right: object, complaint: str) -> None:
    """Raise `CheckFailedError` with the complaint, unless it is right."""
    if not right:
        raise CheckFailedError(complaint)


def is_left(keys: Callable[[], object], linger_s: float) -> bool:
    """Whether there are keys that should be gone. Those that may linger for so many seconds are waited for."""
    give_up_s = time.monotonic() + linger_s + _GIVING_BACK_S
    while keys():
        if not linger_s or time.monotonic() > give_up_s:
            return True
        time.sleep(_LOOK_S)
    return False


def delete_keys(client: redis.Redis, part: str) -> None:
    """Delete the keys that have this part in their names."""
    for key in client.scan_iter(f"*{part}*", count=1000):
        client.delete(key)


def check(key: str, holder: Any, rival: Any, witness: redis.Redis, linger_s: float = 0.0) -> None:
    """Check that a lock excludes others while it is held; raises `CheckFailedError` at the first violation.

    The rival is another lock of the same name. The witness is a plain client that no contestant uses, and the key may
    stay on the server for `linger_s` seconds after a release.
    """

    def is_there() -> bool:
        return is_left(lambda: witness.exists(key), linger_s)

    expect(not is_there(), f"the key {key!r} was left behind")
    expect(holder.acquire(blocking=False), "a free lock could not be acquired")
    value = witness.get(key)
    expect(value, f"acquired, but there is no key {key!r}")
    ttl_ms = witness.pttl(key)
    expect(0 < ttl_ms <= (LEASE_S + linger_s) * 1000, f"held for {ttl_ms} ms instead of {LEASE_S} s")
    expect(not rival.acquire(blocking=False), "two holders at a time")
    after = witness.get(key)
    if linger_s and isinstance(after, bytes):
        after = after.removesuffix(_CONTENDED)
    expect(after == value, "a failed acquire changed the holder's key")
    holder.release()
    expect(not is_there(), f"released, but the key {key!r} is still there")
    expect(rival.acquire(blocking=False), "a released lock could not be acquired by another")
    rival.release()
    expect(not is_there(), f"released by another, but the key {key!r} is still there")


def pack(*words: str | bytes | int) -> bytes:
    """The bytes of a request of these words, as they are sent."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub: a tuple of one
    return packed


def address_of(client: redis.Redis) -> tuple[str, int]:
    """The host and port of a client's server; raises `AbsentError` when it needs more than plain TCP."""
    settings = client.connection_pool.connection_kwargs
    plain = client.connection_pool.connection_class is redis.Connection
    if not plain or settings.get("password") or settings.get("db"):
        raise AbsentError("only over plain TCP, without a password, in database 0")
    return str(settings.get("host", "localhost")), int(settings.get("port", 6379))
