"""The capabilities of a connection's server, and the requests that find them out.

Versions are not trusted: a Valkey may call itself Redis 7.2.4. A probe that is denied or unknown gives the plain
capabilities, which every server since Redis 6.2 has.
"""

from __future__ import annotations

from redislock_fast._pipe.base import Args, Reply

PROBE: Args = (b"COMMAND", b"INFO", b"DELIFEQ", b"DELEX", b"LMPOP")
"""Which of these commands the server has."""

HELLO: Args = (b"HELLO", 3)
"""Asks for RESP3, in which a server may push messages between replies. Else waiters poll."""

CLIENT_INFO: Args = (b"CLIENT", b"INFO")
"""Asks what the server calls the connection (Redis 6.2); see `ending`."""

PING: list[Args] = [(b"PING",)]
"""Sent instead of `greeting` to a server that closes connections for requests that it does not know."""


class Capabilities:
    """The capabilities of the server of one connection.

    All callers of the connection share it. An attribute is only ever lowered, so a stale read costs one refused
    request.

    Attributes:
        set_get: `SET ... NX GET` (Redis 7.0): its reply alone says whether the lock was acquired, or whose it is.
        release: the native compare-and-delete, b"DELIFEQ" (Valkey 9.0) or b"DELEX" (Redis 8.4), or None: then the
            script does it, at three to four times the cost for the server.
        set_ifeq: `SET ... IFEQ token` (Valkey 8.1, Redis 8.4).
        push: messages may come between replies.
        queues: the requests of the key queue may be sent; else the server might close the connection for them.
        sharded: the server is a node of a cluster, and channels have slots as keys have (Redis 7.0).
    """

    __slots__ = ("push", "queues", "release", "set_get", "set_ifeq", "sharded")

    def __init__(self, probe_reply: Reply = None, hello_reply: Reply = None, queues: bool = True) -> None:
        """Read the replies to `COMMAND INFO` and `HELLO`; errors (forbidden, unknown) give the plain capabilities."""
        self.queues = queues
        known = probe_reply if isinstance(probe_reply, list) else []
        delifeq, delex, lmpop = (bool(entry) for entry in known) if len(known) == 3 else (False,) * 3
        self.set_get = lmpop  # LMPOP came with Redis 7.0, as NX together with GET did
        self.set_ifeq = delifeq or delex
        self.release = b"DELIFEQ" if delifeq else b"DELEX" if delex else None
        hello = hello_reply if isinstance(hello_reply, dict) else {}
        self.sharded = hello.get(b"mode") == b"cluster"
        self.push = bool(hello) and (lmpop or not self.sharded)


def greeting(introduction: bytes) -> list[Args]:
    """The requests that are sent once per connection. `introduction` is the text of `identity.py`."""
    return [PROBE, HELLO, CLIENT_INFO, (b"CLIENT", b"SETINFO", b"LIB-NAME", introduction)]


def read_greeting(replies: list[Reply]) -> tuple[Capabilities, Args | None]:
    """The capabilities of a connection and its `ending`, by the replies to `greeting` or to `PING`."""
    if len(replies) == len(PING):
        return Capabilities(queues=False), None
    probed, greeted, described, _ = replies
    return Capabilities(probed, greeted), ending(described)


def is_named(replies: list[Reply]) -> bool:
    """Whether the connection has a name, or may have one, by the replies to `greeting`."""
    return _fields(replies[2]).get(b"name") != b""


def may_read_from_replica(replies: list[Reply]) -> bool:
    """Whether a replica of a cluster answers reads on the connection (`READONLY`), by the replies to `greeting`."""
    return b"r" in _fields(replies[2]).get(b"flags", b"")


def ending(client_info: Reply) -> Args | None:
    """The request by which another connection ends this one: the server executes nothing more from it.

    It names the connection by number and address: after a failover, another server may have given the number to a
    connection of another client.

    Args:
        client_info: the connection's own reply to `CLIENT INFO`; for an error, None is returned.
    """
    fields = _fields(client_info)
    if b"id" not in fields or b"addr" not in fields:
        return None
    return (b"CLIENT", b"KILL", b"ID", fields[b"id"], b"ADDR", fields[b"addr"])


def _fields(client_info: Reply) -> dict[bytes, bytes]:
    described = client_info if isinstance(client_info, bytes) else b""
    return dict(field.partition(b"=")[::2] for field in described.split())


def native_release(capabilities: Capabilities, key: bytes, token: bytes) -> Args:
    """The native compare-and-delete, on a server that has one."""
    if capabilities.release == b"DELIFEQ":
        return (b"DELIFEQ", key, token)
    return (b"DELEX", key, b"IFEQ", token)
