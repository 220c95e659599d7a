"""The names of the semaphores of a function that `limited` decorates: a template of the call's arguments."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from redislock_fast._util.coroutines import is_coroutine_function

_MOST = 1024
"""How many semaphore objects a decorated function keeps; their permits keep theirs."""

_Semaphore = TypeVar("_Semaphore")


def check_job(template: Any, job: Any, is_for_tasks: bool) -> None:
    """Check that calls of a function can be limited.

    Args:
        template: of the semaphores' names.
        job: the function.
        is_for_tasks: whether it is to be a coroutine function.

    Raises:
        TypeError: it cannot.
    """
    if inspect.isgeneratorfunction(job) or inspect.isasyncgenfunction(job):
        raise TypeError(f"limited({template!r}) takes no generator function, whose body runs later: {job!r}")
    if is_coroutine_function(job) is not is_for_tasks:
        kind = "a plain function, which redislock_fast.limited takes"
        if not is_for_tasks:
            kind = "a coroutine function, which redislock_fast.asyncio.limited takes"
        raise TypeError(f"limited({template!r}): this is {kind}: {job!r}")


class Limits(Generic[_Semaphore]):
    """The semaphores of one decorated function, by name.

    Args:
        template: of the name, with the parameters of the function in braces, as for `str.format`.
        job: the function.
        make: makes the semaphore of a name.

    Raises:
        TypeError: the template is no str.
        ValueError: it is no template, or the function has no such parameter.
    """

    def __init__(self, template: str, job: Callable[..., Any], make: Callable[[str], _Semaphore]) -> None:
        if not isinstance(template, str):
            raise TypeError(f"limited takes a name, or a template of one, as a str, not {type(template).__name__}")
        self._template = template
        self._signature = inspect.signature(job)
        self._make = make
        self._by_name: dict[str, _Semaphore] = {}
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
        for field in fields:
            name = field.partition(".")[0].partition("[")[0]
            if name not in self._signature.parameters:
                called = getattr(job, "__qualname__", job)  # a partial function has none
                raise ValueError(f"limited({template!r}): {called}() has no parameter {name!r}")
        self._is_template = bool(fields) or "{{" in template or "}}" in template

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Semaphore:
        """The semaphore of a call with these arguments.

        Raises:
            TypeError: the function does not take them.
        """
        name = self._template
        if self._is_template:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            name = name.format_map(bound.arguments)
        semaphore = self._by_name.get(name)
        if semaphore is None:
            if len(self._by_name) >= _MOST:
                self._by_name.clear()
            semaphore = self._by_name.setdefault(name, self._make(name))
        return semaphore
