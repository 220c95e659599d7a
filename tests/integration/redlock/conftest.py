"""Fixtures of the tests of Redlock."""

from __future__ import annotations

import pytest

from redislock_fast.server import Server
from tests.support.redlock import Make
from tests.support.worlds import world_of


@pytest.fixture
def make(request: pytest.FixtureRequest, fleet: list[Server]) -> Make:
    """Makes Redlocks on the fleet, in the test's world, each on clients of its own."""
    return Make(world_of(request), fleet)
