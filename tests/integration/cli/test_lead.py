"""`redislock lead`: the command runs while its process leads, and ends before another one leads.

Rules: `FAR_S` never passes during a test, so a leader that is followed has handed over.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import redis

from redislock_fast.server import Server, free_port
from tests.conftest import MakeUser
from tests.integration.cli.conftest import Command
from tests.support.proxy import Proxy
from tests.support.running import ALONE, ECHO, GRANDCHILD, Run, Runs
from tests.support.waiting import FAR_S, queued, until_queued

pytestmark = pytest.mark.slow

FAR = ("-t", str(FAR_S))

ASK = ["sh", "-c", "echo term $REDISLOCK_TERM; read -r code; exit $code"]
"""Says its term, then ends with the code that it is told."""


def lead(runs: Runs, port: int, *arguments: str, options: tuple[str, ...] = FAR) -> Run:
    """A process of `redislock lead`."""
    return runs(port, *options, "beat", *arguments, command="lead")


def ended(run: Run, number: int) -> tuple[int, str, str]:
    """How a process ends that gets this signal. Its command still has its input then."""
    run.send(number)
    output = run.line()
    code, rest, errors = run.end()
    return code, output + rest, errors


def until_told(run: Run, text: str) -> None:
    """Read its errors up to a line with this text: a busy machine may add some about renewals."""
    while text not in (line := run.trouble()):
        assert line


def again(code: int, pause_s: int) -> str:
    """The line about a command that will be run again."""
    return f"redislock: the command has ended with {code}: in {pause_s} s, this process campaigns again to run it\n"


def test_command_is_told_its_term(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    tell = ["--", "sh", "-c", "echo $REDISLOCK_NAME $REDISLOCK_TERM ${REDISLOCK_FENCE-none}; exit 7"]
    environment = {"REDISLOCK_TERM": "99", "REDISLOCK_FENCE": "99"}  # of a command around
    run = runs(valkey.port, "--restart", "never", "beat", *tell, command="lead", environment=environment)
    assert run.end() == (7, "beat 1 none\n", "")
    assert not valkey_client.exists("beat")


def test_command_that_fails_is_run_again_until_it_succeeds(runs: Runs, valkey: Server) -> None:
    run = lead(runs, valkey.port, *ASK)
    assert run.line() == "term 1\n"
    run.say("7\n")
    assert (run.trouble(), run.line()) == (again(7, 1), "term 2\n")
    run.say("0\n")
    assert run.end() == (0, "", "")


def test_command_that_is_always_run_again_ends_with_its_process(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    run = lead(runs, valkey.port, *ASK, options=(*FAR, "--restart", "always"))
    assert run.line() == "term 1\n"
    run.say("0\n")
    assert (run.trouble(), run.line()) == (again(0, 1), "term 2\n")
    assert ended(run, signal.SIGTERM) == (128 + signal.SIGTERM, "", "")
    assert not valkey_client.exists("beat")


def test_signal_ends_the_process_if_it_has_ended_the_command(runs: Runs, valkey: Server) -> None:
    reload = "trap 'echo reloaded' HUP; echo begun; read -r line || read -r line"
    run = lead(runs, valkey.port, "sh", "-c", reload, options=(*FAR, "--restart", "always"))
    assert run.line() == "begun\n"
    run.send(signal.SIGHUP)
    assert run.line() == "reloaded\n"
    assert ended(run, signal.SIGUSR1) == (128 + signal.SIGUSR1, "", "")


def test_leader_that_is_told_to_end_hands_over(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    first = lead(runs, valkey.port, *ASK)
    assert first.line() == "term 1\n"
    second = lead(runs, valkey.port, *ASK)
    until_queued(valkey_client, "beat", 1)
    assert ended(first, signal.SIGTERM) == (128 + signal.SIGTERM, "", "")
    assert second.line() == "term 2\n"
    assert ended(second, signal.SIGINT) == (128 + signal.SIGINT, "", "")
    assert not valkey_client.exists("beat")


def test_leader_whose_command_fails_hands_over(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    first = lead(runs, valkey.port, *ASK)
    assert first.line() == "term 1\n"
    second = lead(runs, valkey.port, *ASK)
    until_queued(valkey_client, "beat", 1)
    first.say("7\n")
    assert (first.trouble(), second.line()) == (again(7, 1), "term 2\n")
    until_queued(valkey_client, "beat", 1)  # it stands in line again
    second.say("0\n")
    assert second.end() == (0, "", "")
    assert first.line() == "term 3\n"


def test_signal_ends_the_campaign_and_the_pause(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    first = lead(runs, valkey.port, *ASK)
    assert first.line() == "term 1\n"
    second = lead(runs, valkey.port, *ASK)
    until_queued(valkey_client, "beat", 1)
    assert ended(second, signal.SIGTERM) == (128 + signal.SIGTERM, "", "")
    assert queued(valkey_client, "beat") == 0
    first.say("7\n")
    assert first.trouble() == again(7, 1)
    assert ended(first, signal.SIGTERM) == (128 + signal.SIGTERM, "", "")


def test_nothing_of_the_command_outlives_a_leader_that_is_killed(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    first = lead(runs, valkey.port, *GRANDCHILD, options=("-t", "3"))
    assert first.line() == "begun\n"
    second = lead(runs, valkey.port, *ASK, options=("-t", "3"))
    until_queued(valkey_client, "beat", 1)
    first.process.kill()
    assert first.end()[:2] == (-signal.SIGKILL, "")  # it is the end of the output, too
    assert second.line() == "term 2\n"


def test_nothing_of_the_command_outlives_its_term(runs: Runs, valkey: Server) -> None:
    run = lead(
        runs,
        valkey.port,
        *("sh", "-c", "trap '' TERM; sleep 30 & exit 7"),  # which ignores TERM, too
        options=("-t", "3", "--restart", "never"),
    )
    assert run.end()[:2] == (7, "")  # it is the end of the output, too


def test_term_that_is_lost_ends_the_command_and_another_one_begins(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    run = lead(runs, valkey.port, *GRANDCHILD, options=("-t", "3", "--restart", "never"))
    for _ in range(2):
        assert run.line() == "begun\n"
        valkey_client.delete("beat")
        until_told(run, "the command was ended, since the term of the election 'beat' was lost (deleted)")
    assert run.line() == "begun\n"


def test_two_commands_never_overlap_in_a_partition(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, tmp_path: Path
) -> None:
    alone = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path / "lock")]
    with Proxy(valkey.port) as proxy:
        first = lead(runs, proxy.port, *alone, options=("-t", "4"))
        assert first.line() == "begun\n"
        second = lead(runs, valkey.port, *alone, options=("-t", "4"))
        until_queued(valkey_client, "beat", 1)
        proxy.refuse()
        proxy.cut()
        assert second.line() == "begun\n"
        proxy.accept()
        until_queued(valkey_client, "beat", 1)  # the first campaigns again
        assert second.end() == (0, "", "")
        assert first.line() == "begun\n"
    until_told(first, "the command was ended, since the term of the election 'beat' could not be renewed in time")


def test_leader_is_known_with_its_value(
    runs: Runs, valkey: Server, redislock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lead(runs, valkey.port, *ECHO, options=(*FAR, "--value", "http://10.0.0.7"))
    assert run.line() == "begun\n"
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    (leader,) = redislock("leader", "beat", "--json").objects
    process = leader["process"]
    assert (leader["term"], leader["value"]) == (1, "http://10.0.0.7")
    assert (process["pid"], process["program"]) == (run.pid, "redislock:sh")


def test_what_cannot_be_run_ends_with_the_codes_of_run(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, tmp_path: Path
) -> None:
    not_there = lead(runs, valkey.port, str(tmp_path / "not-there"), options=(*FAR, "--restart", "always"))
    no_server = lead(runs, free_port(), "true")
    assert not_there.end() == (127, "", f"redislock: cannot run '{tmp_path}/not-there': No such file or directory\n")
    assert not valkey_client.exists("beat")
    code, output, errors = no_server.end()
    assert (code, output, errors[:20]) == (69, "", "redislock: no server")


def test_candidate_whose_password_becomes_wrong_ends(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser
) -> None:
    leader, user = lead(runs, valkey.port, *ASK), acl_user(valkey)
    assert leader.line() == "term 1\n"
    url = f"redis://{user.username}:{user.password}@127.0.0.1:{valkey.port}"
    waits = runs(valkey.port, *FAR, "beat", *ASK, command="lead", environment={"REDISLOCK_URL": url})
    until_queued(valkey_client, "beat", 1)
    valkey_client.acl_setuser(user.username, enabled=True, reset_passwords=True, passwords=["+another"])
    valkey_client.client_kill_filter(user=user.username)
    assert waits.end() == (69, "", "redislock: the server does not accept this user and password\n")
