"""A held lock as a handle: given up here without a release, and held by another lock object, thread or process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError

from redislock_fast._lease.owner import PendingOwner, current_task
from redislock_fast._procedures.lease import LeaseBase
from redislock_fast._util.errors import LockLostError, LossReason, shown
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from typing_extensions import Self

    from redislock_fast._lease.handle import Handle

__all__ = ["HandleBase"]


class HandleBase(LeaseBase):
    """A lock that can be detached and attached. The public classes describe the parameters."""

    def detach(self) -> Handle:
        """Give up the held lock without releasing it. The caller of `attach` with the returned handle holds it then.

        Sends nothing. The lock is not renewed until the handle is attached.

        Raises:
            redis.exceptions.LockError: this thread or task holds no lock, or has entered it more than once.
            LockLostError: the lock was lost.
        """
        from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # few need it, and it takes a millisecond

        held = self._held()
        self._refuse_in_callback("detach", held)
        token = held.token
        if token is None:
            raise self._unlocked(f"Cannot detach an unlocked lock: {self.name!r}")
        lease = self._lease_of(held)
        lease_end = held.expires_at(token)
        if lease is not None:
            if lease.depth > 1:
                text = f"Cannot detach a lock that was entered more than once: {shown(self.name)}"
                raise LockError(text, lock_name=self.name)
            if lease.is_lost():
                raise self._lost_error("detach", lease)
            lease_end = lease.expires_at
            self._forget(held, lease)
        held.token = None
        held.forget_cached()  # it goes with the handle
        name = self.name if isinstance(self.name, (str, bytes)) else self._key
        return Handle.of(name, token, self._timeout, lease_end, held.fence)

    @classmethod
    def attach(cls, client: Any, handle: Handle, **settings: Any) -> Self:
        """Hold a lock that was detached, here or in another process. Sends nothing.

        The lease ends when the handle says, by the wall clock; `reacquire` makes it exact. The next `with` block of the
        lock uses the attached lock without an acquire, and raises LockLostError where it is lost.

        Args:
            client: as for the class.
            handle: the handle that `detach` has returned.
            settings: other parameters of the class; name and timeout come from the handle.

        Returns:
            The lock, held by this thread or task.

        Raises:
            TypeError: `handle` is no `Handle`; and as the class.
            ValueError: as the class.
        """
        from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # as above

        if not isinstance(handle, Handle):
            raise TypeError(f"attach needs a handle that detach has returned, not {type(handle).__name__}")
        for given in ("name", "timeout"):
            if given in settings:
                raise TypeError(f"{cls.__name__}.attach() takes no {given!r}: the handle has it")
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

    _attached: bytes | None = None  # the attached token, until a `with` block enters it

    def _enter_attached(self) -> bool:
        """Enter an attached lock without an acquire. Returns False where the caller does not hold it any more.

        Raises:
            LockLostError: the lock was lost.
        """
        held = self._taken()
        if held.token is not self._attached:  # another object: the lock was released, and perhaps acquired again
            return False
        lease = self._lease_of(held)
        if clock() >= self._deadline(held):
            if lease is not None:
                raise self._lost_error("enter", lease)
            text = f"Cannot enter the lock {shown(self.name)}, which was lost: {LossReason.EXPIRED}"
            raise LockLostError(text, lock_name=self.name, reason=LossReason.EXPIRED)
        self._attached = None
        return True
