"""Calls in turn: none waits for another one, and none is lost."""

from __future__ import annotations

import pytest

from redislock_fast._observe.turns import in_turn
from tests.support.helpers import in_thread


def test_what_comes_in_the_midst_of_a_call_is_called_after_it() -> None:
    """As from a signal handler, or from another thread while such a handler waits for a lock of that."""
    called: list[str] = []

    def call() -> None:
        in_turn(called.append, "of a handler")
        in_thread(lambda: in_turn(called.append, "of another thread"))
        called.append("first")

    in_turn(call)
    assert called == ["first", "of a handler", "of another thread"]


def test_what_an_interrupt_leaves_is_called_with_the_next_call() -> None:
    called: list[str] = []

    def interrupt() -> None:
        in_turn(called.append, "left")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_turn(interrupt)
    assert called == []
    in_turn(called.append, "next")
    assert called == ["left", "next"]


def test_an_error_is_logged_and_ends_no_other_call(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def fail() -> None:
        in_turn(called.append, "after it")
        raise ValueError

    in_turn(fail)
    assert (called, [record.message for record in caplog.records]) == (["after it"], ["metrics failed."])
