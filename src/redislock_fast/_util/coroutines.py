"""Methods that return a coroutine without being `async def`: they look as if they were. And what awaits for them.

The public methods for tasks are plain functions, as they note which task has called them. So mocks and frameworks must
be told that they are coroutine functions, and a coroutine that is never awaited must name the public method.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_Held = TypeVar("_Held", bound=AbstractAsyncContextManager[Any])


def coroutine_method(method: _Method) -> _Method:
    """Have `inspect.iscoroutinefunction` say yes; before Python 3.12 `asyncio.iscoroutinefunction`, which mocks use."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(method)
    method._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001  # no other way
    return method


def is_coroutine_function(function: Any) -> bool:
    """Whether a call of it returns a coroutine: it is an `async def`, or an object whose `__call__` is one."""
    call = getattr(type(function), "__call__", None)  # noqa: B004  # the method itself, not whether there is one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def named(coroutine: Coroutine[Any, Any, _Result], name: str) -> Coroutine[Any, Any, _Result]:
    """Name the public method in the warning for a coroutine that is never awaited."""
    coroutine.__qualname__ = name  # type: ignore[attr-defined]  # typeshed does not know it
    return coroutine


def runs(name: str) -> Callable[[_Method], _Method]:
    """Give all coroutines of an `async def` the name of the public method that returns them: costs a call nothing."""

    def rename(method: _Method) -> _Method:
        method.__qualname__ = name
        return method

    return rename


async def awaited(answer: Any) -> Any:
    """Await the answer of a user's function where it is an awaitable."""
    return await answer if inspect.isawaitable(answer) else answer


class Acquiring(Generic[_Held]):
    """Gives what the coroutine acquires to `await`, once; `async with` also leaves what was acquired.

    Args:
        acquiring: made, not begun: if it is never awaited, Python says so.
    """

    def __init__(self, acquiring: Coroutine[Any, Any, _Held]) -> None:
        self._acquiring = acquiring
        self._held: _Held | None = None

    def __await__(self) -> Generator[Any, Any, _Held]:
        return self._acquiring.__await__()

    async def __aenter__(self) -> _Held:
        self._held = held = await self._acquiring
        await held.__aenter__()
        return held

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._held is not None
        await self._held.__aexit__(exc_type, exc_value, traceback)
