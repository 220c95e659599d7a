"""What a forked child forgets, and when. No server, and no fork: `forget_parent` is called as in a child."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures

import pytest

from redislock_fast._util import fork
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, start

Forget = Callable[[], None]


class Holder:
    """Registered as what a child must not use."""

    def __init__(self, forget: Forget) -> None:
        self._forget = forget
        fork.forget_in_child(self)

    def forget(self) -> None:
        self._forget()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Forget:
    """Notices a fork, in this process, which forgets nothing of its own."""
    for name, empty in (("_callbacks", []), ("_forgetters", set()), ("_turns", {}), ("_left", {})):
        monkeypatch.setattr(fork, name, empty)
    monkeypatch.setattr(fork, "_known", fork.generation())
    monkeypatch.setattr(fork, "generation", lambda: 0)
    return lambda: fork.forget_parent(-1)


def test_all_forget_once(child: Forget) -> None:
    calls: list[str] = []
    fork.on_fork(lambda: calls.append("callback"))
    holders = [Holder(lambda: calls.append("holder")) for _ in range(3)]
    for _ in range(2):
        child()
    assert calls == ["callback", *["holder"] * len(holders)]


def test_after_an_interrupt_the_next_caller_goes_on_with_the_rest(child: Forget) -> None:
    calls: list[int] = []

    def forget() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise KeyboardInterrupt

    for _ in range(3):
        fork.on_fork(forget)
    with pytest.raises(KeyboardInterrupt):
        child()
    child()
    assert calls == [0, 1, 2, 3]


def test_a_signal_handler_that_comes_in_the_midst_has_all_forgotten(child: Forget) -> None:
    calls: list[str] = []

    def forget() -> None:
        calls.append("first")
        if calls == ["first"]:  # a handler, which calls before this has ended
            child()
            assert calls == ["first", "first", "second"]

    fork.on_fork(forget)
    fork.on_fork(lambda: calls.append("second"))
    child()
    assert calls == ["first", "first", "second"]


def test_no_thread_goes_on_before_another_one_has_had_all_forgotten(child: Forget) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def forget() -> None:
        if not begun.is_set():
            begun.set()
            assert goes_on.wait(PATIENCE_S)

    fork.on_fork(forget)
    first = start(child)
    assert begun.wait(PATIENCE_S)
    others = [start(child) for _ in range(3)]
    assert futures.wait(others, timeout=0.1).done == set()
    goes_on.set()
    assert [one.result(PATIENCE_S) for one in (first, *others)] == [None] * 4


def test_a_child_has_another_generation_at_each_call_the_same(in_fork: InFork) -> None:
    before = fork.generation()
    calls: list[str] = []
    holder = Holder(lambda: calls.append("forgotten"))

    def child() -> str:
        generations = {fork.generation() for _ in range(3)}
        return f"{len(generations)} {before in generations} {calls}"

    assert in_fork(child) == "1 False ['forgotten']"
    assert (fork.generation(), calls) == (before, [])
    del holder


def test_what_is_made_in_a_child_that_has_not_noticed_is_the_childs(in_fork: InFork) -> None:
    calls: list[str] = []

    def child() -> str:
        Holder(lambda: calls.append("forgotten"))
        fork.on_fork(lambda: calls.append("forgotten"))
        fork.generation()
        return str(calls)

    assert in_fork(child) == "[]"
