"""The failures after which a transport does without the queue: of servers that close connections or have no pushes.

Rules: no server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from redislock_fast._pipe.base import ConnectionBroken
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.operation import SUBSCRIBED, Exchange, NotExecuted
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
            transport._note_queue_trouble(ConnectionBroken(True, "closed"), lost, operation)
        greeted.append(transport.greets)
    ends = closed_by_peer and not is_proven and (is_tried or operation is OF_THE_QUEUE)
    assert greeted == [True, not ends]


def test_request_refused_beside_a_subscription_is_sent_again_whatever_failed_before() -> None:
    client = redis.Redis()
    transport = transport_of(client)
    assert isinstance(transport, ThreadServerTransport)
    attempts = transport._attempts(None)
    refused = NotExecuted(SUBSCRIBED, "ERR only (P)SUBSCRIBE allowed in this context")
    for trouble in (ConnectionBroken(True, "closed for the error of another caller"), refused):
        connection: Any = SimpleNamespace(
            pipe=SimpleNamespace(closed_by_peer=True),
            registry=SimpleNamespace(is_tried=False, is_proven=False),
            close=lambda: None,
        )
        assert transport._note_trouble(attempts, connection, OF_A_LOCK, trouble, [])
    assert (attempts.next_pause_s(), transport.greets) == (0.0, False)
