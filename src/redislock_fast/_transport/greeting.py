"""The first requests on a connection: they ask what its server understands, and tell whose the connection is.

Nothing here waits or receives.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import PurePath
from typing import Any

import hiredis

from redislock_fast._pipe.base import Args, ConnectionBroken, Reply
from redislock_fast._protocol.capabilities import (
    PING,
    Capabilities,
    greeting,
    is_named,
    may_read_from_replica,
    read_greeting,
)
from redislock_fast._protocol.identity import introduction
from redislock_fast._protocol.operation import MISCONF, NotExecuted, later_code
from redislock_fast._util.tokens import TokenSource

_program: str | None = None
"""What this process calls itself; None: by its script."""


def first_requests(tokens: TokenSource, greets: bool) -> list[Args]:
    """What is sent first.

    Args:
        tokens: of the connection.
        greets: whether the capabilities are asked for.
    """
    return greeting(_introduction(tokens)) if greets else PING


def leave_unnamed(connection: Any) -> None:
    """Have redis-py not tell the server its library's name and version: `first_requests` tells more.

    It would wait for two replies more, and a caller whose time is up during them would be late.
    """
    connection.driver_info = connection.lib_name = connection.lib_version = None  # the first is of newer redis-py


def take_greeting(pipe: Any, tokens: TokenSource, replies: list[Reply]) -> tuple[Capabilities, Args | None]:
    """Read the replies. Returns the capabilities and the connection's `ending`.

    A server that does not know `CLIENT SETINFO` gets the text as the name of the connection, unless that has a name.
    A cluster client that reads from replicas has told the node so, which would then go on to answer reads once it is
    a replica: it is told otherwise. No caller waits for these replies.

    Raises:
        NotExecuted: the server answers "later", as while a script runs for long: what it understands is not known.
    """
    for reply in replies:
        later = later_code(str(reply)) if isinstance(reply, hiredis.ReplyError) else ""
        if later and later != MISCONF:  # the reply to a PING
            raise NotExecuted(later, str(reply))
    told = replies[-1]
    if len(replies) == len(PING) or (isinstance(told, hiredis.ReplyError) and str(told).startswith("NOPERM")):
        tokens.disown()
    elif isinstance(told, hiredis.ReplyError) and not is_named(replies):
        with contextlib.suppress(ConnectionBroken):
            pipe.post((b"CLIENT", b"SETNAME", _introduction(tokens)))
    if len(replies) > len(PING) and may_read_from_replica(replies):
        with contextlib.suppress(ConnectionBroken):
            pipe.post((b"READWRITE",))
    return read_greeting(replies)


def introduce_as(program: str) -> None:
    """Have all connections that are made from now on tell the server this name in the place of the script's."""
    global _program  # noqa: PLW0603  # the only place that changes it
    _program = program


def _introduction(tokens: TokenSource) -> bytes:
    host = socket.gethostname().partition(".")[0]
    path = PurePath((getattr(sys, "argv", None) or [""])[0])
    script = path.parent.name if path.name == "__main__.py" else path.name  # python -m package
    return introduction(tokens.identifier, host, os.getpid(), script if _program is None else _program)
