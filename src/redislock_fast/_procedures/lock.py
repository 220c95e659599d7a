"""A lock as its users call it, step by step: acquire on options, release, extend, reacquire, and looks.

Written once for threads and tasks, as generators: `redislock_fast/lock.py` and `redislock_fast/asyncio/lock.py` have
the signatures, and drive these. How a lock is acquired without options is in `acquisition.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from redis.exceptions import (
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    LockError,
    LockNotOwnedError,
    TimeoutError,  # noqa: A004
)

from redislock_fast._lease.options import Breaker, Terms
from redislock_fast._lease.ownership import Holding, Trial
from redislock_fast._lease.tenure import Tenure
from redislock_fast._procedures.acquisition import AcquireBase, Left
from redislock_fast._procedures.settings import EXTEND, REACQUIRE, RELEASE, UNLOCKED
from redislock_fast._procedures.steps import CallHook, Execute, ExecuteBeside, Steps
from redislock_fast._protocol.commands import Extend, Look, Reacquire, Release
from redislock_fast._protocol.fenced import AcquireFenced, Fence
from redislock_fast._protocol.replicas import Replicate
from redislock_fast._util.errors import NotReplicatedError
from redislock_fast._util.times import GRACE_S, Limit, added_ms, clock
from redislock_fast._util.tokens import is_held_with

__all__ = ["LockBase"]

_WAIT_GRACE_S = GRACE_S / 2
"""Replicas may still take so long when the acquire's time ends; the other half is left to the reply that says so."""


@contextlib.contextmanager
def _guarded(breaker: Breaker) -> Iterator[None]:
    """Let the breaker learn of a server that does not answer; whatever else is raised is no failure to it."""
    other: BaseException | None = None
    with breaker.calling():
        try:
            yield
        except (ConnectionError, TimeoutError):
            raise
        except BaseException as error:
            other = error
    if other is not None:
        try:
            raise other
        finally:
            del other  # or this frame and the error would keep each other alive


_UNGUARDED = contextlib.nullcontext()


