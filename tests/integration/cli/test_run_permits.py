"""`redislock run --limit`: so many commands at once, with all that `run` does for a lock."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
import redis

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.support.running import ECHO, GRANDCHILD, Runs
from tests.support.waiting import FAR_S, queued, until_queued

pytestmark = pytest.mark.slow

LIMIT = ("--limit", "2")


def test_so_many_run_at_once_and_the_next_one_after_the_first(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    first, second = (runs(valkey.port, *LIMIT, "name", *ECHO) for _ in range(2))
    assert [first.line(), second.line()] == ["begun\n"] * 2
    code, output, errors = runs(valkey.port, *LIMIT, "-n", "-E", "9", "name", "echo", "runs").end()
    assert (code, output) == (9, "")
    holder = r"process \d+ \(redislock:sh\) on \S+"
    assert re.fullmatch(
        rf"redislock: no permit of the semaphore 'name' was free: it is held by {holder}, {holder}\n", errors
    )
    third = runs(valkey.port, *LIMIT, "name", "echo", "next")
    until_queued(valkey_client, "name", 1)
    assert first.end() == (0, "", "")
    assert third.end() == (0, "next\n", "")
    assert second.end() == (0, "", "")
    assert valkey_client.zcard("name") == 0


def test_command_has_its_own_exit_code_and_no_fence(runs: Runs, valkey: Server) -> None:
    outer = {"REDISLOCK_FENCE": "outer"}
    script = "echo $REDISLOCK_NAME ${REDISLOCK_FENCE-none}; exit 7"
    code, output, errors = runs(valkey.port, "-v", *LIMIT, "name", "sh", "-c", script, environment=outer).end()
    assert (code, output) == (7, "name none\n")
    assert re.fullmatch(
        r"redislock: acquired the permit of the semaphore 'name' after \d+\.\d{3} s, running 'sh'\n", errors
    )


def test_permit_is_kept_for_the_least_time_that_was_asked_for(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    kept = runs(valkey.port, "--at-least", "600", *LIMIT, "kept", "sh", "-c", "exit 3")
    released = runs(valkey.port, "--at-least", "0.001", *LIMIT, "released", "sleep", "0.002")
    assert [kept.end(), released.end()] == [(3, "", ""), (0, "", "")]
    kept_for: Any = valkey_client.zrange("kept", 0, -1, withscores=True)
    ((_, ends_at_ms),) = kept_for
    assert 30 < float(ends_at_ms) / 1000 - int(valkey_client.time()[0]) <= 601
    assert valkey_client.exists("released") == 0
    assert runs(valkey.port, "--limit", "1", "-n", "kept", "echo", "runs").end()[:2] == (75, "")


def test_command_is_ended_where_the_permit_is_lost(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    run = runs(valkey.port, "-t", "3", *LIMIT, "name", *GRANDCHILD)
    warned = runs(valkey.port, "-t", "3", "--on-lost", "warn", *LIMIT, "name", *ECHO)
    assert [run.line(), warned.line()] == ["begun\n"] * 2
    valkey_client.delete("name")
    what = "the permit of the semaphore 'name' was lost (deleted)"
    assert warned.trouble() == f"redislock: {what}, and the command goes on\n"
    assert run.end() == (76, "", f"redislock: the command was ended, since {what}\n")
    assert warned.end() == (0, "", "")


def test_signal_ends_the_wait_for_a_permit(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    first = runs(valkey.port, "--limit", "1", "name", *ECHO)
    assert first.line() == "begun\n"
    waiting = runs(valkey.port, "--limit", "1", "name", "echo", "runs")
    until_queued(valkey_client, "name", 1)
    waiting.send(signal.SIGTERM)
    assert waiting.end() == (128 + signal.SIGTERM, "", "")
    assert queued(valkey_client, "name") == 0
    assert first.end() == (0, "", "")


def test_semaphore_and_lock_of_one_name_are_refused(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    with Lock(valkey_client, "name", timeout=FAR_S):
        code, output, errors = runs(valkey.port, *LIMIT, "name", "echo", "runs").end()
    assert (code, output, "WRONGTYPE" in errors) == (125, "", True)


def test_limit_is_a_number_above_0(runs: Runs, valkey: Server) -> None:
    for limit in ("0", "-1", "many"):
        code, output, errors = runs(valkey.port, "--limit", limit, "name", "echo", "runs").end()
        assert (code, output) == (125, "")
        assert "--limit" in errors
