"""`redislock run --once-done`: the first process runs the command, and the others wait until it is done."""

from __future__ import annotations

import pytest
import redis

from redislock_fast import Lock, once
from redislock_fast.server import Server
from tests.integration.cli.conftest import Command
from tests.support.running import ECHO, Runs
from tests.support.waiting import FAR_S, until_queued

pytestmark = pytest.mark.slow

DONE = "{name}:rlf:done"
ONCE = ("--once-done", "60")


def test_others_wait_until_the_command_is_done(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, redislock: Command
) -> None:
    first = runs(valkey.port, *ONCE, "name", *ECHO)
    assert first.line() == "begun\n"
    others = [runs(valkey.port, *ONCE, "name", "echo", "runs") for _ in range(2)]
    until_queued(valkey_client, "name", 2)
    assert [first.end(), *(run.end() for run in others)] == [(0, "", "")] * 3
    assert (valkey_client.exists("name"), 0 < valkey_client.pttl(DONE) <= 60_000) == (0, True)
    assert redislock("ls", "--url", valkey.url, "*").err == "redislock: no locks\n"
    with Lock(valkey_client, "name", timeout=FAR_S):  # which is not even asked for
        late = runs(valkey.port, "-v", *ONCE, "name", "echo", "runs")
        assert late.end() == (0, "", "redislock: 'name' is done: the command is not run\n")


def test_command_that_fails_is_run_by_the_next_process(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    first = runs(valkey.port, *ONCE, "name", "sh", "-c", "echo begun; read -r line; exit 7")
    assert first.line() == "begun\n"
    second = runs(valkey.port, *ONCE, "name", *ECHO)
    until_queued(valkey_client, "name", 1)
    third = runs(valkey.port, *ONCE, "name", "echo", "runs")
    until_queued(valkey_client, "name", 2)
    assert first.end() == (7, "", "")
    assert (second.line(), valkey_client.exists(DONE)) == ("begun\n", 0)
    assert [second.end(), third.end()] == [(0, "", "")] * 2


def test_command_of_a_killed_process_is_run_by_the_next_one(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    first = runs(valkey.port, "-t", "3", *ONCE, "name", *ECHO)
    assert first.line() == "begun\n"
    second = runs(valkey.port, *ONCE, "name", "echo", "runs")
    until_queued(valkey_client, "name", 1)
    first.process.kill()
    assert second.end() == (0, "runs\n", "")


def test_command_that_was_ended_is_not_done(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    run = runs(valkey.port, "-t", "3", *ONCE, "name", "sh", "-c", "trap 'exit 0' TERM; echo begun; sleep 60 & wait")
    assert run.line() == "begun\n"
    valkey_client.delete("name")
    assert run.end()[0] == 76
    assert not valkey_client.exists(DONE)


def test_it_is_the_job_of_once(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    with once(valkey_client, "name", timeout=FAR_S, others="wait", done_for=FAR_S):
        run = runs(valkey.port, *ONCE, "name", "echo", "runs")
        until_queued(valkey_client, "name", 1)
    assert run.end() == (0, "", "")
    valkey_client.delete(DONE)
    assert runs(valkey.port, *ONCE, "name", "echo", "runs").end() == (0, "runs\n", "")
    assert valkey_client.exists(DONE)
