"""What the server of one connection understands, and how it is asked for that.

Versions are not trusted: a Valkey may call itself Redis 7.2.4. Whatever is denied or unknown gives the plain dialect,
in which every server since Redis 6.2 can be spoken to.
"""

from __future__ import annotations

from redislock_fast._pipe.base import Args, Reply

__all__ = ["CLIENT_INFO", "HELLO", "PROBE", "Dialect", "ending", "native_release"]

PROBE: Args = (b"COMMAND", b"INFO", b"DELIFEQ", b"DELEX", b"LMPOP")
"""Sent once per connection. Versions are not trusted: a Valkey may call itself Redis 7.2.4."""

HELLO: Args = (b"HELLO", 3)
"""Sent behind it: RESP3, in which a server may push messages between replies. Without it, waiters poll."""

CLIENT_INFO: Args = (b"CLIENT", b"INFO")
"""And this (Redis 6.2): what the server calls the connection; see `ending`."""


class Dialect:
    """What the server of one connection understands.

    Attributes:
        set_get: `SET ... NX GET` (Redis 7.0): the one reply tells acquired, ours already, or whose.
        release: the native compare-and-delete, b"DELIFEQ" (Valkey 9.0) or b"DELEX" (Redis 8.4), or None for the script:
            it costs the server three to four times as much.
        set_ifeq: `SET ... IFEQ token` (Valkey 8.1, Redis 8.4).
        push: messages may come between replies.
        sharded: the server is a node of a cluster, and channels have slots as keys have (Redis 7.0).

    Shared by all callers of the connection. Attributes only ever fall, so a stale read costs one refused request.
    """

    __slots__ = ("push", "release", "set_get", "set_ifeq", "sharded")

    def __init__(self, probe_reply: Reply = None, hello_reply: Reply = None) -> None:
        """Read the replies to `PROBE` and `HELLO`; errors (forbidden, unknown) give the plain dialect."""
        known = probe_reply if isinstance(probe_reply, list) else []
        delifeq, delex, lmpop = (bool(entry) for entry in known) if len(known) == 3 else (False,) * 3
        self.set_get = lmpop  # LMPOP came with Redis 7.0, as NX together with GET did
        self.set_ifeq = delifeq or delex
        self.release = b"DELIFEQ" if delifeq else b"DELEX" if delex else None
        hello = hello_reply if isinstance(hello_reply, dict) else {}
        self.sharded = hello.get(b"mode") == b"cluster"
        self.push = bool(hello) and (lmpop or not self.sharded)


def ending(client_info: Reply) -> Args | None:
    """What ends a connection when another one sends it: what the server has not executed by then, it never will.

    By number and address, since after a failover another server may have given the number to somebody else.

    Args:
        client_info: the connection's own reply to `CLIENT_INFO`; for an error, None is returned.
    """
    described = client_info if isinstance(client_info, bytes) else b""
    fields = dict(field.partition(b"=")[::2] for field in described.split())
    if b"id" not in fields or b"addr" not in fields:
        return None
    return (b"CLIENT", b"KILL", b"ID", fields[b"id"], b"ADDR", fields[b"addr"])


def native_release(dialect: Dialect, key: bytes, token: bytes) -> Args:
    """The native compare-and-delete, where there is one."""
    if dialect.release == b"DELIFEQ":
        return (b"DELIFEQ", key, token)
    return (b"DELEX", key, b"IFEQ", token)
