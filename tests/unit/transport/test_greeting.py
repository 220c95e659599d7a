"""The first requests on a connection. No server."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import Args, ConnectionBroken, Reply
from redislock_fast._protocol.identity import read_introduction
from redislock_fast._protocol.operation import NotExecuted
from redislock_fast._transport.greeting import first_requests, take_greeting
from redislock_fast._util.redis_py import own_copy
from redislock_fast._util.tokens import TokenSource, is_of_connection

UNKNOWN = hiredis.ReplyError("ERR Unknown subcommand or wrong number of arguments for 'SETINFO'")
NOPERM = hiredis.ReplyError("NOPERM User u has no permissions to run the 'client|setinfo' command")
NO_INFO = hiredis.ReplyError("NOPERM User u has no permissions to run the 'client|info' command")
INFO = b"id=7 addr=127.0.0.1:51406 name=%b age=0"
BUSY = hiredis.ReplyError("BUSY The server is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.")


class Pipe:
    """Takes requests whose replies nobody waits for."""

    def __init__(self, broken: bool = False) -> None:
        self.posted: list[Args] = []
        self._broken = broken

    def post(self, args: Args, _: Any = None) -> None:
        if self._broken:
            raise ConnectionBroken(True, "gone")
        self.posted.append(args)


def answers(info: Reply, told: Reply) -> list[Reply]:
    """The replies to the first requests."""
    return [None, {b"mode": b"standalone"}, info, told]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/srv/app/worker.py", "--secret"], "worker.py"),
        (["/usr/lib/python3/celery/__main__.py"], "celery"),
        (["-c"], "-c"),
        ([""], ""),
        ([], ""),
    ],
)
def test_connection_tells_its_identifier_and_its_process(
    argv: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(socket, "gethostname", lambda: "web-1.example.org")
    tokens = TokenSource()
    *_, introduction = first_requests(tokens, greets=True)
    assert (b"CLIENT", b"SETINFO", b"LIB-NAME") == introduction[:3]
    assert isinstance(introduction[3], bytes)
    assert (tokens.identifier, "web-1", os.getpid(), expected) == read_introduction(introduction[3])


@pytest.mark.parametrize(
    ("info", "told", "expected"),
    [
        (INFO % b"", b"OK", (False, True)),
        (INFO % b"", UNKNOWN, (True, True)),
        (INFO % b"theirs", UNKNOWN, (False, True)),
        (NO_INFO, UNKNOWN, (False, True)),
        (INFO % b"", NOPERM, (False, False)),
        (NO_INFO, NOPERM, (False, False)),
    ],
    ids=["told", "by name", "named", "perhaps named", "forbidden", "all forbidden"],
)
def test_server_that_does_not_know_of_libraries_is_told_by_the_name_of_a_connection_without_one(
    info: Reply, told: Reply, expected: tuple[bool, bool]
) -> None:
    pipe, tokens = Pipe(), TokenSource()
    *_, (_, _, _, text) = first_requests(tokens, greets=True)
    take_greeting(pipe, tokens, answers(info, told))
    assert ([(b"CLIENT", b"SETNAME", text)] if expected[0] else []) == pipe.posted
    assert expected[1] is is_of_connection(tokens.identifier)


def test_connection_that_breaks_meanwhile_is_noticed_later() -> None:
    capabilities, ending = take_greeting(Pipe(broken=True), TokenSource(), answers(INFO % b"", UNKNOWN))
    assert capabilities.queues
    assert ending is not None


@pytest.mark.parametrize("reply", [b"PONG", hiredis.ReplyError("MISCONF unable to save")], ids=["pong", "full disk"])
def test_connection_to_a_server_that_is_asked_for_nothing_has_no_identifier_of_its_own(reply: Reply) -> None:
    pipe, tokens = Pipe(), TokenSource()
    assert [(b"PING",)] == first_requests(tokens, greets=False)
    capabilities, ending = take_greeting(pipe, tokens, [reply])
    assert (False, None, []) == (capabilities.queues, ending, pipe.posted)
    assert not is_of_connection(tokens.identifier)


@pytest.mark.parametrize("replies", [[BUSY, {b"mode": b"standalone"}, BUSY, BUSY], [BUSY]], ids=["greeting", "ping"])
def test_server_that_says_later_is_not_taken_for_one_that_understands_little(replies: list[Reply]) -> None:
    with pytest.raises(NotExecuted, match="busy running a script") as raised:
        take_greeting(Pipe(), TokenSource(), replies)
    assert (raised.value.code, str(raised.value)) == ("BUSY", str(BUSY))
    twin = own_copy(raised.value)
    assert twin is not raised.value
    assert (twin.code, str(twin)) == ("BUSY", str(BUSY))


@pytest.mark.parametrize(("flags", "expected"), [(b"r", [(b"READWRITE",)]), (b"N", [])])
def test_connection_of_a_client_that_reads_from_replicas_reads_from_none(flags: bytes, expected: list[Args]) -> None:
    pipe = Pipe()
    take_greeting(pipe, TokenSource(), answers(INFO % b"" + b" flags=" + flags, b"OK"))
    assert pipe.posted == expected
