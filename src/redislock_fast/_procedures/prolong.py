"""How the lease of a held lock is prolonged, and asked about: extend, reacquire, locked, owned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.callbacks import lease_of_callback
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.owner import Owner
from redislock_fast._lease.prolonging import Prolonging
from redislock_fast._pipe.base import NOT_ASKED, Args
from redislock_fast._procedures.lease import end_lost, lost_error, raise_lost, refuse_in_callback, unlocked_error
from redislock_fast._procedures.lock import EXTEND, REACQUIRE, LockBase, is_replaced
from redislock_fast._procedures.release import call_script, end_lease
from redislock_fast._protocol.commands import Extend, Reacquire, ReadHolder
from redislock_fast._protocol.operation import FirstRequest
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import LossReason, noted, shown
from redislock_fast._util.times import added_ms, clock
from redislock_fast._util.tokens import TokenSource, is_held_with
from redislock_fast._util.tracing import is_observed

_SCRIPTS: Mapping[str, Any] = {"extend": EXTEND, "reacquire": REACQUIRE}
"""Our own scripts, in whose place a user's may stand, by the method."""

_DONE: Mapping[object, Any] = {b"EVALSHA": 1, b"SET": b"OK"}
"""The reply by which a request has prolonged the lease, by its command; a request that only asks has none."""


def held_with_ttl(lock: LockBase, verb: str) -> Owner:
    """The owner of a lock that can be prolonged.

    Raises:
        LockLostError: this is a callback for the loss of the lock.
        redis.exceptions.LockError: the caller holds nothing, or the lock does not expire.
    """
    held = lock._held()
    if lock._options is not None:
        refuse_in_callback(lock, verb, held)
    if held.token is None:
        raise unlocked_error(lock, f"Cannot {verb} an unlocked lock")
    if not lock.timeout:
        error = LockError(f"Cannot {verb} a lock with no timeout", lock_name=lock.name)
        raise noted(error, f"of the lock {shown(lock.name)}")
    return held


def token_of(lock: LockBase, held: Owner, verb: str) -> bytes:
    """The owner's token. Where the owner is shared, another caller may have released it meanwhile."""
    token = held.token
    if token is None:
        raise unlocked_error(lock, f"Cannot {verb} an unlocked lock")
    return token


def to_prolong(lock: LockBase, token: Any) -> bytes | None:
    """The held token, where `acquire_or_extend` with this token must prolong; None where it must acquire."""
    owner = lock._taken()
    lost = lease_of_callback(lock)
    if lost is not None and owner.held_lease is not lost:
        return None
    held = owner.token
    return held if held is not None and lock._is_meant(token, held) else None


def drop_lost(lock: LockBase, token: bytes) -> None:
    """Forget a lock that this thread or task has lost."""
    held = lock._taken()
    if held.token != token:  # where the owner is shared, another caller may have acquired meanwhile
        return
    held.token = None
    held.forget_cached()
    lease = held.lease
    if lease is not None:
        end_lost(lock, lease, LossReason.DELETED)
        end_lease(lock, held, lease, False)


# ---- the first request ----


class ProlongCall(FirstRequest):
    """One extend or reacquire without hooks. It belongs to the thread or task that has made it.

    Attributes:
        owner: who holds the lock.
        operation: what prolongs the lease.
        ttl_ms: the ttl that it sets, in milliseconds; None: it adds to the ttl.
        added_ms: what it adds.
        prolonging: its part in the owner's account of such requests; None before the request is made.
    """

    owner: Owner
    operation: Extend | Reacquire
    ttl_ms: int | None
    added_ms: int = 0
    prolonging: Prolonging | None = None

    def request_on(self, connection: Any, tokens: TokenSource) -> Args:  # noqa: ARG002  # as for an acquire
        """The first request."""
        self.begin()
        self.request = self.operation.request(connection.capabilities, clock())
        self.ours = _DONE.get(self.request[0], NOT_ASKED)
        self.connection = connection
        return self.request

    def begin(self) -> None:
        """Note that the request leaves now, if it has not left."""
        if self.prolonging is None:
            self.prolonging = self.owner.begin_prolonging(self.operation.token, self.ttl_ms, self.added_ms)

    def end(self) -> None:
        """Note what the request has done, if it has left."""
        if self.prolonging is not None:
            self.owner.prolonged(self.prolonging, self.operation, self.added_ms)

    def settle(self, reply: object) -> bool:
        """Note that the first request has prolonged the lease. Returns False where the reply does not mean that."""
        if self.connection is None or reply != self.ours:
            return False
        self.operation.feed(reply, self.connection.capabilities)
        self.end()
        return True


