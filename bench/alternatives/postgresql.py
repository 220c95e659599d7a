"""Locks in PostgreSQL: a row of a table that expires, and an advisory lock that lasts as long as its session.

Each thread has a session of its own, and each statement is committed at once.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bench.alternatives import places
from bench.alternatives.locks import Alternative, PollingLock, released
from bench.contestants import LEASE_S, AbsentError
from bench.contestants.commands import new_token
from redislock_fast.server import free_port

if TYPE_CHECKING:
    import psycopg

_PACKAGE = "postgresql"
_PROGRAMS = "usr/lib/postgresql/*/bin"  # Debian keeps the versions apart
_USER = "postgres"  # the server refuses to run as root

_TABLE = (
    """
    CREATE TABLE distributed_locks (
        lock_name VARCHAR(255) PRIMARY KEY,
        owner_id VARCHAR(255) NOT NULL,
        acquired_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
        expires_at TIMESTAMPTZ NOT NULL
    )
    """,
    "CREATE INDEX idx_expires_at ON distributed_locks (expires_at)",
)
_INSERT = f"""
    INSERT INTO distributed_locks (lock_name, owner_id, expires_at)
    VALUES (%s, %s, now() + INTERVAL '{LEASE_S} seconds')
    ON CONFLICT (lock_name) DO UPDATE
        SET owner_id = EXCLUDED.owner_id, acquired_at = EXCLUDED.acquired_at, expires_at = EXCLUDED.expires_at
        WHERE distributed_locks.expires_at < now()
"""
_DELETE = "DELETE FROM distributed_locks WHERE lock_name = %s AND owner_id = %s"


class TableLock(PollingLock):
    """A row with the owner and the end of the lease, as articles on distributed locks propose it.

    Args:
        session: used by this thread alone.
        name: of the lock.
    """

    def __init__(self, session: psycopg.Connection[Any], name: str) -> None:
        self._session = session
        self._name = name
        self._owner = ""

    def attempt(self) -> bool:
        """Insert the row, or replace a row whose lease has ended."""
        owner = new_token()
        if self._session.execute(_INSERT, (self._name, owner)).rowcount != 1:
            return False
        self._owner = owner
        return True

    def release(self) -> None:
        """Delete the row of this owner."""
        released(self._session.execute(_DELETE, (self._name, self._owner)).rowcount == 1)


class AdvisoryLock(PollingLock):
    """A lock of the server itself: the server writes nothing, and the lock lasts as long as the session.

    Args:
        session: used by this thread alone.
        name: of the lock.
    """

    def __init__(self, session: psycopg.Connection[Any], name: str) -> None:
        self._session = session
        self._name = name

    def attempt(self) -> bool:
        """Acquire the lock for the session."""
        return self._answer("SELECT pg_try_advisory_lock(hashtextextended(%s, 0))")

    def release(self) -> None:
        """Release the lock."""
        released(self._answer("SELECT pg_advisory_unlock(hashtextextended(%s, 0))"))

    def _answer(self, query: str) -> bool:
        row = self._session.execute(query, (self._name,)).fetchone()
        return row is not None and row[0] is True


@dataclass(frozen=True)
class Cluster:
    """A running server.

    Attributes:
        port: on loopback.
        closing: closes the open sessions before the server ends.
    """

    port: int
    closing: ExitStack

    def session(self, synchronous_commit: str = "on") -> psycopg.Connection[Any]:
        """Open a session.

        Args:
            synchronous_commit: "on" when a commit waits for the disk, else "off".
        """
        import psycopg  # noqa: PLC0415 - optional

        session = psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=_USER,
            dbname=_USER,
            autocommit=True,
            options=f"-c synchronous_commit={synchronous_commit}",
        )
        return self.closing.enter_context(session)

    def answers(self) -> bool:
        """Whether the server accepts a session."""
        import psycopg  # noqa: PLC0415 - optional

        try:
            self.session()
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def open_cluster() -> Iterator[Cluster]:
    """Start a server with the table and with default settings, except for its address.

    Yields:
        The server; it ends with the context.

    Raises:
        AbsentError: when the server or its driver is not installed.
    """
    initdb, postgres = (places.program(name, _PACKAGE, _PROGRAMS) for name in ("initdb", "postgres"))
    if not find_spec("psycopg"):
        raise AbsentError("no Python package psycopg")
    user = _USER if os.geteuid() == 0 else None
    port = free_port()
    with places.folder(user) as folder:
        data = folder / "data"
        settings = ("-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C")
        subprocess.run([initdb, "-D", data, *settings], check=True, stdout=subprocess.DEVNULL, user=user, cwd=folder)
        listening = ("-c", "listen_addresses=127.0.0.1", "-p", str(port), "-k", str(folder))
        command = [str(postgres), "-D", str(data), *listening]
        with places.Daemon(command, folder / "log", user) as server, ExitStack() as closing:
            cluster = Cluster(port, closing)
            server.wait_until(cluster.answers)
            session = cluster.session()
            for statement in _TABLE:
                session.execute(statement)
            yield cluster


@contextmanager
def open_server() -> Iterator[list[Alternative]]:
    """Start a server.

    Yields:
        The alternatives; the server ends with the context.

    Raises:
        AbsentError: when the server or its driver is not installed.
    """
    with open_cluster() as cluster:
        server = f"PostgreSQL {cluster.session().info.parameter_status('server_version')}"

        def alternative(
            name: str, kept: str, lock_class: type[TableLock | AdvisoryLock], synchronous_commit: str = "on"
        ) -> Alternative:
            def make(lock_name: str) -> TableLock | AdvisoryLock:
                return lock_class(cluster.session(synchronous_commit), lock_name)

            return Alternative(name, kept, server, lambda: make)

        yield [
            alternative("PostgreSQL table, synchronous_commit on", "disk", TableLock),
            alternative("PostgreSQL table, synchronous_commit off", "memory; disk within 0.6 s", TableLock, "off"),
            alternative("PostgreSQL advisory lock", "memory, of the session", AdvisoryLock),
        ]
