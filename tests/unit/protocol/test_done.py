"""The operation on the mark of a job that is done: what it makes of each reply. No server."""

from __future__ import annotations

import hiredis
import pytest

from redislock_fast._pipe.base import Malformed
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.done import Done
from redislock_fast._protocol.operation import NotExecuted, Refused
from redislock_fast._protocol.scripts import DONE

TOKEN = b"rlf:" + b"0" * 32
SERVER = Capabilities()


def test_job_is_noted_beside_its_lock() -> None:
    note = Done(b"migrate", TOKEN, 60_000)
    rest = (2, b"migrate", b"{migrate}:rlf:done", TOKEN, 60_000)
    assert note.request(SERVER, 0.0) == (b"EVALSHA", DONE.sha, *rest)
    assert note.feed(hiredis.ReplyError("NOSCRIPT No matching script"), SERVER) is False
    assert note.request(SERVER, 0.0) == (b"EVAL", DONE.text, *rest)
    assert (note.feed(0, SERVER), note.result) == (True, False)
    assert (note.feed(1, SERVER), note.result) == (True, True)


def test_look_has_no_token() -> None:
    assert Done(b"migrate").request(SERVER, 0.0)[-2:] == (b"", 0)


def test_errors_of_the_server_are_told() -> None:
    for reply, error in (("NOPERM", Refused), ("LOADING", NotExecuted)):
        with pytest.raises(error):
            Done(b"migrate").feed(hiredis.ReplyError(reply), SERVER)
    with pytest.raises(Malformed):
        Done(b"migrate").feed(b"OK", SERVER)
