"""Fixtures of the tests of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast.server import Server
from tests.support.async_helpers import async_few
from tests.support.helpers import few
from tests.support.worlds import World

MakeLocker = Callable[..., Any]


@pytest.fixture
def make_locker(world: World) -> MakeLocker:
    """Makes Lockers of the test's world: `make_locker(port, **options_of_the_client)`. They soon give up."""

    def make(port: int, **options: Any) -> Any:
        retry = few() if world.in_threads else async_few()
        return world.locker(world.connect(port, retry=retry, **options))

    return make


@pytest.fixture
def locker(make_locker: MakeLocker, server: Server) -> Any:
    """A Locker on each kind of server in turn."""
    return make_locker(server.port)


@pytest.fixture
def valkey_locker(make_locker: MakeLocker, valkey: Server) -> Any:
    """A Locker on Valkey."""
    return make_locker(valkey.port)
