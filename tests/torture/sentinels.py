"""A primary with a replica, and a sentinel that says which of the two is the primary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.sentinels import announce, sentinel_of

__all__ = ["Watched"]


class Watched:
    """The two servers and their sentinel.

    Args:
        kind: of server.
        options: of the two servers.
        folder: where the sentinel's program gets its name.

    Attributes:
        servers: the two.
        admins: a client of each.
        primary: the number of the one that is the primary.
        port: of the sentinel.
    """

    def __init__(self, kind: str, options: dict[str, str], folder: Path) -> None:
        self._opened = ExitStack()
        self.servers = [self._opened.enter_context(Server(kind, options)) for _ in range(2)]
        self.admins: list[Any] = [redis.Redis(port=server.port, socket_timeout=20) for server in self.servers]
        self.primary = 0
        self.admins[1].replicaof("127.0.0.1", self.servers[0].port)
        wait_until(self._is_followed, "the replica follows", PATIENCE_S)
        self.port = self._opened.enter_context(sentinel_of(self.servers[0], folder)).port

    def close(self) -> None:
        """End all servers."""
        for admin in self.admins:
            admin.close()
        self._opened.close()

    def _is_followed(self) -> bool:
        """Whether the replica has all that the primary has."""
        primary, replica = (self.admins[number].info("replication") for number in (self.primary, 1 - self.primary))
        is_up = replica.get("master_link_status") == "up"
        return is_up and int(replica["slave_repl_offset"]) >= int(primary["master_repl_offset"])

    def promote(self) -> None:
        """Let the replica become the primary, with all that the primary had, and the primary its replica."""
        old, new = self.admins[self.primary], self.admins[1 - self.primary]
        old.execute_command("CLIENT", "PAUSE", int(1000 * PATIENCE_S), "WRITE")
        try:
            wait_until(self._is_followed, "all is replicated", PATIENCE_S)
            new.replicaof("NO", "ONE")
            self.primary = 1 - self.primary
            old.replicaof("127.0.0.1", self.servers[self.primary].port)
        finally:
            old.execute_command("CLIENT", "UNPAUSE")
        self._announce()
        wait_until(self._is_followed, "the new replica follows", PATIENCE_S)

    def split(self, wait: Callable[[float], object]) -> None:
        """Let the replica become the primary while the primary goes on. What this writes from then on is lost.

        Args:
            wait: lets some time pass, of so many seconds at most.
        """
        old, new = self.admins[self.primary], self.admins[1 - self.primary]
        new.replicaof("NO", "ONE")
        self.primary = 1 - self.primary
        wait(0.5)
        self._announce()
        wait(0.5)
        old.replicaof("127.0.0.1", self.servers[self.primary].port)
        wait_until(self._is_followed, "the new replica follows", PATIENCE_S)

    def _announce(self) -> None:
        """Let the sentinel name the new primary."""
        with redis.Redis(port=self.port) as sentinel:
            announce(sentinel, self.servers[self.primary])
