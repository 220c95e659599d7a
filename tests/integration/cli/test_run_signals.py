"""`redislock run` and signals: each reaches the command and what that has started, or ends the wait for the lock."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import redis

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.running import ECHO, GRANDCHILD, Runs
from tests.support.waiting import FAR_S, queued, until_queued

pytestmark = pytest.mark.slow

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
