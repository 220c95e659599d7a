# Generated from src/redislock_fast/asyncio/semaphore.py by .ci/unasync.py, as `make format` runs it: change that file.
"""`Semaphore`: at most so many holders of one name, over all processes, in the order of arrival.

See https://redislock-fast.github.io/redislock_fast/how-to/semaphore.html
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.metrics import of_semaphore
from redislock_fast._lease.options import check_callback, refuse_unknown, spelled_out
from redislock_fast._protocol.permits import ReleasePermit, acquire_permit
from redislock_fast._semaphore.callers import Permits, ThreadCallers
from redislock_fast._semaphore.limiting import Limits, check_job
from redislock_fast._semaphore.permit_lock import (
    SemaphoreReport,
    SoleOwner,
    check_handle,
    clean_up,
    ignore_loss,
    limit_of,
    no_permit,
    not_granted,
    not_held,
    read_status,
    resize,
    with_permit,
)
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.tokens import PERMIT
from redislock_fast.lock import Lock

if TYPE_CHECKING:
    from typing import TypeAlias

    import redis
    from typing_extensions import Never

    from redislock_fast._lease.handle import Handle
    from redislock_fast._lease.metrics import Metrics

    Client: TypeAlias = "redis.Redis | redis.RedisCluster"

__all__ = ["Permit", "Semaphore", "SemaphoreReport", "limited"]

logger = logging.getLogger(__name__)

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class _PermitLock(Lock):
    """The lock object on which a permit stands. Its semaphore uses it for one permit after the other.

    Args:
        args: of a lock.
        limit: how many may hold.
        settings: of a lock.

    Attributes:
        permit: a weak reference to the permit.
    """

    __slots__ = ("permit",)

    permit: weakref.ref[Permit]

    def __init__(self, *args: Any, limit: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._attempt_kind, self._token_kind, self._release_kind = acquire_permit(limit), PERMIT, ReleasePermit

    def _set_options(self, options: Any, adaptive: Any) -> None:
        super()._set_options(options, adaptive)
        if self._options is not None:
            self._options.observers = of_semaphore(self._options.observers)

    def _new_owner(self) -> Any:
        return SoleOwner()

    def _heirs_of(self, former: Any) -> Any:
        return former

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        return not_held(self.name, verb)


class Permit:
    """The right of one caller to be one of the holders. `Semaphore.acquire` and `with semaphore` give it.

    Any thread may release it and ask about it.
    """

    __slots__ = ("__weakref__", "_lock", "_permits", "_semaphore")

    def __init__(self, semaphore: Semaphore, permits: Permits) -> None:
        self._semaphore = semaphore
        self._permits = permits.weak  # since they refer to this
        self._lock: list[_PermitLock] = []  # empty once it was released: `pop` lets one caller alone release it

    @property
    def name(self) -> Any:
        """The semaphore's name."""
        return self._semaphore.name

    def remaining(self) -> float:
        """How long the permit is certainly still held, in seconds, as `Lock.remaining` tells it. Sends nothing."""
        try:
            lock = self._lock[0]
        except IndexError:
            return 0.0
        return lock.remaining()

    @property
    def valid(self) -> bool:
        """Whether the permit is certainly held, by the clock: `remaining() > 0`."""
        return self.remaining() > 0

    @property
    def lost(self) -> bool:
        """Whether the permit was lost before it was released, as far as is known without asking the server."""
        try:
            lock = self._lock[0]
        except IndexError:
            return False
        return lock.lost

    def ensure_held(self) -> None:
        """Return if the permit is certainly held: where `valid` is true. Sends nothing.

        Raises:
            LockLostError: it was lost.
            redis.exceptions.LockError: it was released.
        """
        try:
            lock = self._lock[0]
        except IndexError:
            raise self._released("use") from None
        lock.ensure_held()

    def release(self) -> None:
        """Give the permit back; the first waiter gets it.

        Sends `EVALSHA`. When this raises a connection error, it can be called again. If it is interrupted, the release
        goes on in the background.

        Raises:
            LockLostError: the permit was lost.
            redis.exceptions.LockNotOwnedError: the server did not have it any more.
            redis.exceptions.LockError: it was released before.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        try:
            lock = self._lock.pop()
        except IndexError:
            raise self._released("release") from None
        try:
            lock.release()
        except LockError:
            self._leave()
            raise
        except BaseException:
            self._lock.append(lock)
            raise
        self._leave()
        if lock._attached is None:  # noqa: SLF001  # else it has the ttl of its handle
            self._semaphore._free.append(lock)  # noqa: SLF001  # of this very module

    def detach(self) -> Handle:
        """Give up the permit without releasing it. The caller of `Semaphore.attach` with the handle holds it then.

        Sends nothing. The permit is not renewed until the handle is attached.

        Raises:
            LockLostError: the permit was lost.
            redis.exceptions.LockError: it was released.
        """
        try:
            lock = self._lock[0]
        except IndexError:
            raise self._released("detach") from None
        handle = lock.detach()
        self._lock.clear()
        self._leave()
        return handle

    def _leave(self) -> None:
        permits = self._permits()
        if permits is not None:  # else its caller is gone
            try:  # noqa: SIM105  # `suppress` takes as long as the rest
                permits.remove(self)
            except ValueError:  # its caller has left it
                pass

    def _enter(self, lock: _PermitLock) -> None:
        """Note that the permit was granted."""
        self._lock.append(lock)
        permits = self._permits()
        if permits is not None:
            permits.append(self)

    def _drop(self) -> None:
        """Have the permit be released in the background, since nobody will do it."""
        clean_up(self._lock)
        self._leave()

    def _released(self, verb: str) -> LockError:
        text = f"Cannot {verb} a permit of the semaphore {shown(self.name)} that was released"
        return LockError(text, lock_name=self.name)

    def __enter__(self) -> Permit:
        """Return itself; the block's end releases it. Sends nothing.

        Raises:
            redis.exceptions.LockError: it was released.
        """
        if not self._lock:
            raise self._released("enter")
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the permit, unless the block has. Where the block has raised, an error of the release is logged.

        Where the release fails, it is done in the background as soon as that is possible.

        Raises:
            LockLostError: the permit was lost.
        """
        try:
            if self._lock:
                self.release()
        except LockError:
            if exc_type is None:
                raise
            logger.warning("A permit was no longer held when exiting context manager: %s", shown(self.name))
        except BaseException as error:
            self._drop()
            if exc_type is None or not isinstance(error, Exception):
                raise
            logger.warning("A permit of %s could not be released: %r", shown(self.name), error)
        finally:
            self._leave()

    def __repr__(self) -> str:
        """The semaphore's name, and for how long the permit is held. Sends nothing."""
        left_s = self.remaining()
        return f"<Permit of {self.name!r}: {f'held, {left_s:.3f} s left' if left_s else 'not held'}>"


