"""`redislock run`: what it exits with, how long the lock is kept, losses, `--once-done`, `--limit` and signals."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from redislock_fast import Lock, holders, once
from redislock_fast.server import Server, free_port
from tests.conftest import MakeUser
from tests.integration.cli.conftest import Command
from tests.support.helpers import wait_until
from tests.support.proxy import Proxy
from tests.support.running import ALONE, ECHO, GRANDCHILD, Runs
from tests.support.waiting import FAR_S, queued, until_queued

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


@pytest.mark.parametrize("options", [("name",), ("--limit", "2", "name"), ("--once-done", "60", "name")], ids=str)
def test_nothing_is_left_that_python_warns_of(runs: Runs, valkey: Server, options: tuple[str, ...]) -> None:
    run = runs(valkey.port, *options, "true", environment={"PYTHONWARNINGS": "always"})
    assert run.end() == (0, "", "")


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


# The lock is lost: the command ends before another one can begin


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


# --once-done: the first process runs the command, and the others wait until it is done


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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 128 + signal.SIGINT)])
def test_signal_ends_the_question_whether_it_is_done(runs: Runs, valkey: Server, number: int, code: int) -> None:
    with Proxy(valkey.port) as proxy:
        proxy.hold_from("EVALSHA")
        run = runs(proxy.port, *ONCE, "name", "echo", "runs")
        proxy.wait_for_request("EVALSHA")
        run.send(number)
        assert run.end() == (code, "", "")


# --limit: so many commands at once


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
    for limit in ("0", "-1", "many", str(1 << 53)):
        code, output, errors = runs(valkey.port, "--limit", limit, "name", "echo", "runs").end()
        assert (code, output) == (125, "")
        assert "argument --limit" in errors


# Signals: each reaches the command and what that has started, or ends the wait for the lock


FORWARDED = ["HUP", "INT", "QUIT", "ABRT", "ALRM", "TERM", "USR1", "USR2", "WINCH", "CONT"]
ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]

TELL = """if True:
    import signal
    heard = signal.valid_signals() - {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    print("begun", flush=True)
    while True:
        print(signal.Signals(signal.sigwait(heard)).name, flush=True)
"""
"""Tells the name of each signal that it gets."""

IGNORE = """if True:
    import os, signal, sys
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that ignores these signals, as `nohup` does."""


def test_every_signal_reaches_the_command(runs: Runs, valkey: Server) -> None:
    run = runs(valkey.port, "name", sys.executable, "-I", "-S", "-c", TELL)
    assert run.line() == "begun\n"
    numbers = [getattr(signal, f"SIG{name}") for name in FORWARDED]
    caught = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # as SIGHUP by `nohup make`
    told = []
    for number in caught:
        run.send(number)
        told.append(run.line().strip())
    assert told == [number.name for number in caught]


def test_signal_reaches_what_the_command_has_started(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    started = {number: runs(valkey.port, str(number), *GRANDCHILD) for number in ENDING}
    for number, run in started.items():
        assert run.line() == "begun\n"
        run.send(number)
        assert run.end() == (128 + number, "", "")
    assert valkey_client.exists(*map(str, ENDING)) == 0


def test_signal_ends_the_wait_for_the_lock(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    with Lock(valkey_client, "name", timeout=FAR_S):
        started = {number: runs(valkey.port, "name", "echo", "runs") for number in ENDING}
        until_queued(valkey_client, "name", len(ENDING))
        for number, run in started.items():
            run.send(number)
            assert run.end() == (128 + number, "", "")
        assert queued(valkey_client, "name") == 0
    assert valkey_client.exists("name") == 0


def test_nothing_of_the_command_outlives_a_process_that_is_killed(runs: Runs, valkey: Server) -> None:
    begins_on_signal = "trap 'sh -c \"echo begun; exec sleep 60\"' USR1; echo ready; read -r line; :"
    run = runs(valkey.port, "name", "sh", "-c", begins_on_signal)
    assert run.line() == "ready\n"
    run.send(signal.SIGUSR1)  # passed on by a process whose watcher knows the command
    assert run.line() == "begun\n"
    run.process.kill()
    assert run.end() == (-signal.SIGKILL, "", "")  # it is the end of the output, too


def test_signal_that_is_ignored_stays_ignored(runs: Runs, valkey: Server) -> None:
    run = runs(valkey.port, "name", *ECHO, wrapper=(sys.executable, "-I", "-S", "-c", IGNORE))
    assert run.line() == "begun\n"
    run.send(signal.SIGHUP)
    run.send(signal.SIGTERM)
    assert run.line() == ""
    assert run.end() == (128 + signal.SIGTERM, "", "")


def test_job_that_is_stopped_and_continued_goes_on(runs: Runs, valkey: Server) -> None:
    run = runs(valkey.port, "name", *ECHO)
    assert run.line() == "begun\n"
    run.send(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(run.pid, os.WUNTRACED)[1])
    run.say("hello\n")
    run.send(signal.SIGCONT)
    assert run.line() == "hello\n"
    assert run.end() == (0, "", "")


def test_job_that_is_continued_after_its_lease_does_not_go_on(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    run = runs(valkey.port, "-t", "1", "name", *ECHO)
    assert run.line() == "begun\n"
    run.send(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(run.pid, os.WUNTRACED)[1])
    run.say("hello\n")
    wait_until(lambda: not valkey_client.exists("name"), "the lease ends")
    run.send(signal.SIGCONT)
    code, output, _ = run.end()
    assert (code, output) == (76, "")
