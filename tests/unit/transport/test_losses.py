"""Which lost connections let a transport do without the queue, for a proxy that closes them instead of answering.

Rules: no server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.operation import Exchange
from redislock_fast._protocol.queue import Watch
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._transport.threads.server import ThreadServerTransport

OF_THE_QUEUE = Watch(b"name")
OF_A_LOCK = Acquire(b"name", b"token", None)


@pytest.mark.parametrize("is_tried", [True, False], ids=["a request is under way", "none is"])
@pytest.mark.parametrize("is_proven", [True, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("closed_by_peer", [True, False], ids=["by the peer", "by an interrupt"])
@pytest.mark.parametrize("operation", [OF_THE_QUEUE, OF_A_LOCK], ids=["of the queue", "of a lock"])
def test_two_connections_in_a_row_that_the_peer_closes_for_the_queue_end_its_use(
    is_tried: bool, is_proven: bool, closed_by_peer: bool, operation: Exchange
) -> None:
    client = redis.Redis()
    transport = transport_of(client)
    assert isinstance(transport, ThreadServerTransport)
    greeted = []
    for _ in range(2):
        lost: Any = SimpleNamespace(
            pipe=SimpleNamespace(closed_by_peer=closed_by_peer),
            registry=SimpleNamespace(is_tried=is_tried, is_proven=is_proven, is_lost=False),
        )
        for _ in range(2):  # two callers notice it
            transport._note_loss(lost, operation)
        greeted.append(transport.greets)
    ends = closed_by_peer and not is_proven and (is_tried or operation is OF_THE_QUEUE)
    assert greeted == [True, not ends]
