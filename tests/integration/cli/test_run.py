"""`redislock run`: what it exits with, what the command is given, and how long the lock is kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import redis

from redislock_fast import Lock, holders
from redislock_fast.server import Server, free_port
from tests.conftest import MakeUser
from tests.integration.cli.conftest import Command
from tests.support.running import ECHO, Runs
from tests.support.waiting import FAR_S

pytestmark = pytest.mark.slow


def test_exit_code_is_that_of_the_command(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    exits = runs(valkey.port, "a", "sh", "-c", "echo $REDISLOCK_NAME $REDISLOCK_FENCE; exit 7")
    dies = runs(valkey.port, "b", "--", "sh", "-c", "kill -9 $$")
    assert exits.end() == (7, "a 1\n", "")
    assert dies.end() == (137, "", "")
    assert valkey_client.exists("a", "b") == 0


def test_command_that_cannot_be_run_exits_as_with_timeout(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, tmp_path: Path
) -> None:
    not_there = runs(valkey.port, "a", "--", str(tmp_path / "not-there"))
    not_a_program = runs(valkey.port, "b", "--", str(tmp_path))
    assert not_there.end() == (127, "", f"redislock: cannot run '{tmp_path}/not-there': No such file or directory\n")
    assert not_a_program.end() == (126, "", f"redislock: cannot run '{tmp_path}': Permission denied\n")
    assert valkey_client.exists("a", "b") == 0


def test_exit_code_says_that_there_is_no_server(runs: Runs) -> None:
    run = runs(0, "--url", f"redis://user:canary@127.0.0.1:{free_port()}", "name", "true")
    code, output, errors = run.end()
    assert (code, output, errors[:20], "canary" in errors) == (69, "", "redislock: no server", False)


def test_refusal_names_the_holder(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    with Lock(valkey_client, "name", timeout=FAR_S):
        refused = runs(valkey.port, "-n", "name", "echo", "runs")
        late = runs(valkey.port, "-w", "2", "-E", "9", "name", "echo", "runs")
        skipped = runs(valkey.port, "-n", "--skip-ok", "name", "echo", "runs")
        ends = [run.end() for run in (refused, late, skipped)]
        holder = holders(valkey_client, "name").holder
    assert holder is not None
    assert holder.process is not None
    refusals = {errors for _, _, errors in ends}
    assert [(75, ""), (9, ""), (0, "")] == [(code, output) for code, output, _ in ends]
    process = re.escape(f"process {os.getpid()} ({holder.process.program}) on {holder.process.host}")
    since = r"connected since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    line = rf"redislock: the lock 'name' is held by {process}, {since} \(token id {holder.token_id}\)\n"
    assert [True] * len(refusals) == [re.fullmatch(line, refusal) is not None for refusal in refusals]


def test_refusal_by_an_unknown_holder_has_its_token_id(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    valkey_client.set("name", "taken", px=600_000)
    code, output, errors = runs(valkey.port, "-n", "name", "echo", "runs").end()
    holder = holders(valkey_client, "name").holder
    assert holder is not None
    text = f"redislock: the lock 'name' is held by an unknown process (token id {holder.token_id})\n"
    assert (75, "", text) == (code, output, errors)


def test_verbose_run_says_how_long_the_acquire_took(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    code, output, errors = runs(valkey.port, "-v", "name", "--", "echo", "a secret").end()
    assert (0, "a secret\n") == (code, output)
    assert re.fullmatch(r"redislock: acquired the lock 'name' after \d+\.\d{3} s, running 'echo'\n", errors)


def test_command_is_known_to_the_server_by_its_name(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, redislock: Command
) -> None:
    run = runs(valkey.port, "name", "--", "/bin/sh", "-c", ECHO[-1])
    assert run.line() == "begun\n"
    shown = redislock("show", "name", "--url", valkey.url, "--json").objects[0]["holder"]["process"]
    text = redislock("show", "name", "--url", valkey.url).out
    assert run.end() == (0, "", "")
    assert (run.pid, "redislock:sh") == (shown["pid"], shown["program"])
    assert "redislock:sh" in text


def test_command_runs_once_the_lock_was_handed_over(runs: Runs, valkey: Server) -> None:
    first = runs(valkey.port, "name", *ECHO)
    assert first.line() == "begun\n"
    second = runs(valkey.port, "name", "echo", "next")
    first.say("still here\n")
    assert first.line() == "still here\n"
    assert first.end() == (0, "", "")
    assert second.end() == (0, "next\n", "")


def test_lock_is_kept_for_the_least_time_that_was_asked_for(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    kept = runs(valkey.port, "--at-least", "600", "kept", "sh", "-c", "exit 3")
    released = runs(valkey.port, "--at-least", "0.001", "released", "sleep", "0.002")
    assert [kept.end(), released.end()] == [(3, "", ""), (0, "", "")]
    assert 30_000 < valkey_client.pttl("kept") <= 600_000
    assert valkey_client.exists("released") == 0
    assert runs(valkey.port, "-n", "kept", "echo", "runs").end()[:2] == (75, "")


def test_command_has_no_fence_where_the_server_allows_none(runs: Runs, valkey: Server, acl_user: MakeUser) -> None:
    user = acl_user(valkey, "-eval", "-evalsha")
    url = f"redis://{user.username}:{user.password}@127.0.0.1:{valkey.port}"
    outer = {"REDISLOCK_FENCE": "outer"}
    run = runs(valkey.port, "--url", url, "name", "sh", "-c", "echo ${REDISLOCK_FENCE-none}", environment=outer)
    assert run.end() == (0, "none\n", "")


def test_release_that_fails_leaves_the_exit_code_alone(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    run = runs(valkey.port, "name", "sh", "-c", "echo begun; read -r line; exit 4")
    assert run.line() == "begun\n"
    valkey_client.delete("name")
    code, _, errors = run.end()
    assert (code, errors.startswith("redislock: the lock 'name' was not released, and ends by its ttl: ")) == (4, True)
