"""The names of the semaphores of a function that `limited` decorates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast._semaphore.limiting import Limits


def job(user: Any, *rest: int, kind: str = "pdf", **more: int) -> None:
    """Stands for the function that is limited."""


def noting(made: list[str]) -> Callable[[str], str]:
    """Makes what is asked for, and notes it."""

    def make(name: str) -> str:
        made.append(name)
        return name

    return make


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("plain", "plain"),
        ("{user}", "anna"),
        ("{{user}}:{user}", "{user}:anna"),
        ("{user!r}:{kind:>5}", "'anna':  pdf"),
        ("{user.__class__.__name__}:{rest[1]}:{more[page]}", "str:2:3"),
    ],
)
def test_the_name_is_made_of_the_calls_arguments(template: str, name: str) -> None:
    made: list[str] = []
    limits: Limits[str] = Limits(template, job, noting(made))
    for _ in range(2):
        assert limits.of(("anna", 1, 2), {"page": 3}) == name
    assert made == [name]


def test_arguments_that_the_function_does_not_take_are_refused() -> None:
    limits: Limits[str] = Limits("{user}", job, str)
    with pytest.raises(TypeError):
        limits.of((), {})


@pytest.mark.parametrize("template", ["{other}", "{}", "{0}", "{user", "user}"])
def test_what_is_no_template_of_the_arguments_is_refused(template: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # some texts are Python's
        Limits(template, job, str)


def test_a_bounded_number_of_semaphores_is_kept() -> None:
    made: list[str] = []
    limits: Limits[str] = Limits("{user}", job, noting(made))
    for user in [*range(2000), 0]:
        limits.of((user,), {})
    assert len(made) == 2001
    assert len(limits._by_name) <= 1024
