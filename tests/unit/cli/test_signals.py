"""The signals that `redislock run` hears. Each test runs in a process of its own, whose handlers it replaces."""

from __future__ import annotations

from tests.support.helpers import run_script

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
