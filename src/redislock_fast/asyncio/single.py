"""`once` for asyncio: runs a job on one of many workers, and skips it on the others.

See https://redislock-fast.github.io/redislock_fast/how-to/once.html
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from redislock_fast._lease.options import refuse_unknown, spelled_out
from redislock_fast._procedures.once import OnceBase, Skipped
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


class Once(OnceBase, Lock, Generic[_SkipResult]):
    """The lock of a job: a context manager and a decorator. `once` makes it."""

    def __call__(
        self, job: Callable[_Parameters, Awaitable[_Result]]
    ) -> Callable[_Parameters, Coroutine[Any, Any, _Result | _SkipResult]]:
        """Have each call of the coroutine function run it or skip it.

        Raises:
            TypeError: for any other function, and where each call would have the same token.
        """
        self._check_job(job)

        @functools.wraps(job)
        async def run_once(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result | _SkipResult:
            async with _Attempt(self, self._token_of_run()) as is_held:
                if is_held:
                    return await job(*args, **kwargs)
            skipped: Any = None if self._on_skip is None else self._on_skip(await self._drive(self._skipping()))
            return await skipped if inspect.isawaitable(skipped) else skipped  # type: ignore[no-any-return]

        return run_once

    async def __aenter__(self) -> Once[_SkipResult]:
        """Take the lock.

        Raises:
            Skipped: another caller has it; and what `Lock.acquire` raises.
        """
        if await self.acquire(token=self._token_of_run()):
            return self
        raise await self._drive(self._skipping())


class _Attempt:
    """One call of a decorated function: holds the lock in an `async with` block, where it is free."""

    def __init__(self, run: Once[Any], token: str | bytes | None) -> None:
        self._run = run
        self._token = token
        self._is_held = False

    async def __aenter__(self) -> bool:
        self._is_held = await self._run.acquire(token=self._token)
        return self._is_held

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_held:
            await self._run.__aexit__(exc_type, exc_value, traceback)


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
    on_skip: Callable[[Skipped], Any],
    token: RunToken | None = None,
    on_lost: Callable[[Once[Any], LossReason], object] | None = None,
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
    **unknown: Never,
) -> Once[Any]:
    """Run a job on one of many workers, and skip it on the others.

        @once(client, "nightly", timeout=60, at_least=55)
        async def nightly(): ...

        async with once(client, "nightly", timeout=60, at_least=55) as run: ...

    Does, sends and raises what `redislock_fast.once` does.

    Args:
        client: as for `Lock`.
        name: as for `redislock_fast.once`, and so are `timeout`, `at_least` and `token`.
        timeout: in seconds.
        at_least: in seconds.
        on_skip: called with a `Skipped` where the decorated function is not run. An awaitable that it returns is
            awaited.
        token: of one run.
        on_lost: as for `Lock`.

    Raises:
        TypeError: for a wrong type, a client that blocks or a pipeline. The text names the lock.
        ValueError: for a `timeout` that is not above 0, or a negative `at_least`. The text names the lock.
    """
    refuse_unknown("once", unknown, once)
    return Once(client, name, timeout, at_least, on_skip, token, on_lost)
