"""Fixtures of the tests of holding."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from redislock_fast.server import Server
from tests.conftest import FLEETS, Servers
from tests.support.holding import Holders
from tests.support.redlock import wait_until_held
from tests.support.waiting import Contender


class Held:
    """Makes locks that are held, on one server or on a majority of several: `hold(**settings)`.

    Attributes:
        servers: all of them.
        majority: as few as decide.
        minority: the others.
    """

    def __init__(self, holders: Holders, servers: list[Server]) -> None:
        self._holders = holders
        self.servers = servers
        count = len(servers) // 2 + 1
        self.majority, self.minority = servers[:count], servers[count:]

    def __call__(self, everywhere: bool = True, **settings: Any) -> Contender:
        """A lock on clients of its own that is held at all servers, or at so many as decide."""
        if len(self.servers) == 1:
            return self._holders.hold(self.servers[0].port, **settings)
        clients = self._holders.clients(self.servers)
        for client in clients:
            self._holders.on(client).call("locked")  # connects: on a busy machine, that takes longer than a round
        holder = self._holders.hold_redlock(clients, **settings)
        if everywhere:
            wait_until_held(self.servers)
        return holder


@pytest.fixture(params=["valkey", "mixed"])
def hold(request: pytest.FixtureRequest, holders: Holders, servers: Servers) -> Held:
    """Locks on Valkey, and on a majority of servers of several kinds."""
    kinds = FLEETS["mixed"] if request.param == "mixed" else (request.param,)
    numbers = range(1, 6) if request.param == "mixed" else range(1)
    chosen = [servers.get(kind, number) for kind, number in zip(kinds, numbers, strict=True)]
    for server in chosen:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    return Held(holders, chosen)
