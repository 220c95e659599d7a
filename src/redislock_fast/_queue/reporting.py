"""How a lock is looked at from outside, by one request in several parts; and the log of long waits."""

from __future__ import annotations

from redislock_fast._lease.logs import is_logged, log_wait
from redislock_fast._protocol.permits import ReadPermits
from redislock_fast._protocol.report import Connections, Participant, ReadReport
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.times import Limit, wait_seconds

_MOST_NAMED = 3


def log_waits(after_s: float | None = 5.0) -> None:
    """Set after how long a wait for a lock is logged, as a warning of the logger `redislock_fast.waiting`.

    Each wait is logged once, with the process that holds the lock: that is read as `holders` reads it. For a semaphore,
    three of its holders are named, those whose permits end first, as `Semaphore.status` reads them. Of a Redlock's
    holder nothing is known. Counts for the waits that begin from now on; for a lock that another caller of this process
    holds, with `linger`, at once.

    Args:
        after_s: in seconds; None: no wait is logged.

    Raises:
        TypeError: `after_s` is not a number.
        ValueError: it is negative or NaN.
    """
    long_s = None if after_s is None else wait_seconds(after_s, "after_s")
    if long_s is not None and long_s < 0:
        raise ValueError(f"after_s must be 0 or more, not {after_s!r}")
    Limit.long_s = long_s


def read_report(key: bytes, limit_s: float | None = None) -> Steps:
    """Read who holds a lock, and who waits for it. Returns a `LockReport`."""
    reading = ReadReport(key)
    yield Do("execute", reading, limit_s)
    return reading.report


def log_long_wait(key: bytes, waited_s: float, limit_s: float | None, is_semaphore: bool = False) -> Steps:
    """Log that a caller has waited for a lock or a semaphore for long, and who holds it. An error costs no wait."""
    if not is_logged():
        return
    try:
        holders = yield from (name_holders if is_semaphore else _name_holder)(key, limit_s)
    except Exception:  # the waiter finds out by itself
        holders = "an owner that could not be read"
    log_wait(key, waited_s, holders, "semaphore" if is_semaphore else "lock")


def _name_holder(key: bytes, limit_s: float | None) -> Steps:
    """Returns the holder of a lock in words."""
    report = yield from read_report(key, limit_s)
    return "nobody by now" if report.holder is None else described(report.holder)


def name_holders(key: bytes, limit_s: float | None) -> Steps:
    """Returns some holders of a semaphore in words, the first whose permits end."""
    reading = ReadPermits(key)
    yield Do("execute", reading, limit_s)
    connections = Connections(reading.listing)
    named = [described(connections.participant(token)) for token, _ in reading.holders[:_MOST_NAMED]]
    more = len(reading.holders) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "") if named else "nobody by now"


def described(holder: Participant) -> str:
    """A holder in words: its process, as far as that is known."""
    process = holder.process
    if process is None:
        return "an unknown process" if holder.alive is None else "a process that has lost its connection"
    return f"process {process.pid} ({process.program}) on {process.host}"
