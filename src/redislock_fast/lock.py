"""`Lock`: redis-py's lock on our transport.

Any difference in behaviour from `redis.lock.Lock` is a bug, except those that `docs/differences.md` lists. The class
derives from the original, so that whatever asks for one takes ours.
"""

from __future__ import annotations

import contextlib
import logging
import time as mod_time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, NoReturn

import redis
import redis.lock
from redis.exceptions import (
    LockError,
    LockNotOwnedError,
    TimeoutError,  # noqa: A004  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding, ThreadHolding, Trial
from redislock_fast._lease.tenure import Tenure
from redislock_fast._pipe.base import NOT_ASKED
from redislock_fast._procedures.facade import EXTEND, NOT_ENTERED, REACQUIRE, RELEASE, UNLOCKED, Backoff
from redislock_fast._procedures.keeping import KeepingBase
from redislock_fast._procedures.renewal import Loss
from redislock_fast._procedures.waiters import Grant
from redislock_fast._procedures.waiting import POLL, TIME_UP, Waiting
from redislock_fast._protocol import commands
from redislock_fast._protocol.commands import HANDED_OVER, first_acquire, first_release
from redislock_fast._transport.threads.driver import Transport, drive, transport_of, wait
from redislock_fast._transport.threads.renewer import Renewer, renewer_of, tell, tell_in_background
from redislock_fast._transport.threads.server import Begun
from redislock_fast._util import fork
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import Limit, added_ms, clock, poll_seconds
from redislock_fast._util.tokens import is_held_with

__all__ = ["Lock"]

logger = logging.getLogger(__name__)


class Lock(KeepingBase, redis.lock.Lock):
    """A lock on one Redis or Valkey server, shared by processes and machines.

    The key `name` holds the owner's token. Exclusion holds until the ttl passes, on one server that keeps its data;
    what is not guaranteed stands in the README.

    Args:
        redis: a `redis.Redis` or `redis.RedisCluster` of any kind; its settings are used, its connections are not.
        name: the key, bytes or str.
        timeout: the ttl in seconds, rounded up to whole milliseconds. None or 0: the lock does not expire.
        sleep: how long a waiter sleeps between two attempts, in seconds.
        blocking: whether `acquire` waits.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: for ever.
        thread_local: whether the token belongs to the thread that acquired, or to every thread with this object.
        raise_on_release_error: whether leaving a `with` block raises when the lock was lost, or only logs.
        wait: how `acquire` waits. "push": in the lock's queue, and the server tells who is next; `sleep` is then how
            often to look whether all is well: the shortest among the process's waiters for the lock (the first time
            later by as long as the last wait took, four times `sleep` at most). "poll": as redis-py does, an attempt
            every `sleep`. Or a `redis.backoff.AbstractBackoff`, which says how long to sleep between two attempts.
            Where the server allows or knows no better, "push" becomes watching the key by client tracking, and then
            polling.
        auto_renew: whether the lease is renewed, in the background, as long as the lock is held. `timeout` is then how
            long others wait for a holder that died.
        max_hold: until how many seconds after it was acquired it is renewed at most. None: for ever.
        on_lost: called once with the lock and a `LossReason` when it is found to be lost, from a background thread, or
            by the release or extend that finds it out.
        fencing: whether each holding gets a number, `fence`; see `redislock_fast.fencing`.
        reentrant: whether the thread that holds the lock may acquire it again; it is released as often.
        wait_replicas: how many replicas must have the lock before `acquire` returns.
        wait_timeout: for how long to wait for them, in seconds.
        breaker: a circuit breaker with pybreaker's `calling()`. It guards `acquire`, and counts errors of the
            connection and timeouts alone.
        metrics: is told of each acquisition and release; see `Metrics`.

    `timeout` may be an `AdaptiveTTL`. What the background does stands in docs/holding.md.

    Raises:
        TypeError: for a pipeline or an asyncio client, a `timeout` that is no number, an `on_lost` that cannot be
            called, a `breaker` that is none, or an unknown parameter.
        ValueError: for a `timeout` that is negative, NaN or infinite, a `wait` that is none of these, or terms that do
            not go together.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    _transport: Transport

    @staticmethod
    def _transport_of(client: Any) -> Transport:
        return transport_of(client)

    def _new_holding(self) -> ThreadHolding:
        return ThreadHolding()

    # ---- acquire ----

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Any = None,
    ) -> bool:
        """Take the lock.

        Sends `SET name token NX [PX ms] GET` (Redis 7.0, Valkey) or `SET name token NX [PX ms]` and, when that fails,
        `GET name`, once per attempt; none where others are known to wait. To wait by push, it sends `SUBSCRIBE` (once
        per connection; in a cluster `SSUBSCRIBE`, once per slot) and `EVALSHA`, and for a lock that redis-py's class
        holds `CLIENT TRACKING`, `CLIENT CACHING` and `GET`. If it raises, the lock is not held, and an attempt of
        unknown outcome is undone.

        Args:
            sleep: seconds between two attempts, or two looks, instead of the lock's own setting.
            blocking: whether to wait, likewise.
            blocking_timeout: seconds until the deadline of the whole call, likewise. A request under way at the end
                may take 0.1 s more. 0 or less makes one attempt, which may take 0.1 s.
            token: the token to use, bytes or str; by default a random one.

        Returns:
            True once the lock is held, False when it was not to be had in time.

        Raises:
            redis.exceptions.LockError: this thread holds the lock itself, without a ttl or renewed, and would wait for
                ever.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time, and none before that said that the lock is another's.
            redis.exceptions.ResponseError: the server's error, as WRONGTYPE for a key that is no string.
            ValueError: `sleep` negative, or a time that is NaN.
        """
        if self._generation != fork.generation:
            self._own_nothing()
        if self._terms is not None:
            return self._acquire_on_terms(self._terms, sleep, blocking, blocking_timeout, token)
        if (
            sleep is blocking_timeout is token is self.blocking_timeout is None
            and self._wait == "push"
            and self.sleep >= 0
        ):
            return self._acquire_at_once(self.local, blocking)
        return self._acquire(self.local, sleep, blocking, blocking_timeout, token)

    def _acquire_at_once(self, local: Holding, blocking: bool | None) -> bool:
        """`_acquire` for the usual settings: its first attempt, in as few calls as can be; see `_release_at_once`."""
        channel = self._transport
        link = channel.link  # nothing that is yet to be undone concerns a new token
        if link is None or getattr(self.do_acquire, "__func__", None) is not Lock.do_acquire:
            return self._acquire(local, None, blocking, None, None)
        token = self._next_token(None)
        before = local.token
        waits = before is None and (self.blocking if blocking is None else blocking)
        if waits and link.room is not None and link.room.is_contended(self._key, True):
            waiting = self._waiting(token, None, self.sleep, Limit(None))
            try:
                if self._acquire_by_push(waiting, local) is not POLL:
                    return True
            except Exception:
                raise
            except BaseException:
                self._undo_unnoticed(local, waiting.token, None, None)
                raise
            return self._acquire(local, None, blocking, None, None)
        ttl_ms = self._ttl_ms
        request, ours = first_acquire(link.dialect, self._key, token, ttl_ms)
        begun: Begun | None
        sent_at = clock()
        try:
            reply = link.pipe.ask(request, channel.timeout_s, channel.inside)
            if reply == ours:
                local.lease = (token, None if ttl_ms is None else sent_at + ttl_ms / 1000)
                local.hold(token)
                return True
            begun = (link, reply, None) if reply is not NOT_ASKED else None
        except BaseException as interruption:
            begun = (link, None, interruption)
        del link  # an error keeps this frame, which must keep neither it nor a connection
        local.attempt = attempt = commands.Acquire(self._key, token, ttl_ms)
        if begun is not None:
            attempt.resume(request, sent_at)
        try:
            channel.execute(attempt, begun=begun)
            if attempt.result:
                self._note(attempt, local)
                local.hold(token)
                return True
        except Exception:
            raise
        except BaseException:
            self._undo_unnoticed(local, token, before, None, attempt)
            raise
        finally:
            del begun
        return self._acquire(local, None, blocking, None, None, attempt)

    def _acquire(  # noqa: PLR0912, PLR0915  # as asyncio's, which costs less in one piece
        self,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: Any,
        failed: commands.Acquire | None = None,
        limit: Limit | None = None,
    ) -> bool:
        before = local.token
        sleep = poll_seconds(self.sleep if sleep is None else sleep)
        brought, token = token, self._next_token(token) if failed is None else failed.token
        blocking = self.blocking if blocking is None else blocking
        limit = limit or self._limit(blocking_timeout)
        stop_trying_at = None if limit.wait_s is None else mod_time.monotonic() + limit.wait_s
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
                    acquired = self._hooked(local, trial, hook, token)
                    attempt = trial.attempt
                elif not tries:
                    acquired = False
                else:
                    attempt = self._new_attempt(token, brought is not None, local)
                    acquired = self._execute(attempt, local, limit)
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
                    outcome = self._acquire_by_push(waiting, local)
                    token, attempt = waiting.token, waiting.attempt or attempt
                    if outcome is not POLL:
                        return outcome is not TIME_UP
                    by_push, tries = False, True
                backoff = backoff or Backoff(self._wait, sleep)
                pause_s = backoff.next_s()
                if stop_trying_at is not None and mod_time.monotonic() + pause_s > stop_trying_at:
                    return False
                mod_time.sleep(pause_s)
                local.retries += 1
        except TimeoutError:  # what was asked last is undone
            limit.refused = limit.refused or (attempt is not None and attempt.refused)
            if not limit.is_settled:
                raise
            return False
        except Exception:
            raise
        except BaseException:  # KeyboardInterrupt, between the server's reply and the return
            self._undo_unnoticed(local, token, before, brought, attempt if trial is None else trial.attempt)
            raise

    def _acquire_on_terms(
        self, terms: Terms, sleep: float | None, blocking: bool | None, blocking_timeout: float | None, token: Any
    ) -> bool:
        local = self.local
        if self._reenter(local, token):
            return True
        self._adapt(terms)
        asked_at = clock()
        trial = Trial(local)
        before = trial.token
        try:
            with self._guarded(terms):
                limit = self._limit(blocking_timeout)
                if not self._acquire(trial, sleep, blocking, None, token, limit=limit):
                    return False
                if not drive(self._transport, self._completing(terms, trial, limit)):
                    self._transport.undo(self._give_up(local, trial, before, token))
                    return False
                self._keep(self._begin(terms, local, trial, asked_at))
        except BaseException:  # whatever it is: the lock is not held
            self._transport.undo(self._give_up(local, trial, before, token))
            raise
        return True

    def _hooked(self, local: Holding, trial: Trial, hook: Callable[[Any], Any], token: bytes) -> bool:
        """Make an attempt by an overridden `do_acquire`."""
        before = self._act_for(trial)
        try:
            acquired = bool(hook(token))
        finally:
            self._act_no_more(before)
        if acquired:
            local.attempt, local.lease = trial.attempt, trial.lease
        return acquired

    def _renewer(self) -> Renewer:
        return renewer_of(self._transport)

    def _tell(self, tenure: Tenure, reason: LossReason) -> None:
        tell(tenure, reason)

    def _tell_of_former(self, tenure: Tenure, reason: LossReason) -> None:
        tell_in_background([Loss(tenure, reason)])  # it may wait for the lock, which its thread has acquired

    def _acquire_by_push(self, waiting: Waiting, local: Holding) -> object:
        """Wait in the queue. Returns a Grant, TIME_UP or POLL."""
        try:
            outcome = wait(self._transport, waiting)
            if type(outcome) is Grant:
                outcome.note(local, waiting.token, waiting.ttl_ms)
                if waiting.attempt is not None:
                    local.attempt = waiting.attempt
        except BaseException:  # whatever it is, and wherever it came: the lock is not held
            if self._leaves(waiting, local):
                self._transport.undo([(self._key, waiting.token)])
            raise
        return outcome

    def do_acquire(self, token: Any) -> bool:
        """Make one attempt; may be overridden. Returns True when the lock is held."""
        local = self._acting() or self.local
        token = token if type(token) is bytes else self._transport.encode(token)
        return self._execute(self._new_attempt(token, token is local.brought, local), local, local.limit)

    def _execute(self, attempt: commands.Acquire, local: Holding, limit: Limit | None) -> bool:
        self._transport.execute(attempt, None if limit is None else limit.left_s())
        if attempt.result:
            self._note(attempt, local)
        return attempt.result

    # ---- look ----

    def locked(self) -> bool:
        """Whether anybody holds the lock. Sends `GET name`, always to the primary."""
        look = commands.Look(self._key)
        self._transport.execute(look)
        return look.result

    def owned(self) -> bool:
        """Whether this thread holds the lock, by the server's word. Sends `GET name`, always to the primary."""
        token = self._held().token
        look = commands.Look(self._key)
        self._transport.execute(look)
        return token is not None and is_held_with(look.holder, token)

    # ---- release, extend, reacquire ----

    def release(self) -> None:
        """Give the lock back.

        Sends `DELIFEQ` (Valkey 9.0), `DELEX ... IFEQ` (Redis 8.4), or `EVALSHA`; where somebody waits in the queue,
        `EVALSHA` instead or behind it, which hands the lock over. The token is forgotten only after the
        server's verdict: when this raises a connection error, it can be called again.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, or was deleted or taken by another.
            redis.exceptions.LockError: this thread holds no lock.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        if self._generation != fork.generation:
            self._own_nothing()
        local = self.local
        token = local.token
        if token is None:
            self._refuse_in_callback("release", local)
            raise LockError(UNLOCKED, lock_name=self.name)
        tenure = local.tenure
        if tenure is None and self._release_at_once(local, token):
            return
        if tenure is not None and not self._may_release(local, tenure):
            return
        release = object()
        try:
            if tenure is not None and not tenure.begin_release(release):
                raise LockError(UNLOCKED, lock_name=self.name)  # another who shares the lock object releases it
            self.do_release(token)
            if local.token == token:  # where the token is shared, another thread may have acquired meanwhile
                local.token = None
        except LockNotOwnedError as error:
            if local.token == token:
                local.token = None
            if tenure is not None:
                self._account(local, tenure, False)
                self._raise_lost("release", tenure, error, by_release=True)
            raise
        except BaseException:
            if tenure is not None:
                tenure.release_failed(release)
            raise
        if tenure is not None:
            self._account(local, tenure, True)

    def _release_at_once(self, local: Holding, token: bytes) -> bool:
        """`do_release` for the usual settings: its first request, in as few calls as can be.

        A usual day needs no state machine, here and in `_acquire_at_once`: a lone pair takes 0.9 of the time. And where
        the process has slept while others had the caches, the request leaves after 35 us instead of 45, for which the
        next in the queue waits. What has come of the request is else told to a machine, which goes on from there.

        Returns:
            Whether it was released; False where these settings are not the usual ones.
        """
        channel = self._transport
        link = channel.link
        if (
            link is None
            or type(token) is not bytes
            or local.releasing is not None
            or self.lua_release is not RELEASE
            or getattr(self.do_release, "__func__", None) is not Lock.do_release
        ):
            return False
        request, ours = first_release(link.dialect, self._key, token, local.queued == token)
        begun: Begun
        sent_at = clock()
        try:
            reply = link.pipe.ask(request, channel.timeout_s, channel.inside)
            if reply is NOT_ASKED:
                return False
            if reply == ours:
                if reply == HANDED_OVER and link.room is not None:
                    link.room.note_hand_over(self._key, True)
                if local.token == token:  # where the token is shared, another thread may have acquired meanwhile
                    local.token = None
                return True
            begun = (link, reply, None)
        except BaseException as interruption:
            begun = (link, None, interruption)
        operation = self._release_of(token, local)
        operation.resume(request, sent_at)
        del link  # an error keeps this frame, which must keep neither it nor a connection
        try:
            released = self._go_on_releasing(operation, local, begun)
        finally:
            del begun
        if local.token == token:
            local.token = None
        if not released:
            raise self._lost("release")
        return True

    def do_release(self, expected_token: Any) -> None:
        """Release by token; may be overridden."""
        if self.lua_release is RELEASE or self.lua_release is None:
            released = self._release(expected_token)
        else:
            released = bool(self.lua_release(keys=[self.name], args=[expected_token], client=self.redis))
        if not released:
            raise self._lost("release")

    def _release(self, expected_token: Any) -> bool:
        token = expected_token if type(expected_token) is bytes else self._transport.encode(expected_token)
        local: Holding = self.local
        return self._go_on_releasing(self._release_of(token, local), local, None)

    def _go_on_releasing(self, operation: commands.Release, local: Holding, begun: Begun | None) -> bool:
        try:
            self._transport.execute(operation, begun=begun)
            if operation.handed_over is not None:
                self._transport.note_hand_over(self._key, operation.handed_over)
        except BaseException:
            local.note_release(operation)
            raise
        finally:
            del begun
        return local.is_released(operation)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Prolong the lease.

        Sends `EVALSHA`; where scripts are forbidden, `GET`, `PTTL` and `SET name token IFEQ token PX ms`. Sent again
        after a lost reply, it still adds only once.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: let `additional_time` be the new ttl instead.

        Returns:
            True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more, or has no ttl on the server.
            redis.exceptions.LockError: this thread holds no lock, or the lock does not expire.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        held = self._held_with_ttl("extend")
        if held.tenure is None:
            return self.do_extend(additional_time, replace_ttl)
        new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
        with self._prolonging("extend", held, held.tenure, new_ttl_ms):
            return self.do_extend(additional_time, replace_ttl)

    @contextlib.contextmanager
    def _prolonging(self, verb: str, local: Holding, tenure: Tenure, new_ttl_ms: int | None) -> Iterator[None]:
        if tenure.is_lost():
            self._raise_lost(verb, tenure)
        try:
            with tenure.prolonged_by_hand(local, new_ttl_ms):
                yield
        except LockNotOwnedError as error:
            self._raise_lost(verb, tenure, error)
        finally:
            if tenure.loss is None:
                self._keep(tenure)  # also after an error: it may have made the lease shorter
        if tenure.loss is not None:  # it was told of meanwhile: it does not come back
            self._transport.undo([(self._key, tenure.token)])
            raise self._lost_error(verb, tenure)

    def _raise_lost(
        self, verb: str, tenure: Tenure, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> NoReturn:
        """Find out why the lock was lost, and tell, unless that has been done, or another has given the lock back."""
        self._let_go(tenure)
        if tenure.loss is None and (by_release or not tenure.over):
            reason = drive(self._transport, self._finding_out(tenure))
            if tenure.lose(reason, by_release):
                self._tell(tenure, reason)
        raise (self._lost(verb) if tenure.loss is None else self._lost_error(verb, tenure)) from error

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend by the caller's token; may be overridden."""
        add_ms = added_ms(additional_time, replace_ttl)
        token = self._token_of(self.local, "extend")
        if self.lua_extend not in (EXTEND, None):
            args = [token, add_ms, "1" if replace_ttl else "0"]
            extended = bool(self.lua_extend(keys=[self.name], args=args, client=self.redis))
        else:
            operation = commands.Extend(self._key, token, add_ms, replace_ttl, self.local.expires_at(token))
            prolonging = self.local.begin_prolonging(token, add_ms if replace_ttl else None, add_ms)
            try:
                self._transport.execute(operation)
            finally:
                self.local.prolonged(prolonging, operation, add_ms)
            extended = operation.result
        if not extended:
            raise self._lost("extend")
        return True

    def reacquire(self) -> Literal[True]:
        """Set the lease back to the lock's whole `timeout`.

        Sends `SET name token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`.

        Returns:
            True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more.
            redis.exceptions.LockError: this thread holds no lock, or the lock does not expire.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        held = self._held_with_ttl("reacquire")
        if held.tenure is None:
            return self.do_reacquire()
        with self._prolonging("reacquire", held, held.tenure, self._ttl_ms):
            return self.do_reacquire()

    def do_reacquire(self) -> Literal[True]:
        """Reacquire by the caller's token; may be overridden."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        token = self._token_of(self.local, "reacquire")
        if self.lua_reacquire not in (REACQUIRE, None):
            held = bool(self.lua_reacquire(keys=[self.name], args=[token, ttl_ms], client=self.redis))
        else:
            operation = commands.Reacquire(self._key, token, ttl_ms, self.local.queued == token)
            prolonging = self.local.begin_prolonging(token, ttl_ms)
            try:
                self._transport.execute(operation)
            finally:
                self.local.prolonged(prolonging, operation)
            held = operation.result
        if not held:
            raise self._lost("reacquire")
        return True

    # ---- in other words ----

    def try_acquire(self, token: Any = None) -> bool:
        """Make one attempt: `acquire(blocking=False)`."""
        return self.acquire(blocking=False, token=token)

    def try_extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """`extend`, with False where the lock is not held any more.

        Raises:
            redis.exceptions.LockError: this thread holds no lock, or the lock does not expire; and whatever `extend`
                raises besides.
        """
        try:
            return self.extend(additional_time, replace_ttl)
        except LockNotOwnedError:
            return False

    def acquire_or_extend(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Any = None,
    ) -> bool:
        """Hold the lock with its whole ttl ahead: reacquire it if this thread holds it, else acquire it.

        The parameters, what is returned and raised are those of `acquire`. What was lost meanwhile is acquired anew,
        and has another fence.
        """
        held = self._to_prolong(token)
        if held is not None:
            with contextlib.suppress(LockNotOwnedError):
                return self.reacquire()
            self._drop_lost(held)
        return self.acquire(sleep, blocking, blocking_timeout, token)

    # ---- with ----

    def __enter__(self) -> Lock:
        """Acquire, or take what was attached.

        Raises:
            LockLostError: what was attached is lost.
            redis.exceptions.LockError: the lock was not to be had in time; and whatever `acquire` raises.
        """
        if (self._attached is not None and self._enter_attached()) or self.acquire():
            return self
        raise LockError(NOT_ENTERED, lock_name=self.name)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release. An error of the release never takes the place of the body's own exception: it is logged."""
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error and exc_type is None:
                raise
            logger.warning("Lock was unlocked or no longer owned when exiting context manager.")
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Lock could not be released when exiting context manager: %r", error)


Lock._own_hooks = (Lock.do_release, Lock.do_extend, Lock.do_reacquire)  # noqa: SLF001  # of this very module
