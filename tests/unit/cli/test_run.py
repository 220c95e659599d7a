"""`redislock run` without a server: wrong command lines, when the command is ended, the signals that it takes.

The clock is simulated. Each test of signals runs in a process of its own, whose handlers it replaces.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast import LossReason
from redislock_fast._cli import guard as guard_module
from redislock_fast._cli.guard import Guard
from redislock_fast._cli.main import main
from tests.support.helpers import run_script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: NAME"),
        (["--bogus", "name", "true"], "unrecognized arguments: --bogus"),
        (["-n", "-w", "1", "name", "true"], "argument -w: not allowed with argument -n"),
        (["-w", "soon", "name", "true"], "argument -w: invalid seconds value: 'soon'"),
        (["-w", "nan", "name", "true"], "argument -w: nan is no time"),
        (["-t", "0", "name", "true"], "argument -t: invalid ttl value: '0'"),
        (["--at-least", "-1", "name", "true"], "argument --at-least: -1 is no time"),
        (["--at-least", "1e15", "name", "true"], "argument --at-least: invalid time_kept value: '1e15'"),
        (["n\udcff", "true"], "argument NAME: invalid name value: 'n\\udcff'"),
        (["--once-done", "0", "name", "true"], "argument --once-done: invalid ttl value: '0'"),
        (["-E", "256", "name", "true"], "argument -E: 256 is not between 0 and 255"),
        (["--on-lost", "redis://:canary@host", "name"], "redis://...@host"),
        (["--", "echo", "hi there"], "the name of the lock stands before the --, as in: run NAME -- echo 'hi there'"),
        (["-n", "--", "echo"], "NAME is missing"),
        (["--", "curl", "redis://:canary@host"], "run NAME -- curl redis://...@host"),
    ],
)
def test_wrong_options_exit_as_with_timeout(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    errors = capsys.readouterr().err
    assert (end.value.code, message in errors, "canary" in errors) == (125, True, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["name"], "a command is missing"),
        (["name", "--"], "a command is missing"),
        (["--", "-name", "--"], "a command is missing"),
        (["name", "-n", "--", "true"], "options stand before the name of the lock: -n"),
        (["--once-done", "60", "--limit", "2", "name", "true"], "--once-done goes with neither"),
        (["--once-done", "60", "--at-least", "2", "name", "true"], "--once-done goes with neither"),
    ],
)
def test_wrong_order_exits_as_with_timeout(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["run", *words]) == 125
    assert message in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "url",
    [
        "http://:canary@host",
        "redis://:canary@host:port",
        "redis://:canary@a..b:6379/0",
        "redis://:canary@host?protocol=7",
        "redis://:canary@host?encoding=none",
        "rediss://:canary@host?ssl_cert_reqs=perhaps",
        "redis+cluster://:canary@host:port",
        "redis+sentinel://:canary@host",
        "redis+sentinel://:canary@a..b/service",
    ],
)
def test_wrong_url_exits_as_with_timeout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    by_option = main(["run", "--url", url, "name", "--", "true"])
    monkeypatch.setenv("REDISLOCK_URL", url)
    by_environment = main(["run", "name", "--", "true"])
    by_other_command = main(["show", "name"])
    errors = capsys.readouterr().err
    assert (by_option, by_environment, by_other_command) == (125, 125, 2)
    assert (errors.count("redislock: the URL is wrong"), len(errors.splitlines()), "canary" in errors) == (3, 3, False)


def test_fault_of_its_own_exits_as_with_timeout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redislock_fast._cli.run.client_of", lambda _: 1 / 0)
    assert main(["run", "name", "--", "true"]) == 125
    assert "ZeroDivisionError" in capsys.readouterr().err


# When the command is ended


TTL_S = 10.0
TERM_S, KILL_S = 2.5, 1.0
"""How long before the end of a lease of this ttl the command is killed, and how long before that it is told to end."""

NEVER = math.inf


class World:
    """A lock, a command and the signals of this process, on one simulated clock.

    Args:
        ends: whether the command has ended.
        renewed_until: until when renewals succeed.
    """

    name = "name"

    def __init__(self, ends: Callable[[World], bool], renewed_until: float) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, int]] = []
        self.events: list[tuple[float, Callable[[], object]]] = []
        self.lost = False
        self._ends = ends
        self._renewed_until = renewed_until

    def remaining(self) -> float:
        """The lock is renewed when a third of its lease has passed."""
        renewed_at = min(self.now, self._renewed_until) // (TTL_S / 3) * (TTL_S / 3)
        return 0.0 if self.lost else max(renewed_at + TTL_S - self.now, 0.0)

    def send(self, number: int) -> None:
        self.sent.append((round(self.now, 6), number))

    def poll(self) -> int | None:
        return 0 if self._ends(self) else None

    def has_left_others(self) -> bool:
        return False

    def wait(self, limit_s: float) -> list[int]:
        """Time passes until the next event, or to the limit."""
        assert limit_s > 0, "it does not sleep"
        due = [event for event in self.events if event[0] <= self.now + limit_s]
        self.now = max(self.now, due[0][0]) if due else self.now + limit_s
        if due:
            self.events.remove(due[0])
            due[0][1]()
        return []

    def wake(self) -> None:
        pass


def killed(world: World) -> bool:
    return signal.SIGKILL in (number for _, number in world.sent)


def told(world: World) -> bool:
    return signal.SIGTERM in (number for _, number in world.sent)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[World, Guard]]:
    """Makes a world and a guard in it."""

    def make(ends: Callable[[World], bool], renewed_until: float = NEVER) -> tuple[World, Guard]:
        world: Any = World(ends, renewed_until)
        monkeypatch.setattr(guard_module, "clock", lambda: world.now)
        return world, Guard("the lock", world, TTL_S, kills=True)

    return make


def test_command_is_left_alone_while_the_lock_is_renewed(begin: Callable[..., Any]) -> None:
    world, guard = begin(lambda world: world.now > 100)
    assert guard.run(world, world) == 0
    assert (world.sent, guard.has_ended_it) == ([], False)


def test_command_that_ignores_term_is_killed_before_its_lease_ends(begin: Callable[..., Any]) -> None:
    world, guard = begin(killed, renewed_until=1.0)
    guard.run(world, world)
    kill_at = TTL_S - KILL_S
    assert (world.sent, guard.has_ended_it) == ([(kill_at - TERM_S, signal.SIGTERM), (kill_at, signal.SIGKILL)], True)


def test_command_that_is_told_to_end_may_end_by_itself(begin: Callable[..., Any]) -> None:
    world, guard = begin(told, renewed_until=1.0)
    guard.run(world, world)
    assert (world.sent, guard.has_ended_it) == ([(TTL_S - KILL_S - TERM_S, signal.SIGTERM)], True)


def test_command_is_told_at_once_and_killed_soon_after_a_loss(begin: Callable[..., Any]) -> None:
    world, guard = begin(killed)

    def lose() -> None:
        world.lost = True
        guard.note_loss(world, LossReason.TAKEN)

    world.events.append((0.5, lose))
    guard.run(world, world)
    assert world.sent == [(0.5, signal.SIGTERM), (1.5, signal.SIGKILL)]


def test_command_whose_lease_ended_while_the_machine_slept_is_killed_at_once(begin: Callable[..., Any]) -> None:
    world, guard = begin(killed, renewed_until=0.0)

    def sleep() -> None:
        world.now += 3600

    world.events.append((0.5, sleep))
    guard.run(world, world)
    assert world.sent == [(3600.5, signal.SIGTERM), (3600.5, signal.SIGKILL)]


def test_loss_that_the_release_finds_out_is_none_of_the_command(begin: Callable[..., Any]) -> None:
    world, guard = begin(lambda _: True)
    guard.run(world, world)
    guard.note_loss(world, LossReason.DELETED)
    assert (guard.loss, guard.has_ended_it) == (None, False)


# Signals


BEGIN = """if True:
    import os, signal
    from redislock_fast._cli.signals import Interrupted, Signals
    signals = Signals()
