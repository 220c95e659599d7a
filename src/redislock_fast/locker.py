# Generated from src/redislock_fast/asyncio/locker.py by .ci/unasync.py, as `make format` runs it: change that file.
"""`Locker` and `Batch`: many locks acquired and released in one round.

    locker = Locker(client)
    with locker.acquire_many(["a", "b", "c"], timeout=10) as batch:
        work_on(batch.acquired)

On leaving the block, the batch releases what it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from redis.exceptions import LockError, RedisError

from redislock_fast._batch import (
    BatchBase,
    BatchLease,
    BatchWatch,
    LockerBase,
    Name,
    Plan,
    acquire_locks,
    batch_options,
)
from redislock_fast._lease.options import Options, refuse_unknown, spelled_out
from redislock_fast._renewal.threads import renewer_of
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util.errors import LossReason
from redislock_fast.lock import Lock

if TYPE_CHECKING:
    from typing_extensions import Never

    from redislock_fast.lock import Client

__all__ = ["Batch", "Locker"]

logger = logging.getLogger(__name__)


class Batch(BatchBase):
    """Locks that were acquired together, under one token. To be used by one thread at a time.

    Attributes:
        acquired: names of the locks that were acquired, in the order given. A later loss or release does not change it.
        missed: names of those that were not. With `all_or_nothing`, all names or none.
    """

    def __init__(self, transport: ThreadServerTransport, lease: BatchLease, missed: list[int]) -> None:
        super().__init__(lease, missed)
        self._transport = transport

    def release(self) -> dict[Name, bool]:
        """Release the locks that are still held.

        Sends what `Lock.release` sends, for all locks in one round per server; the nodes of a cluster are asked at
        once.

        If it is interrupted, the release goes on in the background.

        Returns:
            For each name that was still held, whether the server still had the batch's token. Afterwards nothing is
            held. False, too, for each loss that a call has found which has raised.

        Raises:
            redis.exceptions.ConnectionError: no connection, after the client's retries. Locks for which no reply has
                come are still held, and can be released again.
            redis.exceptions.TimeoutError: no reply in time; as for ConnectionError.
        """
        try:
            results: dict[Name, bool] = drive(self._transport, self._release())
        except RedisError:
            raise
        except BaseException:  # an interrupt, which may be an error, too: a release once called runs to its end
            self._lease.doubt()
            self._transport.clean_up(self._lease.given_up())
            raise
        return results

    def extend(self, additional_time: float) -> dict[Name, bool]:
        """Extend the leases of the locks that are held; sends what `Lock.extend` sends, in one round per server.

        Args:
            additional_time: seconds to add to each remaining ttl, rounded up to whole milliseconds.

        Returns:
            For each name that was held, whether the server still had the batch's token. Where it had not, the lock
            leaves the batch. False, too, for each loss that a call has found which has raised.

        Raises:
            redis.exceptions.LockError: the locks do not expire.
            ValueError: a time that is negative, NaN or infinite. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        results: dict[Name, bool] = drive(self._transport, self._extend(additional_time))
        return results

    def reacquire(self) -> dict[Name, bool]:
        """Set the leases of the held locks back to the whole `timeout`. Returns and raises what `extend` does."""
        results: dict[Name, bool] = drive(self._transport, self._reacquire())
        return results

    def __enter__(self) -> Batch:
        """Check that the batch has what was asked for. Sends nothing.

        Raises:
            redis.exceptions.LockError: `all_or_nothing` was set and not every lock was acquired.
        """
        self._check_entry()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release. Where the body has raised an exception, an error of the release is logged instead of raised.

        Raises:
            redis.exceptions.LockNotOwnedError: a lock was lost before.
        """
        try:
            self._check_exit(self.release())
        except LockError as error:
            if exc_type is None:
                raise
            logger.warning("Locks were no longer owned when exiting context manager: %s", error)
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Locks could not be released when exiting context manager: %r", error)


def _acquire(transport: ThreadServerTransport, plan: Plan, options: Options | None) -> Batch:
    lease = BatchLease(plan, transport.new_token)
    try:
        batch = Batch(transport, lease, drive(transport, acquire_locks(lease)))
        if options is not None:
            renewer = renewer_of(transport)
            lease.watch = BatchWatch(batch, lease.groups, options, renewer)
        return batch  # noqa: TRY300  # an interrupt here is cleaned up, too
    except BaseException:
        transport.clean_up(lease.given_up())
        raise


class Locker(LockerBase[Lock]):
    """Makes locks, and acquires many at once.

    Args:
        client: a `redis.Redis` or `redis.RedisCluster`; its settings are used, its connections are not.

    Raises:
        TypeError: for a pipeline or an asyncio client.
    """

    _lock_class = Lock

    if TYPE_CHECKING:  # as for `Lock`

        def __init__(self, client: Client) -> None: ...

    @spelled_out("Locker")
    def acquire_many(  # noqa: D417
        self,
        names: Iterable[Name],
        timeout: float | None = None,
        blocking_timeout: float | None = 0,
        *,
        sleep: float = 0.1,
        all_or_nothing: bool = False,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Batch, Name, LossReason], object] | None = None,
        **unknown: Never,
    ) -> Batch:
        """Acquire the locks that are free; with `all_or_nothing`, all of them or none.

        Sends what `Lock.acquire` sends, for all names in one round per server, in windows of about a thousand requests.
        The nodes of a cluster are asked at once; with `all_or_nothing`, one after the other. If it raises
        or is interrupted, nothing is held, and attempts of unknown outcome are cleaned up.

        Args:
            names: of the locks, each bytes or str.
            timeout: the ttl in seconds, rounded up to whole milliseconds. None or 0: the locks do not expire.
            blocking_timeout: seconds to wait at most for missed locks. None: forever. The last round is at
                their end. 0 or less makes one round, which the client's retries and `socket_timeout` alone limit.
            sleep: seconds between two rounds; with `all_or_nothing`, between two health checks of the waiter in the
                queue. Leases that age meanwhile are extended.
            all_or_nothing: whether to release the rest where one lock is missed. A waiting batch holds only the locks
                whose keys come before the one that it waits for, so that batches do not deadlock.
            auto_renew: whether to renew the leases in the background until the batch is released, as `Lock` does.
            max_hold: with `auto_renew`, after how many seconds renewal ends.
            on_lost: called with the batch, the name and the reason for each lock that is lost before its release, once,
                in a thread of its own. Another thread may use the batch meanwhile, so it must not call the batch.

        Returns:
            The batch: the names that were acquired and those that were missed.

        Raises:
            TypeError: `names` is a single name, or `on_lost` cannot be called.
            ValueError: a name comes twice, an impossible time, or options that do not go together, such as `auto_renew`
                without `timeout`. Nothing was sent.
            redis.exceptions.DataError: a name that redis-py cannot encode. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: the server's error, such as WRONGTYPE for a key that is no string.
        """
        refuse_unknown("Locker.acquire_many", unknown, Locker.acquire_many)
        transport = self._transport
        plan = Plan(names, transport.encoding.keys_of, timeout, blocking_timeout, sleep, all_or_nothing)
        options = batch_options(auto_renew, max_hold, on_lost, plan.ttl_ms)
        return _acquire(transport, plan, options)
