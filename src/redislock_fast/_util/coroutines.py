"""Methods that return a coroutine without being `async def`: they look as if they were.

The public methods for tasks are plain functions, as they note which task has called them. So mocks and frameworks must
be told that they are coroutine functions, and a coroutine that is never awaited must name the public method.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["coroutine_method", "named", "runs"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")


def coroutine_method(method: _Method) -> _Method:
    """Have `inspect.iscoroutinefunction` say yes; before Python 3.12 `asyncio.iscoroutinefunction`, which mocks use."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(method)
    method._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001  # no other way
    return method


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
