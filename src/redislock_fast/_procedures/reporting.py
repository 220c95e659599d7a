"""How a lock is looked at from outside: by one request in several parts, at the lock's server."""

from __future__ import annotations

from redislock_fast._procedures.steps import Execute, Steps
from redislock_fast._protocol.report import ReadReport

__all__ = ["reporting"]


def reporting(key: bytes) -> Steps:
    """Read who holds a lock, and who waits for it. Returns a `LockReport`."""
    reading = ReadReport(key)
    yield Execute(reading)
    return reading.report
