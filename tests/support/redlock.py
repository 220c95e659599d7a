"""Helpers of the tests of Redlock: the clients of five servers, and the values on the servers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import redis

from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.worlds import World

LIMIT_S = 60.0
"""Longer than a test lasts: waiting for a silent server for so long fails the test."""

SHORT_S = 0.8
"""A limit that is to be reached; not so short that a server which answers does not."""


def clients_of(fleet: Iterable[Listening], **options: Any) -> list[redis.Redis]:
    """A client of each server."""
    return [redis.Redis(port=server.port, **options) for server in fleet]


class Make:
    """Makes Redlocks on some servers, for a test's world: `make(timeout=10)`."""

    def __init__(self, world: World, fleet: Iterable[Server]) -> None:
        self._world = world
        self._ports = [server.port for server in fleet]

    def clients(self, **options: Any) -> list[Any]:
        """A client of each server."""
        return [self._world.connect(port, **options) for port in self._ports]

    def on(self, clients: list[Any], name: str = "name", **settings: Any) -> Any:
        """A lock on these clients."""
        return self._world.redlock(clients, name, **{"timeout": 30, "limit": LIMIT_S, **settings})

    def __call__(self, name: str = "name", **settings: Any) -> Any:
        """A lock on clients of its own, as another process has it."""
        return self.on(self.clients(), name, **settings)

    def connected(self, **settings: Any) -> Any:
        """A lock on clients of its own that have connected: a busy machine may take longer for that than its limit."""
        clients = self.clients()
        warm_up = self.on(clients, "warm-up")
        assert warm_up.acquire() is True
        warm_up.release()
        return self.on(clients, **settings)


class Listening(Protocol):
    """A server, or what stands before it."""

    @property
    def port(self) -> int:
        """Where it listens."""


class Onlooker:
    """Looks at a key on several servers, as often as it is asked, by clients of its own."""

    def __init__(self, fleet: Iterable[Listening]) -> None:
        self._clients: list[Any] = clients_of(fleet)

    def values(self, name: str = "name") -> list[bytes | None]:
        """The value at the key, by server."""
        return [client.get(name) for client in self._clients]

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            client.close()


def values(fleet: Iterable[Listening], name: str = "name") -> list[bytes | None]:
    """The value at the key, by server."""
    with contextlib.closing(Onlooker(fleet)) as onlooker:
        return onlooker.values(name)


def wait_until_free(fleet: Iterable[Listening]) -> None:
    """Return once no server has the key: a majority is enough for an operation to end."""
    with contextlib.closing(Onlooker(fleet)) as onlooker:
        wait_until(lambda: not any(onlooker.values()), "the key is gone everywhere")


def wait_until_held(fleet: Iterable[Server]) -> None:
    """Return once all servers have the key."""
    with contextlib.closing(Onlooker(fleet)) as onlooker:
        wait_until(lambda: all(onlooker.values()), "the key is there everywhere")


def believes_no_more_than_is_true(lock: Any, fleet: Iterable[Server]) -> bool:
    """Whether a majority has the lock for as long as the lock believes, at least."""
    believed_s: float = lock.remaining()
    left_s: list[float] = sorted(client.pttl("name") / 1000 for client in clients_of(fleet))
    return 0 < believed_s <= left_s[len(left_s) // 2] + SHORT_S  # looking takes its time


@contextlib.contextmanager
def freezing(*servers: Server) -> Iterator[None]:
    """Within the block, the servers are frozen."""
    for server in servers:
        server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for server in servers:
            server.signal(signal.SIGCONT)


def take(servers: Iterable[Server]) -> None:
    """Have the lock held by another client at these servers."""
    for server in servers:
        with redis.Redis(port=server.port) as client:
            client.set("name", "another's")


def delete(servers: Iterable[Server]) -> None:
    """Have the lock deleted at these servers."""
    for server in servers:
        with redis.Redis(port=server.port) as client:
            client.delete("name")
