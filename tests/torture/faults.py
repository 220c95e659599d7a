"""The faults that are made while processes use locks, one at a time, each noted with its class and its time.

A fault that goes on by itself, such as a pause, is noted until its end. One that concerns one link or one process is
noted with the name of that process.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from redislock_fast.server import Server
from tests.support.clusters import Cluster
from tests.support.proxy import Proxy
from tests.torture.history import SECOND, Log, now_ns
from tests.torture.sentinels import Watched

__all__ = ["PASSWORD", "ClusterFaults", "Faults", "SentinelFaults", "Target"]

PASSWORD = "torture"
"""Of single servers: a connection may lose its authentication."""

_STRIKES_WITHIN_S = 0.5

_RIGHTS = (("eval", "evalsha"), ("publish",), ("subscribe", "psubscribe"), ("set",), ("client",))
"""Which commands a user may lose for a while."""


class Target(Protocol):
    """A process that uses locks.

    Attributes:
        name: in the history.
        pid: its process id.
        links: the proxies that it connects through; none: it connects to the servers.
    """

    name: str
    links: list[Proxy]

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End it as a crash would, and put another one in its place."""


class Faults:
    """Makes faults.

    Args:
        servers: whose locks are used. A fault of a server concerns one of them.
        admins: a client of each.
        targets: the processes that use them.
        names: of the locks that all of them use.
        log: where faults are noted.
        chance: chooses.
    """

    _has_passwords = True
    _server: Server
    _admin: Any

    def __init__(
        self,
        servers: list[Server],
        admins: list[Any],
        targets: list[Any],
        names: tuple[str, ...],
        log: Log,
        chance: random.Random,
    ) -> None:
        self._servers = servers
        self.admins = admins
        self._targets = targets
        self._linked = [target for target in targets if target.links]
        self._names = names
        self._log = log
        self._chance = chance

    def primaries(self) -> list[int]:
        """The numbers of the servers that have the locks now."""
        return list(range(len(self._servers)))

    def _choose_server(self) -> None:
        number = self._chance.choice(self.primaries())
        self._server, self._admin = self._servers[number], self.admins[number]

    def make_one(self) -> None:
        """Make a fault, and wait until it is over."""
        self._choose_server()
        faults = [*self._of_server(), *self._of_processes()]
        links = self._of_links()
        fault = self._chance.choice(links if links and self._chance.random() < 0.4 else faults)
        fault()

    @contextmanager
    def _noted(self, kind: str, lasts_s: float = 0.0, **concerned: Any) -> Iterator[None]:
        """Note the fault of the block; it goes on for so long behind it."""
        since = now_ns()
        try:
            yield
        finally:
            self._log.note("fault", since, kind=kind, until=now_ns() + int(lasts_s * SECOND), **concerned)

    def _wait(self, most_s: float) -> None:
        """Let a fault last: mostly shortly."""
        time.sleep(most_s * self._chance.random() ** 2)

    # ---- of the server ----

    def _of_server(self) -> list[Callable[[], None]]:
        return [
            self._stop_server,
            self._kill_server,
            self._kill_connections,
            self._pause,
            self._flush_scripts,
            self._take_rights,
            lambda: self._refuse("out of memory", "maxmemory", "1", "0"),
            lambda: self._refuse("no replicas", "min-replicas-to-write", "1", "0"),
            self._delete,
            self._flush,
        ]

    def _stop_server(self) -> None:
        with self._noted("server stopped"):
            self._server.signal(signal.SIGSTOP)
            self._wait(1.0)
            self._server.signal(signal.SIGCONT)

    def _kill_server(self) -> None:
        """It has written each command to its file before it answers, so it loses nothing."""
        with self._noted("server killed"):
            self._server.kill()
            self._wait(0.3)
            self._server.start()

    def _kill_connections(self) -> None:
        with self._noted("clients killed"):
            self._kill_all()

    def _kill_all(self) -> None:
        for kind in ("normal", "pubsub"):
            self._admin.execute_command("CLIENT", "KILL", "TYPE", kind)

    def _pause(self) -> None:
        paused_s = 0.5 * self._chance.random()
        with self._noted("clients paused", paused_s):
            self._admin.execute_command("CLIENT", "PAUSE", int(1000 * paused_s), self._chance.choice(("ALL", "WRITE")))

    def _flush_scripts(self) -> None:
        with self._noted("scripts flushed"):
            self._admin.script_flush()

    def _take_rights(self) -> None:
        """A connection that was refused a command does without it for good: so all connections are made anew."""
        rights = self._chance.choice(_RIGHTS)
        with self._noted("rights taken"):
            self._admin.execute_command("ACL", "SETUSER", "default", *("-" + right for right in rights))
            self._wait(0.5)
            self._admin.execute_command("ACL", "SETUSER", "default", *("+" + right for right in rights))
            self._kill_all()

    def _refuse(self, kind: str, setting: str, on: str, off: str) -> None:
        with self._noted(kind):
            self._admin.config_set(setting, on)
            self._wait(0.5)
            self._admin.config_set(setting, off)

    def _delete(self) -> None:
        name = self._chance.choice(self._names)
        with self._noted("key deleted", names=[name]):
            self._admin.delete(name)

    def _flush(self) -> None:
        with self._noted("all deleted"):
            self._admin.flushall()

    # ---- of processes ----

    def _of_processes(self) -> list[Callable[[], None]]:
        return [self._stop_client, self._kill_client, self._interrupt, self._interrupt]

    def _stop_client(self) -> None:
        target = self._chance.choice(self._targets)
        with self._noted("client stopped", processes=[target.name]), contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGSTOP)
            self._wait(2.0)
            os.kill(target.pid, signal.SIGCONT)

    def _kill_client(self) -> None:
        with self._noted("client killed"):
            self._chance.choice(self._targets).kill()

    def _interrupt(self) -> None:
        target = self._chance.choice(self._targets)
        with self._noted("interrupt", processes=[target.name]), contextlib.suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGINT)

    # ---- of links ----

    def _forget(self, target: Any, link: Proxy) -> None:
        with self._noted("authentication lost", processes=[target.name]):
            link.forget()

    def _of_links(self) -> list[Callable[[], None]]:
        if not self._linked:
            return []
        target = self._chance.choice(self._linked)
        link: Proxy = self._chance.choice(target.links)

        def noted(kind: str, lasts_s: float = 0.0) -> Any:
            return self._noted(kind, lasts_s, processes=[target.name])

        def strike(kind: str, arm: Callable[..., None]) -> None:
            with noted(kind):
                arm(nth=self._chance.randrange(1, 4), share=self._chance.choice((0, 0, 0.5)))
                link.dropped.wait(_STRIKES_WITHIN_S)
                link.disarm()

        def cut() -> None:
            with noted("link cut"):
                link.refuse()
                link.cut()
                self._wait(0.3)
                link.accept()

        def half_open() -> None:
            with noted("link half open"):
                link.hold(messages_pass=self._chance.random() < 0.3)
                self._wait(2.0)
                if self._chance.random() < 0.5:
                    link.cut()
                link.resume()

        def late_bytes() -> None:
            with noted("late bytes"):
                link.stall()
                self._wait(3.0)
                link.thaw()

        def lose_messages() -> None:
            with noted("messages lost"):
                link.lose_messages()
                self._wait(0.5)
                link.lose_messages(False)

        def dribble() -> None:
            with noted("link slow"):
                link.dribbles = True
                self._wait(1.0)
                link.dribbles = False

        return [
            *([lambda: self._forget(target, link)] if self._has_passwords else []),
            lambda: strike("reply lost", link.drop_reply),
            lambda: strike("request lost", link.drop_request),
            cut,
            half_open,
            late_bytes,
            lose_messages,
            dribble,
        ]