def new_extend(lock: LockBase, owner: Owner, additional_time: float, replace_ttl: bool) -> ProlongCall:
    """The call of an extend by token.

    Raises:
        redis.exceptions.LockError: the owner holds nothing by now.
        ValueError: a time that is negative, NaN or infinite, or a new ttl of 0.
    """
    add_ms = added_ms(additional_time, replace_ttl)
    token = token_of(lock, owner, "extend")
    call = ProlongCall()
    call.key, call.owner, call.added_ms = lock._key, owner, add_ms
    call.ttl_ms = add_ms if replace_ttl else None
    call.operation = Extend(lock._key, token, add_ms, replace_ttl, owner.expires_at(token))
    return call


def new_reacquire(lock: LockBase, owner: Owner) -> ProlongCall:
    """The call of a reacquire by token.

    Raises:
        redis.exceptions.LockError: the owner holds nothing by now.
    """
    assert lock._ttl_ms is not None
    token = token_of(lock, owner, "reacquire")
    call = ProlongCall()
    call.key, call.owner, call.ttl_ms = lock._key, owner, lock._ttl_ms
    call.operation = Reacquire(lock._key, token, lock._ttl_ms, owner.contended == token)
    return call


def begins_prolonging(lock: LockBase, owner: Owner, verb: str) -> bool:
    """Whether the first request of an extend or a reacquire may leave at once, as mostly.

    Not where a hook is overridden, something observes redis-py's commands, or the lock is held on options: then the
    steps decide.
    """
    return (
        owner.holding is None
        and not lock._is_overridden(f"do_{verb}")
        and not is_replaced(getattr(lock, f"lua_{verb}"), _SCRIPTS[verb])
        and not is_observed(lock._redis)
    )


# ---- extend, reacquire ----


def extend_lock(lock: LockBase, owner: Owner, additional_time: float, replace_ttl: bool) -> Steps:
    """Extend. Returns True, or what an overridden `do_extend` returns."""
    if lock._is_overridden("do_extend"):
        prolonging = lock._call_hook(owner, lock.do_extend, additional_time, replace_ttl)
    else:
        prolonging = extend_once(lock, owner, additional_time, replace_ttl)
    if owner.lease is None:
        return (yield from prolonging)
    new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
    return (yield from prolong_lease(lock, "extend", owner, owner.lease, new_ttl_ms, prolonging))


def reacquire_lock(lock: LockBase, owner: Owner) -> Steps:
    """Reacquire. Returns True, or what an overridden `do_reacquire` returns."""
    if lock._is_overridden("do_reacquire"):
        prolonging = lock._call_hook(owner, lock.do_reacquire)
    else:
        prolonging = reacquire_once(lock, owner)
    if owner.lease is None:
        return (yield from prolonging)
    return (yield from prolong_lease(lock, "reacquire", owner, owner.lease, lock._ttl_ms, prolonging))


