"""What is held of a lock: until when it is valid, how it is entered again, handed over by a handle, and lost.

A lock without options has no lease of its own, only a token and the time until which that is valid. Nothing here takes
or releases a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner, PendingOwner, current_task
from redislock_fast._lease.telling import end_telling, told_of
from redislock_fast._procedures.renewal import reason_of
from redislock_fast._procedures.settings import LockSettings
from redislock_fast._procedures.steps import Execute, Steps
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._util import fork
from redislock_fast._util.errors import LockLostError, LossReason
from redislock_fast._util.times import clock, drift_s

if TYPE_CHECKING:
    from typing_extensions import Self

    from redislock_fast._lease.handle import Handle


from abc import abstractmethod

__all__ = ["LeaseBase", "LeaseHolder"]


class LeaseHolder:
    """A lock that has, while it is held on options, a lease beside its token."""

    @property
    @abstractmethod
    def name(self) -> Any:
        """The key."""

    @abstractmethod
    def _held(self) -> Owner:
        """What the caller holds and may release."""

    @abstractmethod
    def _renewer(self) -> Any:
        """The renewer of what is held on this lock's server."""

    @abstractmethod
    def _tell(self, lease: Lease, reason: LossReason) -> None:
        """Call back for a loss."""

    @abstractmethod
    def _finding_out(self, lease: Lease) -> Steps:
        """Returns why the lease was lost."""

    @abstractmethod
    def _not_owned(self, verb: str) -> LockNotOwnedError:
        """The error for a lock that is not held any more, where nothing is known of its lease."""

    def _lease_of(self, owner: Owner) -> Lease | None:
        """The lease of what is held now."""
        lease = owner.lease
        return lease if lease is not None and lease.token == owner.token else None

    def _keep(self, lease: Lease) -> None:
        """Renew it, and watch for its loss, as its options say."""
        if lease.is_watched:
            self._renewer().keep(lease)

    def _let_go(self, lease: Lease) -> None:
        """Renew it no more."""
        if lease.is_watched:
            self._renewer().let_go(lease)

    def _tell_of_former(self, lease: Lease, reason: LossReason) -> None:
        """Call back for the loss of what was held before the acquire that has found it out."""
        self._tell(lease, reason)

    def _refuse_in_callback(self, verb: str, owner: Owner) -> None:
        """In a callback for a loss, refuse what needs the lock: what others hold by this object is not the callback's.

        Raises:
            LockLostError: the callback has not acquired the lock anew, and `owner` is not what was lost.
        """
        told = told_of(self)
        if told is not None and self._lease_of(owner) is not told:
            raise self._lost_error(verb, told)

    def _end_lost(self, lease: Lease, reason: LossReason) -> None:
        """End what is held no more, and tell, unless that was told. `reason` is why if its lease has not ended."""
        self._let_go(lease)
        if clock() >= lease.deadline:
            reason = LossReason.EXPIRED
        if lease.lose(reason):
            self._tell_of_former(lease, reason)

    def _raising_lost(
        self, verb: str, lease: Lease, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> Steps:
        """Find out why the lock was lost, and tell, unless that has been done, or another has given the lock back.

        Raises:
            redis.exceptions.LockNotOwnedError: in any case.
        """
        self._let_go(lease)
        if lease.loss is None and (by_release or not lease.over):
            reason = yield from self._finding_out(lease)
            if lease.lose(reason, by_release):
                self._tell(lease, reason)
        raise (self._not_owned(verb) if lease.loss is None else self._lost_error(verb, lease)) from error

    def _lost_error(self, verb: str, lease: Lease) -> LockLostError:
        reason = lease.loss or LossReason.EXPIRED
        return LockLostError(f"Cannot {verb} a lock that was lost: {reason}", lock_name=self.name, reason=reason)

    def _say_why(self, error: BaseException | None) -> None:
        """Give a cancel that the loss of the lock has caused that cause."""
        lease = self._held().lease
        if lease is None or not lease.options.cancel_on_lost or lease.loss is None:
            return
        if isinstance(error, asyncio.CancelledError) and error.__cause__ is None:
            error.__cause__ = self._lost_error("hold on to", lease)


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what an object of the user's raises: it is no reason to lose a lock."""
    try:
        yield
    except Exception:
        logger.exception("%s failed.", what)


class LeaseBase(LockSettings, LeaseHolder):
    """A lock that may be held. The parameters stand on the classes that users name."""

    # ---- what the caller holds ----

    def _held(self) -> Owner:
        """What the caller holds and may release. A forked child has nothing of its parent's."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Owner = self.local.held()
        return holding

    def _mine(self) -> Owner:
        """The holding of the calling thread or task."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Owner = self.local.mine()
        return holding

    def _held_with_ttl(self, verb: str) -> Owner:
        """What the caller holds.

        Raises:
            LockLostError: this is a callback for the loss of the lock.
            redis.exceptions.LockError: the caller holds nothing, or what does not expire.
        """
        held = self._held()
        if self._options is not None:
            self._refuse_in_callback(verb, held)
        if held.token is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self.name)
        if not self.timeout:
            raise LockError(f"Cannot {verb} a lock with no timeout", lock_name=self.name)
        return held

    def _token_of(self, held: Owner, verb: str) -> bytes:
        """The token of what is held; where it is shared, another may have released it since it was looked at."""
        if held.token is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self.name)
        token: bytes = self._transport.encode(held.token)  # others may have set it
        return token

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self.name)

    # ---- validity ----

    def remaining(self) -> float:
        """For how long the lock is certainly still held, in seconds. Nothing is sent: the clock is read.

        Counted from before the request left that took or prolonged it, less 1 % of the ttl and 2 ms for clocks that
        drift. 0.0 where the lock is lost or not held, or where nobody knows whether a release was executed; `math.inf`
        where it does not expire.
        """
        held = self._held()
        return 0.0 if held.token is None or self._is_released(held) else max(self._deadline(held) - clock(), 0.0)

    def _deadline(self, owner: Owner) -> float:
        """Until when what is held is certainly held, in the clock's seconds."""
        lease = self._lease_of(owner)
        if lease is not None:
            return -math.inf if lease.loss is not None else lease.deadline
        token, expires_at = owner.expiry
        if token != owner.token:  # set by hand
            return -math.inf if self._ttl_ms else math.inf
        return math.inf if expires_at is None else expires_at - drift_s((self._ttl_ms or 0) / 1000)

    def _is_released(self, owner: Owner) -> bool:
        """Whether its release was called, and may have been executed although that failed."""
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
    def fence(self) -> int | None:
        """The number of this holding, higher than that of every earlier one; None where it is not held or numbered.

        See `redislock_fast.fencing`.
        """
        held = self._held()
        return None if held.token is None else held.fence

    # ---- begin and end ----

    def _reenter(self, owner: Owner, token: Any) -> bool:
        """Enter once more what this thread or task holds already. Returns False where it does not."""
        lease = self._lease_of(owner)
        if lease is None or not lease.options.reentrant or not self._is_meant(token, lease.token):
            return False
        if lease.is_lost():
            if told_of(self) is lease:
                return False
            raise self._lost_error("reenter", lease)
        lease.depth += 1
        return True

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
            LockLostError: the lock is lost, and another who shares the lock object may have it by now.
        """
        token = pending.token
        assert token is not None
        lease = Lease(self, self._key, token, self._ttl_ms, pending.expires_at(token), options)
        lease.contended = pending.contended == token
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
        if options.metrics is not None and asked_at is not None:
            with _logged("metrics"):
                options.metrics.record_acquisition(self._name, lease.begun - asked_at, pending.retries + 1)
        return lease

    def _lost_at_once(self) -> LockLostError:
        reason = LossReason.EXPIRED
        return LockLostError("Lost the lock before its acquire was done", lock_name=self.name, reason=reason)

    def _to_prolong(self, token: Any) -> bytes | None:
        """The token of what is to be prolonged, instead of acquiring with this token."""
        owner = self._held()
        told = told_of(self)
        if told is not None and self._lease_of(owner) is not told:
            return None
        held = owner.token
        return held if held is not None and self._ttl_ms is not None and self._is_meant(token, held) else None

    def _is_meant(self, token: Any, held: bytes) -> bool:
        """Whether an acquire with this token, which may be None, may mean what is held."""
        return token is None or self._transport.encode(token) == held

    def _drop_lost(self, token: bytes) -> None:
        """Forget what this thread or task has lost."""
        held = self._held()
        if held.token != token:  # where the token is shared, another may have acquired meanwhile
            return
        held.token = None
        if held.lease is not None:
            self._account(held, held.lease, False)

    def _may_release(self, owner: Owner, lease: Lease) -> bool:
        """Whether a release is to be sent. What is lost is forgotten.

        Raises:
            LockLostError: the lock was lost.
        """
        self._refuse_in_callback("release", owner)
        if lease.depth > 1 and told_of(self) is not lease:
            lease.depth -= 1
            return False
        self._let_go(lease)
        if not lease.end():
            if owner.token == lease.token:
                owner.token = None
            self._account(owner, lease, False)
            raise self._lost_error("release", lease)
        owner.expiry = (lease.token, lease.expires_at)
        if lease.contended:
            owner.contended = lease.token
        return True

    def _account(self, owner: Owner, lease: Lease, released: bool) -> None:
        """Note how long it was held."""
        if owner.lease is lease:
            owner.lease = None
        held_s = clock() - lease.begun
        if lease.options.adaptive is not None:
            lease.options.adaptive.observe(self._name, held_s)
        if lease.options.metrics is not None:
            with _logged("metrics"):
                lease.options.metrics.record_release(self._name, held_s, released)

    # ---- loss ----

    def _finding_out(self, lease: Lease) -> Steps:
        """Why it is lost. Sends `GET name` where the lease has not ended."""
        if clock() >= lease.deadline:
            return LossReason.EXPIRED
        look = ReadHolder(self._key)
        try:
            yield Execute(look)
        except Exception:  # then it is not known
            return LossReason.SERVER_GONE
        return reason_of(look)

    # ---- handles ----

    def detach(self) -> Handle:
        """Let go of the lock without releasing it: whoever attaches the handle holds it then.

        Nothing is sent, and nothing is renewed until the handle is attached.

        Raises:
            redis.exceptions.LockError: this thread or task holds no lock, or has entered it more than once.
            LockLostError: the lock was lost.
        """
        from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # few need it, and it takes a millisecond

        held = self._held()
        self._refuse_in_callback("detach", held)
        token = held.token
        if token is None:
            raise LockError("Cannot detach an unlocked lock", lock_name=self.name)
        lease = self._lease_of(held)
        lease_end = held.expires_at(token)
        if lease is not None:
            if lease.depth > 1:
                raise LockError("Cannot detach a lock that was entered more than once", lock_name=self.name)
            if lease.is_lost():
                raise self._lost_error("detach", lease)
            lease_end = lease.expires_at
            self._forget(held, lease)
        held.token = None
        name = self.name if isinstance(self.name, (str, bytes)) else self._key
        return Handle.of(name, token, self._timeout, lease_end, held.fence)

    @classmethod
    def attach(cls, client: Any, handle: Handle, **settings: Any) -> Self:
        """Hold a lock that was detached, here or in another process. Nothing is sent.

        The lease is believed to end when the handle says, by the wall clock: `reacquire` makes it exact. A `with` block
        of the lock takes it as it is attached, and raises LockLostError where it is lost.

        Args:
            client: as for the class.
            handle: what `detach` gave.
            settings: of the lock, as for the class; its name and timeout are the handle's.

        Returns:
            The lock, held by this thread or task.

        Raises:
            TypeError: `handle` is none; and as the class.
            ValueError: as the class.
        """
        from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # as above

        if not isinstance(handle, Handle):
            raise TypeError(f"attach needs what detach gave, not {type(handle).__name__}")
        lock = cls(client, handle.name, handle.timeout, **settings)
        owner = lock._mine()
        pending = PendingOwner(owner)
        # A ttl whose end is not known counts as ended.
        pending.expiry = (handle.token, clock() if handle.timeout and handle.expires_at is None else handle.lease_end())
        pending.fence = handle.fence
        pending.token = handle.token
        if lock._options is None:
            pending.publish(owner)
        else:
            lock._keep(lock._begin(lock._options, owner, pending, task=current_task()))
        lock._attached = handle.token
        return lock

    _attached: bytes | None = None  # what `attach` held, until a block enters it

    def _enter_attached(self) -> bool:
        """Enter what was attached, without an acquire. Returns False where that is not what the caller holds now.

        Raises:
            LockLostError: the lock was lost.
        """
        held = self._held()
        if held.token is not self._attached:  # not the same object: released, and perhaps acquired again
            return False
        lease = self._lease_of(held)
        if clock() >= self._deadline(held):
            if lease is not None:
                raise self._lost_error("enter", lease)
            raise LockLostError("Cannot enter a lock that was lost", lock_name=self.name, reason=LossReason.EXPIRED)
        self._attached = None
        return True

    def _forget(self, owner: Owner, lease: Lease) -> None:
        """End a lease, whatever becomes of the lock."""
        self._let_go(lease)
        lease.end()
        owner.lease = None