class ClusterFaults(Faults):
    """Makes faults of a cluster, too: slots move, and primaries and replicas change places. Nothing is lost by it."""

    _has_passwords = False

    def __init__(self, cluster: Cluster, *concerned: Any) -> None:
        super().__init__(cluster.nodes, cluster.admins, *concerned)
        self._cluster = cluster

    def primaries(self) -> list[int]:
        return self._cluster.primaries()

    def _of_server(self) -> list[Callable[[], None]]:
        # A key is deleted at the one primary that has it, and a dead node does not say whether it is a primary.
        unfit = (self._delete, self._kill_server)
        common = [fault for fault in super()._of_server() if fault not in unfit]
        return [*common, self._move_slot, self._move_slot, self._swap]

    def _move_slot(self) -> None:
        """Let the slot of a lock be on the move for a while, its keys at one place, at both, or at the other."""
        cluster = self._cluster
        slot: int = self._admin.execute_command("CLUSTER", "KEYSLOT", self._chance.choice(self._names))
        (source,) = (number for number in cluster.primaries() if cluster.has(number, slot))
        target = self._chance.choice([number for number in cluster.primaries() if number != source])
        with self._noted("slot moved"):
            cluster.begin_move(slot, source, target)
            self._wait(0.5)
            cluster.move_keys(slot, source, target)
            self._wait(0.5)
            cluster.end_move(slot, source, target)
        cluster.settle()

    def _swap(self) -> None:
        with self._noted("replica promoted"):
            self._cluster.swap(self._chance.choice(self._cluster.primaries()))


class SentinelFaults(Faults):
    """Makes faults of a primary that a sentinel watches, too: its replica takes its place. What a primary writes
    that goes on beside the new one is lost."""

    _has_passwords = False

    def __init__(self, watched: Watched, *concerned: Any) -> None:
        super().__init__(watched.servers, watched.admins, *concerned)
        self._watched = watched

    def primaries(self) -> list[int]:
        return [self._watched.primary]

    def _of_server(self) -> list[Callable[[], None]]:
        return [*super()._of_server(), *[self._promote] * 2, self._split]

    def _promote(self) -> None:
        with self._noted("replica promoted"):
            self._watched.promote()

    def _split(self) -> None:
        with self._noted("primary split"):
            self._watched.split(self._wait)
