"""Sentinels, which name the primary of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redislock_fast.server import Server

__all__ = ["SERVICE", "announce", "sentinel_of"]

SERVICE = "service"


def sentinel_of(primary: Server, folder: Path, quorum: int = 1, options: dict[str, str] | None = None) -> Server:
    """Start a sentinel that watches a primary; the caller closes it.

    Args:
        primary: the service's.
        folder: for the name of the program: a server becomes a sentinel by its name.
        quorum: how many sentinels must agree.
        options: further lines of its configuration.
    """
    program = folder / "redis-sentinel"
    if not program.exists():
        program.symlink_to(primary.binary)
    monitored = {"sentinel monitor": f"{SERVICE} 127.0.0.1 {primary.port} {quorum}"}
    return Server(str(program), monitored | (options or {}))


def announce(admin: Any, primary: Server) -> None:
    """Let a sentinel call this server the primary from now on.

    Args:
        admin: a client of the sentinel.
        primary: the server.
    """
    admin.execute_command("SENTINEL", "REMOVE", SERVICE)
    admin.execute_command("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", primary.port, 1)
