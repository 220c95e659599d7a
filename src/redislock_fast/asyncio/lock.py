"""`Lock` for asyncio: redis-py's `redis.asyncio.lock.Lock` on this library's transport.

    from redislock_fast.asyncio import Lock      # was: from redis.asyncio.lock import Lock

Any difference in behaviour from `redis.asyncio.lock.Lock` is a bug, except those that
https://redislock-fast.github.io/redislock_fast/explanation/differences.html lists. The class derives from the
original, so that code which checks for the original's type accepts it.

Cancellation, at any await: a cancelled acquire does not hold the lock, and is cleaned up. A cancelled release goes on
in the background. A cancelled extend or reacquire has an unknown outcome, and `remaining` counts on the shorter lease.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import redis.asyncio.lock
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import takes_no_timeout, wrong_timeout
from redislock_fast._lease.owner import Owner, current_task
from redislock_fast._lease.task_owner import TaskOwners
from redislock_fast._linger.loop import LINGER, acquire_lingering, release_lingering
from redislock_fast._pipe.base import NOT_ASKED, Reply
from redislock_fast._procedures.acquire import (
    Call,
    acquire_lock,
    attempt_for_caller,
    clean_up_after,
    go_on,
    hold_by_reply,
    new_call,
)
from redislock_fast._procedures.lease import not_entered, say_why
from redislock_fast._procedures.lock import Hooks, LockBase
from redislock_fast._procedures.prolong import (
    ProlongCall,
    begins_prolonging,
    drop_lost,
    extend_lock,
    extend_once,
    held_with_ttl,
    new_extend,
    new_reacquire,
    prolong_by_token,
    reacquire_lock,
    reacquire_once,
    read_locked,
    read_owned,
    to_prolong,
)
from redislock_fast._procedures.release import (
    new_release,
    release_for_caller,
    release_from,
    release_lock,
    release_what,
    settle_release,
)
from redislock_fast._protocol.steps import Steps
from redislock_fast._renewal.loop import LoopRenewer, renewer_of
from redislock_fast._transport.loop.driver import AsyncTransport, drive, transport_of
from redislock_fast._util.coroutines import coroutine_method, named, runs
from redislock_fast._util.errors import LossReason, shown

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Unpack

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.options import OptionSettings
    from redislock_fast._procedures.lock import WaitBy

    Client: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"

__all__ = ["Lock"]

logger = logging.getLogger(__name__)


class Lock(LockBase, redis.asyncio.lock.Lock):
    """A lock on one Redis or Valkey server, shared by tasks, processes and machines.

        client = redis.asyncio.Redis()
        async with Lock(client, "invoice:17", timeout=10, blocking_timeout=3):
            ...  # at most one caller is here; a LockError where it was another's for 3 s

    The key `name` holds the owner's token. Exclusion is guaranteed until the ttl passes, on one server that keeps its
    data; https://redislock-fast.github.io/redislock_fast/explanation/guarantees.html says what is not guaranteed.

    Args:
        redis: a `redis.asyncio.Redis` or `RedisCluster`; its settings are used, its connections are not.
        name: the key, bytes or str.
        timeout: the ttl in seconds, rounded up to whole milliseconds. None or 0: the lock does not expire.
        sleep: how long a waiter sleeps between two attempts, in seconds.
        blocking: whether `acquire` waits for another owner. False bounds no time: on a silent server, one attempt takes
            as long as the client's retries (58 s by default). `blocking_timeout` bounds it, as do the client's `retry`
            and `socket_timeout`.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: forever. 0: one attempt, for 0.1 s.
        thread_local: whether the token belongs to the task that acquired, or to every task with this object. Either
            way, where one task holds the lock, others that hold none by this object may prolong, ask about and release
            it: heartbeat tasks, timers, signal handlers, whatever closes a generator. They do not hold it by that.
        raise_on_release_error: whether leaving an `async with` block raises when the lock was lost, or only logs.
        wait: how `acquire` waits, as for `redislock_fast.Lock`.
        on_lost: called once with the lock and a `LossReason` when the lock is found to be lost, in the event loop. An
            awaitable that it returns is awaited.
        cancel_on_lost: whether the task that acquired is cancelled then. Where it leaves an `async with` of the lock by
            that, the CancelledError's cause is a `LockLostError`.
        on_wanted: called once for each holding, with the lock, when another caller is heard to wait for it, in the
            event loop. An awaitable that it returns is awaited.
        on_danger: called with the lock, in the event loop, when its renewals have failed until a third of `timeout` is
            left: to stop the work while the lock is still held. Once in a series of failures. An awaitable that it
            returns is awaited. It needs auto_renew.
        auto_renew: as for `redislock_fast.Lock`, by a thread with a connection of its own: an event loop that is busy
            for longer than `timeout` keeps the lock. "loop": by the event loop, as where no thread can connect so.
        max_stall: for how many seconds the event loop may not run until the lock is renewed no more, and told as lost:
            it hangs. None: three times `timeout`. A loop that is stopped or closed renews nothing, either way.
        options: max_hold, fencing, reentrant, wait_replicas, wait_timeout, breaker, metrics and linger, as
            for `redislock_fast.Lock`. A key lingers in its event loop.

    Raises:
        TypeError: for a pipeline or a client that blocks, a `timeout` that is no number, or an unknown parameter.
        ValueError: for a `timeout` that is negative, NaN or infinite, an unknown `wait`, or options that do not go
            together.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    _is_for_tasks = True
    __slots__ = ()

    _linger = LINGER

    if TYPE_CHECKING:  # the code is in `LockBase`, which takes a client of either kind

        def __init__(
            self,
            redis: Client,
            name: str | bytes,
            timeout: float | AdaptiveTTL | None = None,
            sleep: float = 0.1,
            blocking: bool = True,
            blocking_timeout: float | None = None,
            thread_local: bool = True,
            raise_on_release_error: bool = True,
            *,
            wait: WaitBy = "push",
            **options: Unpack[OptionSettings[Lock]],
        ) -> None: ...

    @staticmethod
    def _transport_of(client: Any) -> AsyncTransport:
        return transport_of(client)

    def _new_owner(self) -> TaskOwners:
        return TaskOwners()

    def _renewer(self) -> LoopRenewer:
        return renewer_of(self._transport)

    def _report_loss(self, lease: Lease, reason: LossReason) -> None:
        self._renewer().report_loss(lease, reason)

    def _report_former_loss(self, lease: Lease, reason: LossReason) -> None:
        self._report_loss(lease, reason)

    def _on_wanted_caller(self) -> Callable[[Lease], object]:
        return self._renewer().call_on_wanted

    # The task that calls a method owns the lock, whichever task awaits the result: `shield`, `gather` and `wait_for`
    # (before Python 3.12) await in tasks of their own. So plain methods look up the owner and pass it to the steps.
    # Those may begin later, when the owner holds the lock anew: a release passes on what it is called for, too.

    def _drive(self, steps: Steps) -> Coroutine[Any, Any, Any]:
        self._follow_pool()
        return drive(self._transport, steps, None, self._redis)

    # ---- acquire ----

    @overload  # type: ignore[misc]  # the only form: `timeout` is there to be refused by its right name
    def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: Any = None
    ) -> Coroutine[Any, Any, bool]: ...

    @coroutine_method
    @takes_no_timeout
    def acquire(  # noqa: D417
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Any = None,
        timeout: object = None,
    ) -> Coroutine[Any, Any, bool]:
        """Acquire the lock.

        Sends what `redislock_fast.Lock.acquire` sends. If it raises or is cancelled, the lock is not held, and an
        attempt of unknown outcome is cleaned up.

        Args:
            blocking: whether to wait, instead of the lock's own setting. False bounds no time: on a silent server, one
                attempt takes as long as the client's retries (58 s by default), unless `blocking_timeout` is 0.
            blocking_timeout: seconds until the deadline of the whole call, instead of the lock's own setting. A request
                under way at the end may take 0.1 s more. 0 or less makes one attempt, which may take 0.1 s.
            token: the token to use, bytes or str; by default a random one.

        Returns:
            An awaitable: True once the lock is held, False when it was not granted in time.

        Raises:
            redis.exceptions.LockError: this task holds the lock itself, without a ttl or renewed, and would wait for
                ever.
            LockLostError: with `fencing` or `wait_replicas`: the lock was granted, and lost before that was done.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time, and no earlier reply said that another owner has the lock.
            redis.exceptions.ResponseError: the server's error, such as WRONGTYPE for a key that is no string.
            ValueError: the lock's `sleep` is negative, or a time is NaN.
        """
        pool = self._pool
        if pool is not None and self._redis.connection_pool is not pool:
            self._follow_pool()
        owner, options = self._mine(), self._options
        if timeout is not None:
            raise wrong_timeout(self)
        if self._linger_ms is not None and options is None and token is blocking_timeout is None:
            return acquire_lingering(self, owner, blocking)
        task = current_task() if options is not None and options.cancel_on_lost else None
        return self._acquire(new_call(self, owner, None, blocking, blocking_timeout, token, task))

    @runs("Lock.acquire")
    async def _acquire(self, call: Call) -> bool:
        """Acquire for the caller that has made this call."""
        server, owner, options = self._transport.of_running_loop(), call.owner, self._options
        try:
            if self._linger_ms is None and call.begins:
                reply: Reply = None
                try:
                    sent = server.begin(call)
                    if sent is not None:
                        reply = await sent
                        if options is not None:
                            if hold_by_reply(self, options, call, server, reply):
                                return True
                        elif reply == call.ours:
                            ttl_ms = call.ttl_ms
                            owner.expiry = (call.token, None if ttl_ms is None else call.sent_at + ttl_ms / 1000)
                            owner.token = call.token
                            if owner.forgotten_by is not None:  # else `hold` would do no more
                                owner.hold(call.token)
                            return True
                    go_on(self, call, reply)
                except BaseException as interruption:
                    go_on(self, call, None, interruption)
            return bool(await drive(server, acquire_lock(self, call), call.left, self._redis))
        except BaseException as error:
            clean_up_after(self, error, owner, call)
            raise

    async def do_acquire(self, token: Any) -> bool:
        """Make one attempt; may be overridden. Returns whether the lock is held."""
        return bool(await self._drive(attempt_for_caller(self, token)))

    # ---- query ----

    async def locked(self) -> bool:
        """Whether any owner holds the lock. Sends `GET name`, always to the primary."""
        return bool(await self._drive(read_locked(self)))

    @coroutine_method
    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether the server says that this task holds the lock, or the one whose lock it may use.

        Sends `GET name`, always to the primary.
        """
        held = self._held()
        return named(self._drive(read_owned(self, held, held.token)), "Lock.owned")

    # ---- release, extend, reacquire ----

    @coroutine_method
    def release(self) -> Coroutine[Any, Any, None]:
        """Release the lock.

        Sends what `redislock_fast.Lock.release` sends. The token is dropped only after the server has replied: when
        this raises a connection error, it can be called again. If it is cancelled, the release goes on in the
        background.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, was deleted, or has another owner.
            redis.exceptions.LockError: this task holds no lock, and no single other task does; logged, too.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        owner = self._held()
        cached: Any = owner.cached if self._linger_ms is not None and self._options is None else None
        if cached is not None:
            return release_lingering(self, owner, cached, cached.locked_by.get(0))
        pool = self._pool
        if pool is not None and self._redis.connection_pool is not pool:
            self._follow_pool()
        token = owner.token
        if type(token) is bytes and owner.cached is None:
            return self._release(owner, token)
        return named(self._drive(release_what(self, owner, owner.holding_id)), "Lock.release")

    @runs("Lock.release")
    async def _release(self, owner: Owner, token: bytes) -> None:
        """Release what the owner held with this token when the method was called."""
        server = self._transport.of_running_loop()
        call = new_release(self, owner, token) if owner.token is token else None
        if call is None:
            await drive(server, release_what(self, owner, token), None, self._redis)
            return
        reply: Reply = None
        try:
            sent = server.begin(call)
            if sent is not None:
                reply = await sent
                if reply == call.ours:
                    settle_release(self, owner, call)
                    return
        except BaseException as interruption:
            operation = release_from(self, owner, call, None, interruption)
        else:
            operation = release_from(self, owner, call, reply)
        await drive(server, release_lock(self, owner, operation))

    async def do_release(self, expected_token: Any) -> None:
        """Release by token; may be overridden."""
        await self._drive(release_for_caller(self, expected_token))

    @coroutine_method
    def extend(self, additional_time: float, replace_ttl: bool = False) -> Awaitable[Literal[True]]:
        """Prolong the lease.

        Sends what `redislock_fast.Lock.extend` sends. The LockErrors except LockNotOwnedError are raised by the call,
        all other errors by awaiting it.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: whether `additional_time` is the new ttl instead.

        Returns:
            An awaitable of True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more, or has no ttl on the server.
            redis.exceptions.LockError: as `release`, or the lock does not expire.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        owner = held_with_ttl(self, "extend")
        if begins_prolonging(self, owner, "extend"):
            return named(self._prolong(new_extend, owner, additional_time, replace_ttl), "Lock.extend")
        return named(self._drive(extend_lock(self, owner, additional_time, replace_ttl)), "Lock.extend")

    async def _prolong(self, new: Callable[..., ProlongCall], owner: Owner, *args: Any) -> Literal[True]:
        """Extend or reacquire what the owner holds, by a new call with these parameters."""
        self._follow_pool()
        call, server = new(self, owner, *args), self._transport.of_running_loop()
        reply: Any = NOT_ASKED
        try:
            sent = server.begin(call)
            if sent is not None:
                reply = await sent
            if call.settle(reply):
                return True
            steps = prolong_by_token(self, call, reply)
        except BaseException as interruption:
            steps = prolong_by_token(self, call, None, interruption)
        prolonged: Literal[True] = await drive(server, steps, None, self._redis)
        return prolonged

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend by the caller's token; may be overridden."""
        extended: Literal[True] = await self._drive(extend_once(self, None, additional_time, replace_ttl))
        return extended

    @coroutine_method
    def reacquire(self) -> Awaitable[Literal[True]]:
        """Set the lease back to the lock's whole `timeout`.

        Sends `SET name token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`. The LockErrors except
        LockNotOwnedError are raised by the call, all other errors by awaiting it.

        Returns:
            An awaitable of True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more.
            redis.exceptions.LockError: as `release`, or the lock does not expire.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        owner = held_with_ttl(self, "reacquire")
        if begins_prolonging(self, owner, "reacquire"):
            return named(self._prolong(new_reacquire, owner), "Lock.reacquire")
        steps = reacquire_lock(self, owner)
        return named(self._drive(steps), "Lock.reacquire")

    async def do_reacquire(self) -> Literal[True]:
        """Reacquire by the caller's token; may be overridden."""
        reacquired: Literal[True] = await self._drive(reacquire_once(self, None))
        return reacquired

    # ---- shorthands ----

    async def try_acquire(self, token: Any = None) -> bool:
        """Make one attempt: `acquire(blocking=False)`."""
        return await self.acquire(blocking=False, token=token)

    async def try_extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Prolong the lease, or return False where the lock is not held; see `redislock_fast.Lock.try_extend`."""
        try:
            return await self.extend(additional_time, replace_ttl)
        except LockNotOwnedError:
            return False

    async def acquire_or_extend(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: Any = None
    ) -> bool:
        """Hold the lock with its whole ttl ahead; see `redislock_fast.Lock.acquire_or_extend`."""
        held = to_prolong(self, token)
        if held is not None:
            with contextlib.suppress(LockNotOwnedError):
                is_held = await self.reacquire() if self.timeout else await self.owned()
                if is_held:
                    return True
            drop_lost(self, held)
        return await self.acquire(blocking, blocking_timeout, token)

    # ---- async with ----

    async def __aenter__(self) -> Lock:
        """Acquire the lock, or use the one that was attached.

        Raises:
            LockLostError: the attached lock was lost.
            redis.exceptions.LockError: the lock was not granted in time; and what `acquire` raises.
        """
        if (self._attached is not None and self._enter_attached()) or await self.acquire():
            return self
        raise not_entered(self.name)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release. Where the body has raised an exception, an error of the release is logged instead of raised."""
        say_why(self, exc_value)
        try:
            await self.release()
        except LockError:
            if self.raise_on_release_error and exc_type is None:
                raise
            logger.warning("Lock was unlocked or no longer owned when exiting context manager: %s", shown(self.name))
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Lock %s could not be released when exiting context manager: %r", shown(self.name), error)


Lock._class_hooks = Hooks.of(Lock)  # noqa: SLF001  # of this very module
