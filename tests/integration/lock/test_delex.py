"""The native commands of Redis 8.4 and later on a key that became no string.

Rules: by threads and by tasks. No server with DELEX can be installed with the tests, so the proxy gives one of its
replies, as real servers gave it; where the redis-server on the PATH has DELEX, the other modules use it for real.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import LockNotOwnedError

from redislock_fast.server import Server
from tests.support.proxy import Proxy
from tests.support.waiting import Callers
from tests.support.worlds import World

KNOWS_DELEX = b"*3\r\n$-1\r\n*1\r\n+delex\r\n*1\r\n+lmpop\r\n"
"""The reply to COMMAND INFO DELIFEQ DELEX LMPOP."""

NO_STRING = b"-ERR Key should be of string type if conditions are specified\r\n"


@pytest.fixture
def redis8(valkey: Server) -> Iterator[Proxy]:
    """A server that has DELEX, as far as a key is concerned that is no string."""
    with Proxy(valkey.port) as proxy:
        proxy.answer(KNOWS_DELEX, "COMMAND")
        proxy.answer(NO_STRING, "DELEX")
        yield proxy


def test_release_of_a_key_that_became_no_string_is_of_a_lock_not_owned(
    callers: Callers, redis8: Proxy, valkey_client: redis.Redis
) -> None:
    contender = callers.contender(callers.client(redis8.port), timeout=60)
    assert contender.call("acquire")
    valkey_client.delete("name")
    valkey_client.hset("name", "field", "value")
    with pytest.raises(LockNotOwnedError):
        contender.release()
    assert redis8.requests["DELEX"] == 1


def test_batch_does_not_count_a_key_that_became_no_string_as_released(
    world: World, redis8: Proxy, valkey_client: redis.Redis
) -> None:
    batch = world.locker(world.connect(redis8.port)).acquire_many(["a", "b"], 60)
    for name in ("a", "b"):
        valkey_client.delete(name)
        valkey_client.hset(name, "field", "value")
    assert batch.release() == {"a": False, "b": False}
    assert redis8.requests["DELEX"] == 2
