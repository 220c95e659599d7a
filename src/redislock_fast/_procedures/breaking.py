"""How a lock or a permit is taken from its holder by an operator: as that holder's own release would do it.

A key may linger in the holder's process, where callers take it in memory. Such a process listens, so it is told to
release the lock itself. Once the key is gone, no caller there can take it. Where the process does not answer, the lock
is released for it.
"""

from __future__ import annotations

from typing import NamedTuple

from redislock_fast._protocol.commands import ReadHolder, Release
from redislock_fast._protocol.permits import ReadPermits, ReleasePermit
from redislock_fast._protocol.queue import AskHolder
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._queue.reporting import read_report
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import listens, token_id_of, without_flag

_ANSWER_S = 2.0
"""How long the holder's process has to release the lock, in seconds."""

_PAUSE_S = 0.01


class Broken(NamedTuple):
    """A lock or a permit that was taken from its holder.

    Attributes:
        handed_over: whether the first waiter has it.
        remains_s: for how long the holder's process, which has not answered, may still take the lock in memory, in
            seconds; 0: it does not.
    """

    handed_over: bool
    remains_s: float = 0.0


def break_lock(key: bytes, token_id: str) -> Steps:
    """Release a lock or a permit for the holder with this token id, and hand it over to the first waiter.

    The release names the holder's token, so a newer holder keeps the lock, whenever it got it.

    Returns:
        A `Broken`; None where it is held by others alone, or free.
    """
    reading = ReadHolder(key)
    yield Do("execute", reading)
    if reading.result and reading.holder is None:  # no string: a semaphore
        return (yield from _break_permit(key, token_id))
    token = without_flag(reading.holder or b"")
    if not token or token_id_of(token) != token_id:
        return None
    remains_s = 0.0
    if listens(token):
        left = yield from _ask_holder(key, token)
        if left is not None:
            return left
        remains_s = (yield from read_report(key)).ttl_s or 0.0
    release = Release(key, token, None)
    yield Do("execute", release)
    return Broken(bool(release.handed_over), remains_s) if release.result else None


def _break_permit(key: bytes, token_id: str) -> Steps:
    reading = ReadPermits(key)
    yield Do("execute", reading)
    for token, _ in reading.holders:
        if token_id_of(token) == token_id:
            release = ReleasePermit(key, token, None)
            yield Do("execute", release)
            return Broken(bool(release.handed_over)) if release.result else None
    return None


def _ask_holder(key: bytes, token: bytes) -> Steps:
    """Have the holder's process release the lock. Returns a `Broken`; None where it does not answer."""
    asking = AskHolder(key, token)
    yield Do("execute", asking)
    ends_at = clock() + _ANSWER_S
    while asking.result and clock() < ends_at:
        reading = ReadHolder(key)
        yield Do("execute", reading)
        if without_flag(reading.holder or b"") != token:
            return Broken(reading.result)
        yield Do("sleep", _PAUSE_S)
    return None
