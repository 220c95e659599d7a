"""The held lock: until when it is valid, how it is reentered, detached, attached, and lost.

A lock without options has no `Lease`, only a token and the time until which the token is valid. Nothing here acquires
or releases a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.local import Local, owners_of
from redislock_fast._lease.metrics import report, report_call, report_later
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner, PendingOwner, ThreadOwners
from redislock_fast._lease.task_owner import TaskOwners
from redislock_fast._lease.telling import end_telling, told_of
from redislock_fast._procedures.loss import reason_of
from redislock_fast._procedures.settings import LockSettings
from redislock_fast._procedures.steps import Do, Steps
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._util import fork
from redislock_fast._util.errors import LockLostError, LossReason, noted, shown
from redislock_fast._util.times import clock, drift_s

__all__ = ["LeaseBase", "LeaseHolder"]

logger = logging.getLogger(__name__)


class LeaseHolder:
    """A lock that has a `Lease` while it is held on options."""

    @property
    @abstractmethod
    def name(self) -> Any:
        """The key."""

    @abstractmethod
    def remaining(self) -> float:
        """How long the caller's lease is certainly still valid, in seconds; see the public classes."""

    def __repr__(self) -> str:
        """The name and, for the caller, whether the lock is held and for how long. Never the token. Sends nothing."""
        left_s = self.remaining()
        state = "not held" if left_s <= 0 else "held" if left_s == math.inf else f"held, {left_s:.3f} s left"
        return f"<{type(self).__name__} {self.name!r}: {state}>"

    _owners: Any

    @abstractmethod
    def _held(self) -> Owner:
        """The owner whose lock the caller may use."""

    @abstractmethod
    def _mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""

    @abstractmethod
    def _renewer(self) -> Any:
        """The renewer of the leases on this lock's server."""

    @abstractmethod
    def _tell(self, lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss, and cancel the owner's task, as the options say."""

    @abstractmethod
    def _finding_out(self, lease: Lease) -> Steps:
        """Returns why the lease was lost."""

    @abstractmethod
    def _not_owned(self, verb: str) -> LockNotOwnedError:
        """The error for a lock that is not held any more and has no lease."""

    def _lease_of(self, owner: Owner) -> Lease | None:
        """The lease of the owner's present token."""
        lease = owner.lease
        return lease if lease is not None and lease.token == owner.token else None

    def _keep(self, lease: Lease) -> None:
        """Have the renewer renew the lease and watch for its loss, as its options say."""
        if lease.is_watched:
            self._renewer().keep(lease)

    def _let_go(self, lease: Lease) -> None:
        """Have the renewer drop the lease."""
        if lease.is_watched:
            self._renewer().let_go(lease)

    def _tell_of_former(self, lease: Lease, reason: LossReason) -> None:
        """Report the loss of an earlier lease, which the next acquire has found out."""
        self._tell(lease, reason)

    def _refuse_in_callback(self, verb: str, owner: Owner) -> None:
        """Refuse an operation in a callback for a loss: a lock that others hold by this object is not the callback's.

        Raises:
            LockLostError: the callback has not acquired the lock again, and the owner's lease is not the lost one.
        """
        told = told_of(self)
        if told is not None and (self._lease_of(owner) is not told or owner is not self._mine()):
            raise self._lost_error(verb, told)

    def _unlocked(self, message: str) -> LockError:
        """The error for a caller that holds nothing, and that may use no other task's lock.

        It is logged, too, where the caller is a task that has never held the lock, or outside of tasks: the errors of
        heartbeat tasks, timers and signal handlers are often lost.
        """
        owners = self._owners
        if isinstance(owners, TaskOwners):
            count = owners.count()
            if count > 1:
                message += f" ({count} other tasks have acquired it by this object: one of them could be meant)"
            if not owners.has_held:
                logger.warning(
                    "The lock %s is refused to a task that has not acquired it: %s", shown(self.name), message
                )
        note = f"of the lock {shown(self.name)}, which this lock object does not hold"
        if isinstance(owners, ThreadOwners):
            note += " for this thread. If another thread has acquired it, thread_local=False lets all threads use it"
        return noted(LockError(message, lock_name=self.name), note)

    def _end_lost(self, lease: Lease, reason: LossReason) -> None:
        """End a lease that was lost, and report the loss once. `reason` counts where the lease has not expired."""
        self._let_go(lease)
        if clock() >= lease.deadline:
            reason = LossReason.EXPIRED
        if lease.lose(reason):
            self._tell_of_former(lease, reason)

    def _raising_lost(
        self, verb: str, lease: Lease, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> Steps:
        """Find out why the lock was lost, report the loss once, and raise it.

        Where another caller that shares the lock object has released the lock, nothing is reported.

        Raises:
            redis.exceptions.LockNotOwnedError: always.
        """
        self._let_go(lease)
        if lease.loss is None and (by_release or not lease.over):
            reason = yield from self._finding_out(lease)
            if lease.lose(reason, by_release):
                self._tell(lease, reason)
        raise (self._not_owned(verb) if lease.loss is None else self._lost_error(verb, lease)) from error

    def _lost_error(self, verb: str, lease: Lease) -> LockLostError:
        reason = lease.loss or LossReason.EXPIRED
        text = f"Cannot {verb} the lock {shown(self.name)}, which was lost: {reason}"
        return LockLostError(text, lock_name=self.name, reason=reason)

    # ---- reentrance ----

    def _is_meant(self, token: Any, held: bytes) -> bool:  # noqa: ARG002  # a Redlock's acquire takes no token
        """Whether an acquire with this token, which may be None, may mean the held lock."""
        return True

    def _reenter(self, owner: Owner, token: Any = None) -> bool:
        """Acquire a reentrant lock once more. Returns False where this thread or task does not hold it."""
        lease = self._lease_of(owner)
        if lease is None or not lease.options.reentrant or not self._is_meant(token, lease.token):
            return False
        if lease.is_lost():
            if told_of(self) is lease:
                return False
            raise self._lost_error("reenter", lease)
        lease.depth += 1
        return True

    def _leave_once(self, lease: Lease) -> bool:
        """Release a lock that was entered more than once. Returns False where it was not."""
        if lease.depth > 1 and told_of(self) is not lease:
            lease.depth -= 1
            return True
        return False

    # ---- reports ----

    def _report_failure(self, options: Options, owner: Owner, asked_at: float, error: BaseException | None) -> None:
        """Report that the lock was not acquired, for metrics."""
        is_dropped = isinstance(error, GeneratorExit)  # the garbage collector drops the task
        tell, asked_s = report_later if is_dropped else report, clock() - asked_at
        tell(options.observers, "record_failure", self.name, asked_s, owner.retries + 1, error)
        if not is_dropped:
            why = "" if error is None else type(error).__name__
            report_call(options, "did not acquire {} for", self.name, asked_s, None, why)

    def _report_release(self, lease: Lease, released: bool) -> None:
        """Report how long the lock was held, for metrics and the adaptive ttl."""
        held_s = clock() - lease.begun
        if lease.options.adaptive is not None:
            lease.options.adaptive.observe(self.name, held_s)
        lease.report("record_release", held_s, released)
        lease.end_count()
        what = "released {}, held for" if released else "released {}, which was lost before, held for"
        report_call(lease.options, what, self.name, held_s, lease.token)

    def _say_why(self, error: BaseException | None) -> None:
        """Set the loss of the lock as the cause of the CancelledError that it has led to."""
        if not isinstance(error, asyncio.CancelledError) or error.__cause__ is not None:
            return
        lease = self._held().lease
        if lease is not None and lease.options.cancel_on_lost and lease.loss is not None:
            error.__cause__ = self._lost_error("hold on to", lease)


class LeaseBase(LockSettings, LeaseHolder):
    """A lock that may be held. The public classes describe the parameters."""

    @abstractmethod
    def _tells_wanted(self) -> Callable[[Lease], object]:
        """What calls `on_wanted` for a lease. It does not keep the lock alive."""

    def _keep(self, lease: Lease) -> None:
        super()._keep(lease)
        if lease.options.on_wanted is not None:
            self._transport.key_cache_of(self._key).listen(lease, self._tells_wanted())

    def _let_go(self, lease: Lease) -> None:
        super()._let_go(lease)
        if lease.options.on_wanted is not None:
            self._transport.key_cache_of(self._key).end_listening(lease)

    # ---- what the caller holds ----

    def _held(self) -> Owner:
        """The owner whose lock the caller may use. A forked child holds nothing of its parent's."""
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        owner: Owner = self._owners.held()
        return owner

    @property
    def local(self) -> Any:
        """As redis-py's: `local.token` is the caller's token, and may be set."""
        self._held()
        return Local(self._owners, self._transport.encode)

    @local.setter
    def local(self, local: Any) -> None:
        self._owners = owners_of(local)

    def _mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        owner: Owner = self._owners.mine()
        return owner

    def _taken(self) -> Owner:
        """The owner in whose place the caller may hold, without an acquire of its own."""
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        owner: Owner = self._owners.taken()
        return owner

    def _held_with_ttl(self, verb: str) -> Owner:
        """The owner of a lock that can be prolonged.

        Raises:
            LockLostError: this is a callback for the loss of the lock.
            redis.exceptions.LockError: the caller holds nothing, or the lock does not expire.
        """
        held = self._held()
        if self._options is not None:
            self._refuse_in_callback(verb, held)
        if held.token is None:
            raise self._unlocked(f"Cannot {verb} an unlocked lock")
        if not self.timeout:
            error = LockError(f"Cannot {verb} a lock with no timeout", lock_name=self.name)
            raise noted(error, f"of the lock {shown(self.name)}")
        return held

    def _token_of(self, held: Owner, verb: str) -> bytes:
        """The owner's token. Where the owner is shared, another caller may have released it meanwhile."""
        if held.token is None:
            raise self._unlocked(f"Cannot {verb} an unlocked lock")
        return self._encoded(held.token)  # a user may have set `local.token` to a str

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        error = LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self.name)
        return noted(error, f"of the lock {shown(self.name)}")

    # ---- validity ----

    def remaining(self) -> float:
        """How long the lock is certainly still held, in seconds. Sends nothing.

        The lease counts from before the last request that set it was sent, less 1 % of the ttl and 2 ms for clock
        drift. 0.0 where the lock is lost or not held, or a release has an unknown outcome; `math.inf` where the lock
        does not expire.
        """
        held = self._held()
        return 0.0 if held.token is None or self._is_released(held) else max(self._deadline(held) - clock(), 0.0)

    def _deadline(self, owner: Owner) -> float:
        """Until when the owner certainly holds the lock, in the clock's seconds."""
        lease = self._lease_of(owner)
        if lease is not None:
            return -math.inf if lease.loss is not None else lease.deadline
        token, expires_at = owner.expiry
        if token != owner.token:  # set by hand
            return -math.inf if self._ttl_ms else math.inf
        return math.inf if expires_at is None else expires_at - drift_s((self._ttl_ms or 0) / 1000)

    def _is_released(self, owner: Owner) -> bool:
        """Whether a release was called and has failed, but may have been executed."""
        lease = self._lease_of(owner)
        return owner.releasing == owner.token or (lease is not None and lease.over)

    @property
    def valid(self) -> bool:
        """Whether the lock is certainly held, by the clock: `remaining() > 0`."""
        return self.remaining() > 0

    @property
    def lost(self) -> bool:
        """Whether the lock was lost before it was released, as far as is known without asking the server."""
        held = self._held()
        return held.token is not None and clock() >= self._deadline(held)

    @property
    def wanted(self) -> bool:
        """Whether another caller waits for the lock that the caller holds, as far as is known. Sends nothing.

        With `linger` or `on_wanted`, waiters tell the holder. Else it is known after a request that has seen the lock's
        value. A waiter may have given up since.
        """
        held = self._held()
        if held.token is None:
            return False
        cached, lease = held.cached, self._lease_of(held)
        if cached is not None and (cached.wanted_at is not None or cached.waiters):
            return True
        return (lease is not None and lease.wanted) or held.is_contended(held.token)

    @property
    def fence(self) -> int | None:
        """The fence of the held lock, higher than those of all earlier owners; see `redislock_fast.fencing`.

        None where the lock is not held, or has no `fencing`.
        """
        held = self._held()
        return None if held.token is None else held.fence

    # ---- begin and end ----

    def _is_meant(self, token: Any, held: bytes) -> bool:
        """Whether an acquire with this token, which may be None, may mean the held lock."""
        return token is None or self._encoded(token) == held

    def _begin(
        self,
        options: Options,
        owner: Owner,
        pending: PendingOwner,
        asked_at: float | None = None,
        task: asyncio.Task[Any] | None = None,
    ) -> Lease:
        """Begin the lease of a lock that was just acquired on options.

        Raises:
            LockLostError: the lock is lost, and another caller that shares the lock object may have it now.
        """
        token = pending.token
        assert token is not None
        lease = Lease(weakref.ref(self), self._key, token, self._ttl_ms, pending.expires_at(token), options)
        lease.contended = pending.contended == token
        lease.cached = pending.cached
        lease.task = None if task is None else weakref.ref(task)
        before = owner.lease
        if before is not pending.lease and lease.is_lost():
            raise self._lost_at_once()
        pending.lease = lease
        pending.publish(owner)
        end_telling(self)
        if before is not None and before.token != token:
            self._end_lost(before, LossReason.DELETED)
        elif before is not None:
            self._let_go(before)
        if asked_at is not None:
            report(options.observers, "record_acquisition", self._name, lease.begun - asked_at, pending.retries + 1)
            report_call(options, "acquired {} after", self._name, lease.begun - asked_at, token)
        lease.count()
        return lease

    def _lost_at_once(self) -> LockLostError:
        reason = LossReason.EXPIRED
        text = f"Lost the lock {shown(self.name)} before its acquire was done"
        return LockLostError(text, lock_name=self.name, reason=reason)

    def _to_prolong(self, token: Any) -> bytes | None:
        """The held token, where `acquire_or_extend` with this token must prolong; None where it must acquire."""
        owner = self._taken()
        told = told_of(self)
        if told is not None and self._lease_of(owner) is not told:
            return None
        held = owner.token
        return held if held is not None and self._ttl_ms is not None and self._is_meant(token, held) else None

    def _drop_lost(self, token: bytes) -> None:
        """Forget a lock that this thread or task has lost."""
        held = self._taken()
        if held.token != token:  # where the owner is shared, another caller may have acquired meanwhile
            return
        held.token = None
        held.forget_cached()
        if held.lease is not None:
            self._account(held, held.lease, False)

    def _may_release(self, owner: Owner, lease: Lease) -> bool:
        """Whether a release must be sent. A lost lock is forgotten.

        Raises:
            LockLostError: the lock was lost.
        """
        self._refuse_in_callback("release", owner)
        if self._leave_once(lease):
            return False
        self._let_go(lease)
        if not lease.end():
            if owner.token == lease.token:
                owner.token = None
                owner.forget_cached()
            self._account(owner, lease, False)
            raise self._lost_error("release", lease)
        owner.expiry = (lease.token, lease.expires_at)
        if lease.contended:
            owner.contended = lease.token
        return True

    def _account(self, owner: Owner, lease: Lease, released: bool) -> None:
        """Report how long the lock was held, for metrics and the adaptive ttl."""
        if owner.lease is lease:
            owner.lease = None
        self._report_release(lease, released)

    # ---- loss ----

    def _finding_out(self, lease: Lease) -> Steps:
        """Returns why the lock was lost. Sends `GET name` where the lease has not ended."""
        if clock() >= lease.deadline:
            return LossReason.EXPIRED
        read = ReadHolder(self._key)
        try:
            yield Do("execute", read)
        except Exception:  # then the reason is not known
            return LossReason.SERVER_GONE
        return reason_of(read)

    def _forget(self, owner: Owner, lease: Lease) -> None:
        """End a lease without a release of the lock."""
        self._let_go(lease)
        lease.end()
        lease.end_count()
        owner.lease = None
