"""`redislock top`: the most contended locks first, what changes between two looks, and an end by Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
import redis

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.cli.conftest import Command
from tests.support.helpers import PATIENCE_S, start
from tests.support.waiting import FAR_S, until_queued


@pytest.fixture
def client(valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """A client of the server that the command line finds in the environment."""
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    return connect(valkey.port)


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_most_contended_lock_comes_first(
    redislock: Command, client: redis.Redis, valkey: Server, connect: Connect
) -> None:
    quiet, busy = Lock(client, "a quiet one", timeout=FAR_S), Lock(client, "name", timeout=FAR_S)
    quiet.acquire()
    busy.acquire()
    waiter = Lock(connect(valkey.port), "name", timeout=FAR_S, thread_local=False)
    waiting = start(waiter.acquire)
    until_queued(client, "name", 1)
    looks = redislock("top", "--json", "-n", 2, "--interval", 0.001)
    one = redislock("top", "--json", "-n", 1, "--most", 1)
    text = redislock("top", "-n", 1)
    busy.release()
    assert waiting.result()
    waiter.release()
    quiet.release()
    assert (0, "", 2) == (looks.code, looks.err, len(looks.objects))
    first, second = looks.objects[-1]["locks"]
    assert [("name", 1, True), ("a quiet one", 0, False)] == [
        (lock["name"], lock["waiting"], lock["contended"]) for lock in (first, second)
    ]
    assert (os.getpid(), 0, None) == (
        first["holder"]["process"]["pid"], first["changes_seen"], first["acquisitions_per_s"],
    )  # fmt: skip
    assert first["seen_s"] > 0
    assert looks.objects[-1]["complete"]
    assert [["name"]] == [[lock["name"] for lock in look["locks"]] for look in one.objects]
    assert ["name", "a quiet one"] == [line.split("  ")[0] for line in text.out.splitlines()[2:4]]


def test_looks_go_on_where_the_budget_has_ended(redislock: Command, client: redis.Redis) -> None:
    client.mset({f"key-{number}": "x" for number in range(1000)})
    with Lock(client, "name", timeout=FAR_S):
        outcome = redislock("top", "--json", "-n", 4, "--budget", 500, "--interval", 0.001)
    looks = outcome.objects
    assert {False, True} == {look["complete"] for look in looks}
    assert ["name"] == [lock["name"] for lock in looks[-1]["locks"]]


def test_terminal_gets_a_screen_that_changes_and_lines_without_rich(
    redislock: Command, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Lock(client, "[red]name", timeout=FAR_S):
        monkeypatch.setattr(sys, "stdout", terminal)
        redislock("top", "-n", 1)
        screen = terminal.getvalue()
        monkeypatch.setitem(sys.modules, "rich", None)
        redislock("top", "-n", 1)
    assert "\x1b[?1049h" in screen
    assert "[red]name" in screen
    assert "[red]name" in terminal.getvalue()[len(screen) :]
    assert "\x1b" not in terminal.getvalue()[len(screen) :]


def test_terminal_whose_screen_cannot_change_gets_lines(
    redislock: Command, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with Lock(client, "name", timeout=FAR_S):
        monkeypatch.setattr(sys, "stdout", terminal)
        redislock("top", "-n", 1)
    assert ["name"] == [line.split()[0] for line in terminal.getvalue().splitlines()[2:3]]


def test_look_fits_into_the_terminal(redislock: Command, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["invoice:17", f"invoice:{'x' * 90}:end"]
    holder = f":{os.getpid()}"
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    with Lock(client, names[0], timeout=1e8, fencing=True), Lock(client, names[1], timeout=FAR_S):
        piped = redislock("top", "-n", 1).out
        monkeypatch.setattr(sys, "stdout", terminal)
        redislock("top", "-n", 1)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert ["NAME", "HOLDER", "STATE", "SEEN", "TTL", "WAITING", "ACQ/S", "CHANGES"] == lines[1].split()
    short, long = sorted(lines[2:4])
    assert (True, True, True) == ("..x" in long, ":end" in long, holder in long)
    assert [names[0]] == short.split()[:1]
    assert names[1] in piped


def test_no_locks_are_said_to_be_none(redislock: Command, client: redis.Redis) -> None:
    empty = redislock("top", "-n", 1)
    client.set("theirs", "0123456789abcdef" * 2)
    theirs = redislock("top", "-n", 1)
    assert (0, ["no locks"]) == (empty.code, empty.out.split("\n")[1:2])
    assert (0, True) == (theirs.code, "1 keys (PATTERN '*' shows them)" in theirs.out)


@pytest.mark.slow
def test_terminal_gets_its_screen_back_after_a_signal(client: redis.Redis) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    words = [sys.executable, "-m", "redislock_fast", "top"]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"no locks" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # the end of a terminal
            while more := os.read(ours, 4096):
                shown += more
    os.close(ours)
    assert (process.returncode, shown.endswith(b"\x1b[?1049l")) == (128 + signal.SIGTERM, True)


@pytest.mark.slow
def test_changes_are_counted_until_an_interrupt(client: redis.Redis, valkey: Server, connect: Connect) -> None:
    lock = Lock(client, "name", timeout=FAR_S, fencing=True)
    lock.acquire()
    waiter = Lock(connect(valkey.port), "name", timeout=FAR_S, fencing=True, thread_local=False)
    waiting = start(waiter.acquire)
    until_queued(client, "name", 1)
    words = [sys.executable, "-m", "redislock_fast", "top", "--json", "--interval", "0.01"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        looks = (json.loads(line)["locks"][0] for line in iter(process.stdout.readline, ""))
        assert any((look["changes_seen"], look["acquisitions_per_s"]) == (0, 0) for look in looks)
        lock.release()
        rates: list[float] = []
        for look in looks:
            rates.append(look["acquisitions_per_s"])
            if look["changes_seen"] == 1 and max(rates) > 0:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert waiting.result()
    waiter.release()
    assert (0, "") == (process.returncode, errors)