class Semaphore:
    """Lets at most `limit` callers of all processes and machines be in a block at once, in the order of arrival.

        semaphore = Semaphore(client, "openai:gpt", 20)
        with semaphore as permit:
            ...  # at most 20 callers are here

    One object serves any number of callers at the same time. Each permit has an end of its own on the server, by the
    server's clock, and is renewed while it is held: where a process dies, its permits are free `timeout` seconds later
    at most, and nothing else is. https://redislock-fast.github.io/redislock_fast/explanation/guarantees.html says what
    is not guaranteed.

    Needs a server that runs scripts. Waiters that cannot listen there (RESP2, or forbidden) poll, once in `sleep`.

    Args:
        client: a `redis.Redis` or `RedisCluster`; its settings are used, its connections are not.
        name: the key, bytes or str: a sorted set. No lock has the same name.
        limit: how many may hold a permit. A limit that `resize` has set on the server overrides it.
        timeout: the ttl of a permit in seconds: for how long others wait at most after its holder's process has died.
        sleep: how long a waiter sleeps between two health checks, in seconds.
        blocking: whether `acquire` waits for a permit.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: forever.
        auto_renew: whether permits are renewed in the background as long as they are held.
        max_hold: for how many seconds after its acquire a permit is renewed at most. None: forever.
        on_lost: called once with the permit and a `LossReason` when a permit is found to be lost,
            from a background thread, or by the release or extend that finds it out.
        on_danger: called with the permit as `Lock`'s is with the lock: while it is still held, when its renewals have
            failed until a third of `timeout` is left. It needs auto_renew.
        metrics: gets each acquisition and release; see `Metrics` and `FailureMetrics`.

    Raises:
        TypeError: for a pipeline or an asyncio client, a wrong type, or an unknown parameter.
        ValueError: for a `limit` below 1, a `timeout` that is not above 0, or options that do not go together.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    @spelled_out("Semaphore")
    def __init__(
        self,
        client: Client,
        name: str | bytes,
        limit: int,
        *,
        timeout: float = 30,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        auto_renew: bool = True,
        max_hold: float | None = None,
        on_lost: Callable[[Permit, LossReason], object] | None = None,
        on_danger: Callable[[Permit], object] | None = None,
        metrics: Metrics | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown("Semaphore", unknown, Semaphore.__init__)
        self._limit = limit_of(limit, name)
        if not timeout:
            raise ValueError(f"the semaphore {shown(name)} needs a timeout above 0: a permit must end")
        self._settings: dict[str, Any] = {
            "redis": client,
            "name": name,
            "timeout": timeout,
            "sleep": sleep,
            "blocking": blocking,
            "blocking_timeout": blocking_timeout,
            "auto_renew": auto_renew,
            "max_hold": max_hold,
            "on_lost": with_permit(ignore_loss if on_lost is None and not auto_renew else on_lost),
            "on_danger": with_permit(on_danger),
            "metrics": metrics,
        }
        self._calls_back = self._settings["on_lost"] is not None or on_danger is not None
        self._callers = ThreadCallers()
        self._free: deque[_PermitLock] = deque([self._new_lock()])  # any thread takes one, and puts it back

    def _new_lock(self) -> _PermitLock:
        return _PermitLock(**self._settings, limit=self._limit)

    @property
    def name(self) -> Any:
        """The key."""
        return self._settings["name"]

    @property
    def limit(self) -> int:
        """How many may hold a permit, unless an operator has set that on the server; see `status`."""
        return self._limit

    # ---- acquire and release ----

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
    ) -> Permit | None:
        """Acquire a permit. No waiter is overtaken, by `blocking=False` neither.

        Sends `EVALSHA`. To wait, `SUBSCRIBE` or `SSUBSCRIBE` once and `EVALSHA`. If it raises or is interrupted, no
        permit is held: an attempt is undone.

        Args:
            blocking: whether to wait; None: as the semaphore's own setting says.
            blocking_timeout: seconds until the deadline of the whole call; None: as above.

        Returns:
            The permit; None where none was granted in time. The semaphore keeps it until it is released, or the thread
            that called this method is gone: then it is released with a ResourceWarning.

        Raises:
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: the server's error, such as WRONGTYPE for a key that is no semaphore's.
        """
        permit, lock = self._begin()
        return self._acquire(permit, lock, blocking, blocking_timeout)

    def _begin(self) -> tuple[Permit, _PermitLock]:
        """A permit for the caller, and a lock object to acquire it."""
        try:
            lock = self._free.pop()
        except IndexError:
            lock = self._new_lock()
        permit = Permit(self, self._callers.mine())
        if self._calls_back:
            lock.permit = weakref.ref(permit)  # before it may be lost
        return permit, lock

    def _acquire(
        self, permit: Permit, lock: _PermitLock, blocking: bool | None, blocking_timeout: float | None
    ) -> Permit | None:
        try:
            if not lock.acquire(blocking=blocking, blocking_timeout=blocking_timeout):
                self._free.append(lock)
                return None
            permit._enter(lock)  # noqa: SLF001  # of this very module
            return permit  # noqa: TRY300  # as soon as nothing can interrupt any more
        except BaseException:  # an interrupt may come once it was granted
            permit._lock[:] = [lock]  # noqa: SLF001  # as above
            permit._drop()  # noqa: SLF001  # as above
            raise

    def release(self) -> None:
        """Release the permit that this thread has acquired last. Sends and raises what `Permit.release` does.

        Raises:
            redis.exceptions.LockError: this thread has none.
        """
        permits = self._callers.mine()
        if not permits:
            raise no_permit(self.name, "thread")
        latest: Permit = permits[-1]
        if not latest._lock:  # noqa: SLF001  # of this very module
            latest = next((permit for permit in reversed(permits) if permit._lock), latest)  # noqa: SLF001  # as above
        latest.release()

    def attach(self, handle: Handle) -> Permit:
        """Hold a permit that was detached, here or in another process. Sends nothing.

        The lease ends when the handle says, by the wall clock.

        Raises:
            TypeError: `handle` is no `Handle`.
            ValueError: it is of another name, or of a lock.
        """
        check_handle(self._new_lock(), handle)
        settings = {key: value for key, value in self._settings.items() if key not in ("redis", "name", "timeout")}
        lock = _PermitLock.attach(self._settings["redis"], handle, **settings, limit=self._limit)
        permit = Permit(self, self._callers.mine())
        lock.permit = weakref.ref(permit)
        permit._enter(lock)  # noqa: SLF001  # of this very module
        return permit

    # ---- the semaphore as a whole ----

    def resize(self, limit: int | None) -> None:
        """Set how many may hold a permit, for the callers of all processes, whatever limit they were made with.

        A higher limit admits waiters at once. With a lower one, holders go on, and nobody is admitted until fewer are
        left. Sends `EVALSHA`.

        Args:
            limit: how many; None: as many as each caller says, as before.

        Raises:
            TypeError: it is no whole number.
            ValueError: it is below 1.
        """
        most = None if limit is None else limit_of(limit, self.name)
        lock = self._new_lock()
        lock._drive(resize(lock._key, most))  # noqa: SLF001  # of this very module

    def status(self) -> SemaphoreReport:
        """Tell how many permits are held, by which processes, and who waits.

        Sends `ZRANGE`, `TIME`, `GET`, `ZCARD`, `ZRANGE` and `CLIENT LIST` in one piece.

        Raises:
            redis.exceptions.ResponseError: the server's error, such as WRONGTYPE for a key that is no semaphore's.
        """
        lock = self._new_lock()
        report: SemaphoreReport = lock._drive(read_status(lock._key, self._limit))  # noqa: SLF001  # as above
        return report

    # ---- with ----

    def __enter__(self) -> Permit:
        """Acquire a permit.

        Raises:
            redis.exceptions.LockError: none was granted in time; and what `acquire` raises.
        """
        permit: Permit | None = None
        try:
            permit = self.acquire()
            if permit is None:
                raise not_granted(self.name)
            self._callers.enter(permit)
            return permit  # noqa: TRY300  # as above
        except BaseException:
            if permit is not None:  # an interrupt: nobody will leave the block
                self._callers.open.pop(permit, None)
                permit._drop()  # noqa: SLF001  # of this very module
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the permit as its own `with` block does.

        Where another thread than has entered the block leaves it, and several blocks of this object are open, the
        permit of one of the others may be released in its stead.

        Raises:
            LockLostError: the permit was lost.
            redis.exceptions.LockError: no block is open.
        """
        permit: Permit | None = None
        try:
            permit = self._callers.leave()
            if permit is None:
                raise no_permit(self.name, "thread")
            permit.__exit__(exc_type, exc_value, traceback)
        except BaseException:
            if permit is not None:  # an interrupt may have come before it was released
                permit._drop()  # noqa: SLF001  # of this very module
            raise

    def __repr__(self) -> str:
        """The name and the caller's limit. Sends nothing."""
        return f"<Semaphore {self.name!r}: {self._limit} at most>"


