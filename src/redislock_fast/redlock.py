# Generated from src/redislock_fast/asyncio/redlock.py by .ci/unasync.py, as `make format` runs it: change that file.
"""`Redlock`: one lock over several independent servers, granted by a majority of them.

https://redislock-fast.github.io/redislock_fast/explanation/redlock.html says what it guarantees, what it does not, and
when one server is the better choice.

An interrupted acquire does not hold the lock, and is cleaned up. An interrupted release goes on in the background.
An interrupted extend or reacquire has an unknown outcome, and `remaining` counts on the shorter lease.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Literal, overload

from redis.exceptions import LockError

from redislock_fast._lease.options import takes_no_timeout, wrong_timeout
from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.lease import not_entered
from redislock_fast._protocol.steps import Steps
from redislock_fast._redlock.lease import renew
from redislock_fast._redlock.lock import RedlockBase
from redislock_fast._redlock.procedures import (
    RedlockCall,
    acquire_redlock,
    clean_up_after,
    extend_redlock,
    reacquire_redlock,
    read_redlock,
    release_redlock,
)
from redislock_fast._redlock.threads import ThreadQuorum
from redislock_fast._renewal.threads import Renewer, renewer_of
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._util.errors import shown

__all__ = ["Redlock"]

logger = logging.getLogger(__name__)


class Redlock(RedlockBase):
    """A lock that a majority of independent Redis or Valkey servers grants, by the Redlock algorithm.

    All requests leave before any reply is waited for, so an operation takes about one round trip, however many servers
    there are. A minority of servers that are down or silent is no failure.

    Args:
        servers: a `redis.Redis` for each server: an odd number, three at least, none a replica of another.
        name: the key on all of them, bytes or str.
        timeout: the ttl in seconds, rounded up to whole milliseconds, or an `AdaptiveTTL`.
        sleep: `acquire` waits a random time up to this before the next attempt, in seconds.
        blocking: whether `acquire` waits.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: forever.
        thread_local: whether the thread that acquired owns the lock, or every thread that has this object.
        raise_on_release_error: whether leaving a `with` block raises when the lock was lost, or only logs.
        limit: how long an operation waits for servers that do not answer, in seconds, connecting included. All of them
            together cost it no more, and a server that stays silent is not waited for again.
        auto_renew: whether the lease is renewed, in the background and by a majority, as long as the lock is held.
            `timeout` is then how long others wait after the owner's process has died.
        max_hold: for how many seconds after the acquire the lease is renewed at most. None: forever.
        on_lost: called once with the lock and a `LossReason` when the lock is found to be lost,
            from a background thread, or by the release or extend that finds it out.
        reentrant: whether the thread that holds the lock may acquire it again.
        breaker: a circuit breaker, as for `Lock`.
        metrics: gets each acquisition and release, as for `Lock`.

    https://redislock-fast.github.io/redislock_fast/explanation/redlock.html describes the work in the background.

    Raises:
        TypeError: for a pipeline, a cluster or an asyncio client, a `timeout` that is no number, or an `on_lost`
            that cannot be called.
        ValueError: for a number of servers that is even or below three, for a server that is given twice, for a
            `timeout`, `limit` or `max_hold` that is not above 0, NaN or infinite, for a `max_hold` below `timeout` or
            without `auto_renew`, and for `cancel_on_lost`, which is for tasks.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    _quorum: ThreadQuorum
    _quorum_class = ThreadQuorum
    _transport_of = staticmethod(transport_of)

    def _renewer(self) -> Renewer:
        return renewer_of(self._quorum, renew)

    @overload  # type: ignore[misc]  # the only form: `timeout` is there to be refused by its right name
    def acquire(
        self, sleep: float | None = None, blocking: bool | None = None, blocking_timeout: float | None = None
    ) -> bool: ...

    @takes_no_timeout
    def acquire(  # noqa: D417
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        timeout: object = None,
    ) -> bool:
        """Acquire the lock.

        Sends `SET name token NX PX ms GET` (Redis 7.0, Valkey), or `SET name token NX PX ms` and, when that fails,
        `GET name`, to every server, once per attempt. A failed attempt is cleaned up at each server that may have
        agreed: by `DELIFEQ`, `DELEX` or `EVAL` after its SET on the same connection.

        Args:
            sleep: the longest random time between two attempts in seconds, instead of the lock's own setting.
            blocking: whether to wait, instead of the lock's own setting.
            blocking_timeout: seconds to wait at most, instead of the lock's own setting. An attempt under way at the
                end is not cut off. 0 or less makes one attempt.

        Returns:
            True once a majority has granted the lock, False when none has in time.

        Raises:
            redis.exceptions.LockError: this thread holds the lock itself, renewed, and would wait forever.
            redis.exceptions.ConnectionError: in the last attempt less than a majority voted, since servers could not be
                reached. Without a `blocking_timeout`, after three such attempts.
            redis.exceptions.TimeoutError: as before, since they did not answer.
            redis.exceptions.ResponseError: a majority replied with errors, such as WRONGTYPE for a key that is no
                string.
            ValueError: `sleep` negative, or a time that is NaN.
        """
        if timeout is not None:
            raise wrong_timeout(self)
        return self._acquire(RedlockCall(self._mine(), sleep, blocking, blocking_timeout))

    def _acquire(self, call: RedlockCall) -> bool:
        try:
            acquired: bool = self._quorum.drive(acquire_redlock(self, call))
        except BaseException:  # perhaps an interrupt between the votes and the statement that notes them
            clean_up_after(self, call)
            raise
        return acquired

    def release(self) -> None:
        """Release the lock at all servers.

        Sends `DELIFEQ` (Valkey 9.0), `DELEX ... IFEQ` (Redis 8.4), or `EVAL`. The token is dropped only after enough
        servers have replied: when this raises a connection error, it can be called again, and asks the servers that
        have not replied.

        Raises:
            redis.exceptions.LockNotOwnedError: so many servers do not hold the token that no majority can have held it.
                With `auto_renew` or `on_lost` it is a `LockLostError` with the reason. After a loss nothing is sent.
            redis.exceptions.LockError: this thread holds no lock.
            redis.exceptions.ConnectionError: less than a majority answered, since servers could not be reached.
            redis.exceptions.TimeoutError: as before, since they did not answer.
        """
        owner = self._held()
        return self._release(owner, owner.token)

    def _release(self, owner: Owner, token: bytes | None) -> None:
        if owner.token != token and owner.token is not None:  # acquired again meanwhile
            raise self._not_owned("release")
        self._quorum.drive(release_redlock(self, owner))

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Prolong the lease.

        Sends `SET name token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVAL`, with the whole new ttl. After a
        connection error the lease is as long as `remaining` says, and this can be called again.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: whether `additional_time` is the new ttl instead.

        Returns:
            True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is lost: a majority does not hold the token any more, or agreed
                only when the lease was over. The rest of it is released. With `auto_renew` or `on_lost` it is a
                `LockLostError` with the reason.
            redis.exceptions.LockError: this thread holds no lock.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: less than a majority agreed, since servers could not be reached.
            redis.exceptions.TimeoutError: as before, since they did not answer.
        """
        return self._prolong(extend_redlock(self, self._held(), additional_time, replace_ttl))

    def reacquire(self) -> Literal[True]:
        """Set the lease back to the lock's whole `timeout`.

        Sends and raises what `extend` does.

        Returns:
            True.
        """
        return self._prolong(reacquire_redlock(self, self._held()))

    def _prolong(self, steps: Steps) -> Literal[True]:
        self._quorum.drive(steps)
        return True

    def locked(self) -> bool:
        """Whether a majority of the servers has the key. Sends `GET name`.

        Raises:
            redis.exceptions.ConnectionError: too few answered to tell, since servers could not be reached.
            redis.exceptions.TimeoutError: as before, since they did not answer.
        """
        locked: bool = self._quorum.drive(read_redlock(self, self._held(), b""))
        return locked

    def owned(self) -> bool:
        """Whether a majority of the servers has the key with this thread's token.

        Sends and raises what `locked` does.
        """
        return self._owned(self._held())

    def _owned(self, owner: Owner) -> bool:
        return owner.token is not None and bool(self._quorum.drive(read_redlock(self, owner, owner.token)))

    def __enter__(self) -> Redlock:
        """Acquire.

        Raises:
            redis.exceptions.LockError: the lock was not granted in time; and what `acquire` raises.
        """
        if self.acquire():
            return self
        raise not_entered(self.name)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release. Where the body has raised an exception, an error of the release is logged instead of raised."""
        try:
            self.release()
        except Exception as error:
            if exc_type is None and (self.raise_on_release_error or not isinstance(error, LockError)):
                raise
            logger.warning("Redlock %s could not be released when exiting context manager: %r", shown(self.name), error)
