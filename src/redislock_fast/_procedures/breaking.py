"""How a lock is taken from its holder by an operator: as that holder's own release would do it."""

from __future__ import annotations

from redislock_fast._procedures.steps import Execute, Steps
from redislock_fast._protocol.commands import ReadHolder, Release
from redislock_fast._util.tokens import token_id_of, without_flag

__all__ = ["breaking"]


def breaking(key: bytes, token_id: str) -> Steps:
    """Release a lock for the holder with this token id, and hand it over to the first waiter.

    The release names the holder's token, so a newer holder keeps the lock, whenever it got it.

    Returns:
        The `Release`; None where the lock is held by another, or free.
    """
    reading = ReadHolder(key)
    yield Execute(reading)
    token = without_flag(reading.holder or b"")
    if not token or token_id_of(token) != token_id:
        return None
    release = Release(key, token, None)
    yield Execute(release)
    return release
