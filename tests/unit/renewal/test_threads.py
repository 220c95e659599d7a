"""The callbacks of lost leases, where no thread can be started. No server."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from redislock_fast import LossReason
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._renewal import threads as renewer
from redislock_fast._renewal.threads import Renewer, report_losses_in_threads
from redislock_fast._transport.threads import starting
from redislock_fast._util.times import clock
from tests.support.helpers import PATIENCE_S


class Holder:
    """Something that can be referred to weakly."""


def loss(holder: Holder, on_lost: Callable[[Any, LossReason], object]) -> LeaseLoss:
    """A lock of the holder is lost."""
    return LeaseLoss(
        Lease(weakref.ref(holder), b"name", b"token", 1000, 0.0, Options(on_lost=on_lost)), LossReason.DELETED
    )


def test_where_one_callback_gets_no_thread_the_others_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    over = threading.Event()
    told: list[Future[bool]] = [Future() for _ in range(3)]
    losses = [loss(holder, lambda *_: told[0].set_result(over.wait(PATIENCE_S)))]
    losses += [loss(holder, lambda *_, number=number: told[number].set_result(True)) for number in (1, 2)]
    real_start = starting.start_thread

    def fail_once(*args: Any) -> None:
        if threading.current_thread().name == "redislock_fast-lost":  # the first thread, which starts the others
            monkeypatch.setattr(renewer, "start_thread", real_start)
            raise RuntimeError("can't start new thread")
        real_start(*args)

    monkeypatch.setattr(renewer, "start_thread", fail_once)
    report_losses_in_threads(losses)
    assert told[1].result(PATIENCE_S)
    over.set()
    assert (told[0].result(PATIENCE_S), told[2].result(PATIENCE_S)) == (True, True)


class _Ending(Renewer):
    """Gets a lease when its thread is about to end.

    Args:
        lease: that one.
        burst: what renews it.
    """

    def __init__(self, lease: Lease, burst: Any) -> None:
        super().__init__(self, burst)
        self._late = [lease]

    def _look_again_and_again(self, in_force: Any) -> None:
        super()._look_again_and_again(in_force)
        if self._late:
            self.keep(self._late.pop())


def test_lease_that_comes_as_the_thread_ends_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewer, "_LINGER_S", 0.0)
    holder = Holder()
    first, late = (
        Lease(weakref.ref(holder), b"name", b"token", 50, clock() + 0.05, Options(auto_renew=True)) for _ in range(2)
    )
    renewed: Future[list[Lease]] = Future()

    def note(_: object, due: list[Lease], _losses: object) -> None:
        for lease in due:
            lease.record.is_over = True
        if late in due:
            renewed.set_result(due)

    ending = _Ending(late, note)
    ending.keep(first)
    assert renewed.result(PATIENCE_S) == [late]
