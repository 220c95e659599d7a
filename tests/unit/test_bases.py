"""A class of the package derives from few others of the package: else no reader can follow `self.name`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import redislock_fast

MOST_BASES = 2

EXCEPTIONS = {
    f"_protocol.{name}"
    for name in (
        "fenced.AcquireManyFenced",
        "fenced.AcquireOwnFenced",
        "fenced.RedeemFenced",
        "own_token.Redeem",
        "queue.LeaveQueue",
    )
}
"""The operations that still have more. None may be added."""


def bases_that_count(class_: type) -> list[type]:
    """The classes of the package that a class derives from, except protocols and exceptions."""
    return [
        base
        for base in class_.__mro__[1:]
        if base.__module__.startswith("redislock_fast")
        and not getattr(base, "_is_protocol", False)
        and not issubclass(base, BaseException)
    ]


def classes_of_the_package() -> Iterator[type]:
    for module in pkgutil.walk_packages(redislock_fast.__path__, "redislock_fast."):
        if module.name.endswith("__main__"):
            continue
        with contextlib.suppress(ImportError):  # of a library that is not installed
            names: dict[str, Any] = vars(importlib.import_module(module.name))
            yield from (one for one in names.values() if inspect.isclass(one) and one.__module__ == module.name)


def test_bases_are_counted() -> None:
    class First:
        pass

    class Second(First, LookupError):
        pass

    First.__module__ = Second.__module__ = "redislock_fast.example"
    assert [one.__name__ for one in bases_that_count(type("Third", (First,), {}))] == ["First"]
    assert bases_that_count(type("Fourth", (Second,), {})) == [First]


def test_no_class_has_more_bases_than_a_reader_can_follow() -> None:
    found = {
        f"{class_.__module__}.{class_.__qualname__}".removeprefix("redislock_fast.")
        for class_ in classes_of_the_package()
        if len(bases_that_count(class_)) > MOST_BASES
    }
    assert sorted(found) == sorted(EXCEPTIONS)