def limited(
    client: Client, name: str, limit: int, *, on_full: Callable[[LockError], Any] | None = None, **settings: Any
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, Any]]:
    """Let at most `limit` calls of the function run at once, over all processes.

        @limited(client, "export:{user_id}", 5)
        def export(user_id, format): ...

    Args:
        client: as for `Semaphore`.
        name: of the semaphore, with parameters of the function in braces: each value has a semaphore of its own.
        limit: as for `Semaphore`.
        on_full: called with a `LockError` instead of the function where no permit is free in time; the call returns
            what it returns. With it, calls do not wait, unless `blocking` or `blocking_timeout` is given.
        settings: other parameters of `Semaphore`.

    Returns:
        The decorator. A decorated function raises LockError where no permit is granted in time, and there is no
        `on_full`.

    Raises:
        TypeError: as for `Semaphore`, for a coroutine function or a generator function, or a wrong `on_full`.
        ValueError: as for `Semaphore`, or where the function has no such parameter.
    """
    check_callback("on_full", on_full)
    if on_full is not None and not (settings.keys() & {"blocking", "blocking_timeout"}):
        settings["blocking"] = False
    Semaphore(client, name, limit, **settings)  # refuses what is wrong at once

    def limit_job(job: Callable[_Parameters, _Result]) -> Callable[_Parameters, Any]:
        check_job(name, job, _PermitLock._is_for_tasks)  # noqa: SLF001  # of this very module
        limits = Limits(name, job, lambda full_name: Semaphore(client, full_name, limit, **settings))

        @functools.wraps(job)
        def run_limited(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Any:
            semaphore = limits.of(args, kwargs)
            permit: Permit | None = None
            try:
                permit = semaphore.acquire()
                if permit is None:
                    error = not_granted(semaphore.name)
                    if on_full is None:
                        raise error
                    return on_full(error)
                with permit:
                    return job(*args, **kwargs)
            except BaseException:
                if permit is not None:  # an interrupt may come before the block is entered, or as its end begins
                    permit._drop()  # noqa: SLF001  # of this very module
                raise

        return run_limited

    return limit_job
