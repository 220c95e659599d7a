"""What tests of a loop's pipe run on: each pipe, and each kind of loop."""

from __future__ import annotations

import pytest

from tests.support.async_peer import PIPES, MakePipe


@pytest.fixture(scope="session", params=PIPES)
def make_loop_pipe(request: pytest.FixtureRequest) -> MakePipe:
    maker: MakePipe = request.param
    return maker


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind
