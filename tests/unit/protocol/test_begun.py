"""First requests that leave without a machine: one that is told of them stands where it would if it had sent them.

Rules: those of `test_commands.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import hiredis
import pytest

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import PROBE, Dialect
from redislock_fast._protocol.commands import Acquire, Operation, Release, first_acquire, first_release
from redislock_fast._util.tokens import MARKER
from tests.simulation.model import SERVERS, Model

KEY = b"name"
TOKENS = {"ours": MARKER + b"0123456789abcdef" * 2, "brought": b"token"}
SENT_AT = 50.0

REPLIES: list[Reply] = [
    None,
    0,
    1,
    2,
    b"OK",
    b"another",
    *TOKENS.values(),
    *map(
        hiredis.ReplyError,
        [
            "NOPERM User u has no permissions to run the command",
            "ERR unknown command 'X', with args beginning with: ",
            "NOSCRIPT No matching script. Please use EVAL.",
            "READONLY You can't write against a read only replica.",
            "MOVED 1 127.0.0.1:1",
            "WRONGTYPE Operation against a key holding the wrong kind of value",
        ],
    ),
]


def fed(operation: Operation, reply: Reply, dialect: Dialect) -> tuple[object, ...]:
    """What comes of a reply, and all that the machine then knows."""
    try:
        outcome: object = operation.feed(reply, dialect)
    except Exception as error:
        outcome = (type(error), str(error))
    following = operation.request(dialect, SENT_AT + 1) if outcome is False else None
    return outcome, following, vars(operation), dialect.set_get, dialect.release


def begun_and_asked(
    server: str, first: Callable[[Dialect], tuple[Args, Reply]], make: Callable[[], Acquire | Release], reply: Reply
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    probed = Model(SERVERS[server]).execute(PROBE)
    dialect = Dialect(probed)
    begun = make()
    request, _ = first(dialect)
    begun.resume(request, SENT_AT)
    other = Dialect(probed)
    asked = make()
    assert request == asked.request(other, SENT_AT)
    return fed(begun, reply, dialect), fed(asked, reply, other)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("ttl_ms", [None, 1500])
@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("reply", REPLIES, ids=str)
def test_acquire_goes_on_from_a_first_request(server: str, ttl_ms: int | None, token: bytes, reply: Reply) -> None:
    begun, asked = begun_and_asked(
        server,
        lambda dialect: first_acquire(dialect, KEY, token, ttl_ms),
        lambda: Acquire(KEY, token, ttl_ms),
        reply,
    )
    assert begun == asked


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("expires_at", [None, SENT_AT - 1, SENT_AT + 1], ids=["unknown", "expired", "valid"])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("reply", REPLIES, ids=str)
def test_release_goes_on_from_a_first_request(
    server: str, expires_at: float | None, queued: bool, token: bytes, reply: Reply
) -> None:
    begun, asked = begun_and_asked(
        server,
        lambda dialect: first_release(dialect, KEY, token, queued),
        lambda: Release(KEY, token, expires_at, queued=queued),
        reply,
    )
    assert begun == asked


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_usual_reply_is_the_one_that_a_machine_takes_for_success(server: str, token: bytes) -> None:
    dialect = Dialect(Model(SERVERS[server]).execute(PROBE))
    for operation, (request, ours) in (
        (Acquire(KEY, token, 1500), first_acquire(dialect, KEY, token, 1500)),
        (Release(KEY, token, None), first_release(dialect, KEY, token, queued=False)),
        (Release(KEY, token, None, queued=True), first_release(dialect, KEY, token, queued=True)),
    ):
        operation.resume(request, SENT_AT)
        assert (True, True) == (operation.feed(ours, dialect), operation.result)
