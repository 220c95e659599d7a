"""`Lock`: redis-py's lock on this library's transport.

Any difference in behaviour from `redis.lock.Lock` is a bug, except those that
https://redislock-fast.github.io/redislock_fast/explanation/differences.html lists. The class derives from the
original, so that code which checks for the original's type accepts it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import redis
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease import owner as owners
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import takes_no_timeout, wrong_timeout
from redislock_fast._lease.owner import ThreadOwners
from redislock_fast._linger.procedures import release_here
from redislock_fast._linger.threads import LINGER, acquire_lingering, take_lingering
from redislock_fast._procedures.acquire import (
    acquire_lock,
    attempt_for_caller,
    clean_up_after,
    go_on,
    hold_by_reply,
    new_call,
)
from redislock_fast._procedures.lease import not_entered
from redislock_fast._procedures.lock import Hooks, LockBase
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._procedures.prolong import (
    ProlongCall,
    begins_prolonging,
    drop_lost,
    extend_lock,
    extend_once,
    held_with_ttl,
    new_extend,
    new_reacquire,
    prolong_by_token,
    reacquire_lock,
    reacquire_once,
    read_locked,
    read_owned,
    to_prolong,
)
from redislock_fast._procedures.release import (
    new_release,
    release_for_caller,
    release_from,
    release_lock,
    settle_release,
)
from redislock_fast._protocol.steps import Steps
from redislock_fast._renewal.threads import Renewer, call_on_wanted, renewer_of, report_loss, report_losses_in_threads
from redislock_fast._transport.threads.driver import drive, transport_of
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util import fork
from redislock_fast._util.errors import LossReason, shown

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Unpack

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.options import OptionSettings
    from redislock_fast._procedures.lock import WaitBy

    Client: TypeAlias = "redis.Redis | redis.RedisCluster"

__all__ = ["Lock"]

logger = logging.getLogger(__name__)


class Lock(LockBase, redis.lock.Lock):
    """A lock on one Redis or Valkey server, shared by processes and machines.

        client = redis.Redis()
        with Lock(client, "invoice:17", timeout=10, blocking_timeout=3):
            ...  # at most one caller is here; a LockError where it was another's for 3 s

    The key `name` holds the owner's token. Exclusion is guaranteed until the ttl passes, on one server that keeps its
    data; https://redislock-fast.github.io/redislock_fast/explanation/guarantees.html says what is not guaranteed.

    Args:
        redis: a `redis.Redis` or `redis.RedisCluster` of any kind; its settings are used, its connections are not.
        name: the key, bytes or str.
        timeout: the ttl in seconds, rounded up to whole milliseconds. None or 0: the lock does not expire.
        sleep: how long a waiter sleeps between two attempts, in seconds.
        blocking: whether `acquire` waits for another owner. False bounds no time: on a silent server, one attempt takes
            as long as the client's retries (58 s by default). `blocking_timeout` bounds it, as do the client's `retry`
            and `socket_timeout`.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: forever. 0: one attempt, for 0.1 s.
        thread_local: whether the token belongs to the thread that acquired, or to every thread with this object.
        raise_on_release_error: whether leaving a `with` block raises when the lock was lost, or only logs.
        wait: how `acquire` waits. "push": in the lock's queue; the server sends a message to the next owner, and
            `sleep` is the interval of health checks: the shortest of the process's waiters for the lock counts. The
            first health check may come later, by as long as the last wait took, and by four times `sleep` at most.
            "poll": as redis-py does, an attempt every `sleep`. Or a `redis.backoff.AbstractBackoff`, which gives the
            pauses between attempts. Where the server does not support or allow a queue, "push" watches the key by
            client tracking; where it does not support or allow that either, "push" polls.
        auto_renew: whether the lease is renewed in the background as long as the lock is held. `timeout` is then how
            long others wait after the owner's process has died.
        max_hold: for how many seconds after the acquire the lease is renewed at most. None: forever.
        on_lost: called once with the lock and a `LossReason` when the lock is found to be lost, from a background
            thread, or by the release or extend that finds it out.
        fencing: whether each acquire gets a fencing token, `fence`; see `redislock_fast.fencing`.
        reentrant: whether the thread that holds the lock may acquire it again. It must release it as often.
        wait_replicas: how many replicas must have the lock before `acquire` returns.
        wait_timeout: how long to wait for the replicas, in seconds.
        breaker: a circuit breaker with pybreaker's `calling()`. It guards `acquire`, and counts connection errors and
            timeouts only.
        metrics: gets each acquisition and release; see `Metrics` and `FailureMetrics`.
        linger: for how many seconds a released key stays in this process at most. Meanwhile its lock objects with
            `linger` for the same server and name take it in memory, and a release sends nothing that it waits for. The
            key's ttl is `timeout` and `linger` together. A waiter of another process gets it at once. None or 0: a
            release gives it back. See https://redislock-fast.github.io/redislock_fast/explanation/linger.html
        on_wanted: called once for each holding, with the lock, when another caller is heard to wait for it, from a
            background thread. It may come late, and the waiter may have given up.
        on_danger: called with the lock, from a background thread, when its renewals have failed until a third of
            `timeout` is left: to stop the work while the lock is still held. Once in a series of failures. It needs
            auto_renew.

    `timeout` may be an `AdaptiveTTL`. The work in the background is described in
    https://redislock-fast.github.io/redislock_fast/how-to/holding.html

    Raises:
        TypeError: for a pipeline or an asyncio client, a `timeout` that is no number, an `on_lost` that cannot be
            called, an `on_wanted` that cannot be called, a `breaker` without `calling()`, or an unknown parameter.
        ValueError: for a `timeout` that is negative, NaN or infinite, a `wait` that is none of these, or options that
            do not go together.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    if TYPE_CHECKING:  # the code is in `LockBase`, which takes a client of either kind

        def __init__(
            self,
            redis: Client,
            name: str | bytes,
            timeout: float | AdaptiveTTL | None = None,
            sleep: float = 0.1,
            blocking: bool = True,
            blocking_timeout: float | None = None,
            thread_local: bool = True,
            raise_on_release_error: bool = True,
            *,
            wait: WaitBy = "push",
            **options: Unpack[OptionSettings[Lock]],
        ) -> None: ...

    __slots__ = ()

    _linger = LINGER

    @staticmethod
    def _transport_of(client: Any) -> ThreadServerTransport:
        return transport_of(client)

    def _new_owner(self) -> ThreadOwners:
        return owners.of_threads()

    def _heirs_of(self, former: ThreadOwners) -> ThreadOwners:
        return owners.heirs_of(former)

    def _renewer(self) -> Renewer:
        return renewer_of(self._transport)

    def _report_loss(self, lease: Lease, reason: LossReason) -> None:
        report_loss(lease, reason)

    def _report_former_loss(self, lease: Lease, reason: LossReason) -> None:
        # The callback may wait for the lock, which this thread holds.
        report_losses_in_threads([LeaseLoss(lease, reason)])

    def _on_wanted_caller(self) -> Callable[[Lease], object]:
        return call_on_wanted

    def _drive(self, steps: Steps) -> Any:
        self._follow_pool()
        return drive(self._transport, steps, None, self._redis)

    # ---- acquire ----

    @overload  # type: ignore[misc]  # the only form: `timeout` is there to be refused by its right name
    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Any = None,
    ) -> bool: ...

    @takes_no_timeout
    def acquire(  # noqa: D417
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Any = None,
        timeout: object = None,
    ) -> bool:
        """Acquire the lock.

        Sends `SET name token NX [PX ms] GET` (Redis 7.0, Valkey), or that without `GET` and then `GET name`, once per
        attempt. To wait by push, `SUBSCRIBE` or `SSUBSCRIBE` once and `EVALSHA`; where redis-py's class holds the lock,
        `CLIENT TRACKING`, `CLIENT CACHING` and `GET`. If it raises, the lock is not held: an attempt is undone.

        Args:
            sleep: seconds between two attempts, or two health checks, instead of the lock's own setting.
            blocking: whether to wait, instead of the lock's own setting. False bounds no time; see the class.
            blocking_timeout: seconds until the deadline of the whole call, instead of the lock's own setting. A request
                under way at the end may take 0.1 s more. 0 or less makes one attempt, which may take 0.1 s.
            token: the token to use, bytes or str; by default a random one.

        Returns:
            True once the lock is held, False when it was not granted in time.

        Raises:
            redis.exceptions.LockError: this thread holds the lock, with no ttl or renewed, and would wait forever.
            LockLostError: with `fencing` or `wait_replicas`: the lock was granted, and lost before that was done.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time, and no earlier reply said that another owner has the lock.
            redis.exceptions.ResponseError: the server's error, such as WRONGTYPE for a key that is no string.
            ValueError: `sleep` negative, or a time that is NaN.
        """
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        if (pool := self._pool) is not None and self._redis.connection_pool is not pool:
            self._follow_pool()
        if timeout is not None:
            raise wrong_timeout(self)
        owner, options = self._owners.owner, self._options
        if self._linger_ms is not None and options is None and token is blocking_timeout is None:
            return take_lingering(self, owner) or acquire_lingering(self, new_call(self, owner, sleep, blocking))
        transport, call = self._transport, new_call(self, owner, sleep, blocking, blocking_timeout, token)
        try:
            if self._linger_ms is None and call.begins:
                try:
                    reply = transport.begin(call)
                    if options is not None:
                        if hold_by_reply(self, options, call, transport, reply):
                            return True
                    elif reply == call.ours:
                        owner.expiry = (call.token, None if call.ttl_ms is None else call.sent_at + call.ttl_ms / 1000)
                        owner.token = call.token
                        return True
                    go_on(self, call, reply)
                except BaseException as interruption:
                    go_on(self, call, None, interruption)
            return bool(drive(transport, acquire_lock(self, call), call.left, self._redis))
        except BaseException as error:
            clean_up_after(self, error, owner, call)
            raise

    def do_acquire(self, token: Any) -> bool:
        """Make one attempt; may be overridden. Returns whether the lock is held."""
        return bool(self._drive(attempt_for_caller(self, token)))

    # ---- query ----

    def locked(self) -> bool:
        """Whether any owner holds the lock. Sends `GET name`, always to the primary."""
        return bool(self._drive(read_locked(self)))

    def owned(self) -> bool:
        """Whether the server says that this thread holds the lock. Sends `GET name`, always to the primary."""
        held = self._held()
        return bool(self._drive(read_owned(self, held, held.token)))

    # ---- release, extend, reacquire ----

    def release(self) -> None:
        """Release the lock.

        Sends `DELIFEQ` (Valkey 9.0), `DELEX ... IFEQ` (Redis 8.4), or `EVALSHA`. Where a waiter is in the queue,
        `EVALSHA`, instead or as a second request, hands the lock over. The token is dropped only after the server has
        replied: when this raises a connection error, it can be called again.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, was deleted, or has another owner.
            redis.exceptions.LockError: this thread holds no lock.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        if self._generation != fork.generation():
            self._own_anew()
        owner = self._owners.owner
        cached: Any = owner.cached if self._linger_ms is not None and self._options is None else None
        if cached is not None:
            release_here(self, owner, cached)
            return
        if self._local is not threading.local:
            self._adapt_to_patch()
            owner = self._owners.owner
        pool = self._pool
        if pool is not None and self._redis.connection_pool is not pool:
            self._follow_pool()
        token, transport = owner.token, self._transport
        call = new_release(self, owner, token)
        if call is None:
            self._drive(release_lock(self, owner))
            return
        try:
            reply = transport.begin(call)
            if call.connection is not None and reply == call.ours:
                settle_release(self, owner, call)
                return
        except BaseException as interruption:
            operation = release_from(self, owner, call, None, interruption)
        else:
            operation = release_from(self, owner, call, reply)
        drive(transport, release_lock(self, owner, operation))

    def do_release(self, expected_token: Any) -> None:
        """Release by token; may be overridden."""
        self._drive(release_for_caller(self, expected_token))

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Prolong the lease.

        Sends `EVALSHA`; where scripts are forbidden, `GET`, `PTTL` and `SET name token IFEQ token PX ms`. A request
        that is sent again after its reply did not come adds only once.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: whether `additional_time` is the new ttl instead.

        Returns:
            True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more, or has no ttl on the server.
            redis.exceptions.LockError: this thread holds no lock, or the lock does not expire.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        owner = held_with_ttl(self, "extend")
        if begins_prolonging(self, owner, "extend"):
            return self._prolong(new_extend(self, owner, additional_time, replace_ttl))
        extended: Literal[True] = self._drive(extend_lock(self, owner, additional_time, replace_ttl))
        return extended

    def _prolong(self, call: ProlongCall) -> Literal[True]:
        """Extend or reacquire for the caller that has made this call."""
        self._follow_pool()
        try:
            reply = self._transport.begin(call)
            if call.settle(reply):
                return True
            steps = prolong_by_token(self, call, reply)
        except BaseException as interruption:
            steps = prolong_by_token(self, call, None, interruption)
        prolonged: Literal[True] = self._drive(steps)
        return prolonged

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend by the caller's token; may be overridden."""
        extended: Literal[True] = self._drive(extend_once(self, None, additional_time, replace_ttl))
        return extended

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
        owner = held_with_ttl(self, "reacquire")
        if begins_prolonging(self, owner, "reacquire"):
            return self._prolong(new_reacquire(self, owner))
        reacquired: Literal[True] = self._drive(reacquire_lock(self, owner))
        return reacquired

    def do_reacquire(self) -> Literal[True]:
        """Reacquire by the caller's token; may be overridden."""
        reacquired: Literal[True] = self._drive(reacquire_once(self, None))
        return reacquired

    # ---- shorthands ----

    def try_acquire(self, token: Any = None) -> bool:
        """Make one attempt: `acquire(blocking=False)`."""
        return self.acquire(blocking=False, token=token)

    def try_extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """Prolong the lease as `extend` does, but return False where the lock is not held any more.

        Raises what `extend` raises, except LockNotOwnedError.
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

        Takes, returns and raises what `acquire` does. A lock that was lost meanwhile is acquired again, and gets
        another fence. One without a ttl is asked about by `owned`, and stays as it is.
        """
        held = to_prolong(self, token)
        if held is not None:
            with contextlib.suppress(LockNotOwnedError):
                is_held = self.reacquire() if self.timeout else self.owned()
                if is_held:
                    return True
            drop_lost(self, held)
        return self.acquire(sleep, blocking, blocking_timeout, token)

    # ---- with ----

    def __enter__(self) -> Lock:
        """Acquire the lock, or use the one that was attached.

        Raises:
            LockLostError: the attached lock was lost.
            redis.exceptions.LockError: the lock was not granted in time; and what `acquire` raises.
        """
        if (self._attached is not None and self._enter_attached()) or self.acquire():
            return self
        raise not_entered(self.name)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release. Where the body has raised an exception, an error of the release is logged instead of raised."""
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error and exc_type is None:
                raise
            logger.warning("Lock was unlocked or no longer owned when exiting context manager: %s", shown(self.name))
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Lock %s could not be released when exiting context manager: %r", shown(self.name), error)


Lock._class_hooks = Hooks.of(Lock)  # noqa: SLF001  # of this very module
