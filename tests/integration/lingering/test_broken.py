"""`redislock break` of a lock with `linger`: the holder's process gives the key up, and takes it in memory no more."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
import redis

from redislock_fast import Lock
from redislock_fast import holders as holders_of
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.cli.conftest import Command, redislock
from tests.integration.lingering.test_lingering import LINGERS
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.holding import Holders
from tests.support.waiting import FAR_S

__all__ = ["redislock"]


@pytest.fixture
def admin(valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """A client of the server that the command line uses."""
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    return connect(valkey.port)


def _break(redislock: Command, admin: redis.Redis, *words: str) -> Any:
    holder = holders_of(admin, "name").holder
    assert holder is not None
    outcome = redislock("break", "name", "--token-id", holder.token_id, "--yes", *words)
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_key_that_lingers_is_given_up_before_the_command_says_so(
    redislock: Command, admin: redis.Redis, holders: Holders, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    lock = holders.hold(valkey.port, **LINGERS)
    lock.release()
    assert _break(redislock, admin).out == "broke lock 'name': it is free\n"
    other = Lock(admin, "name", timeout=FAR_S)
    assert other.acquire(blocking=False)
    assert lock.call("acquire", blocking=False) is False
    other.release()
    assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    assert [record.getMessage() for record in caplog.records if "was lost" in record.getMessage()] == []


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
def test_a_held_key_is_taken_by_no_local_caller_once_it_is_broken(
    redislock: Command, admin: redis.Redis, holders: Holders, valkey: Server, settings: dict[str, Any]
) -> None:
    lock = holders.hold(valkey.port, **LINGERS, **settings)
    local = holders.make(valkey.port, **LINGERS)
    assert _break(redislock, admin, "--json").objects[0]["remains_s"] == 0
    other = Lock(admin, "name", timeout=FAR_S)
    assert other.acquire(blocking=False)
    assert local.call("acquire", blocking=False) is False
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()
    assert local.call("acquire", blocking=False) is False
    assert other.owned()
    other.release()
    assert local.call("acquire", blocking_timeout=PATIENCE_S) is True


def test_a_waiter_of_another_process_gets_the_broken_lock(
    redislock: Command, admin: redis.Redis, holders: Holders, valkey: Server, connect: Connect
) -> None:
    lock = holders.hold(valkey.port, **LINGERS)
    waiter = Lock(connect(valkey.port), "name", timeout=FAR_S, thread_local=False)
    waiting = start(waiter.acquire)
    wait_until(lambda: holders_of(admin, "name").waiting == 1, "it waits")
    assert _break(redislock, admin).out == "broke lock 'name': the first waiter has it\n"
    assert waiting.result(PATIENCE_S) is True
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()
    waiter.release()


_PROGRAM = """
import redis, sys, redislock_fast
lock = redislock_fast.Lock(redis.Redis(port=int(sys.argv[1])), "name", timeout=60, linger=60)
lock.acquire()
lock.release()
print("lingers", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_the_command_says_what_remains_where_the_process_does_not_answer(
    redislock: Command, admin: redis.Redis, valkey: Server, end: signal.Signals
) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(valkey.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "lingers\n"
            program.send_signal(end)
            said, remains = _break(redislock, admin).out.splitlines()
        finally:
            program.kill()
    assert said == "broke lock 'name': it is free"
    assert remains.startswith("its process has not answered: it may still take the lock in memory for 1")
    assert not admin.exists("name")
