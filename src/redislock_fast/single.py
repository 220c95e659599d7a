# Generated from src/redislock_fast/asyncio/single.py by .ci/unasync.py, as `make format` runs it: change that file.
"""`once`: runs a job on one of many workers, and skips it on the others.

See https://redislock-fast.github.io/redislock_fast/how-to/once.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from redislock_fast._lease.options import refuse_unknown, spelled_out
from redislock_fast._procedures.once import Skipped, check_job, check_settings, describe_skip, naming, token_of_run
from redislock_fast.lock import Lock

if TYPE_CHECKING:
    from typing import TypeAlias

    import redis
    from typing_extensions import Never

    from redislock_fast._procedures.once import RunToken
    from redislock_fast._util.errors import LossReason

    Client: TypeAlias = "redis.Redis | redis.RedisCluster"

__all__ = ["Once", "Skipped", "once"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_SkipResult = TypeVar("_SkipResult")


class Once(Lock, Generic[_SkipResult]):
    """The lock of a job: a context manager and a decorator. `once` makes it."""

    def __init__(
        self,
        client: Client,
        name: str | bytes,
        timeout: float,
        at_least: float,
        on_skip: Callable[[Skipped], Any] | None,
        token: RunToken | None,
        on_lost: Callable[[Once[Any], LossReason], object] | None,
    ) -> None:
        told: Any = on_lost  # it gets this object, which is a `Once`
        with naming(name):
            at_least_s = check_settings(name, timeout, at_least, on_skip, token)
            super().__init__(client, name, timeout, blocking=False, auto_renew=True, on_lost=told)
        self._at_least_s = at_least_s
        self._on_skip = on_skip
        self._token = token

    def __call__(self, job: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result | _SkipResult]:
        """Have each call of the function run it or skip it.

        Raises:
            TypeError: for a coroutine function or a generator function, and where each call would have the same token.
        """
        check_job(self, job, self._token)

        @functools.wraps(job)
        def run_once(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result | _SkipResult:
            with _Attempt(self, token_of_run(self._token)) as is_held:
                if is_held:
                    return job(*args, **kwargs)
            skipped: Any = None if self._on_skip is None else self._on_skip(self._drive(describe_skip(self)))
            return skipped  # type: ignore[no-any-return]

        return run_once

    def __enter__(self) -> Once[_SkipResult]:
        """Take the lock.

        Raises:
            Skipped: another caller has it; and what `Lock.acquire` raises.
        """
        if self.acquire(token=token_of_run(self._token)):
            return self
        raise self._drive(describe_skip(self))


class _Attempt:
    """One call of a decorated function: holds the lock in a `with` block, where it is free."""

    def __init__(self, run: Once[Any], token: str | bytes | None) -> None:
        self._run = run
        self._token = token
        self._is_held = False

    def __enter__(self) -> bool:
        self._is_held = self._run.acquire(token=self._token)
        return self._is_held

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_held:
            self._run.__exit__(exc_type, exc_value, traceback)


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
) -> Once[None]: ...
@overload
def once(
    client: Client,
    name: str | bytes,
    *,
    timeout: float,
    at_least: float = 0,
    on_skip: Callable[[Skipped], _SkipResult],
    token: RunToken | None = None,
    on_lost: Callable[[Once[Any], LossReason], object] | None = None,
) -> Once[_SkipResult]: ...
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
    **unknown: Never,
) -> Once[Any]:
    """Run a job on one of many workers, and skip it on the others.

        @once(client, "nightly", timeout=60, at_least=55)
        def nightly(): ...

        with once(client, "nightly", timeout=60, at_least=55) as run: ...

    One attempt is made to take the lock; nothing waits. The lock is renewed while the job runs, and released at its
    end, but not before `at_least` has passed. That holds for a job that raises, too.

    A call of a decorated function that is skipped returns None, or what `on_skip` returns. A `with` block that
    is skipped raises `Skipped`. `run` is the held `Lock`, with `run.valid` and `run.lost`. Where the lock was lost
    while the job ran, so that another worker may have begun it, LockLostError is raised after the job,
    as by a `with` block of a `Lock`.

    Sends what `Lock` sends to acquire without waiting, to renew and to release. To keep the lock, it sends `SET name
    token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`. Where it is skipped, a `with` block or a
    decorator with `on_skip` sends what `holders` sends.

    Args:
        client: as for `Lock`.
        name: of the job; the key of its lock.
        timeout: how many seconds after a worker was killed another one may run the job, at the most.
        at_least: for how many seconds after its start no other worker begins the job, in seconds: more than the clocks
            of the workers differ by, and less than the time between two runs. It may be longer than `timeout`. It does
            not hold for a worker that is killed.
        on_skip: called with a `Skipped` where the decorated function is not run.
        token: names one run, such as the id of a job, where a run that has failed is tried again: a caller with the
            token of the run that has the lock is let in, and `at_least` begins anew. For a decorator, a function that
            is called for each run.
        on_lost: as for `Lock`.

    Raises:
        TypeError: for a wrong type, an asyncio client or a pipeline. The text names the lock.
        ValueError: for a `timeout` that is not above 0, or a negative `at_least`. The text names the lock.
    """
    refuse_unknown("once", unknown, once)
    return Once(client, name, timeout, at_least, on_skip, token, on_lost)
