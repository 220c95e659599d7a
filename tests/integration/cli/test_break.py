"""`redislock break`: one certain holder loses the lock, its first waiter gets it, and a newer holder keeps it."""

from __future__ import annotations

import os
import pty
import sys
from typing import Any

import pytest
import redis
import redis.lock

from redislock_fast import Lock, LockNotOwnedError, holders
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.cli.conftest import Command
from tests.support.helpers import start
from tests.support.waiting import FAR_S, until_queued


@pytest.fixture(params=["valkey", "scripts only"])
def client(request: pytest.FixtureRequest, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """A client of a server with a command for releases, and of one without."""
    fixture = "valkey" if request.param == "valkey" else "scripts_only"
    server: Server = request.getfixturevalue(fixture)
    monkeypatch.setenv("REDISLOCK_URL", server.url)
    return connect(server.port)


def token_id(client: redis.Redis) -> str:
    """That of the present holder."""
    holder = holders(client, "name").holder
    assert holder is not None
    assert holder.token_id is not None
    return holder.token_id


def test_first_waiter_gets_the_lock(redislock: Command, client: redis.Redis, connect: Connect) -> None:
    port: Any = client.connection_pool.connection_kwargs["port"]
    lock = Lock(client, "name", timeout=FAR_S)
    lock.acquire()
    waiter = Lock(connect(port), "name", timeout=FAR_S, thread_local=False)
    waiting = start(waiter.acquire)
    until_queued(client, "name", 1)
    outcome = redislock("break", "name", "--token-id", token_id(client), "--yes", "--json")
    assert waiting.result()
    assert (0, [True]) == (outcome.code, [one["handed_over"] for one in outcome.objects])
    assert waiter.owned()
    with pytest.raises(LockNotOwnedError):
        lock.release()
    waiter.release()


@pytest.mark.parametrize("class_", [Lock, redis.lock.Lock])
def test_lock_without_waiters_is_free(redislock: Command, client: redis.Redis, class_: type[redis.lock.Lock]) -> None:
    assert class_(client, "name").acquire()
    outcome = redislock("break", "name", "--token-id", token_id(client), "--yes")
    assert (0, "broke lock 'name': it is free\n") == (outcome.code, outcome.out)
    assert not client.keys()


def test_newer_holder_keeps_the_lock(redislock: Command, client: redis.Redis) -> None:
    with Lock(client, "name", timeout=FAR_S):
        old = token_id(client)
    with Lock(client, "name", timeout=FAR_S) as lock:
        outcome = redislock("break", "name", "--token-id", old, "--yes")
        assert lock.owned()
    assert (1, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert 1 == redislock("break", "name", "--token-id", old, "--yes").code  # a free lock


def test_nobody_to_ask(redislock: Command, client: redis.Redis) -> None:
    with Lock(client, "name", timeout=FAR_S) as lock:
        outcome = redislock("break", "name", "--token-id", token_id(client))
        assert lock.owned()
    assert (2, True) == (outcome.code, "--yes" in outcome.err)


@pytest.mark.usefixtures("client")
def test_break_without_an_id_says_where_it_stands(redislock: Command) -> None:
    outcome = redislock("break", "a name")
    assert (2, "") == (outcome.code, outcome.out)
    assert "`redislock show 'a name'` prints the holder's" in outcome.err
    assert "NAME --token-id ID" in redislock("break", "--help").out


@pytest.mark.parametrize(("text", "code"), [("y", 0), ("Yes", 0), ("n", 1), ("", 1), ("\udcff", 1)])
def test_terminal_is_asked(
    redislock: Command, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    assert Lock(client, "name", timeout=FAR_S).acquire()
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "w", errors="surrogateescape") as keyboard, os.fdopen(theirs) as terminal:
        keyboard.write(f"{text}\n")
        keyboard.flush()
        monkeypatch.setattr(sys, "stdin", terminal)
        outcome = redislock("break", "name", "--token-id", token_id(client))
    assert code == outcome.code
    assert "Break lock 'name' held by " in outcome.err
    assert (code != 0) == bool(client.exists("name"))
