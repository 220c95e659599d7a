"""Fixtures of the tests of one lock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from redislock_fast.server import KINDS, Server


@pytest.fixture(params=KINDS)
def mortal_server(request: pytest.FixtureRequest, spare_server: Callable[..., Server]) -> Server:
    """Each kind of server in turn, for this test alone."""
    return spare_server(request.param)
