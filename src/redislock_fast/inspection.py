# Generated from src/redislock_fast/asyncio/inspection.py by .ci/unasync.py, as `make format` runs it: change that file.
"""`holders`: who holds a lock, and who waits for it.

See https://redislock-fast.github.io/redislock_fast/reference/holders.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from redislock_fast._protocol.report import LockReport, Participant, ProcessDetails
from redislock_fast._queue.reporting import read_report
from redislock_fast._transport.threads.driver import drive, transport_of

if TYPE_CHECKING:
    import redis

    Client: TypeAlias = "redis.Redis | redis.RedisCluster"

__all__ = ["LockReport", "Participant", "ProcessDetails", "holders"]


def holders(client: Client, name: str | bytes) -> LockReport:
    """Tell which process holds a lock, for how much longer, and which processes wait for it.

    Sends `GET`, `PTTL`, `HMGET`, `ZCARD`, `ZRANGE`, `TIME` and `CLIENT LIST` in one piece, to the lock's server. What
    the user may not read is None in the report; `CLIENT LIST` tells of processes. It costs the server some time if it
    has thousands of connections.

    Args:
        client: redis-py's client, as for `Lock`.
        name: the lock, as for `Lock`.

    Returns:
        The report. It never has a token in it. A key that is no string, such as a semaphore, has an unknown holder:
        `Semaphore.status` tells of a semaphore.

    Raises:
        TypeError: for a pipeline or an asyncio client.
        redis.exceptions.DataError: a name that redis-py cannot encode. Nothing was sent.
        redis.exceptions.ConnectionError: no connection, after the client's retries.
        redis.exceptions.TimeoutError: no reply in time.
        redis.exceptions.NoPermissionError: the user may not `GET` the lock.
        redis.exceptions.ResponseError: another error of the server.
    """
    transport = transport_of(client)
    report: LockReport = drive(transport, read_report(transport.encoding.key_of(name)))
    return report
