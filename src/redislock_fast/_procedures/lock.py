"""The operations of a lock, step by step: acquire on options, release, extend, reacquire, locked, owned.

`redislock_fast/lock.py` and `redislock_fast/asyncio/lock.py` have the signatures, and drive these generators. A lock
without options is acquired in `acquisition.py`.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import (
    LockNotOwnedError,
    TimeoutError,  # noqa: A004  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.metrics import report, report_call, report_end_later
from redislock_fast._lease.note import Held, Note
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner, PendingOwner
from redislock_fast._lease.telling import is_telling
from redislock_fast._pipe.base import NOT_ASKED
from redislock_fast._procedures.call import Call, ReleaseCall
from redislock_fast._procedures.lingering import LingerBase, Turn
from redislock_fast._procedures.settings import EXTEND, REACQUIRE, RELEASE, UNLOCKED, hooks_of
from redislock_fast._procedures.steps import Do, Steps
from redislock_fast._protocol.commands import HANDED_OVER, Extend, Reacquire, ReadHolder, Release
from redislock_fast._protocol.fenced import MANY, AcquireFenced, Fence, fence_given
from redislock_fast._protocol.replicas import Replicate
from redislock_fast._util.errors import NotReplicatedError, shown
from redislock_fast._util.times import FOREVER_S, GRACE_S, Limit, added_ms, clock
from redislock_fast._util.tokens import is_held_with
from redislock_fast._util.tracing import OWN, OWN_ASYNC, providers

__all__ = ["LockBase"]

_Client = redis.Redis
_AsyncClient = redis.asyncio.Redis
_NUMBERS = (float, int)

_WAIT_GRACE_S = GRACE_S / 2
"""How long replicas may take after the acquire's deadline; the other half of the grace is for the server's reply."""


def _is_replaced(script: Any, own: Any) -> bool:
    """Whether a user's script stands in place of our own, as redis-py's users may set `lua_release` and the like."""
    return script is not own and script is not None


class LockBase(LingerBase):
    """A lock. The public classes describe the parameters."""

    # ---- the first request ----

    def _call(
        self, owner: Owner, sleep: Any, blocking: Any, blocking_timeout: Any = None, token: Any = None, task: Any = None
    ) -> Call:
        """The call of an acquire with these parameters; see `Call`."""
        call = Call()
        call.key = self._key
        call.owner = owner
        call.sleep = sleep
        call.blocking = blocking
        call.blocking_timeout = blocking_timeout
        call.own_token = token
        call.wait_s = None
        call.listens = False
        if task is not None:
            call.task = task
        return call

    def _begins(self, call: Call) -> bool:
        """Whether the first request of an acquire may leave before anything else is done, as mostly.

        Not where a hook is overridden, something observes redis-py's commands, the caller holds the lock and may
        reenter it, or a parameter is not of the usual kind: then the steps decide. Hooks and tracers may come and go at
        any time, so every call looks.
        """
        before = call.owner.token
        options = self._options
        wait_s = self.blocking_timeout if call.blocking_timeout is None else call.blocking_timeout
        blocking = self.blocking if call.blocking is None else call.blocking
        sleep_s = self.sleep if call.sleep is None else call.sleep
        try:
            if not (
                self._is_direct
                and call.own_token is None
                and (wait_s is None or (type(wait_s) in _NUMBERS and 0 < wait_s < FOREVER_S))
                and type(sleep_s) in _NUMBERS
                and sleep_s >= 0
                and (blocking is True or blocking is False)
                and (options is None or (before is None and is_telling() is None))
                and hooks_of(self) == self._own_hooks
                and _Client.execute_command is OWN
                and _AsyncClient.execute_command is OWN_ASYNC
                and "execute_command" not in self._redis.__dict__
                and providers._observability_instance._provider_manager is None  # noqa: SLF001
            ):
                return False
        except AttributeError:  # a hook that is no method, a client without attributes, or the metrics were reset
            return False
        call.kind = self._attempt_kind
        call.ttl_ms = self._ttl_ms
        if wait_s is not None:
            call.wait_s, call.limit, call.sleep_s = wait_s, Limit(wait_s), sleep_s
        call.waits = blocking
        call.joins = blocking and before is None and self._wait == "push"
        return True

    def _go_on(self, call: Call, reply: Any, interruption: BaseException | None = None) -> None:
        """Have the steps go on from the outcome of the first request, which has not settled the acquire.

        Raises:
            BaseException: the interruption, where it came before the request left.
        """
        connection, call.connection = call.connection, None
        if connection is None or reply is NOT_ASKED:
            if interruption is not None:
                raise interruption
            return
        token, request = call.token, call.request
        assert token is not None
        assert request is not None
        if interruption is not None:
            self._drop_noted(call.owner, token)
        call.attempt = attempt = call.kind(self._key, token, call.ttl_ms)
        capabilities = connection.capabilities
        attempt.begin(request, capabilities, call.sent_at, (connection, reply, interruption))
        if type(reply) is bytes and attempt.with_get and attempt.begun is not None and attempt.begun[1] is reply:
            attempt.begun = None
            attempt.feed(reply, capabilities)
            call.is_refused = True

    # ---- acquire ----

    def _acquiring(self, call: Call, turn: Turn | None = None) -> Steps:
        """The steps of an acquire. They return whether the lock is held; see `_acquiring_by`."""
        call.left = []
        if self._options is None:
            return self._acquiring_by(call, turn)
        return self._acquiring_on_options(self._options, call)

    def _is_noted(self, options: Options, call: Call, server: Any, reply: object) -> bool:
        """Note a lock that the first request has got on options: it becomes the owner's.

        Returns False where the reply does not mean that, or the owner holds something by now, as tasks that one task
        has started may acquire for it at the same time. Then steps go on from the reply.
        """
        fence = fence_given(reply) if options.fencing else None
        if fence is None and (options.fencing or reply != call.ours):
            return False
        owner, token, ttl_ms, sent_at = call.owner, call.token, call.ttl_ms, call.sent_at
        assert token is not None
        note = owner.note
        if note is None:
            if owner.is_shared:
                return False
            note = owner.note = Note(self)
        if owner.token is not None or owner.kept is not None or note.held is not None or note.lease is not None:
            return False
        expires_at = None if ttl_ms is None else sent_at + ttl_ms / 1000
        begun = clock()
        owner.expiry = (token, expires_at)
        owner.fence = fence
        if note.lock() is not self:  # two lock objects may have one owner
            note.lock = weakref.ref(self)
        note.over = False
        if options.observers:
            note.count(options.observers, self._name)  # before the renewer may find out a loss
        note.held = (self._key, token, ttl_ms, expires_at, options, begun)
        owner.token = token
        if owner.forgotten_by is not None:  # else `hold` would do no more
            owner.hold(token)
        if ttl_ms is not None and options.watches:
            renewer = server.renewer
            if renewer is None:
                renewer = server.renewer = self._renewer()
            if note.listed_ms != ttl_ms or note.renewer is not renewer:
                renewer.note(note, ttl_ms, sent_at)
        if options.observers:
            report(options.observers, "record_acquisition", self._name, begun - sent_at, 1)
            report_call(options, "acquired {} after", self._name, begun - sent_at, token)
        return True

    def _drop_noted(self, owner: Owner, token: bytes) -> None:
        """Drop what an acquire has noted that was interrupted just then."""
        lease = owner.lease
        if lease is not None and lease.token == token:
            self._forget(owner, lease)
        if owner.note is not None and owner.note.held is None:
            owner.note.end_count()
        if owner.token == token:
            owner.token = None

    # ---- on options ----

    def _acquiring_on_options(self, options: Options, call: Call) -> Steps:
        """Acquire, and do what the options ask for. Returns whether the lock is held."""
        owner, token = call.owner, call.own_token
        if call.attempt is None and self._reenter(owner, token):
            return True
        self._adapt(options)
        asked_at = call.sent_at or clock()
        pending = call.owner = PendingOwner(owner)
        before = pending.token
        try:
            with options.guarded():
                acquired = yield from self._acquiring_by(call)
                if acquired and not (yield from self._completing(options, pending, call.deadline)):
                    call.left += self._drop_failed(owner, pending, before, token)
                    acquired = False
                if acquired:
                    self._keep(self._begin(options, owner, pending, asked_at, call.task))
        except BaseException as error:  # after any error, the lock is not held
            call.left += self._drop_failed(owner, pending, before, token)
            self._report_failure(options, pending, asked_at, error)
            raise
        if not acquired:
            self._report_failure(options, pending, asked_at, None)
        return acquired

    def _adapt(self, options: Options) -> None:
        """Set the ttl by the hold times. Half of it at least is left after the wait for the replicas."""
        if options.adaptive is not None:
            ttl_ms = max(options.adaptive.ttl_ms(self._name), 2 * options.wait_ms)
            self._ttl_ms = ttl_ms
            self._timeout = ttl_ms / 1000

    def _completing(self, options: Options, owner: Owner, limit: Limit) -> Steps:
        """Do what the options ask for once the lock is held: a certain lease, a fence, replicas.

        Returns:
            False where the time was up before, after another owner had the lock.

        Raises:
            LockLostError: the lock was lost before that was done.
            NotReplicatedError: too few replicas had the lock in time.
            redis.exceptions.TimeoutError: no reply in time, and no reply said that another owner has the lock.
        """
        token = owner.token
        assert token is not None
        try:
            if self._ttl_ms is not None and owner.expires_at(token) is None:  # acquired by a hook, at an unknown time
                yield from self._confirming(owner, token, self._ttl_ms, limit)
            owner.fence = None
            if options.fencing:
                owner.fence = yield from self._numbering(owner, token, limit)
            if options.wait_replicas:
                yield from self._replicating(options, owner, token, limit)
        except TimeoutError:
            if not limit.is_settled:
                raise
            return False
        return True

    def _numbering(self, owner: Owner, token: bytes, limit: Limit) -> Steps:
        """Returns the fence of the lock."""
        attempt, lease = owner.attempt, None if owner.cached is None else owner.cached.lease
        fence = None if lease is None else lease.take_fence()
        if fence is not None:
            return fence
        if isinstance(attempt, AcquireFenced) and attempt.result and attempt.token == token:
            first = attempt.fence
        else:  # the lock was handed over, or acquired by a hook
            numbering = Fence(self._key, token, 1 if lease is None else MANY)
            yield Do("execute", numbering, limit.left_s())
            if not numbering.result:
                raise self._lost_at_once()
            first = numbering.fence
        if lease is not None:
            lease.fences = range(first + 1, first + MANY)
        return first

    def _replicating(self, options: Options, owner: Owner, token: bytes, limit: Limit) -> Steps:
        """Wait for the replicas, no longer than the lease and the acquire's deadline allow."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        expires_at = owner.expires_at(token)
        left_s = ttl_ms / 1000 if expires_at is None else max(expires_at - clock(), 0.0)
        wait_ms = options.wait_ms
        time_left_s = limit.left_s()
        if time_left_s is not None:
            left_s = min(left_s, time_left_s)
            wait_ms = max(min(wait_ms, int(1000 * (time_left_s + _WAIT_GRACE_S))), 1)
        wait_s = wait_ms / 1000
        replicate = Replicate(self._key, token, ttl_ms, owner.contended == token, options.wait_replicas, wait_ms)
        try:
            yield Do("execute_dedicated", replicate, left_s, wait_s)
        except TimeoutError:
            if not limit.is_over:
                raise
        else:  # servers end a WAIT up to 0.1 s late, so the deadline may come first
            if not replicate.held:
                raise self._lost_at_once()
        if not replicate.result:
            had = f"{replicate.replicas} of {options.wait_replicas} replicas had the lock within {wait_s} s"
            raise NotReplicatedError(f"{had}: {shown(self.name)}", lock_name=self.name, replicas=replicate.replicas)
        owner.expiry = (token, replicate.sent_at + ttl_ms / 1000)

    def _confirming(self, owner: Owner, token: bytes, ttl_ms: int, limit: Limit) -> Steps:
        confirming = Reacquire(self._key, token, ttl_ms)
        yield Do("execute", confirming, limit.left_s())
        if not confirming.result:
            raise self._lost_at_once()
        owner.expiry = (token, confirming.sent_at + ttl_ms / 1000)

    def _drop_failed(
        self, owner: Owner, pending: PendingOwner, before: bytes | None, own_token: Any
    ) -> list[tuple[bytes, bytes]]:
        """Drop what a failed acquire has got. Returns what must be cleaned up.

        `before` is the token that was held before, `own_token` the token that the caller passed, or None.
        """
        token = pending.token
        if token is None or token == before:
            return []
        is_given_back = self._give_up_cached(pending)
        lease = owner.lease
        if lease is not None and lease.token == token:
            self._forget(owner, lease)
        if owner.token == token:  # where the token is shared, another may have acquired meanwhile
            owner.token = None
        attempt = pending.attempt
        took = attempt is not None and attempt.token == token and attempt.took
        if is_given_back:  # a cleanup beside its release would look like a loss
            return []
        return [(self._key, token)] if own_token is None or took else []

    # ---- release ----

    def _begins_release(self, owner: Owner, token: object) -> bool:
        """Whether the first request of a release may leave before anything else is done, as mostly.

        Not where a hook is overridden that concerns it, something observes redis-py's commands, the key may linger, or
        the lease has to be asked: then the steps decide.
        """
        try:
            return (
                type(token) is bytes
                and owner.kept is None
                and owner.releasing is None
                and self.lua_release is RELEASE
                and self.do_release.__func__ is self._own_hooks.do_release
                and _Client.execute_command is OWN
                and _AsyncClient.execute_command is OWN_ASYNC
                and "execute_command" not in self._redis.__dict__
                and providers._observability_instance._provider_manager is None  # noqa: SLF001
            )
        except AttributeError:  # as in `_begins`
            return False

    def _begin_release(self, owner: Owner, note: Note | None, token: bytes) -> ReleaseCall | None:
        """The call of a release; None where that must go by the lease of what is held. `note` is the owner's."""
        if note is not None and note.held is not None and not (is_telling() is None and note.begin_release(token)):
            return None
        call = ReleaseCall()
        call.key = self._key
        call.token = token
        call.contended = owner.contended == token
        call.wait_s = None
        call.note = note
        call.held = None if note is None else note.held
        return call

    def _note_released(self, owner: Owner, call: ReleaseCall) -> None:
        """Note that the first request has released the lock."""
        if call.ours == HANDED_OVER and call.connection.registry is not None:
            call.connection.registry.note_hand_over(self._key, True)
        note, held = call.note, call.held
        if note is not None and note.held is held:
            note.held = None
        if owner.token == call.token:  # where the token is shared, another caller may have acquired meanwhile
            owner.token = None
        if note is not None and held is not None and held[4].observers:
            self._report_noted_release(note, held)

    def _release_from(
        self, owner: Owner, call: ReleaseCall, reply: Any, interruption: BaseException | None = None
    ) -> Release:
        """The operation that goes on from the outcome of the first request, which has not settled the release.

        Raises:
            BaseException: the interruption, where it came before the request left.
        """
        connection, call.connection = call.connection, None
        operation = self._release_of(call.token, owner)
        if connection is not None and reply is not NOT_ASKED:
            begun = (connection, reply, interruption)
            operation.begin(call.request, connection.capabilities, call.sent_at, begun)
        elif interruption is not None:
            raise interruption
        return operation

    def _releasing(self, owner: Owner, begun: Release | None = None) -> Steps:
        """Release the lock that the caller holds. `begun`: its request has been sent already, without hooks."""
        token = owner.token if begun is None else begun.token
        if token is None:
            self._refuse_in_callback("release", owner)
            raise self._unlocked(UNLOCKED)
        lease = owner.lease if begun is None or owner.token == token else None
        if lease is not None and not self._may_release(owner, lease):
            return
        is_cached, expiry, release = owner.cached is not None, owner.expiry, object()
        note = owner.note
        try:
            if lease is not None and not lease.begin_release(release):
                raise self._unlocked(UNLOCKED)  # a caller that shares the lock object releases it
            if not (yield from self._asking_release(owner, token, begun)):
                raise self._not_owned("release")
            # As `_forget_released`, but without a call, in which an interrupt could come: the verdict would be lost.
            if owner.token == token and (owner.expiry is expiry or not is_cached):
                if note is not None and note.lease is lease:
                    note.held = note.lease = None
                if owner.kept is lease:  # from now on, the end of the lease object at the latest is the holding's
                    owner.kept = None
                owner.token = None
                if is_cached:
                    owner.forget_cached()
        except LockNotOwnedError as error:
            self._forget_released(owner, token, expiry, is_cached)
            if lease is not None:
                self._account(owner, lease, False)
                yield from self._raising_lost("release", lease, error, by_release=True)
            raise
        except BaseException:
            self._end_failed_release(owner, lease, token, release)
            raise
        if lease is not None:
            self._account(owner, lease, True)
        self._end_noted(owner)

    def _asking_release(self, owner: Owner, token: bytes, begun: Release | None) -> Steps:
        """Release by the token, or go on with a release that has begun. Returns whether the lock was held with it."""
        if begun is not None:
            return (yield from self._executing_release(begun, owner))
        if self._is_overridden("do_release"):
            yield from self._calling(owner, self.do_release, token)
            return True
        return (yield from self._releasing_token(token, owner))

    def _report_noted_release(self, note: Note, held: Held) -> None:
        """Report how long the lock was held, for metrics."""
        _, token, _, _, options, begun = held
        held_s = clock() - begun
        report(options.observers, "record_release", self.name, held_s, True)
        note.end_count()
        report_call(options, "released {}, held for", self.name, held_s, token)

    def _end_failed_release(self, owner: Owner, lease: Lease | None, token: bytes, release: object) -> None:
        """End a release that has an unknown outcome for its caller, or was interrupted as its outcome was noted."""
        if lease is not None:
            lease.release_failed(release)
            if owner.left == token:  # the caller has left the release, which goes on
                self._account(owner, lease, True)
        self._end_noted(owner)

    @staticmethod
    def _end_noted(owner: Owner) -> None:
        """Have a lock that was noted and is released count as held no more: an interrupt came as that was reported."""
        note = owner.note
        if note is not None and note.held is None and note.counted is not None:
            report_end_later(note.counted)

    @staticmethod
    def _forget_released(owner: Owner, token: bytes, expiry: object, is_cached: bool) -> None:
        """Note that the lock was released. Where the owner is shared, another caller may have acquired meanwhile.

        With a key of the cache, that has the same token, but another `expiry`.
        """
        if owner.token == token and (owner.expiry is expiry or not is_cached):
            owner.token = None
            owner.forget_cached()

    def _releasing_for_caller(self, expected_token: Any) -> Steps:
        """Release by token, for a caller of `do_release`."""
        if not (yield from self._releasing_token(expected_token, self._acting() or self._held())):
            raise self._not_owned("release")

    def _releasing_token(self, expected_token: Any, owner: Owner) -> Steps:
        """Release by token. Returns whether the lock was held with it."""
        if owner.cached is not None and self._has_own_hooks() and owner.cached.cache.is_here:
            return self._let_linger(owner)
        if _is_replaced(self.lua_release, RELEASE):
            return (yield from self._calling_script(self.lua_release, [expected_token]))
        operation = self._release_of(self._encoded(expected_token), owner)
        return (yield from self._executing_release(operation, owner))

    def _calling_script(self, script: Any, args: list[Any]) -> Steps:
        """Run a script that a user has set for this lock. Returns whether it says yes."""
        return bool((yield Do("call", partial(script, keys=[self.name], args=args, client=self.redis))))

    def _executing_release(self, operation: Release, owner: Owner) -> Steps:
        """Returns whether the lock was held with the operation's token."""
        token, expires_at = operation.token, operation.expires_at
        try:
            yield Do("execute", operation)
            if operation.handed_over is not None:
                self._transport.note_hand_over(self._key, operation.handed_over)
        except BaseException as error:
            owner.note_release(operation)
            if isinstance(error, asyncio.CancelledError):
                # A cancelled release runs to its end, even if nothing was sent yet. A second call finds it done.
                if not operation.unsettled and (expires_at is None or clock() < expires_at):
                    owner.releasing = token
                owner.left = token
                self._transport.clean_up([(self._key, token)])
            raise
        return owner.is_released(operation)

    def _release_of(self, token: bytes, owner: Owner) -> Release:
        """The release of what is held with this token."""
        return Release(self._key, token, owner.expires_at(token), owner.releasing == token, owner.contended == token)

    # ---- extend, reacquire ----

    def _extending(self, owner: Owner, additional_time: float, replace_ttl: bool) -> Steps:
        """Extend. Returns True, or what an overridden `do_extend` returns."""
        if self._is_overridden("do_extend"):
            prolonging = self._calling(owner, self.do_extend, additional_time, replace_ttl)
        else:
            prolonging = self._extending_once(owner, additional_time, replace_ttl)
        if owner.lease is None:
            return (yield from prolonging)
        new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
        return (yield from self._prolonging("extend", owner, owner.lease, new_ttl_ms, prolonging))

    def _reacquiring(self, owner: Owner) -> Steps:
        """Reacquire. Returns True, or what an overridden `do_reacquire` returns."""
        if self._is_overridden("do_reacquire"):
            prolonging = self._calling(owner, self.do_reacquire)
        else:
            prolonging = self._reacquiring_once(owner)
        if owner.lease is None:
            return (yield from prolonging)
        return (yield from self._prolonging("reacquire", owner, owner.lease, self._ttl_ms, prolonging))

    def _prolonging(self, verb: str, owner: Owner, lease: Lease, new_ttl_ms: int | None, prolonging: Steps) -> Steps:
        """Run the steps that prolong the lease of a lock that is held on options, and tell the renewer.

        `new_ttl_ms` is the ttl that the steps set, or None where they add to the ttl.
        """
        if lease.is_lost():
            yield from self._raising_lost(verb, lease)
        try:
            with lease.prolonged_by_hand(owner, new_ttl_ms):
                result = yield from prolonging
        except LockNotOwnedError as error:
            yield from self._raising_lost(verb, lease, error)
        except GeneratorExit:  # the task was dropped: the garbage collector runs this, outside of the loop
            raise
        except BaseException:
            if lease.loss is None:
                self._keep(lease)  # it may have made the lease shorter
            raise
        if lease.loss is not None:  # a loss that was reported meanwhile stands
            self._transport.clean_up([(self._key, lease.token)])
            raise self._lost_error(verb, lease)
        self._keep(lease)
        return result

    def _extending_once(self, owner: Owner | None, additional_time: float, replace_ttl: bool) -> Steps:
        """Extend by token, as `extend` does. Returns True. `owner` is None in a call of `do_extend`."""
        add_ms = added_ms(additional_time, replace_ttl)
        owner = owner or self._acting() or self._held()
        token = self._token_of(owner, "extend")
        if _is_replaced(self.lua_extend, EXTEND):
            args = [token, add_ms, "1" if replace_ttl else "0"]
            extended = yield from self._calling_script(self.lua_extend, args)
        else:
            operation = Extend(self._key, token, add_ms, replace_ttl, owner.expires_at(token))
            prolonging = owner.begin_prolonging(token, add_ms if replace_ttl else None, add_ms)
            try:
                yield Do("execute", operation)
            finally:
                owner.prolonged(prolonging, operation, add_ms)
            extended = operation.result
        if not extended:
            raise self._not_owned("extend")
        return True

    def _reacquiring_once(self, owner: Owner | None) -> Steps:
        """Reacquire by token, as `reacquire` does. Returns True. `owner` is None in a call of `do_reacquire`."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        owner = owner or self._acting() or self._held()
        token = self._token_of(owner, "reacquire")
        if _is_replaced(self.lua_reacquire, REACQUIRE):
            held = yield from self._calling_script(self.lua_reacquire, [token, ttl_ms])
        else:
            operation = Reacquire(self._key, token, ttl_ms, owner.contended == token)
            prolonging = owner.begin_prolonging(token, ttl_ms)
            try:
                yield Do("execute", operation)
            finally:
                owner.prolonged(prolonging, operation)
            held = operation.result
            if held and operation.contended:
                owner.contended = token
        if not held:
            raise self._not_owned("reacquire")
        return True

    # ---- query ----

    def _checking_locked(self) -> Steps:
        """Returns whether the key exists."""
        read = ReadHolder(self._key)
        yield Do("execute", read)
        return read.result

    def _checking_owned(self, owner: Owner, token: bytes | None) -> Steps:
        """Returns whether the lock is held with the owner's token, which is None where the caller holds nothing."""
        read = ReadHolder(self._key)
        yield Do("execute", read)
        if token is None or not is_held_with(read.holder, token):
            return False
        if read.holder != token:
            owner.contended = token
        return True
