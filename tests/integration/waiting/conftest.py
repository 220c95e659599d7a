"""Fixtures of the tests of waiting: which kind of callers waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.waiting import CALLERS, Tasks, Threads

Callers = Threads | Tasks


@pytest.fixture(params=CALLERS)
def callers_kind(request: pytest.FixtureRequest) -> str:
    """Threads and tasks in turn."""
    name: str = request.param
    return name


@pytest.fixture
def callers(callers_kind: str) -> Iterator[Callers]:
    """The factory of contenders of this kind."""
    with CALLERS[callers_kind]() as running:
        yield running
