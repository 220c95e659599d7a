"""For tests of code that holds locks: lose a lock at once, and find locks that were left.

See https://redislock-fast.github.io/redislock_fast/how-to/testing.html

The pytest plugin (`pytest_redislock_fast.py`) has fixtures with a server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, overload

from redis.exceptions import LockError

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._procedures.loss import lose as note_loss
from redislock_fast._procedures.prolong import read_owned
from redislock_fast._protocol.keys import lock_of_queue
from redislock_fast._renewal.threads import report_loss
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import is_ours, is_permit, without_flag
from redislock_fast.asyncio.lock import Lock as AsyncLock
from redislock_fast.asyncio.semaphore import Permit as AsyncPermit
from redislock_fast.inspection import holders
from redislock_fast.lock import Lock
from redislock_fast.semaphore import Permit, Semaphore

if TYPE_CHECKING:
    from redislock_fast.inspection import Client

__all__ = ["assert_no_locks_left", "lose"]

_OTHER_HOLDER = b"another holder, by redislock_fast.testing.lose"


@overload
def lose(lock: Lock, reason: LossReason | str = LossReason.EXPIRED) -> None: ...
@overload
def lose(lock: Permit, reason: LossReason | str = LossReason.EXPIRED) -> None: ...
@overload
def lose(lock: AsyncLock, reason: LossReason | str = LossReason.EXPIRED) -> Coroutine[Any, Any, None]: ...
@overload
def lose(lock: AsyncPermit, reason: LossReason | str = LossReason.EXPIRED) -> Coroutine[Any, Any, None]: ...
def lose(
    lock: Lock | AsyncLock | Permit | AsyncPermit, reason: LossReason | str = LossReason.EXPIRED
) -> Coroutine[Any, Any, None] | None:
    """Have a held lock or permit be lost now. Once this returns, its `on_lost` has returned.

    The key is deleted or, for `LossReason.TAKEN`, gets another value, and the lock is told what a renewal would have
    found. A lock that nothing watches, without `auto_renew` and `on_lost`, learns only that its time is over
    (`EXPIRED`, `SERVER_GONE`), and anything else by its next request, as it would without this function.

    The thread or task that holds the lock calls it. For an asyncio lock, it is awaited; with `cancel_on_lost`, that
    raises CancelledError. `on_lost` is called in another thread or task. Sends `GET name`, then `DEL name` or `SET`;
    for a permit, which any thread or task may lose, `ZREM name`.

    Args:
        lock: a `Lock`, a `Permit` of a semaphore, or one of those of `redislock_fast.asyncio`.
        reason: a `LossReason`, or its text, such as "expired".

    Raises:
        redis.exceptions.LockError: this thread or task does not hold the lock.
        TypeError: another kind of lock.
        ValueError: an unknown reason, or the lock does not expire and so cannot be lost for this one; a permit
            cannot be taken by another.
    """
    reason = LossReason(reason)
    if isinstance(lock, (Permit, AsyncPermit)):
        if reason is LossReason.TAKEN:
            raise ValueError(f"a permit of the semaphore {shown(lock.name)} cannot be lost as {str(reason)!r}")
        lock.ensure_held()
        lock = lock._lock[0]
    if not isinstance(lock, (Lock, AsyncLock)):
        raise TypeError(f"lose takes a Lock of redislock_fast, not {type(lock).__name__}")
    if not lock.timeout and reason in (LossReason.EXPIRED, LossReason.SERVER_GONE):
        raise ValueError(f"the lock {shown(lock.name)} does not expire: it cannot be lost as {str(reason)!r}")
    owner = lock._held()
    if isinstance(lock, AsyncLock):
        return _lose_in_loop(lock, owner, reason)
    if is_permit(owner.token or b""):
        if not lock.redis.zrem(lock.name, owner.token):
            raise _not_held(lock)
    elif not lock._drive(read_owned(lock, owner, owner.token)):
        raise _not_held(lock)
    elif reason is LossReason.TAKEN:
        lock.redis.set(lock.name, _OTHER_HOLDER, keepttl=True)
    else:
        lock.redis.delete(lock.name)
    for loss in _noted(lock, owner, reason):
        thread = threading.Thread(target=report_loss, args=loss, name="redislock_fast-lost")
        thread.start()
        thread.join()
    return None


async def _lose_in_loop(lock: AsyncLock, owner: Owner, reason: LossReason) -> None:
    if is_permit(owner.token or b""):
        if not await lock.redis.zrem(lock.name, owner.token):
            raise _not_held(lock)
    elif not await lock._drive(read_owned(lock, owner, owner.token)):
        raise _not_held(lock)
    elif reason is LossReason.TAKEN:
        await lock.redis.set(lock.name, _OTHER_HOLDER, keepttl=True)
    else:
        await lock.redis.delete(lock.name)
    for loss in _noted(lock, owner, reason):
        await asyncio.create_task(_report_loss_in_loop(lock, *loss))


async def _report_loss_in_loop(lock: AsyncLock, lease: Lease, reason: LossReason) -> None:
    """Call `on_lost` in a task of its own, as it may cancel the holder's, and wait for what it has begun."""
    renewer = lock._renewer()
    before = set(renewer._tasks)
    renewer.report_loss(lease, reason)
    started = renewer._tasks - before
    if started:
        await asyncio.wait(started)


