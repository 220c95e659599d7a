"""Weak sets that threads change while another one goes through them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from redislock_fast._util.fork import members
from tests.support.helpers import PATIENCE_S, start


class _Thing:
    """May be in a weak set."""


@pytest.fixture
def hasty() -> Iterator[None]:
    """With the GIL, threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_stays_is_found_while_another_thread_adds(hasty: None) -> None:
    things = [_Thing() for _ in range(100)]
    weak_set = weakref.WeakSet(things)
    ended = threading.Event()

    def add() -> None:
        while not ended.is_set():
            _other = _Thing()
            weak_set.add(_other)

    adding = start(add)
    try:
        for _ in range(300):
            assert set(things) <= set(members(weak_set))
    finally:
        ended.set()
        adding.result(PATIENCE_S)
