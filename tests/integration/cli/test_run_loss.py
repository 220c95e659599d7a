"""`redislock run` when the lock is lost: the command ends before another one can begin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from redislock_fast.server import Server
from tests.support.proxy import Proxy
from tests.support.running import ECHO, GRANDCHILD, Runs
from tests.support.waiting import until_queued

pytestmark = pytest.mark.slow

ALONE = """if True:
    import fcntl, signal, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file = open(sys.argv[1], "a")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("begun", flush=True)
    sys.stdin.read()
"""
"""Ends with its input or by KILL alone, and cannot begin while another one of its kind lives."""


def refuse(proxy: Proxy) -> None:
    """Cut the link."""
    proxy.refuse()
    proxy.cut()


@pytest.mark.parametrize(
    ("part", "ttl"), [(refuse, "4"), (Proxy.hold, "2")], ids=["the link is cut", "the replies are lost"]
)
def test_two_commands_never_overlap_in_a_partition(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, tmp_path: Path, part: Callable[[Proxy], None], ttl: str
) -> None:
    alone = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path / "lock")]
    with Proxy(valkey.port) as proxy:
        first = runs(proxy.port, "-t", ttl, "name", *alone)
        assert first.line() == "begun\n"
        second = runs(valkey.port, "name", *alone)
        until_queued(valkey_client, "name", 1)
        part(proxy)
        assert second.line() == "begun\n"
        assert first.end()[0] == 76
    assert second.end() == (0, "", "")


def test_command_is_ended_with_all_that_it_has_started(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    run = runs(valkey.port, "-t", "3", "name", *GRANDCHILD)
    assert run.line() == "begun\n"
    valkey_client.set("name", "another's")
    message = "redislock: the command was ended, since the lock 'name' was lost (taken by another)\n"
    assert run.end() == (76, "", message)
    assert valkey_client.get("name") == b"another's"


def test_command_may_clean_up_when_it_is_ended(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    script = "trap 'echo cleaned up; exit 0' TERM; echo begun; sleep 60 & wait"
    run = runs(valkey.port, "-t", "4", "name", "sh", "-c", script)
    assert run.line() == "begun\n"
    valkey_client.delete("name")
    assert run.line() == "cleaned up\n"
    code, _, errors = run.end()
    assert (code, errors) == (76, "redislock: the command was ended, since the lock 'name' was lost (deleted)\n")


def test_command_goes_on_where_a_loss_is_only_reported(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    run = runs(valkey.port, "-t", "2", "--on-lost", "warn", "name", *ECHO)
    assert run.line() == "begun\n"
    valkey_client.delete("name")
    assert run.trouble() == "redislock: the lock 'name' was lost (deleted), and the command goes on\n"
    run.say("still here\n")
    assert run.line() == "still here\n"
    assert run.end() == (0, "", "")