class LockBase(AcquireBase):
    """A lock. The parameters stand on the classes that users name."""

    # ---- acquire ----

    def _acquiring(
        self,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: Any,
        left: Left,
        task: asyncio.Task[Any] | None = None,
    ) -> Steps:
        """Acquire. Returns whether the lock is held.

        Args:
            local: the caller's holding.
            sleep: as for `acquire`, and so the next three.
            blocking: as for `acquire`.
            blocking_timeout: as for `acquire`.
            token: as for `acquire`.
            left: gets what must be undone where this raises.
            task: the task that holds the lock then; None in threads.
        """
        if self._terms is None:
            limit = self._limit(blocking_timeout)
            return (yield from self._acquiring_until(limit, local, sleep, blocking, token, left))
        return (
            yield from self._acquiring_on_options(
                self._terms, local, sleep, blocking, blocking_timeout, token, left, task
            )
        )

    # ---- on options ----

    def _acquiring_on_options(
        self,
        terms: Terms,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        token: Any,
        left: Left,
        task: asyncio.Task[Any] | None,
    ) -> Steps:
        """Acquire, and do what the options ask for. Returns whether the lock is held."""
        if self._reenter(local, token):
            return True
        self._adapt(terms)
        asked_at = clock()
        trial = Trial(local)
        before = trial.token
        try:
            with self._guarded(terms):
                limit = self._limit(blocking_timeout)
                if not (yield from self._acquiring_until(limit, trial, sleep, blocking, token, left)):
                    return False
                if not (yield from self._completing(terms, trial, limit)):
                    self._transport.undo(self._give_up(local, trial, before, token))
                    return False
                self._keep(self._begin(terms, local, trial, asked_at, task))
        except BaseException:  # whatever it is: the lock is not held
            left += self._give_up(local, trial, before, token)
            raise
        return True

    def _adapt(self, terms: Terms) -> None:
        """Use the ttl that the hold times suggest."""
        if terms.adaptive is not None:
            ttl_ms = terms.adaptive.ttl_ms(self._name)
            self._ttl_ms = ttl_ms
            self._timeout = ttl_ms / 1000

    @staticmethod
    def _guarded(terms: Terms) -> AbstractContextManager[None]:
        """Where there is a breaker, an acquire is a call of it."""
        return _UNGUARDED if terms.breaker is None else _guarded(terms.breaker)

    def _completing(self, terms: Terms, local: Holding, limit: Limit) -> Steps:
        """Do what belongs to the acquire besides having the lock.

        Returns:
            False where that could not be done in time, after a wait for a lock that was another's.

        Raises:
            LockLostError: the lock was lost before that was done.
            NotReplicatedError: too few replicas had it in time.
            redis.exceptions.TimeoutError: the server was silent, and the lock never another's.
        """
        token = local.token
        assert token is not None
        try:
            if self._ttl_ms is not None and local.expires_at(token) is None:  # acquired by a hook, nobody knows when
                yield from self._confirming(local, token, self._ttl_ms, limit)
            local.fence = None
            if terms.fencing:
                local.fence = yield from self._numbering(local, token, limit)
            if terms.wait_replicas:
                yield from self._replicating(terms, local, token, limit)
        except TimeoutError:
            if not limit.is_settled:
                raise
            return False
        return True

    def _numbering(self, local: Holding, token: bytes, limit: Limit) -> Steps:
        """Returns the number of this holding."""
        attempt = local.attempt
        if isinstance(attempt, AcquireFenced) and attempt.result and attempt.token == token:
            return attempt.fence
        numbering = Fence(self._key, token)  # handed over, or acquired by a hook
        yield Execute(numbering, limit.left_s())
        if not numbering.result:
            raise self._lost_at_once()
        return numbering.fence

    def _replicating(self, terms: Terms, local: Holding, token: bytes, limit: Limit) -> Steps:
        """Wait for the replicas, as long as the lease and the acquire's deadline allow."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        expires_at = local.expires_at(token)
        left_s = ttl_ms / 1000 if expires_at is None else max(expires_at - clock(), 0.0)
        wait_ms = terms.wait_ms
        time_left_s = limit.left_s()
        if time_left_s is not None:
            left_s = min(left_s, time_left_s)
            wait_ms = max(min(wait_ms, int(1000 * (time_left_s + _WAIT_GRACE_S))), 1)
        wait_s = wait_ms / 1000
        replicate = Replicate(self._key, token, ttl_ms, local.queued == token, terms.wait_replicas, wait_ms)
        try:
            yield ExecuteBeside(replicate, left_s, wait_s)
        except TimeoutError:
            if not limit.is_over:
                raise
        else:  # servers end a WAIT up to 0.1 s late, so the deadline may come first
            if not replicate.held:
                raise self._lost_at_once()
        if not replicate.result:
            had = f"{replicate.replicas} of {terms.wait_replicas} replicas had the lock within {wait_s} s"
            raise NotReplicatedError(had, lock_name=self.name, replicas=replicate.replicas)
        local.lease = (token, replicate.sent_at + ttl_ms / 1000)

    def _confirming(self, local: Holding, token: bytes, ttl_ms: int, limit: Limit) -> Steps:
        confirming = Reacquire(self._key, token, ttl_ms)
        yield Execute(confirming, limit.left_s())
        if not confirming.result:
            raise self._lost_at_once()
        local.lease = (token, confirming.sent_at + ttl_ms / 1000)

    def _give_up(self, local: Holding, trial: Trial, before: bytes | None, brought: Any) -> list[tuple[bytes, bytes]]:
        """The acquire failed. Returns what must be undone.

        Args:
            local: the caller's holding.
            trial: what the acquire has got.
            before: the token that was held till then.
            brought: the token as the caller brought it; None where the caller did not.
        """
        token = trial.token
        if token is None or token == before:
            return []
        tenure = local.tenure
        if tenure is not None and tenure.token == token:
            self._forget(local, tenure)
        if local.token == token:  # where the token is shared, another may have acquired meanwhile
            local.token = None
        attempt = trial.attempt
        took = attempt is not None and attempt.token == token and attempt.took
        return [(self._key, token)] if brought is None or took else []

    # ---- release ----

    def _releasing(self, local: Holding) -> Steps:
        """Release what the caller holds."""
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
                raise LockError(UNLOCKED, lock_name=self.name)  # another caller that shares the lock object releases it
            if self._is_overridden("do_release"):
                yield from self._calling(local, self.do_release, token)
            elif not (yield from self._releasing_token(token, local)):
                raise self._lost("release")
            if local.token == token:  # where the token is shared, another may have acquired meanwhile
                local.token = None
        except LockNotOwnedError as error:
            if local.token == token:
                local.token = None
            if tenure is not None:
                self._account(local, tenure, False)
                yield from self._raising_lost("release", tenure, error, by_release=True)
            raise
        except BaseException:
            if tenure is not None:
                tenure.release_failed(release)
            raise
        if tenure is not None:
            self._account(local, tenure, True)

    def _releasing_for_caller(self, expected_token: Any) -> Steps:
        """Release by token, for whatever has called `do_release`.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held with this token.
        """
        if not (yield from self._releasing_token(expected_token, self._acting() or self._held())):
            raise self._lost("release")

    def _finishing_release(self, operation: Release, local: Holding) -> Steps:
        """Finish a release on the usual settings, whose request has left already."""
        was_held = yield from self._executing_release(operation, local)
        if local.token == operation.token:
            local.token = None
        if not was_held:
            raise self._lost("release")

    def _releasing_token(self, expected_token: Any, local: Holding) -> Steps:
        """Release by token. Returns whether the lock was held with it."""
        script = self.lua_release
        if script is not RELEASE and script is not None:
            return bool((yield CallHook(partial(script, keys=[self.name], args=[expected_token], client=self.redis))))
        operation = self._release_of(self._transport.encode(expected_token), local)
        return (yield from self._executing_release(operation, local))

    def _executing_release(self, operation: Release, local: Holding) -> Steps:
        """Returns whether the lock was held with the operation's token."""
        token, expires_at = operation.token, operation.expires_at
        try:
            yield Execute(operation)
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
        return local.is_released(operation)

    def _release_of(self, token: bytes, local: Holding) -> Release:
        """The release of what is held with this token."""
        return Release(self._key, token, local.expires_at(token), local.releasing == token, local.queued == token)

    # ---- extend, reacquire ----

    def _extending(self, local: Holding, additional_time: float, replace_ttl: bool) -> Steps:
        """Extend. Returns True, or whatever an overridden `do_extend` returns."""
        if self._is_overridden("do_extend"):
            prolonging = self._calling(local, self.do_extend, additional_time, replace_ttl)
        else:
            prolonging = self._extending_once(local, additional_time, replace_ttl)
        if local.tenure is None:
            return (yield from prolonging)
        new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
        return (yield from self._prolonging("extend", local, local.tenure, new_ttl_ms, prolonging))

    def _reacquiring(self, local: Holding) -> Steps:
        """Reacquire. Returns True, or whatever an overridden `do_reacquire` returns."""
        if self._is_overridden("do_reacquire"):
            prolonging = self._calling(local, self.do_reacquire)
        else:
            prolonging = self._reacquiring_once(local)
        if local.tenure is None:
            return (yield from prolonging)
        return (yield from self._prolonging("reacquire", local, local.tenure, self._ttl_ms, prolonging))

    def _prolonging(
        self, verb: str, local: Holding, tenure: Tenure, new_ttl_ms: int | None, prolonging: Steps
    ) -> Steps:
        """Prolong the lease of what is held on options, and keep the renewer informed of it.

        Args:
            verb: "extend" or "reacquire".
            local: the caller's holding.
            tenure: its lease.
            new_ttl_ms: the ttl that is set instead of the old one; None: something is added to that.
            prolonging: the steps that prolong it.
        """
        if tenure.is_lost():
            yield from self._raising_lost(verb, tenure)
        try:
            with tenure.prolonged_by_hand(local, new_ttl_ms):
                result = yield from prolonging
        except LockNotOwnedError as error:
            yield from self._raising_lost(verb, tenure, error)
        except GeneratorExit:  # the task was dropped: whatever collects garbage runs this, outside of the loop
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

    def _extending_once(self, local: Holding | None, additional_time: float, replace_ttl: bool) -> Steps:
        """Extend by token. Returns True.

        Args:
            local: the caller's holding; None: that for which `do_extend` was called.
            additional_time: as for `extend`.
            replace_ttl: as for `extend`.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held, or has no ttl on the server.
        """
        add_ms = added_ms(additional_time, replace_ttl)
        local = local or self._acting() or self._held()
        token = self._token_of(local, "extend")
        script = self.lua_extend
        if script is not EXTEND and script is not None:
            args = [token, add_ms, "1" if replace_ttl else "0"]
            extended = bool((yield CallHook(partial(script, keys=[self.name], args=args, client=self.redis))))
        else:
            operation = Extend(self._key, token, add_ms, replace_ttl, local.expires_at(token))
            prolonging = local.begin_prolonging(token, add_ms if replace_ttl else None, add_ms)
            try:
                yield Execute(operation)
            finally:
                local.prolonged(prolonging, operation, add_ms)
            extended = operation.result
        if not extended:
            raise self._lost("extend")
        return True

    def _reacquiring_once(self, local: Holding | None) -> Steps:
        """Set the lease back to the whole ttl by token. Returns True.

        Args:
            local: the caller's holding; None: that for which `do_reacquire` was called.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held.
        """
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        local = local or self._acting() or self._held()
        token = self._token_of(local, "reacquire")
        script = self.lua_reacquire
        if script is not REACQUIRE and script is not None:
            args = [token, ttl_ms]
            held = bool((yield CallHook(partial(script, keys=[self.name], args=args, client=self.redis))))
        else:
            operation = Reacquire(self._key, token, ttl_ms, local.queued == token)
            prolonging = local.begin_prolonging(token, ttl_ms)
            try:
                yield Execute(operation)
            finally:
                local.prolonged(prolonging, operation)
            held = operation.result
        if not held:
            raise self._lost("reacquire")
        return True

    # ---- look ----

    def _looking(self) -> Steps:
        """Returns whether the key exists."""
        look = Look(self._key)
        yield Execute(look)
        return look.result

    def _looking_for(self, token: bytes | None) -> Steps:
        """Returns whether the lock is held with this token, which is None where the caller holds nothing."""
        look = Look(self._key)
        yield Execute(look)
        return token is not None and is_held_with(look.holder, token)
