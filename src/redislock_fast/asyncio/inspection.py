"""`holders` for asyncio: who holds a lock, and who waits for it.

See https://redislock-fast.github.io/redislock_fast/reference/holders.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from redislock_fast._procedures.reporting import reporting
from redislock_fast._protocol.report import LockReport, Participant, ProcessDetails
from redislock_fast._transport.loop.driver import drive, transport_of

if TYPE_CHECKING:
    import redis.asyncio

    Client: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"

__all__ = ["LockReport", "Participant", "ProcessDetails", "holders"]


async def holders(client: Client, name: str | bytes) -> LockReport:
    """Tell which process holds a lock, for how long yet, and which processes wait for it.

    Sends what `redislock_fast.holders` sends.

    Args:
        client: redis-py's asyncio client, as for `Lock`.
        name: the lock, as for `Lock`.

    Returns:
        The report. It never has a token in it.

    Raises:
        TypeError: for a pipeline or a client that blocks.
        redis.exceptions.RedisError: as for `redislock_fast.holders`.
    """
    transport = transport_of(client)
    report: LockReport = await drive(transport, reporting(transport.key_of(name)))
    return report
