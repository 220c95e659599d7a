"""Servers for the tracked operations: one of each kind that is installed, for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from redislock_fast.server import KINDS, Server, find_binary


@pytest.fixture(scope="session", params=KINDS)
def client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """A client of a server of each kind."""
    if find_binary(request.param) is None:
        pytest.skip(f"no {request.param} server is installed")
    with Server(request.param) as server, redis.Redis.from_url(server.url) as connected:
        yield connected