def _not_held(lock: Lock | AsyncLock) -> LockError:
    return LockError(f"Cannot lose the lock {shown(lock.name)}, which is not held by this caller", lock_name=lock.name)


def _noted(lock: Lock | AsyncLock, owner: Owner, reason: LossReason) -> list[LeaseLoss]:
    """Note the loss as a renewal does. Returns what must be told."""
    losses: list[LeaseLoss] = []
    lease = owner.held_lease
    if lease is not None and lease.is_watched:
        lock._let_go(lease)
        note_loss(lease, reason, losses)
    elif reason in (LossReason.EXPIRED, LossReason.SERVER_GONE):
        owner.expiry = (owner.token, clock())
    return losses


def assert_no_locks_left(client: Client) -> None:
    """Assert that no lock or permit is held on the server of a test, and that nobody waits for one.

    Finds the locks of this package, of all processes, by their tokens: not those with a token of their caller's own,
    and not those of a `Redlock`. A key that lingers counts. Sends `SCAN`, `GET` for each string in the database,
    `ZRANGE` for each sorted set, and what `holders` and `Semaphore.status` send for each lock and semaphore.

    Args:
        client: a `redis.Redis` or `redis.RedisCluster`; for tests of asyncio locks, too.

    Raises:
        AssertionError: the text names the locks, and their holders where they are known.
        TypeError: for a pipeline or an asyncio client.
    """
    transport_of(client)  # refuses other clients
    left = [
        _described(client, name)
        for name in client.scan_iter(count=1000, _type="string", NEVER_DECODE=True)  # a name may be no text
        if any(is_ours(without_flag(value)) for value in _read(client.get, name))
    ]
    for name in client.scan_iter(count=1000, _type="zset", NEVER_DECODE=True):
        waited_for = lock_of_queue(name)
        if waited_for is not None:
            left.append(f"{waited_for.decode(errors='backslashreplace')!r} has waiters")
        elif any(map(is_permit, _read(client.zrange, name, 0, 0))):
            count = Semaphore(client, name, 1).status().held
            if count:
                left.append(f"{name.decode(errors='backslashreplace')!r} has {count} permits held")
    if left:
        raise AssertionError(f"locks are left: {', '.join(sorted(left))}")


def _bytes_of(reply: Any) -> bytes:
    """What a client has read, which may decode; empty for a key that is gone."""
    return reply.encode() if isinstance(reply, str) else reply or b""


def _read(command: Callable[..., Any], *args: Any) -> list[bytes]:
    """The values that a client reads, but none where it decodes and cannot: a token is text."""
    try:
        reply = command(*args)
    except UnicodeDecodeError:
        return []
    return [_bytes_of(value) for value in (reply if isinstance(reply, list) else [reply])]


def _described(client: Client, name: bytes) -> str:
    """A lock that is left, and by whom."""
    holder = holders(client, name).holder
    process = None if holder is None else holder.process
    by = "" if process is None else f" by {process.program}, pid {process.pid} on {process.host}"
    return f"{name.decode(errors='backslashreplace')!r} is held{by}"
