"""Counts the commands that clients send, as a server's MONITOR shows them.

The counters of INFO do not tell a client's commands from those that scripts call; MONITOR does. It costs the server and
this process time, so it is on while nothing else is measured. Rules: raw bytes while it is on, counting afterwards.
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
    """How often each command comes from clients from now on, those of connecting included.

    Args:
        client: of the server; a connection of its own is made as this client's are.
        until_s: when to end, by `time.monotonic`.

    Returns:
        Calls by the command's name in capitals; None where the server allows no MONITOR.
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
        # After its answer no line comes.
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
