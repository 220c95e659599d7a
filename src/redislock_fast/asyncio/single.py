"""`once` for asyncio: runs a job on one of many workers, and skips it on the others.

See https://redislock-fast.github.io/redislock_fast/how-to/once.html
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, overload

from redis.exceptions import LockError

from redislock_fast._lease.options import refuse_unknown, spelled_out
from redislock_fast._procedures.once import (
    Skipped,
    check_job,
    check_others,
    check_settings,
    describe_done,
    describe_skip,
    drop_run,
    mark_done,
    naming,
    read_done,
    token_of_run,
)
from redislock_fast._util.coroutines import awaited
from redislock_fast.asyncio.lock import Lock

if TYPE_CHECKING:
    from typing import TypeAlias

    import redis.asyncio
    from typing_extensions import Never

    from redislock_fast._procedures.once import RunToken
    from redislock_fast._util.errors import LossReason

    Client: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"

__all__ = ["Once", "Skipped", "once"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_SkipResult = TypeVar("_SkipResult")


class Once(Lock, Generic[_SkipResult]):
    """The lock of a job: a context manager and a decorator. `once` makes it."""

    __slots__ = ("_done_for_ms", "_on_skip", "_token")

    def __init__(
        self,
        client: Client,
        name: str | bytes,
        timeout: float,
        at_least: float,
        on_skip: Callable[[Skipped], Any] | None,
        token: RunToken | None,
        on_lost: Callable[[Once[Any], LossReason], object] | None,
        others: str,
        done_for: float | None,
    ) -> None:
        for_once: Any = on_lost  # it gets this object, which is a `Once`
        with naming(name):
            at_least_s = check_settings(name, timeout, at_least, on_skip, token)
            done_for_ms = check_others(others, done_for, at_least_s)
            super().__init__(client, name, timeout, blocking=others == "wait", auto_renew=True, on_lost=for_once)
        self._at_least_s = at_least_s
        self._done_for_ms = done_for_ms
        self._on_skip = on_skip
        self._token = token

    def __call__(
        self, job: Callable[_Parameters, Awaitable[_Result]]
    ) -> Callable[_Parameters, Coroutine[Any, Any, _Result | _SkipResult]]:
        """Have each call of the coroutine function run it or skip it.

        Raises:
            TypeError: for a plain function or a generator function, and where each call would have the same token.
        """
        check_job(self, job, self._token)

        @functools.wraps(job)
        async def run_once(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result | _SkipResult:
            attempt = _Attempt(self, token_of_run(self._token))
            try:
                async with attempt as is_held:
                    if is_held:
                        return await job(*args, **kwargs)
            except GeneratorExit:  # the task was dropped: this may be any thread
                raise
            except BaseException:  # an interrupt may come before the block is entered, or as its end begins
                attempt.drop()
                raise
            skipped: Any = None if self._on_skip is None else self._on_skip(await self._skipped())
            return await awaited(skipped)  # type: ignore[no-any-return]

        return run_once

    async def __aenter__(self) -> Once[_SkipResult]:
        """Take the lock.

        Raises:
            Skipped: another caller has it, or the job is done; and what `Lock.acquire` raises.
        """
        if await self._take(token_of_run(self._token)):
            return self
        raise await self._skipped()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release as a `Lock` does. Where others wait, and no exception has ended the block, the job is done."""
        if exc_type is None and self._done_for_ms is not None:
            try:
                await self._drive(mark_done(self, self._done_for_ms))
            except BaseException as error:
                await super().__aexit__(type(error), error, error.__traceback__)
                raise
        await super().__aexit__(exc_type, exc_value, traceback)

    async def _take(self, token: str | bytes | None) -> bool:
        """Take the lock for a run. Returns False where the job is not to be run."""
        if self._done_for_ms is None:
            return await self.acquire(token=token)
        if await self._drive(read_done(self._key)):
            return False
        if not await self.acquire(token=token):  # its `blocking_timeout` was set
            return False
        try:
            is_done = await self._drive(read_done(self._key))  # it may have been done meanwhile
        except BaseException as error:  # which an error of the release must not replace: it may be a cancel
            await super().__aexit__(type(error), error, error.__traceback__)
            raise
        if is_done:
            with contextlib.suppress(LockError):  # lost: there is nothing to give back
                await self.release()
        return not is_done

    async def _skipped(self) -> Skipped:
        """Why the job was not run."""
        if self._done_for_ms is not None and await self._drive(read_done(self._key)):
            return describe_done(self)
        skipped: Skipped = await self._drive(describe_skip(self))
        return skipped


