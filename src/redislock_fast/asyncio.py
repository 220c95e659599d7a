"""`Lock`, `Locker` and `Redlock` for asyncio: redis-py's `redis.asyncio.lock.Lock` on our transport, and more.

    from redislock_fast.asyncio import Lock      # was: from redis.asyncio.lock import Lock

Any difference in behaviour from `redis.asyncio.lock.Lock` is a bug, except those that `docs/differences.md` lists. The
class derives from the original, so that whatever asks for one takes ours.

Cancellation, at whichever await: a cancelled acquire does not hold the lock, and is undone; a cancelled release goes on
in the background; a cancelled extend or reacquire may or may not have been executed, and the lease is believed to end
no later than either way.

Must not know: bytes on the wire, sockets, transports of asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, NoReturn

import redis.asyncio.lock
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast import _protocol
from redislock_fast._async_batch import Acquiring, Batch
from redislock_fast._async_redlock import Redlock
from redislock_fast._async_renewer import LoopRenewer, renewer_of
from redislock_fast._async_transport import Transport, drive, transport_of
from redislock_fast._batch import Name, Plan
from redislock_fast._facade import EXTEND, NOT_ENTERED, REACQUIRE, RELEASE, Backoff, LockerBase
from redislock_fast._keeping import KeepingBase
from redislock_fast._loss import LossReason
from redislock_fast._ownership import Holding, TaskHoldings, current_task
from redislock_fast._room import Grant
from redislock_fast._tenure import Tenure
from redislock_fast._terms import Terms
from redislock_fast._times import added_ms, clock, poll_seconds, wait_seconds
from redislock_fast._tokens import is_held_with
from redislock_fast._waiting import POLL, TIME_UP, Waiting

__all__ = ["Batch", "Lock", "Locker", "Redlock"]

logger = logging.getLogger(__name__)

_acting: ContextVar[tuple[Lock | None, Holding | None]] = ContextVar("_acting", default=(None, None))


class Lock(KeepingBase, redis.asyncio.lock.Lock):
    """A lock on one Redis or Valkey server, shared by tasks, processes and machines.

    The key `name` holds the owner's token. Exclusion holds until the ttl passes, on one server that keeps its data;
    what is not guaranteed stands in the README.

    Args:
        redis: a `redis.asyncio.Redis` or `RedisCluster`; its settings are used, its connections are not.
        name: the key, bytes or str.
        timeout: the ttl in seconds, rounded up to whole milliseconds. None or 0: the lock does not expire.
        sleep: how long a waiter sleeps between two attempts, in seconds.
        blocking: whether `acquire` waits.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: for ever.
        thread_local: whether the token belongs to the task that acquired, or to every task with this object.
        raise_on_release_error: whether leaving an `async with` block raises when the lock was lost, or only logs.
        wait: how `acquire` waits, as for `redislock_fast.Lock`.
        on_lost: called once with the lock and a `LossReason` when it is found to be lost, in the event loop; what it
            returns is awaited where it can be.
        cancel_on_lost: whether the task that acquired is cancelled then. Where it leaves an `async with` of the lock by
            that, the CancelledError's cause is a `LockLostError`.
        terms: auto_renew, max_hold, fencing, reentrant, wait_replicas, wait_timeout, breaker and metrics, as for
            `redislock_fast.Lock`.

    Raises:
        TypeError: for a pipeline or a client that blocks, a `timeout` that is no number, or an unknown parameter.
        ValueError: for a `timeout` that is negative, NaN or infinite, a `wait` that is none of these, or terms that do
            not go together.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    _transport: Transport
    _is_for_tasks = True

    @staticmethod
    def _transport_of(client: Any) -> Transport:
        return transport_of(client)

    def _new_holding(self) -> TaskHoldings:
        return TaskHoldings()

    # ---- whose holding it is ----

    # The task that calls a method is the one that holds, whichever task awaits what the method returns: `shield`,
    # `gather` and `wait_for` (before Python 3.12) await in tasks of their own. So the holding is looked up in plain
    # methods, and handed to the coroutines.

    def _acting(self) -> Holding | None:
        """For whom an overridden hook calls the original."""
        lock, holding = _acting.get()
        return holding if lock is self else None

    async def _hooked(self, local: Holding, hook: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Call an overridden hook, for this holding."""
        before = _acting.set((self, local))
        try:
            return await hook(*args)
        finally:
            with contextlib.suppress(ValueError):  # a dropped task ends in the context of who collects it
                _acting.reset(before)

    # ---- acquire ----

    def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: Any = None
    ) -> Coroutine[Any, Any, bool]:
        """Take the lock.

        Sends what `redislock_fast.Lock.acquire` sends. If it raises or is cancelled, the lock is not held, and what may
        have been done is undone.

        Args:
            blocking: whether to wait, instead of the lock's own setting.
            blocking_timeout: seconds to wait at most, likewise. An attempt under way at the end may take 0.1 s more.
                0 or less makes one attempt.
            token: the token to use, bytes or str; by default a random one.

        Returns:
            An awaitable: True once the lock is held, False when it was not to be had in time.

        Raises:
            redis.exceptions.LockError: this task holds the lock itself, without a ttl or renewed, and would wait for
                ever.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: the server's error, as WRONGTYPE for a key that is no string.
            ValueError: the lock's `sleep` is negative, or a time is NaN.
        """
        local = self._mine()
        if self._terms is not None:
            return self._acquire_on_terms(self._terms, local, current_task(), blocking, blocking_timeout, token)
        if blocking_timeout is token is self.blocking_timeout is None and self._wait == "push" and self.sleep >= 0:
            return self._acquire_at_once(local, blocking)
        return self._acquire(local, blocking, blocking_timeout, token)

    async def _acquire_at_once(self, local: Holding, blocking: bool | None) -> bool:
        """`_acquire` for the usual settings: its first attempt, which needs no more coroutines on a fair day.

        That, and the same in `_release_at_once`, saves an eighth of the CPU of a pair, with 1,000 tasks a quarter.
        """
        channel = self._transport.channel()
        link = channel.ready()
        if (
            link is None
            or link.is_awaited(self._key)
            or getattr(self.do_acquire, "__func__", None) is not Lock.do_acquire
        ):
            return await self._acquire(local, blocking, None, None)
        token = self._next_token(None, local)
        local.attempt = attempt = self._attempt_kind(self._key, token, self._ttl_ms)
        try:
            finished, begun = False, None
            try:
                finished = attempt.feed(await link.ask(attempt), link.dialect)
            except BaseException as interruption:
                begun = (link, interruption)
            if not finished:
                going_on = channel.execute(attempt, begun=begun)
                link = begun = None  # an error keeps this frame, which must keep neither it nor a connection
                await going_on
            if attempt.result:
                self._note(attempt, local)
                local.token = token
                return True
        except Exception:
            raise
        except BaseException:
            self._undo_unnoticed(local, token)
            raise
        return await self._acquire(local, blocking, None, None, attempt)

    async def _acquire(  # noqa: PLR0912, PLR0915  # one coroutine: each more would cost 0.3 us
        self,
        local: Holding,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: Any,
        failed: _protocol.Acquire | None = None,
    ) -> bool:
        sleep = poll_seconds(self.sleep)
        brought, token = token, self._next_token(token, local) if failed is None else failed.token
        blocking = self.blocking if blocking is None else blocking
        blocking_timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        stop_trying_at = None
        if blocking_timeout is not None:
            wait_s = wait_seconds(blocking_timeout, "blocking_timeout")
            stop_trying_at = asyncio.get_running_loop().time() + wait_s
        bounded = blocking and blocking_timeout is not None and blocking_timeout > 0
        waits = blocking and (bounded or blocking_timeout is None)
        hook = self.do_acquire
        overridden = getattr(hook, "__func__", None) is not Lock.do_acquire
        by_push = self._wait == "push" and not overridden
        # With other tasks of this loop in the queue, an attempt would only fail.
        queues = by_push and waits and brought is local.token is None and self._transport.is_awaited(self._key)
        tries = not queues and failed is None
        backoff = None
        try:
            while True:
                if overridden:
                    acquired = bool(await self._hooked(local, hook, token))
                elif not tries:
                    acquired = False
                else:
                    limit_s = None
                    if bounded and stop_trying_at is not None:
                        limit_s = max(stop_trying_at - asyncio.get_running_loop().time(), 0.0)
                    kind = self._own_kind if token is local.brought else self._attempt_kind
                    local.attempt = attempt = kind(self._key, token, self._ttl_ms)
                    await self._transport.execute(attempt, limit_s)
                    acquired = attempt.result
                    if acquired:
                        self._note(attempt, local)
                if acquired:
                    local.token = token
                    return True
                if not waits:
                    return False
                token = self._token_after(token, brought, local)
                if stop_trying_at is None:
                    self._refuse_to_wait_for_itself(local)
                if by_push:
                    left_s = None if stop_trying_at is None else stop_trying_at - asyncio.get_running_loop().time()
                    waiting = self._waiting(token, brought, sleep, left_s)
                    outcome = await self._acquire_by_push(waiting, local)
                    if outcome is not POLL:
                        return outcome is not TIME_UP
                    token = waiting.token
                    by_push, tries = False, True
                backoff = backoff or Backoff(self._wait, sleep)
                pause_s = backoff.next_s()
                if stop_trying_at is not None and asyncio.get_running_loop().time() + pause_s > stop_trying_at:
                    return False
                await asyncio.sleep(pause_s)
                local.retries += 1
        except Exception:
            raise
        except BaseException:  # a cancel, while an overridden do_acquire still did something after it had the lock
            self._undo_unnoticed(local, token)
            raise

    async def _acquire_on_terms(
        self,
        terms: Terms,
        local: Holding,
        task: asyncio.Task[Any] | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: Any,
    ) -> bool:
        if self._reenter(local, token):
            return True
        self._adapt(terms)
        asked_at = clock()
        before = local.token
        local.retries = 0
        loop = asyncio.get_running_loop()
        try:
            with self._guarded(terms):
                if not await self._acquire(local, blocking, blocking_timeout, token):
                    return False
                await drive(self._transport, self._completing(terms, local))
                self._keep(self._begin(terms, local, asked_at, task))
        except GeneratorExit:
            if local.token is not None and local.token is not before:
                self._undo_dropped(loop, self._give_up(local, local.token))
            raise
        except BaseException:  # whatever it is: the lock is not held
            if local.token is not None and local.token is not before:
                self._transport.undo([self._give_up(local, local.token)])
            raise
        return True

    def _renewer(self) -> LoopRenewer:
        return renewer_of(self._transport)

    def _tell(self, tenure: Tenure, reason: LossReason) -> None:
        self._renewer().tell(tenure, reason)

    def _undo_dropped(self, loop: asyncio.AbstractEventLoop, entry: tuple[bytes, bytes]) -> None:
        """A task was dropped in the middle of its acquire. Whoever collects garbage runs this, in any thread."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._transport.undo, [entry])

    async def _acquire_by_push(self, waiting: Waiting, local: Holding) -> object:
        """Wait in the queue. Returns a Grant, TIME_UP or POLL."""
        loop = asyncio.get_running_loop()
        try:
            outcome = await drive(self._transport, waiting.steps())
        except GeneratorExit:
            self._undo_dropped(loop, (self._key, waiting.token))
            raise
        except BaseException:
            self._transport.undo([(self._key, waiting.token)])
            raise
        if type(outcome) is Grant:
            outcome.note(local, waiting.token, waiting.ttl_ms)
            local.attempt = waiting.attempt or local.attempt
        return outcome

    async def do_acquire(self, token: Any) -> bool:
        """Make one attempt; may be overridden. Returns True when the lock is held."""
        local = self._acting() or self._mine()
        token = token if type(token) is bytes else self._transport.encode(token)
        kind = self._own_kind if token is local.brought else self._attempt_kind
        local.attempt = attempt = kind(self._key, token, self._ttl_ms)
        await self._transport.execute(attempt)
        if attempt.result:
            self._note(attempt, local)
        return attempt.result

    def _note(self, attempt: _protocol.Acquire, local: Holding) -> None:
        """Keep the lease that the attempt has got."""
        ttl_ms = attempt.ttl_ms
        local.lease = (attempt.token, None if ttl_ms is None else attempt.sent_at + ttl_ms / 1000)

    # ---- look ----

    async def locked(self) -> bool:
        """Whether anybody holds the lock. Sends `GET name`, always to the primary."""
        look = _protocol.Look(self._key)
        await self._transport.execute(look)
        return look.result

    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether this task holds the lock, by the server's word. Sends `GET name`, always to the primary."""
        return self._owned(self._held())

    async def _owned(self, local: Holding) -> bool:
        token = local.token
        look = _protocol.Look(self._key)
        await self._transport.execute(look)
        return token is not None and is_held_with(look.holder, token)

    # ---- release, extend, reacquire ----

    def release(self) -> Coroutine[Any, Any, None]:
        """Give the lock back.

        Sends what `redislock_fast.Lock.release` sends. The token is forgotten only after the
        server's verdict: when this raises a connection error, it can be called again. Cancelled, it goes on in the
        background.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, or was deleted or taken by another.
            redis.exceptions.LockError: this task holds no lock.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        local = self._held()
        token = local.token
        if type(token) is bytes and local.tenure is None and local.releasing is None:
            return self._release_at_once(local, token)
        return self._release_held(local)

    async def _release_at_once(self, local: Holding, token: bytes) -> None:
        """`_release_held` for the usual settings; see `_acquire_at_once`."""
        channel = self._transport.channel()
        link = channel.ready()
        if (
            link is None
            or local.token is not token
            or self.lua_release is not RELEASE
            or getattr(self.do_release, "__func__", None) is not Lock.do_release
        ):
            await self._release_held(local)
            return
        operation = self._release_of(token, local)
        finished, begun = False, None
        try:
            finished = operation.feed(await link.ask(operation), link.dialect)
        except BaseException as interruption:
            begun = (link, interruption)
        if not finished:
            going_on = self._go_on_releasing(operation, local, channel.execute(operation, begun=begun))
            link = begun = None
            await going_on
        if local.token == token:  # where the token is shared, another task may have acquired meanwhile
            local.token = None
        if not operation.result:
            raise self._lost("release")

    async def _release_held(self, local: Holding) -> None:
        token = local.token
        if token is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", lock_name=self.name)
        tenure = local.tenure
        if tenure is not None and not self._may_release(local, tenure):
            return
        try:
            hook = self.do_release
            if getattr(hook, "__func__", None) is not Lock.do_release:
                await self._hooked(local, hook, token)
            elif not await self._release(token, local):
                raise self._lost("release")
        except LockNotOwnedError as error:
            local.token = None
            if tenure is not None:
                self._account(local, tenure, False)
                await self._raise_lost("release", tenure, error)
            raise
        if tenure is not None:
            self._account(local, tenure, True)
        if local.token == token:  # where the token is shared, another task may have acquired meanwhile
            local.token = None

    async def do_release(self, expected_token: Any) -> None:
        """Release by token; may be overridden."""
        if not await self._release(expected_token, self._acting() or self._held()):
            raise self._lost("release")

    async def _release(self, expected_token: Any, local: Holding) -> bool:
        if self.lua_release is not RELEASE and self.lua_release is not None:
            return bool(await self.lua_release(keys=[self.name], args=[expected_token], client=self.redis))
        token = expected_token if type(expected_token) is bytes else self._transport.encode(expected_token)
        operation = self._release_of(token, local)
        await self._go_on_releasing(operation, local, self._transport.execute(operation))
        return operation.result

    def _release_of(self, token: bytes, local: Holding) -> _protocol.Release:
        owner, expires_at = local.lease
        if owner != token:
            expires_at = None
        return _protocol.Release(self._key, token, expires_at, local.releasing == token, local.queued == token)

    async def _go_on_releasing(
        self, operation: _protocol.Release, local: Holding, going_on: Coroutine[Any, Any, None]
    ) -> None:
        token, expires_at = operation.token, operation.expires_at
        try:
            await going_on
        except BaseException as error:
            local.releasing = token if operation.unsettled and operation.valid else None
            if isinstance(error, asyncio.CancelledError):
                # A release once called runs to its end, even if nothing has left yet. A second call finds it done.
                if not operation.unsettled and (expires_at is None or clock() < expires_at):
                    local.releasing = token
                self._transport.undo([(self._key, token)])
            raise
        if operation.unsettled:
            local.releasing = None

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Awaitable[Literal[True]]:
        """Prolong the lease.

        Sends `EVALSHA`; where scripts are forbidden, `GET`, `PTTL` and `SET name token IFEQ token PX ms`. Sent again
        after a lost reply, it still adds only once. The LockErrors are raised by the call, the others by awaiting it.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: let `additional_time` be the new ttl instead.

        Returns:
            An awaitable of True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more, or has no ttl on the server.
            redis.exceptions.LockError: this task holds no lock, or the lock does not expire.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        local = self._held_with_ttl("extend")
        if local.tenure is None:
            return self._hooked(local, self.do_extend, additional_time, replace_ttl)
        new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
        return self._prolong("extend", local, local.tenure, new_ttl_ms, self.do_extend, additional_time, replace_ttl)

    async def _prolong(
        self,
        verb: str,
        local: Holding,
        tenure: Tenure,
        new_ttl_ms: int | None,
        hook: Callable[..., Awaitable[Any]],
        *args: Any,
    ) -> Any:
        if tenure.is_lost():
            await self._raise_lost(verb, tenure)
        try:
            with tenure.prolonged_by_hand(local, new_ttl_ms):
                result = await self._hooked(local, hook, *args)
        except LockNotOwnedError as error:
            await self._raise_lost(verb, tenure, error)
        except GeneratorExit:  # the task was dropped: whoever collects garbage runs this, outside of the loop
            raise
        except BaseException:
            if tenure.loss is None:
                self._keep(tenure)  # it may have made the lease shorter
            raise
        if tenure.loss is not None:  # it was told of meanwhile: it does not come back
            self._transport.undo([(self._key, tenure.token)])
            raise self._lost_error(verb, tenure)
        self._keep(tenure)
        return result

    async def _raise_lost(self, verb: str, tenure: Tenure, error: LockNotOwnedError | None = None) -> NoReturn:
        """Find out why the lock was lost, and tell, unless that has been done."""
        self._let_go(tenure)
        if tenure.loss is None:
            reason = await drive(self._transport, self._finding_out(tenure))
            if tenure.lose(reason, by_release=tenure.over):
                self._tell(tenure, reason)
        raise self._lost_error(verb, tenure) from error

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend by the caller's token; may be overridden."""
        add_ms = added_ms(additional_time, replace_ttl)
        local = self._acting() or self._held()
        token = self._transport.encode(local.token)
        if self.lua_extend not in (EXTEND, None):
            args = [token, add_ms, "1" if replace_ttl else "0"]
            extended = bool(await self.lua_extend(keys=[self.name], args=args, client=self.redis))
        else:
            operation = _protocol.Extend(self._key, token, add_ms, replace_ttl, local.expires_at(token))
            try:
                await self._transport.execute(operation)
            except BaseException:
                if replace_ttl and operation.unsettled:
                    local.shorten(token, operation.sent_at + add_ms / 1000)
                raise
            extended = operation.result
            if extended:
                local.lease = (token, operation.expires_at)
        if not extended:
            raise self._lost("extend")
        return True

    def reacquire(self) -> Awaitable[Literal[True]]:
        """Set the lease back to the lock's whole `timeout`.

        Sends `SET name token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`. The LockErrors are raised by the
        call, the others by awaiting it.

        Returns:
            An awaitable of True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more.
            redis.exceptions.LockError: this task holds no lock, or the lock does not expire.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        local = self._held_with_ttl("reacquire")
        if local.tenure is None:
            return self._hooked(local, self.do_reacquire)
        return self._prolong("reacquire", local, local.tenure, self._ttl_ms, self.do_reacquire)

    async def do_reacquire(self) -> Literal[True]:
        """Reacquire by the caller's token; may be overridden."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        local = self._acting() or self._held()
        token = self._transport.encode(local.token)
        if self.lua_reacquire not in (REACQUIRE, None):
            held = bool(await self.lua_reacquire(keys=[self.name], args=[token, ttl_ms], client=self.redis))
        else:
            operation = _protocol.Reacquire(self._key, token, ttl_ms, local.queued == token)
            try:
                await self._transport.execute(operation)
            except BaseException:
                if operation.unsettled:
                    local.shorten(token, operation.sent_at + ttl_ms / 1000)
                raise
            held = operation.result
            if held:
                local.lease = (token, operation.sent_at + ttl_ms / 1000)
        if not held:
            raise self._lost("reacquire")
        return True

    # ---- in other words ----

    async def try_acquire(self, token: Any = None) -> bool:
        """Make one attempt: `acquire(blocking=False)`."""
        return await self.acquire(blocking=False, token=token)

    async def try_extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """`extend`, with False where the lock is not held any more; see `redislock_fast.Lock.try_extend`."""
        try:
            return await self.extend(additional_time, replace_ttl)
        except LockNotOwnedError:
            return False

    async def acquire_or_extend(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: Any = None
    ) -> bool:
        """Hold the lock with its whole ttl ahead; see `redislock_fast.Lock.acquire_or_extend`."""
        if self._is_to_prolong(token):
            with contextlib.suppress(LockNotOwnedError):
                return await self.reacquire()
            self._drop_lost()
        return await self.acquire(blocking, blocking_timeout, token)

    # ---- async with ----

    async def __aenter__(self) -> Lock:
        """Acquire.

        Raises:
            redis.exceptions.LockError: the lock was not to be had in time; and whatever `acquire` raises.
        """
        if await self.acquire():
            return self
        raise LockError(NOT_ENTERED, lock_name=self.name)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release. An error of the release never takes the place of the body's own exception: it is logged."""
        self._say_why(exc_value)
        try:
            await self.release()
        except LockError:
            if self.raise_on_release_error and exc_type is None:
                raise
            logger.warning("Lock was unlocked or no longer owned when exiting context manager.")
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Lock could not be released when exiting context manager: %r", error)


class Locker(LockerBase[Lock]):
    """Makes locks, and takes many at once.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`; its settings are used, its connections are not.

    Raises:
        TypeError: for a pipeline or a client that blocks.
    """

    _lock_class = Lock

    def acquire_many(
        self,
        names: Iterable[Name],
        timeout: float | None = None,
        blocking_timeout: float | None = 0,
        *,
        sleep: float = 0.1,
        all_or_nothing: bool = False,
    ) -> Acquiring:
        """Take the locks that are free, or all: `batch = await ...`, or `async with ... as batch`.

        The parameters and errors are those of `redislock_fast.Locker.acquire_many`; bad ones are refused at the call.
        Cancelled, nothing is held, and attempts of unknown outcome are undone.
        """
        plan = Plan(names, self._transport.keys_of, timeout, blocking_timeout, sleep, all_or_nothing)
        return Acquiring(self._transport, plan)
