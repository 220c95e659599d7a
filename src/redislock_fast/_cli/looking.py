"""What the commands see of one key: a lock, or a semaphore with the ends of its permits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from redislock_fast._protocol.permits import ReadPermits
from redislock_fast._protocol.report import Connections, LockReport, Participant
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._util.tokens import is_permit
from redislock_fast.inspection import holders

if TYPE_CHECKING:
    from redislock_fast._cli.connecting import Client

__all__ = ["PermitReport", "look_at"]


@dataclass(frozen=True)
class PermitReport:
    """A semaphore at one moment. There is no token in it.

    Attributes:
        limit: how many may hold, as an operator has set it; None: as many as each caller says.
        holders: by permit, its holder, and for how many seconds its permit lasts; the first to end first.
        waiting: how many are in the queue.
        waiters: the first of those, in the order in which they get permits, 100 at most.
    """

    limit: int | None
    holders: tuple[tuple[Participant, float], ...]
    waiting: int
    waiters: tuple[Participant, ...]


def look_at(client: Client, name: bytes) -> LockReport | PermitReport:
    """Read a lock, or a semaphore if the key is one's, or has an operator's limit.

    Sends what `holders` sends; where no lock is held there, also `ZRANGE`, and what `Semaphore.status` sends.

    Raises:
        redis.exceptions.NoPermissionError: the user may not read the lock, or the permits of the semaphore.
    """
    report = holders(client, name)
    if report.holder is not None and report.holder.token_id is not None:
        return report
    transport = transport_of(client)
    reading = ReadPermits(transport.encoding.key_of(name))
    first: Any = []
    try:
        first = client.zrange(name, 0, 0)  # not all of it: it may be anything
        if not all(map(is_permit, first)):
            return report
        transport.execute(reading)
    except ResponseError:  # another kind of key, or the user may not read it so
        if first:  # a semaphore's, which must not be taken for a lock
            raise
        return report
    if reading.limit is None and not reading.holders:
        return report
    connections = Connections(reading.listing)
    now_us = reading.time_ms * 1000
    return PermitReport(
        reading.limit,
        tuple((connections.participant(token), (end_ms - reading.time_ms) / 1000) for token, end_ms in reading.holders),
        reading.waiting,
        tuple(
            connections.participant(token, max(now_us - arrival_us, 0.0) / 1e6) for token, arrival_us in reading.queue
        ),
    )
