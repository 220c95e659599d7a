"""The permits of each thread or task, and the blocks that are open."""

from __future__ import annotations

import asyncio

import pytest

from redislock_fast._semaphore.callers import Callers, Permits, TaskCallers, ThreadCallers
from tests.support.helpers import in_thread

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
