"""`Locker` and `Batch` for asyncio: many locks acquired and released in one round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError, RedisError

from redislock_fast._lease.options import Options, refuse_unknown, spelled_out
from redislock_fast._procedures.batch import (
    BatchBase,
    BatchLease,
    BatchWatch,
    Name,
    Plan,
    acquiring,
    batch_options,
)
from redislock_fast._procedures.settings import LockerBase
from redislock_fast._transport.loop.driver import AsyncTransport, drive
from redislock_fast._transport.loop.renewer import renewer_of
from redislock_fast._util.coroutines import runs
from redislock_fast._util.errors import LossReason
from redislock_fast.asyncio.lock import Lock

if TYPE_CHECKING:
    from typing_extensions import Never

    from redislock_fast.asyncio.lock import Client

__all__ = ["Acquiring", "Batch", "Locker"]

logger = logging.getLogger(__name__)


class Batch(BatchBase):
    """Locks that were acquired together, under one token. To be used by one task at a time.

    Attributes:
        acquired: names of the locks that were acquired, in the order given. A later loss or release does not change it.
        missed: names of those that were not. With `all_or_nothing`, all names or none.
    """

    def __init__(self, transport: AsyncTransport, lease: BatchLease, missed: list[int]) -> None:
        super().__init__(lease, missed)
        self._transport = transport

    async def release(self) -> dict[Name, bool]:
        """Release the locks that are still held; see `redislock_fast.Batch.release`.

        If it is cancelled, the release goes on in the background.
        """
        try:
            loop = asyncio.get_running_loop()
            results: dict[Name, bool] = await drive(self._transport, self._releasing())
        except RedisError:
            raise
        except GeneratorExit:  # the task was dropped: this may be any thread
            self._lease.doubt()
            self._transport.clean_up_dropped(loop, self._lease.entries())
            raise
        except BaseException:  # an interrupt, which may be an error, too: a release once called runs to its end
            self._lease.doubt()
            self._transport.clean_up(self._lease.entries())
            raise
        return results

    async def extend(self, additional_time: float) -> dict[Name, bool]:
        """Extend the leases of the locks that are held; see `redislock_fast.Batch.extend`."""
        results: dict[Name, bool] = await drive(self._transport, self._extending(additional_time))
        return results

    async def reacquire(self) -> dict[Name, bool]:
        """Set the leases of the held locks back to the whole `timeout`; see `redislock_fast.Batch.reacquire`."""
        results: dict[Name, bool] = await drive(self._transport, self._reacquiring())
        return results

    async def __aenter__(self) -> Batch:
        """Check that the batch has what was asked for. Sends nothing.

        Raises:
            redis.exceptions.LockError: `all_or_nothing` was set and not every lock was acquired.
        """
        self._check_entry()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release. Where the body has raised an exception, an error of the release is logged instead of raised.

        Raises:
            redis.exceptions.LockNotOwnedError: a lock was lost before.
        """
        try:
            self._check_exit(await self.release())
        except LockError as error:
            if exc_type is None:
                raise
            logger.warning("Locks were no longer owned when exiting context manager: %s", error)
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Locks could not be released when exiting context manager: %r", error)


@runs("Locker.acquire_many")
async def _acquire(transport: AsyncTransport, plan: Plan, options: Options | None) -> Batch:
    loop = asyncio.get_running_loop()
    lease = BatchLease(plan, transport.new_token)
    try:
        batch = Batch(transport, lease, await drive(transport, acquiring(lease)))
        if options is not None:
            renewer = renewer_of(transport)
            lease.watch = BatchWatch(batch, lease.groups, options, renewer, renewer.tell)
        return batch  # noqa: TRY300  # an interrupt here is cleaned up, too
    except GeneratorExit:  # the task was dropped: this may be any thread
        transport.clean_up_dropped(loop, lease.entries())
        raise
    except BaseException:
        transport.clean_up(lease.given_up())
        raise


class Acquiring:
    """Gives the batch to `await`, once; `async with` also releases the batch on leaving."""

    def __init__(self, transport: AsyncTransport, plan: Plan, options: Options | None) -> None:
        self._acquiring = _acquire(transport, plan, options)  # made now: if it is never awaited, Python says so
        self._batch: Batch | None = None

    def __await__(self) -> Generator[Any, Any, Batch]:
        return self._acquiring.__await__()

    async def __aenter__(self) -> Batch:
        self._batch = await self._acquiring
        return await self._batch.__aenter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._batch is not None
        await self._batch.__aexit__(exc_type, exc_value, traceback)


class Locker(LockerBase[Lock]):
    """Makes locks, and acquires many at once.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`; its settings are used, its connections are not.

    Raises:
        TypeError: for a pipeline or a client that blocks.
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
    ) -> Acquiring:
        """Acquire the locks that are free, or all or none: `batch = await ...`, or `async with ... as batch`.

        Takes and raises what `redislock_fast.Locker.acquire_many` does; the call itself raises for bad parameters. If
        it is cancelled, nothing is held, and attempts of unknown outcome are cleaned up. `on_lost` is called in the
        loop, and may be a coroutine function.
        """
        refuse_unknown("Locker.acquire_many", unknown, Locker.acquire_many)
        transport = self._transport
        plan = Plan(names, transport.keys_of, timeout, blocking_timeout, sleep, all_or_nothing)
        return Acquiring(transport, plan, batch_options(auto_renew, max_hold, on_lost, plan.ttl_ms))
