"""A late reply to an acquire with a caller's own token, beside another caller of the same claim. No server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from redislock_fast._protocol.claims import Claims
from tests.support.helpers import PATIENCE_S, start


class _Transport:
    """Notes what is cleaned up."""

    def __init__(self) -> None:
        self.cleaned_up: list[tuple[bytes, bytes]] = []

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        self.cleaned_up += entries


def test_late_reply_waits_for_no_caller() -> None:
    transport = _Transport()
    claims = Claims(transport.clean_up)
    operation: Any = SimpleNamespace(key=b"name", token=b"mine", claim=None)
    claims.begin(operation)
    claim = operation.claim
    is_taken, is_over = threading.Event(), threading.Event()

    def end_slowly() -> None:
        with claim.mutex:  # as a caller that a signal handler has interrupted there
            is_taken.set()
            assert is_over.wait(PATIENCE_S)
        claim.end(False)

    ending = start(end_slowly)
    assert is_taken.wait(PATIENCE_S)
    claim.under_way, under_way = 0, claim.under_way
    start(claim.take).result(PATIENCE_S / 2)
    claim.under_way = under_way
    assert transport.cleaned_up == []
    is_over.set()
    ending.result(PATIENCE_S)
    assert transport.cleaned_up == [(b"name", b"mine")]
