"""A user that may publish on any channel, and nothing else, takes no lock and stops no caller.

Rules: the user has an ACL of its own, with `PUBLISH` alone. A waiter has a ttl and an interval of health checks beyond
any test's patience, so whatever wakes it is a message.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError

from redislock_fast import LockLostError
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, LATE, Contender, Guard, identifier_of, queue_of, until_queued

MIB = 1 << 20


@pytest.fixture
def publisher(valkey: Server, connect: Connect, acl_user: MakeUser) -> redis.Redis:
    """A client of a user that may only publish."""
    user = acl_user(valkey, "resetkeys", "-@all", "+publish")
    return connect(valkey.port, protocol=2, **user.options())


@pytest.fixture
def waiting(holders: Holders, valkey: Server, valkey_client: redis.Redis) -> Waiting:
    """A held lock, and a waiter of another connection."""
    return Waiting(holders, valkey, valkey_client)


class Waiting:
    """A held lock, and a waiter of another connection.

    Args:
        holders: makes the locks.
        server: the server.
        admin: a client with all rights.
        settings: of both locks.

    Attributes:
        holder: has the lock.
        waiter: waits for it.
        answer: what its `acquire` returns.
        token: the waiter's, which is its secret.
        channel: where the waiter listens; no secret.
    """

    def __init__(self, holders: Holders, server: Server, admin: redis.Redis, **settings: Any) -> None:
        self.holder: Contender = holders.make(server.port, **LATE, **settings)
        self.waiter: Contender = holders.make(server.port, **LATE, **settings)
        self.begin(admin)

    def begin(self, admin: redis.Redis) -> None:
        """Let the one hold the lock, and the other wait for it."""
        assert self.holder.call("acquire") is True
        self.answer = self.waiter.acquire()
        until_queued(admin, "name", 1)
        queue: Any = admin.zrange(queue_of("name"), 0, -1)
        self.token: bytes = queue[0]
        self.channel = b"rlf:" + self.token[4:15]

    def ends_well(self, admin: redis.Redis) -> None:
        """The waiter gets the lock behind all messages, by the release of the holder alone."""
        assert not self.answer.done()
        assert self.holder.call("owned") is True
        self.holder.release()
        assert self.answer.result(PATIENCE_S) is True
        assert admin.get("name") == self.token + b"+"
        self.waiter.release()
        assert [] == admin.keys()


def _forgeries(token: bytes) -> list[bytes]:
    """Grants that are not for this token: of guessed ones, and the token cut, changed and moved."""
    random = token[16:]
    changed = b"%x" % (int(random[:1], 16) ^ 1) + random[1:]
    values = [token[:16] + guess for guess in (b"0" * 20, os.urandom(10).hex().encode(), changed, random.upper())]
    texts = [value + end for value in values if value != token for end in (b"", b"+", b"+1", b"+99999999999999999")]
    return [*texts, token[:-1], token[:-1] + b"+1", b" " + token + b"+1", token[:16], token[:15], token[4:] + b"+1"]


def test_forged_grant_without_the_waiters_token_is_ignored(
    waiting: Waiting, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    for text in _forgeries(waiting.token):
        assert 1 == publisher.publish(waiting.channel, text)
    waiting.ends_well(valkey_client)


def test_grant_that_was_observed_is_of_no_use_again(
    waiting: Waiting, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    client: Any = valkey_client
    with client.pubsub(ignore_subscribe_messages=True) as listener:
        listener.psubscribe("rlf:*")
        listener.get_message(timeout=PATIENCE_S)
        waiting.holder.release()
        assert waiting.answer.result(PATIENCE_S) is True
        observed = None
        while observed is None:
            observed = listener.get_message(timeout=PATIENCE_S)
    assert observed["data"].startswith(waiting.token)
    waiting.waiter.release()
    waiting.begin(valkey_client)
    publisher.publish(waiting.channel, observed["data"])
    waiting.ends_well(valkey_client)


def test_who_knows_the_waiters_token_can_forge_a_grant(
    waiting: Waiting, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    publisher.publish(waiting.channel, waiting.token + b"+99999999999999999")
    assert waiting.answer.result(PATIENCE_S) is True
    assert (True, False) == (waiting.holder.call("owned"), waiting.waiter.call("owned"))
    with pytest.raises(LockNotOwnedError):
        waiting.waiter.release()
    waiting.holder.release()


def test_forged_grant_with_the_token_is_found_by_fencing(
    holders: Holders, valkey: Server, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    waiting = Waiting(holders, valkey, valkey_client, fencing=True)
    publisher.publish(waiting.channel, waiting.token + b"+99999999999999999")
    with pytest.raises(LockLostError):
        waiting.answer.result(PATIENCE_S)
    waiting.holder.release()


GARBAGE = {
    "empty": b"",
    "zero": b"\0",
    "flag": b"+",
    "marker": b"rlf:",
    "wanted": b"wanted",
    "wanted nothing": b"wanted ",
    "wanted name": b"wanted name",
    "wanted bytes": b"wanted \xff\r\n",
    "reply": b"*3\r\n$7\r\nmessage\r\n",
    "long": b"x" * MIB,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_on_the_channel_harms_nobody(
    waiting: Waiting, publisher: redis.Redis, valkey_client: redis.Redis, garbage: bytes
) -> None:
    for _ in range(3):
        publisher.publish(waiting.channel, garbage)
        publisher.publish(b"rlf:" + identifier_of(valkey_client), garbage)
    waiting.ends_well(valkey_client)


MANY = 5_000


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wanted %020d", "rlf:%032d+1", "%d"])
def test_a_flood_of_garbage_does_not_stay_in_memory(
    waiting: Waiting, publisher: redis.Redis, valkey_client: redis.Redis, form: str
) -> None:
    blocks: list[int] = []
    for flood in range(3):  # the first fills what is bounded
        with publisher.pipeline(transaction=False) as pipeline:
            for number in range(MANY):
                pipeline.publish(waiting.channel, form % (number + flood * MANY))
            pipeline.execute()
        waiting.ends_well(valkey_client)
        waiting.begin(valkey_client)
        del pipeline
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    assert blocks[2] - blocks[1] < MANY


@pytest.mark.slow
def test_a_connection_that_a_flood_fills_is_used_or_replaced(
    waiting: Waiting, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    waiting.holder.release()
    assert waiting.answer.result(PATIENCE_S) is True
    for _ in range(64):  # nobody reads in threads, and the server closes what has more than 32 MiB to read
        publisher.publish(waiting.channel, b"x" * MIB)
    assert waiting.waiter.call("owned") is True
    assert waiting.waiter.call("reacquire") is True
    waiting.answer = waiting.holder.acquire()
    until_queued(valkey_client, "name", 1)
    waiting.waiter.release()
    assert waiting.answer.result(PATIENCE_S) is True
    waiting.holder.release()
    assert [] == valkey_client.keys()


def test_forged_wanted_does_not_break_exclusion(
    holders: Holders, valkey: Server, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    heard: list[Any] = []
    settings: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.02}
    holder = holders.make(valkey.port, **settings, linger=FAR_S, on_wanted=heard.append)
    other = holders.make(valkey.port, **settings)
    assert holder.call("acquire") is True
    channel = b"rlf:" + identifier_of(valkey_client)
    for _ in range(3):
        publisher.publish(channel, b"wanted name")
    wait_until(lambda: heard, "it is told once")
    assert holder.call("owned") is True
    assert other.call("acquire", blocking=False) is False
    holder.release()
    wait_until(lambda: not valkey_client.exists("name"), "the key does not linger")
    assert other.call("acquire", blocking=False) is True
    publisher.publish(channel, b"wanted name")
    assert holder.call("acquire", blocking=False) is False
    other.release()
    assert 1 == len(heard)


@pytest.mark.slow
def test_a_flood_of_forged_wanted_costs_hand_overs_alone(
    holders: Holders, valkey: Server, publisher: redis.Redis, valkey_client: redis.Redis
) -> None:
    guard = Guard()
    settings: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.02, "linger": FAR_S}
    contenders = [holders.make(valkey.port, **settings) for _ in range(3)]
    channels = []
    for contender in contenders:
        assert contender.call("acquire") is True
        channels.append(b"rlf:" + identifier_of(valkey_client))
        contender.release()
    for _ in range(20):
        answers = [contender.use(guard) for contender in contenders]
        while not all(answer.done() for answer in answers):
            for channel in channels:
                publisher.publish(channel, b"wanted name")
        assert [True] * 3 == [answer.result(PATIENCE_S) for answer in answers]
    assert (60, 0) == (guard.entries, guard.overlaps)
