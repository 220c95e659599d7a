"""Calls of metrics libraries: a handler's are made after the one that it has interrupted, and none is lost."""

from __future__ import annotations

import pytest

from redislock_fast._observe.libraries import call_library
from tests.support.helpers import in_thread


def test_what_a_handler_calls_in_the_midst_of_a_call_is_called_after_it() -> None:
    called: list[str] = []

    def call() -> None:
        call_library(called.append, "of a handler")
        called.append("first")

    call_library(call)
    assert called == ["first", "of a handler"]


def test_another_thread_waits_for_no_call_but_its_own() -> None:
    called: list[str] = []

    def call() -> None:
        in_thread(lambda: call_library(called.append, "of another thread"))
        called.append("first")

    call_library(call)
    assert called == ["of another thread", "first"]


def test_what_an_interrupt_leaves_is_called_with_the_next_call() -> None:
    called: list[str] = []

    def interrupt() -> None:
        call_library(called.append, "left")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_library(interrupt)
    assert called == []
    call_library(called.append, "next")
    assert called == ["left", "next"]


def test_an_error_is_logged_and_ends_no_other_call(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    def fail() -> None:
        call_library(called.append, "after it")
        raise ValueError

    call_library(fail)
    assert (called, [record.message for record in caplog.records]) == (["after it"], ["metrics failed."])