def prolong_lease(
    lock: LockBase, verb: str, owner: Owner, lease: Lease, new_ttl_ms: int | None, prolonging: Steps
) -> Steps:
    """Run the steps that prolong the lease of a lock that is held on options, and tell the renewer.

    `new_ttl_ms` is the ttl that the steps set, or None where they add to the ttl.
    """
    if lease.is_lost():
        yield from raise_lost(lock, verb, lease)
    try:
        with lease.prolonged_by_hand(owner, new_ttl_ms):
            result = yield from prolonging
    except LockNotOwnedError as error:
        yield from raise_lost(lock, verb, lease, error)
    except GeneratorExit:  # the task was dropped: the garbage collector runs this, outside of the loop
        raise
    except BaseException:
        if lease.loss is None:
            lock._keep(lease)  # it may have made the lease shorter
        raise
    if lease.loss is not None:  # a loss that was reported meanwhile stands
        lock._transport.clean_up([(lock._key, lease.token)])
        raise lost_error(lock, verb, lease)
    lock._keep(lease)
    return result


def extend_once(lock: LockBase, owner: Owner | None, additional_time: float, replace_ttl: bool) -> Steps:
    """Extend by token, as `extend` does. Returns True. `owner` is None in a call of `do_extend`."""
    owner = owner or lock._acting() or lock._held()
    call = new_extend(lock, owner, additional_time, replace_ttl)
    if is_replaced(lock.lua_extend, EXTEND):
        args = [call.operation.token, call.added_ms, "1" if replace_ttl else "0"]
        return (yield from prolong_by_script(lock, call, lock.lua_extend, args, "extend"))
    return (yield from prolong_by_token(lock, call))


def reacquire_once(lock: LockBase, owner: Owner | None) -> Steps:
    """Reacquire by token, as `reacquire` does. Returns True. `owner` is None in a call of `do_reacquire`."""
    owner = owner or lock._acting() or lock._held()
    call = new_reacquire(lock, owner)
    if is_replaced(lock.lua_reacquire, REACQUIRE):
        args = [call.operation.token, call.ttl_ms]
        return (yield from prolong_by_script(lock, call, lock.lua_reacquire, args, "reacquire"))
    return (yield from prolong_by_token(lock, call))


def prolong_by_script(lock: LockBase, call: ProlongCall, script: Any, args: list[Any], verb: str) -> Steps:
    """Prolong by a user's script. Returns True."""
    if not (yield from call_script(lock, script, args)):
        raise not_prolonged(lock, call, verb)
    return True


def prolong_by_token(
    lock: LockBase, call: ProlongCall, reply: Any = NOT_ASKED, interruption: BaseException | None = None
) -> Steps:
    """Prolong, or go on from the outcome of the first request, which has not done so. Returns True."""
    operation = call.operation
    connection, call.connection = call.connection, None  # an error keeps the call
    try:
        if connection is not None and reply is not NOT_ASKED:
            operation.first_outcome = (connection, reply, interruption)
            connection = None
        elif interruption is not None:
            raise interruption
        call.begin()
        yield Do("execute", operation)
    finally:
        call.end()
    if not operation.result:
        raise not_prolonged(lock, call, "extend" if isinstance(operation, Extend) else "reacquire")
    if isinstance(operation, Reacquire) and operation.contended:
        call.owner.contended = operation.token
    return True


def not_prolonged(lock: LockBase, call: ProlongCall, verb: str) -> LockNotOwnedError:
    """The error for a lock that is not held any more. A key that lingers is forgotten."""
    call.owner.lose_cached(call.operation.token)
    return lock._not_owned(verb)


# ---- query ----


def read_locked(lock: LockBase) -> Steps:
    """Returns whether the key exists."""
    read = ReadHolder(lock._key)
    yield Do("execute", read)
    return read.result


def read_owned(lock: LockBase, owner: Owner, token: bytes | None) -> Steps:
    """Returns whether the lock is held with the owner's token, which is None where the caller holds nothing."""
    read = ReadHolder(lock._key)
    yield Do("execute", read)
    if token is None or not is_held_with(read.holder, token):
        return False
    if read.holder != token:
        owner.contended = token
    return True
