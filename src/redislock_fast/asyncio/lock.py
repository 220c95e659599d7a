"""`Lock`, `Locker` and `Redlock` for asyncio: redis-py's `redis.asyncio.lock.Lock` on our transport, and more.

    from redislock_fast.asyncio import Lock      # was: from redis.asyncio.lock import Lock

Any difference in behaviour from `redis.asyncio.lock.Lock` is a bug, except those that `docs/differences.md` lists. The
class derives from the original, so that whatever asks for one takes ours.

Cancellation, at whichever await: a cancelled acquire does not hold the lock, and is undone; a cancelled release goes on
in the background; a cancelled extend or reacquire may or may not have been executed, and the lease is believed to end
no later than either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any

import redis.asyncio.lock
from redis.exceptions import (
    LockError,
    LockNotOwnedError,
    TimeoutError,  # noqa: A004  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding, Trial, current_task
from redislock_fast._lease.task_owner import TaskHoldings
from redislock_fast._procedures.batch import Name, Plan
from redislock_fast._procedures.facade import NOT_ENTERED, RELEASE, UNLOCKED, Backoff, LockerBase
from redislock_fast._procedures.waiters import Grant
from redislock_fast._procedures.waiting import POLL, TIME_UP, Waiting
from redislock_fast._protocol import commands
from redislock_fast._protocol.commands import HANDED_OVER, first_acquire, first_release
from redislock_fast._transport.loop.driver import Transport, drive, transport_of, wait
from redislock_fast._transport.loop.server import Begun
from redislock_fast._util.times import Limit, clock, poll_seconds
from redislock_fast._util.tokens import is_held_with
from redislock_fast.asyncio.locker import Acquiring, Batch
from redislock_fast.asyncio.prolonging import ProlongingBase
from redislock_fast.asyncio.redlock import Redlock

__all__ = ["Batch", "Lock", "Locker", "Redlock"]

logger = logging.getLogger(__name__)


class Lock(ProlongingBase, redis.asyncio.lock.Lock):
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

    _is_for_tasks = True

    @staticmethod
    def _transport_of(client: Any) -> Transport:
        return transport_of(client)

    def _new_holding(self) -> TaskHoldings:
        return TaskHoldings()

    # ---- acquire ----

    def acquire(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: Any = None
    ) -> Coroutine[Any, Any, bool]:
        """Take the lock.

        Sends what `redislock_fast.Lock.acquire` sends. If it raises or is cancelled, the lock is not held, and what may
        have been done is undone.

        Args:
            blocking: whether to wait, instead of the lock's own setting.
            blocking_timeout: seconds until the deadline of the whole call, likewise. A request under way at the end
                may take 0.1 s more. 0 or less makes one attempt, which may take 0.1 s.
            token: the token to use, bytes or str; by default a random one.

        Returns:
            An awaitable: True once the lock is held, False when it was not to be had in time.

        Raises:
            redis.exceptions.LockError: this task holds the lock itself, without a ttl or renewed, and would wait for
                ever.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time, and none before that said that the lock is another's.
            redis.exceptions.ResponseError: the server's error, as WRONGTYPE for a key that is no string.
            ValueError: the lock's `sleep` is negative, or a time is NaN.
        """
        local = self._mine()
        if self._terms is not None:
            return self._acquire_on_terms(self._terms, local, current_task(), blocking, blocking_timeout, token)
        if blocking_timeout is token is self.blocking_timeout is None and self._wait == "push" and self.sleep >= 0:
            return self._acquire_at_once(local, blocking)
        return self._acquire(local, blocking, blocking_timeout, token)

    async def _acquire_at_once(  # one coroutine: each more would cost 0.3 us
        self, local: Holding, blocking: bool | None
    ) -> bool:
        """`_acquire` for the usual settings: its first attempt, in as few calls as can be.

        A fair day needs neither another coroutine nor a state machine, here and in `_release_at_once`: that saves four
        tenths of the CPU of a pair. What has come of the request is else told to a machine, which goes on from there.
        """
        channel = self._transport.channel()
        link = channel.link  # nothing that is yet to be undone concerns a new token, or a release
        if link is None or getattr(self.do_acquire, "__func__", None) is not Lock.do_acquire:
            return await self._acquire(local, blocking, None, None)
        token = self._next_token(None)
        waits = local.token is None and (self.blocking if blocking is None else blocking)
        if waits and link.room is not None and link.room.is_contended(self._key, True):
            waiting = self._waiting(token, None, self.sleep, Limit(None))
            try:
                if await self._acquire_by_push(waiting, local) is not POLL:
                    return True
            except Exception:
                raise
            except BaseException:
                self._undo_unnoticed(local, waiting.token, None, None)
                raise
            return await self._acquire(local, blocking, None, None)
        ttl_ms = self._ttl_ms
        request, ours = first_acquire(link.dialect, self._key, token, ttl_ms)
        begun: Begun
        before = local.token
        sent_at = clock()
        try:
            reply = await link.pipe.call(request, link.timeout_s)
            if reply == ours:
                local.lease = (token, None if ttl_ms is None else sent_at + ttl_ms / 1000)
                local.token = token
                if local.forgotten_by is not None:  # by `hold` alone it would take 0.3 us more
                    local.hold(token)
                return True
            begun = (link, reply, None)
        except BaseException as interruption:
            begun = (link, None, interruption)
        local.attempt = attempt = commands.Acquire(self._key, token, ttl_ms)
        attempt.resume(request, sent_at)
        try:
            going_on = channel.execute(attempt, begun=begun)
            del link, begun  # an error keeps this frame, which must keep neither it nor a connection
            await going_on
            if attempt.result:
                self._note(attempt, local)
                local.hold(token)
                return True
        except Exception:
            raise
        except BaseException:
            self._undo_unnoticed(local, token, before, None, attempt)
            raise
        return await self._acquire(local, blocking, None, None, attempt)

    async def _acquire(  # noqa: PLR0912, PLR0915  # one coroutine: each more would cost 0.3 us
        self,
        local: Holding,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: Any,
        failed: commands.Acquire | None = None,
        limit: Limit | None = None,
    ) -> bool:
        loop = asyncio.get_running_loop()
        before = local.token
        sleep = poll_seconds(self.sleep)
        brought, token = token, self._next_token(token) if failed is None else failed.token
        blocking = self.blocking if blocking is None else blocking
        limit = limit or self._limit(blocking_timeout)
        stop_trying_at = None if limit.wait_s is None else loop.time() + limit.wait_s
        waits = blocking and limit.waits
        hook = self.do_acquire
        overridden = getattr(hook, "__func__", None) is not Lock.do_acquire
        trial = self._trial_of(local, token, brought, limit) if overridden else None
        by_push = self._wait == "push" and not overridden
        # Where others wait, an attempt would only fail.
        queues = by_push and waits and brought is before is None
        is_patient = limit.wait_s is None or limit.wait_s > sleep
        queues = queues and self._transport.is_contended(self._key, is_patient)
        tries = not queues and failed is None
        backoff, attempt = None, failed
        try:
            while True:
                if trial is not None:
                    acquired = bool(await self._hooked(trial, hook, token))
                    attempt = trial.attempt
                    if acquired:
                        local.attempt, local.lease = attempt, trial.lease
                elif not tries:
                    acquired = False
                else:
                    attempt = self._new_attempt(token, brought is not None, local)
                    await self._transport.execute(attempt, limit.left_s())
                    acquired = attempt.result
                    if acquired:
                        self._note(attempt, local)
                if acquired:
                    local.hold(token)
                    return True
                if not waits:
                    return False
                limit.refused = limit.refused or tries or failed is not None
                token = self._token_after(token, brought, attempt)
                if stop_trying_at is None:
                    self._refuse_to_wait_for_itself(local, attempt)
                if by_push:
                    waiting = self._waiting(token, brought, sleep, limit)
                    outcome = await self._acquire_by_push(waiting, local)
                    token, attempt = waiting.token, waiting.attempt or attempt
                    if outcome is not POLL:
                        return outcome is not TIME_UP
                    by_push, tries = False, True
                backoff = backoff or Backoff(self._wait, sleep)
                pause_s = backoff.next_s()
                if stop_trying_at is not None and loop.time() + pause_s > stop_trying_at:
                    return False
                await asyncio.sleep(pause_s)
                local.retries += 1
        except TimeoutError:  # what was asked last is undone
            limit.refused = limit.refused or (attempt is not None and attempt.refused)
            if not limit.is_settled:
                raise
            return False
        except Exception:
            raise
        except GeneratorExit:  # an overridden do_acquire that has the lock is ended
            if self._leaves_unnoticed(local, token, before, brought, attempt if trial is None else trial.attempt):
                self._transport.undo_dropped(loop, [(self._key, token)])
            raise
        except BaseException:  # an interrupt, or a cancel while an overridden do_acquire that has the lock does more
            self._undo_unnoticed(local, token, before, brought, attempt if trial is None else trial.attempt)
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
        trial = Trial(local)
        before = trial.token
        loop = asyncio.get_running_loop()
        try:
            with self._guarded(terms):
                limit = self._limit(blocking_timeout)
                if not await self._acquire(trial, blocking, None, token, limit=limit):
                    return False
                if not await drive(self._transport, self._completing(terms, trial, limit)):
                    self._transport.undo(self._give_up(local, trial, before, token))
                    return False
                self._keep(self._begin(terms, local, trial, asked_at, task))
        except GeneratorExit:
            if left := self._give_up(local, trial, before, token):
                self._transport.undo_dropped(loop, left)
            raise
        except BaseException:  # whatever it is: the lock is not held
            self._transport.undo(self._give_up(local, trial, before, token))
            raise
        return True

    async def _acquire_by_push(self, waiting: Waiting, local: Holding) -> object:
        """Wait in the queue. Returns a Grant, TIME_UP or POLL."""
        loop = asyncio.get_running_loop()
        try:
            outcome = await wait(self._transport, waiting)
            if type(outcome) is Grant:
                outcome.note(local, waiting.token, waiting.ttl_ms)
                local.attempt = waiting.attempt or local.attempt
        except GeneratorExit:
            if self._leaves(waiting, local):
                self._transport.undo_dropped(loop, [(self._key, waiting.token)])
            raise
        except BaseException:  # as in Lock for threads
            if self._leaves(waiting, local):
                self._transport.undo([(self._key, waiting.token)])
            raise
        return outcome

    async def do_acquire(self, token: Any) -> bool:
        """Make one attempt; may be overridden. Returns True when the lock is held."""
        local = self._acting() or self._mine()
        token = token if type(token) is bytes else self._transport.encode(token)
        attempt = self._new_attempt(token, token is local.brought, local)
        await self._transport.execute(attempt, None if local.limit is None else local.limit.left_s())
        if attempt.result:
            self._note(attempt, local)
        return attempt.result

    # ---- look ----

    async def locked(self) -> bool:
        """Whether anybody holds the lock. Sends `GET name`, always to the primary."""
        look = commands.Look(self._key)
        await self._transport.execute(look)
        return look.result

    def owned(self) -> Coroutine[Any, Any, bool]:
        """Whether this task holds the lock, by the server's word. Sends `GET name`, always to the primary."""
        return self._owned(self._held())

    async def _owned(self, local: Holding) -> bool:
        token = local.token
        look = commands.Look(self._key)
        await self._transport.execute(look)
        return token is not None and is_held_with(look.holder, token)

    # ---- release ----

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
        link = channel.link
        if (
            link is None
            or local.token is not token
            or self.lua_release is not RELEASE
            or getattr(self.do_release, "__func__", None) is not Lock.do_release
        ):
            await self._release_held(local)
            return
        request, ours = first_release(link.dialect, self._key, token, local.queued == token)
        begun: Begun
        sent_at = clock()
        try:
            reply = await link.pipe.call(request, link.timeout_s)
            if reply == ours:
                if reply == HANDED_OVER and link.room is not None:
                    link.room.note_hand_over(self._key, True)
                if local.token == token:  # where the token is shared, another task may have acquired meanwhile
                    local.token = None
                return
            begun = (link, reply, None)
        except BaseException as interruption:
            begun = (link, None, interruption)
        operation = self._release_of(token, local)
        operation.resume(request, sent_at)
        going_on = self._go_on_releasing(operation, local, channel.execute(operation, begun=begun))
        del link, begun
        await going_on
        if local.token == token:
            local.token = None
        if not local.is_released(operation):
            raise self._lost("release")

    async def _release_held(self, local: Holding) -> None:
        token = local.token
        if token is None:
            self._refuse_in_callback("release", local)
            raise LockError(UNLOCKED, lock_name=self.name)
        tenure = local.tenure
        if tenure is not None and not self._may_release(local, tenure):
            return
        release = object()
        try:
            if tenure is not None and not tenure.begin_release(release):
                raise LockError(UNLOCKED, lock_name=self.name)  # another who shares the lock object releases it
            hook = self.do_release
            if getattr(hook, "__func__", None) is not Lock.do_release:
                await self._hooked(local, hook, token)
            elif not await self._release(token, local):
                raise self._lost("release")
            if local.token == token:  # where the token is shared, another task may have acquired meanwhile
                local.token = None
        except LockNotOwnedError as error:
            if local.token == token:
                local.token = None
            if tenure is not None:
                self._account(local, tenure, False)
                await self._raise_lost("release", tenure, error, by_release=True)
            raise
        except BaseException:
            if tenure is not None:
                tenure.release_failed(release)
            raise
        if tenure is not None:
            self._account(local, tenure, True)

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
        return local.is_released(operation)

    async def _go_on_releasing(
        self, operation: commands.Release, local: Holding, going_on: Coroutine[Any, Any, None]
    ) -> None:
        token, expires_at = operation.token, operation.expires_at
        try:
            await going_on
            if operation.handed_over is not None:
                self._transport.note_hand_over(self._key, operation.handed_over)
        except BaseException as error:
            local.note_release(operation)
            if isinstance(error, asyncio.CancelledError):
                # A release once called runs to its end, even if nothing has left yet. A second call finds it done.
                if not operation.unsettled and (expires_at is None or clock() < expires_at):
                    local.releasing = token
                self._transport.undo([(self._key, token)])
            raise

    # ---- in other words ----

    async def try_acquire(self, token: Any = None) -> bool:
        """Make one attempt: `acquire(blocking=False)`."""
        return await self.acquire(blocking=False, token=token)

    async def acquire_or_extend(
        self, blocking: bool | None = None, blocking_timeout: float | None = None, token: Any = None
    ) -> bool:
        """Hold the lock with its whole ttl ahead; see `redislock_fast.Lock.acquire_or_extend`."""
        held = self._to_prolong(token)
        if held is not None:
            with contextlib.suppress(LockNotOwnedError):
                return await self.reacquire()
            self._drop_lost(held)
        return await self.acquire(blocking, blocking_timeout, token)

    # ---- async with ----

    async def __aenter__(self) -> Lock:
        """Acquire, or take what was attached.

        Raises:
            LockLostError: what was attached is lost.
            redis.exceptions.LockError: the lock was not to be had in time; and whatever `acquire` raises.
        """
        if (self._attached is not None and self._enter_attached()) or await self.acquire():
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


Lock._own_hooks = (Lock.do_release, Lock.do_extend, Lock.do_reacquire)  # noqa: SLF001  # of this very module


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
