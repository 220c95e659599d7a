"""How the lease of a held lock is prolonged, and asked about: extend, reacquire, locked, owned."""

from __future__ import annotations

from typing import Any

from redis.exceptions import (
    LockError,
    LockNotOwnedError,  # redis-py's, as everywhere in its users' code
)

from redislock_fast._lease.callbacks import lease_of_callback
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.lease import (
    lost_error,
    raise_lost,
    refuse_in_callback,
    unlocked_error,
)
from redislock_fast._procedures.lock import EXTEND, REACQUIRE, LockBase
from redislock_fast._procedures.release import _is_replaced, call_script, end_lease
from redislock_fast._protocol.commands import Extend, Reacquire, ReadHolder
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import noted, shown
from redislock_fast._util.times import (
    added_ms,
)
from redislock_fast._util.tokens import is_held_with

__all__ = []


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
    if held.token is None:
        raise unlocked_error(lock, f"Cannot {verb} an unlocked lock")
    return lock._encoded(held.token)  # a user may have set `local.token` to a str


def to_prolong(lock: LockBase, token: Any) -> bytes | None:
    """The held token, where `acquire_or_extend` with this token must prolong; None where it must acquire."""
    owner = lock._taken()
    lost = lease_of_callback(lock)
    if lost is not None and owner.held_lease is not lost:
        return None
    held = owner.token
    return held if held is not None and lock._ttl_ms is not None and lock._is_meant(token, held) else None


def drop_lost(lock: LockBase, token: bytes) -> None:
    """Forget a lock that this thread or task has lost."""
    held = lock._taken()
    if held.token != token:  # where the owner is shared, another caller may have acquired meanwhile
        return
    held.token = None
    held.forget_cached()
    if held.lease is not None:
        end_lease(lock, held, held.lease, False)


# ---- extend, reacquire ----


def extend_lock(lock: LockBase, owner: Owner, additional_time: float, replace_ttl: bool) -> Steps:
    """Extend. Returns True, or what an overridden `do_extend` returns."""
    if lock._is_overridden("do_extend"):
        prolonging = lock._calling(owner, lock.do_extend, additional_time, replace_ttl)
    else:
        prolonging = extend_once(lock, owner, additional_time, replace_ttl)
    if owner.lease is None:
        return (yield from prolonging)
    new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
    return (yield from prolong_lease(lock, "extend", owner, owner.lease, new_ttl_ms, prolonging))


def reacquire_lock(lock: LockBase, owner: Owner) -> Steps:
    """Reacquire. Returns True, or what an overridden `do_reacquire` returns."""
    if lock._is_overridden("do_reacquire"):
        prolonging = lock._calling(owner, lock.do_reacquire)
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
    add_ms = added_ms(additional_time, replace_ttl)
    owner = owner or lock._acting() or lock._held()
    token = token_of(lock, owner, "extend")
    if _is_replaced(lock.lua_extend, EXTEND):
        args = [token, add_ms, "1" if replace_ttl else "0"]
        extended = yield from call_script(lock, lock.lua_extend, args)
    else:
        operation = Extend(lock._key, token, add_ms, replace_ttl, owner.expires_at(token))
        prolonging = owner.begin_prolonging(token, add_ms if replace_ttl else None, add_ms)
        try:
            yield Do("execute", operation)
        finally:
            owner.prolonged(prolonging, operation, add_ms)
        extended = operation.result
    if not extended:
        owner.lose_cached(token)
        raise lock._not_owned("extend")
    return True


def reacquire_once(lock: LockBase, owner: Owner | None) -> Steps:
    """Reacquire by token, as `reacquire` does. Returns True. `owner` is None in a call of `do_reacquire`."""
    ttl_ms = lock._ttl_ms
    assert ttl_ms is not None
    owner = owner or lock._acting() or lock._held()
    token = token_of(lock, owner, "reacquire")
    if _is_replaced(lock.lua_reacquire, REACQUIRE):
        held = yield from call_script(lock, lock.lua_reacquire, [token, ttl_ms])
    else:
        operation = Reacquire(lock._key, token, ttl_ms, owner.contended == token)
        prolonging = owner.begin_prolonging(token, ttl_ms)
        try:
            yield Do("execute", operation)
        finally:
            owner.prolonged(prolonging, operation)
        held = operation.result
        if held and operation.contended:
            owner.contended = token
    if not held:
        owner.lose_cached(token)
        raise lock._not_owned("reacquire")
    return True


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
