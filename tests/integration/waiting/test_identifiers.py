"""The identifier in a token: that of the connection, which its channel has, too.

Rules: those of `test_waiting.py`.
"""

from __future__ import annotations

import redis

from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.waiting import LATE, Callers, hand_round, identifier_of, queue_up


def test_token_has_the_identifier_of_the_channel(callers: Callers, server: Server, client: redis.Redis) -> None:
    holder, waiter = callers.contenders(2, callers.client(server.port), **LATE)
    assert holder.call("acquire")  # the first one of the client: before its token, there was no connection
    first = identifier_of(client)
    answers = queue_up([waiter], client)
    assert b"rlf:" + first in client.pubsub_channels("rlf:*")  # of other tests, too
    holder.release()
    wait_until(answers[0].done, "the lock is handed over")
    assert first == identifier_of(client)
    hand_round([waiter], answers)
    assert holder.call("acquire")
    assert first == identifier_of(client)


def test_connections_one_after_the_other_have_identifiers_that_begin_alike(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    lock = callers.contender(callers.client(server.port), **LATE)
    identifiers = set()
    for _ in range(3):
        assert lock.call("acquire")  # connects again, with the token that was drawn before
        lock.release()
        assert lock.call("acquire")
        identifiers.add(identifier_of(client))
        lock.release()
        client.client_kill_filter(_type="normal", skipme=True)
    assert 3 == len(identifiers)
    assert 1 == len({one[:8] for one in identifiers})
