"""The parts of semaphores without a server: names of limited functions, the permits of each caller, open blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast._semaphore.callers import Callers, Permits, TaskCallers, ThreadCallers
from redislock_fast._semaphore.limiting import Limits
from tests.support.helpers import in_thread


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


# The permits of each thread or task, and the blocks that are open


KINDS = pytest.mark.parametrize("kind", [ThreadCallers, TaskCallers])


def test_each_thread_has_permits_of_its_own() -> None:
    callers = ThreadCallers()
    mine = callers.mine()
    assert callers.mine() is mine
    assert in_thread(lambda: callers.mine() is not mine)


def test_each_task_has_permits_of_its_own() -> None:
    callers = TaskCallers()

    async def mine() -> Permits:
        assert callers.mine() is callers.mine()
        return callers.mine()

    async def scenario() -> tuple[Permits, Permits]:
        return await asyncio.gather(mine(), mine())

    first, second = asyncio.run(scenario())
    assert first is not second
    assert callers.mine() is callers.mine() is not first


@KINDS
def test_a_caller_leaves_its_innermost_block(kind: type[Callers]) -> None:
    callers = kind()
    for permit in ("outer", "inner"):
        callers.enter(permit)
    assert [callers.leave(), callers.leave(), callers.leave()] == ["inner", "outer", None]
    assert callers.open == {}


def test_a_caller_without_a_block_leaves_the_latest_of_another() -> None:
    callers = ThreadCallers()
    callers.enter("mine")

    def enter_and_leave() -> list[str | None]:
        callers.enter("theirs")
        return [callers.leave(), callers.leave(), callers.leave()]

    assert in_thread(enter_and_leave) == ["theirs", "mine", None]
    callers.enter("next")
    assert [callers.leave(), callers.leave()] == ["next", None]  # not "mine", which another thread has left