"""


def test_signals_are_noted_in_their_order() -> None:
    script = """
    for name in ("SIGUSR2", "SIGCHLD", "SIGTERM", "SIGUSR1"):
        os.kill(os.getpid(), getattr(signal, name))
    print([signal.Signals(number).name for number in signals.wait(0)], signals.wait(0))
    """
    assert run_script(BEGIN + script).stdout == "['SIGUSR2', 'SIGTERM', 'SIGUSR1'] []\n"


def test_child_that_ends_and_a_thread_end_the_wait() -> None:
    script = """
    for wake in (signals.wake, lambda: os.kill(os.getpid(), signal.SIGCHLD)):
        wake()
        print(signals.wait(600))
    """
    assert run_script(BEGIN + script).stdout == "[]\n[]\n"


def test_signal_that_came_before_the_wait_ends_it() -> None:
    script = """
    os.kill(os.getpid(), signal.SIGWINCH)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        with signals.interrupting():
            print("waits")
    except Interrupted as interrupt:
        print(interrupt.number == signal.SIGTERM)
    """
    assert run_script(BEGIN + script).stdout == "True\n"


def test_second_signal_does_not_interrupt_what_the_first_one_has_begun() -> None:
    script = """
    try:
        with signals.interrupting():
            os.kill(os.getpid(), signal.SIGTERM)
    except Interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        print(signals.wait(0) == [signal.SIGINT])
    """
    assert run_script(BEGIN + script).stdout == "True\n"
