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
from redislock_fast._procedures.renewal import LeaseLoss
from redislock_fast._transport.threads.renewer import tell_in_background
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
    real_start = threading.Thread.start

    def fail_once(thread: threading.Thread) -> None:
        if threading.current_thread().name == "redislock_fast-lost":  # the first thread, which starts the others
            monkeypatch.setattr(threading.Thread, "start", real_start)
            raise RuntimeError("can't start new thread")
        real_start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    tell_in_background(losses)
    assert told[1].result(PATIENCE_S)
    over.set()
    assert (told[0].result(PATIENCE_S), told[2].result(PATIENCE_S)) == (True, True)
