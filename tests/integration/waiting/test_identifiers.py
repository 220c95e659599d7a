"""The identifier in a token: that of the connection, which its channel has, too.

Rules: those of `test_waiting.py`.
"""

from __future__ import annotations

from tests.support.helpers import wait_until
from tests.support.scenes import Scene
from tests.support.waiting import hand_round, identifier_of


def test_token_has_the_identifier_of_the_channel(scene: Scene) -> None:
    holder, waiter = scene.contenders(2)
    assert holder.call("acquire")  # the first one of the client: before its token, there was no connection
    first = identifier_of(scene.client)
    answers = scene.queue_up([waiter])
    assert b"rlf:" + first in scene.client.pubsub_channels("rlf:*")  # of other tests, too
    holder.release()
    wait_until(answers[0].done, "the lock is handed over")
    assert first == identifier_of(scene.client)
    hand_round([waiter], answers)
    assert holder.call("acquire")
    assert first == identifier_of(scene.client)


def test_connections_one_after_the_other_have_identifiers_that_begin_alike(scene: Scene) -> None:
    lock = scene.contender()
    identifiers = set()
    for _ in range(3):
        assert lock.call("acquire")  # connects again, with the token that was drawn before
        lock.release()
        assert lock.call("acquire")
        identifiers.add(identifier_of(scene.client))
        lock.release()
        scene.client.client_kill_filter(_type="normal", skipme=True)
    assert 3 == len(identifiers)
    assert 1 == len({one[:8] for one in identifiers})