class _Attempt:
    """One call of a decorated function: holds the lock in an `async with` block, where it is free."""

    def __init__(self, run: Once[Any], token: str | bytes | None) -> None:
        self._run = run
        self._token = token
        self._before = run._mine().token  # noqa: SLF001  # of this very module
        self._is_held = False

    async def __aenter__(self) -> bool:
        self._is_held = await self._run._take(self._token)  # noqa: SLF001  # of this very module
        return self._is_held

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_held:
            await self._run.__aexit__(exc_type, exc_value, traceback)

    def drop(self) -> None:
        """Have the lock be renewed no more, if it is still held: nobody will release it."""
        drop_run(self._run, self._before)


@overload
def once(
    client: Client,
    name: str | bytes,
    *,
    timeout: float,
    at_least: float = 0,
    on_skip: None = None,
    token: RunToken | None = None,
    on_lost: Callable[[Once[Any], LossReason], object] | None = None,
    others: Literal["skip", "wait"] = "skip",
    done_for: float | None = None,
) -> Once[None]: ...
@overload
def once(
    client: Client,
    name: str | bytes,
    *,
    timeout: float,
    at_least: float = 0,
    on_skip: Callable[[Skipped], Any],
    token: RunToken | None = None,
    on_lost: Callable[[Once[Any], LossReason], object] | None = None,
    others: Literal["skip", "wait"] = "skip",
    done_for: float | None = None,
) -> Once[Any]: ...
@spelled_out()
def once(  # noqa: D417
    client: Client,
    name: str | bytes,
    *,
    timeout: float,
    at_least: float = 0,
    on_skip: Callable[[Skipped], Any] | None = None,
    token: RunToken | None = None,
    on_lost: Callable[[Once[Any], LossReason], object] | None = None,
    others: Literal["skip", "wait"] = "skip",
    done_for: float | None = None,
    **unknown: Never,
) -> Once[Any]:
    """Run a job on one of many workers, and skip it on the others.

        @once(client, "nightly", timeout=60, at_least=55)
        async def nightly(): ...

        async with once(client, "nightly", timeout=60, at_least=55) as run: ...

    One attempt is made to take the lock; nothing waits, unless `others` says so. The lock is renewed while the job
    runs, and released at its end, but not before `at_least` has passed. That holds for a job that raises, too.

    A call of a decorated function that is skipped returns None, or what `on_skip` returns. An `async with` block that
    is skipped raises `Skipped`. `run` is the held `Lock`, with `run.valid` and `run.lost`. Where the lock was lost
    while the job ran, so that another worker may have begun it, LockLostError is raised after the job.

    With `others="wait"`, the first caller runs the job, and the others wait until it is done: then they are skipped, as
    are those that come within `done_for`. Where the job raises, or its process is killed, the next one runs it.

    Sends what `Lock` sends to acquire without waiting, to renew and to release. To keep the lock, it sends `SET name
    token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`. Where it is skipped, an `async with` block or a
    decorator with `on_skip` sends what `holders` sends. With `others="wait"`, it waits as `Lock` does, and sends
    `EVALSHA` before that, once the lock is held, and after the job.

    Args:
        client: as for `Lock`.
        name: of the job; the key of its lock.
        timeout: how many seconds after a worker was killed another one may run the job, at the most.
        at_least: for how many seconds after its start no other worker begins the job, in seconds: more than the clocks
            of the workers differ by, and less than the time between two runs. It may be longer than `timeout`. It does
            not hold for a worker that is killed.
        on_skip: called with a `Skipped` where the decorated function is not run. An awaitable that it returns is
            awaited.
        token: names one run, such as the id of a job, where a run that has failed is tried again: a caller with the
            token of the run that has the lock is let in, and `at_least` begins anew. For a decorator, a function that
            is called for each run.
        on_lost: as for `Lock`.
        others: what the others do: "skip" the job at once, or "wait" until it is done.
        done_for: with "wait", for how many seconds after the job's end it counts as done; required then.

    Raises:
        TypeError: for a wrong type, a client that blocks or a pipeline. The text names the lock.
        ValueError: for a time that is not above 0, a negative `at_least`, an unknown `others`, or parameters that do
            not go together. The text names the lock.
    """
    refuse_unknown("once", unknown, once)
    return Once(client, name, timeout, at_least, on_skip, token, on_lost, others, done_for)
