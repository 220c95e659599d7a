"""Counts the commands that clients send, as a server's MONITOR shows them.

The counters of INFO include the commands that scripts call; MONITOR tells them apart. MONITOR costs time of the server
and of this process, so nothing else is measured meanwhile, and the lines are counted afterwards.
"""

from __future__ import annotations

import select
import socket
import time
from collections import Counter

import redis

_CHUNK_BYTES = 1 << 18
_END = b"+RESET\r\n"
_GIVE_UP_S = 30.0


def commands_until(client: redis.Redis, until_s: float) -> Counter[str] | None:
    """Count the commands that clients send from now on, with those of connecting.

    Sends MONITOR and RESET on a connection of its own.

    Args:
        client: of the server; the connection has the settings of this client.
        until_s: when to end, by `time.monotonic`, in seconds.

    Returns:
        The number of calls by command, in capitals; None when the server allows no MONITOR.
    """
    pool = client.connection_pool
    connection = pool.connection_class(**pool.connection_kwargs)
    connection.connect()
    try:
        sock = connection._sock
        sock.settimeout(_GIVE_UP_S)
        sock.sendall(b"MONITOR\r\n")
        chunks: list[bytes] = []
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([sock], [], [], left_s)[0]:
                chunks.append(_receive(sock))
        # No line follows the reply to RESET.
        sock.sendall(b"RESET\r\n")
        while not b"".join(chunks[-2:]).endswith(_END):
            chunks.append(_receive(sock))
    finally:
        connection.disconnect()
    return _count(b"".join(chunks).split(b"\r\n"))


def _receive(sock: socket.socket) -> bytes:
    chunk = sock.recv(_CHUNK_BYTES)
    if not chunk:
        raise redis.ConnectionError("the server closed the connection")
    return chunk


def _count(lines: list[bytes]) -> Counter[str] | None:
    """Count lines like `+1700000000.123456 [0 127.0.0.1:5000] "SET" "name"`; a script's have `lua` in the brackets."""
    if not lines[0].startswith(b"+OK"):
        return None
    found: Counter[str] = Counter()
    for line in lines[1:]:
        sender, bracket, rest = line.partition(b'] "')
        if bracket and not sender.endswith(b" lua"):
            found[rest.partition(b'"')[0].decode().upper()] += 1
    found.pop("RESET", None)
    return found
