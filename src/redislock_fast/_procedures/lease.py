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

from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding, Trial, current_task
from redislock_fast._lease.telling import end_telling, told_of
from redislock_fast._lease.tenure import Tenure
from redislock_fast._procedures.renewal import reason_of
from redislock_fast._procedures.settings import LockSettings
from redislock_fast._procedures.steps import Execute, Steps
from redislock_fast._protocol.commands import Look
from redislock_fast._util import fork
from redislock_fast._util.errors import LockLostError, LossReason
from redislock_fast._util.times import clock, drift_s

if TYPE_CHECKING:
    from typing_extensions import Self

    from redislock_fast._lease.handle import Handle


from abc import abstractmethod

__all__ = ["Keeper", "LeaseBase"]


class Keeper:
    """A lock that has, while it is held on options, a lease beside its token."""

    @property
    @abstractmethod
    def name(self) -> Any:
        """The key."""

    @abstractmethod
    def _held(self) -> Holding:
        """What the caller holds and may release."""

    @abstractmethod
    def _renewer(self) -> Any:
        """The renewer of what is held on this lock's server."""

    @abstractmethod
    def _tell(self, tenure: Tenure, reason: LossReason) -> None:
        """Call back for a loss."""

    @abstractmethod
    def _finding_out(self, tenure: Tenure) -> Steps:
        """Returns why the lease was lost."""

    @abstractmethod
    def _lost(self, verb: str) -> LockNotOwnedError:
        """The error for a lock that is not held any more, where nothing is known of its lease."""

    def _tenure_of(self, local: Holding) -> Tenure | None:
        """The lease of what is held now."""
        tenure = local.tenure
        return tenure if tenure is not None and tenure.token == local.token else None

    def _keep(self, tenure: Tenure) -> None:
        """Renew it, and watch for its loss, as its options say."""
        if tenure.is_watched:
            self._renewer().keep(tenure)

    def _let_go(self, tenure: Tenure) -> None:
        """Renew it no more."""
        if tenure.is_watched:
            self._renewer().let_go(tenure)

    def _tell_of_former(self, tenure: Tenure, reason: LossReason) -> None:
        """Call back for the loss of what was held before the acquire that has found it out."""
        self._tell(tenure, reason)

    def _refuse_in_callback(self, verb: str, local: Holding) -> None:
        """In a callback for a loss, refuse what needs the lock: what others hold by this object is not the callback's.

        Raises:
            LockLostError: the callback has not acquired the lock anew, and `local` is not what was lost.
        """
        told = told_of(self)
        if told is not None and self._tenure_of(local) is not told:
            raise self._lost_error(verb, told)

    def _end_lost(self, tenure: Tenure, reason: LossReason) -> None:
        """End what is held no more, and tell, unless that was told. `reason` is why if its lease has not ended."""
        self._let_go(tenure)
        if clock() >= tenure.deadline:
            reason = LossReason.EXPIRED
        if tenure.lose(reason):
            self._tell_of_former(tenure, reason)

    def _raising_lost(
        self, verb: str, tenure: Tenure, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> Steps:
        """Find out why the lock was lost, and tell, unless that has been done, or another has given the lock back.

        Raises:
            redis.exceptions.LockNotOwnedError: in any case.
        """
        self._let_go(tenure)
        if tenure.loss is None and (by_release or not tenure.over):
            reason = yield from self._finding_out(tenure)
            if tenure.lose(reason, by_release):
                self._tell(tenure, reason)
        raise (self._lost(verb) if tenure.loss is None else self._lost_error(verb, tenure)) from error

    def _lost_error(self, verb: str, tenure: Tenure) -> LockLostError:
        reason = tenure.loss or LossReason.EXPIRED
        return LockLostError(f"Cannot {verb} a lock that was lost: {reason}", lock_name=self.name, reason=reason)

    def _say_why(self, error: BaseException | None) -> None:
        """Give a cancel that the loss of the lock has caused that cause."""
        tenure = self._held().tenure
        if tenure is None or not tenure.terms.cancel_on_lost or tenure.loss is None:
            return
        if isinstance(error, asyncio.CancelledError) and error.__cause__ is None:
            error.__cause__ = self._lost_error("hold on to", tenure)


logger = logging.getLogger(__name__)


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what an object of the user's raises: it is no reason to lose a lock."""
    try:
        yield
    except Exception:
        logger.exception("%s failed.", what)


class LeaseBase(LockSettings, Keeper):
    """A lock that may be held. The parameters stand on the classes that users name."""

    # ---- what the caller holds ----

    def _held(self) -> Holding:
        """What the caller holds and may release. A forked child has nothing of its parent's."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Holding = self.local.held()
        return holding

    def _mine(self) -> Holding:
        """The holding of the calling thread or task."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Holding = self.local.mine()
        return holding

    def _held_with_ttl(self, verb: str) -> Holding:
        """What the caller holds.

        Raises:
            LockLostError: this is a callback for the loss of the lock.
            redis.exceptions.LockError: the caller holds nothing, or what does not expire.
        """
        held = self._held()
        if self._terms is not None:
            self._refuse_in_callback(verb, held)
        if held.token is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self.name)
        if not self.timeout:
            raise LockError(f"Cannot {verb} a lock with no timeout", lock_name=self.name)
        return held

    def _token_of(self, held: Holding, verb: str) -> bytes:
        """The token of what is held; where it is shared, another may have released it since it was looked at."""
        if held.token is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self.name)
        token: bytes = self._transport.encode(held.token)  # others may have set it
        return token

    def _lost(self, verb: str) -> LockNotOwnedError:
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

    def _deadline(self, local: Holding) -> float:
        """Until when what is held is certainly held, in the clock's seconds."""
        tenure = self._tenure_of(local)
        if tenure is not None:
            return -math.inf if tenure.loss is not None else tenure.deadline
        owner, expires_at = local.lease
        if owner != local.token:  # set by hand
            return -math.inf if self._ttl_ms else math.inf
        return math.inf if expires_at is None else expires_at - drift_s((self._ttl_ms or 0) / 1000)

    def _is_released(self, local: Holding) -> bool:
        """Whether its release was called, and may have been executed although that failed."""
        tenure = self._tenure_of(local)
        return local.releasing == local.token or (tenure is not None and tenure.over)

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

    def _reenter(self, local: Holding, token: Any) -> bool:
        """Enter once more what this thread or task holds already. Returns False where it does not."""
        tenure = self._tenure_of(local)
        if tenure is None or not tenure.terms.reentrant or not self._is_meant(token, tenure.token):
            return False
        if tenure.is_lost():
            if told_of(self) is tenure:
                return False
            raise self._lost_error("reenter", tenure)
        tenure.depth += 1
        return True

    def _begin(
        self,
        terms: Terms,
        local: Holding,
        trial: Trial,
        asked_at: float | None = None,
        task: asyncio.Task[Any] | None = None,
    ) -> Tenure:
        """Begin the lease of a lock that was just acquired on options.

        Raises:
            LockLostError: the lock is lost, and another who shares the lock object may have it by now.
        """
        token = trial.token
        assert token is not None
        tenure = Tenure(self, self._key, token, self._ttl_ms, trial.expires_at(token), terms)
        tenure.queued = trial.queued == token
        tenure.task = None if task is None else weakref.ref(task)
        before = local.tenure
        if before is not trial.tenure and tenure.is_lost():
            raise self._lost_at_once()
        trial.tenure = tenure
        trial.publish(local)
        end_telling(self)
        if before is not None and before.token != token:
            self._end_lost(before, LossReason.DELETED)
        elif before is not None:
            self._let_go(before)
        if terms.metrics is not None and asked_at is not None:
            with _logged("metrics"):
                terms.metrics.record_acquisition(self._name, tenure.begun - asked_at, trial.retries + 1)
        return tenure

    def _lost_at_once(self) -> LockLostError:
        reason = LossReason.EXPIRED
        return LockLostError("Lost the lock before its acquire was done", lock_name=self.name, reason=reason)

    def _to_prolong(self, token: Any) -> bytes | None:
        """The token of what is to be prolonged, instead of acquiring with this token."""
        local = self._held()
        told = told_of(self)
        if told is not None and self._tenure_of(local) is not told:
            return None
        held = local.token
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
        if held.tenure is not None:
            self._account(held, held.tenure, False)

    def _may_release(self, local: Holding, tenure: Tenure) -> bool:
        """Whether a release is to be sent. What is lost is forgotten.

        Raises:
            LockLostError: the lock was lost.
        """
        self._refuse_in_callback("release", local)
        if tenure.depth > 1 and told_of(self) is not tenure:
            tenure.depth -= 1
            return False
        self._let_go(tenure)
        if not tenure.end():
            if local.token == tenure.token:
                local.token = None
            self._account(local, tenure, False)
            raise self._lost_error("release", tenure)
        local.lease = (tenure.token, tenure.expires_at)
        if tenure.queued:
            local.queued = tenure.token
        return True

    def _account(self, local: Holding, tenure: Tenure, released: bool) -> None:
        """Note how long it was held."""
        if local.tenure is tenure:
            local.tenure = None
        held_s = clock() - tenure.begun
        if tenure.terms.adaptive is not None:
            tenure.terms.adaptive.observe(self._name, held_s)
        if tenure.terms.metrics is not None:
            with _logged("metrics"):
                tenure.terms.metrics.record_release(self._name, held_s, released)

    # ---- loss ----

    def _finding_out(self, tenure: Tenure) -> Steps:
        """Why it is lost. Sends `GET name` where the lease has not ended."""
        if clock() >= tenure.deadline:
            return LossReason.EXPIRED
        look = Look(self._key)
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
        tenure = self._tenure_of(held)
        lease_end = held.expires_at(token)
        if tenure is not None:
            if tenure.depth > 1:
                raise LockError("Cannot detach a lock that was entered more than once", lock_name=self.name)
            if tenure.is_lost():
                raise self._lost_error("detach", tenure)
            lease_end = tenure.expires_at
            self._forget(held, tenure)
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
        local = lock._mine()
        trial = Trial(local)
        # A ttl whose end is not known counts as ended.
        trial.lease = (handle.token, clock() if handle.timeout and handle.expires_at is None else handle.lease_end())
        trial.fence = handle.fence
        trial.token = handle.token
        if lock._terms is None:
            trial.publish(local)
        else:
            lock._keep(lock._begin(lock._terms, local, trial, task=current_task()))
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
        tenure = self._tenure_of(held)
        if clock() >= self._deadline(held):
            if tenure is not None:
                raise self._lost_error("enter", tenure)
            raise LockLostError("Cannot enter a lock that was lost", lock_name=self.name, reason=LossReason.EXPIRED)
        self._attached = None
        return True

    def _forget(self, local: Holding, tenure: Tenure) -> None:
        """End a lease, whatever becomes of the lock."""
        self._let_go(tenure)
        tenure.end()
        local.tenure = None
