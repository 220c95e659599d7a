"""The scripts that number a lock's holders, on real servers.

The numbers that users see are tested in `test_locks.py`; here each attempt is one operation.
"""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.proxy import Proxy
from tests.support.transports import acquire_fenced, fence_of_holder, load_fencing_script

KEY = b"name"
FENCE = b"{name}:rlf:fence"
OURS = b"rlf:" + b"1" * 32
OTHER = b"rlf:" + b"2" * 32


def test_each_holder_has_a_higher_number(client: redis.Redis) -> None:
    fences = []
    for token in (OURS, OTHER, OURS, OURS):  # a token that comes back is a new holder
        fences.append(acquire_fenced(client, token).fence)
        client.delete(KEY)
    assert fences == [1, 2, 3, 4]
    assert client.pttl(FENCE) == -1


def test_lock_expires_and_the_numbers_do_not(client: redis.Redis) -> None:
    assert acquire_fenced(client, OURS).result
    assert 0 < client.pttl(KEY) <= 10_000
    client.delete(KEY)
    assert acquire_fenced(client, OURS, None).result
    assert (client.pttl(KEY), client.pttl(FENCE)) == (-1, -1)


def test_acquire_of_a_held_lock_names_the_holder_and_counts_nothing(client: redis.Redis) -> None:
    acquire_fenced(client, OURS)
    operation = acquire_fenced(client, OTHER)
    assert (operation.result, operation.holder, operation.fence) == (False, OURS, 0)
    assert client.hget(FENCE, "number") == b"1"


def test_acquire_of_what_another_holds_with_the_same_token_fails(client: redis.Redis) -> None:
    acquire_fenced(client, b"same")
    operation = acquire_fenced(client, b"same")
    assert (operation.result, operation.holder) == (False, b"same")
    assert client.hget(FENCE, "number") == b"1"


@pytest.mark.parametrize("value", [b"job", OURS, OURS + b"+"], ids=["brought", "ours", "marked"])
def test_acquire_with_the_token_of_the_holder_has_the_same_number_and_a_new_lease(
    client: redis.Redis, value: bytes
) -> None:
    token = value.removesuffix(b"+")
    acquire_fenced(client, token)
    client.set(KEY, value, px=5_000)
    operation = acquire_fenced(client, token, 60_000, is_own=True)
    assert (operation.result, operation.fence) == (True, 1)
    assert 50_000 < client.pttl(KEY) <= 60_000
    assert client.get(KEY) == value


def test_acquire_with_a_token_that_has_lost_the_lock_has_a_higher_number(client: redis.Redis) -> None:
    fences = []
    for _ in range(3):
        fences.append(acquire_fenced(client, b"job", is_own=True).fence)
        client.delete(KEY)
    assert fences == [1, 2, 3]


def test_own_token_does_not_take_anothers_lock(client: redis.Redis) -> None:
    acquire_fenced(client, OTHER)
    operation = acquire_fenced(client, b"job", is_own=True)
    assert (operation.result, operation.holder, operation.fence) == (False, OTHER, 0)


def test_holder_of_a_handed_over_lock_is_numbered_once(client: redis.Redis) -> None:
    acquire_fenced(client, OURS)
    client.set(KEY, OTHER + b"+")  # as the script that hands over does
    assert [fence_of_holder(client, OTHER) for _ in range(3)] == 3 * [(True, 2)]
    assert client.get(KEY) == OTHER + b"+"


@pytest.mark.parametrize("value", [None, OTHER], ids=["free", "another's"])
def test_a_lock_that_is_not_held_any_more_is_not_numbered(client: redis.Redis, value: bytes | None) -> None:
    if value is not None:
        client.set(KEY, value)
    assert fence_of_holder(client, OURS) == (False, 0)
    assert client.get(KEY) == value
    assert not client.exists(FENCE)


@pytest.mark.parametrize("command", ["EVALSHA", "EVAL"])
@pytest.mark.parametrize("is_own", [False, True], ids=["ours", "brought"])
def test_acquire_whose_reply_is_lost_gets_the_number_that_it_has(
    client: redis.Redis, proxy: Proxy, connect: Connect, command: str, is_own: bool
) -> None:
    client.script_flush()
    if command == "EVALSHA":
        load_fencing_script(client)
    proxy.drop_reply(command)
    operation = acquire_fenced(connect(proxy.port), OURS, is_own=is_own)
    assert proxy.dropped.is_set()
    assert (operation.result, operation.unsettled, operation.fence) == (True, True, 1)
    assert client.hget(FENCE, "number") == b"1"


def test_numbers_are_exact_as_far_as_a_double_is(client: redis.Redis) -> None:
    client.hset(FENCE, "number", str(2**53 - 2))
    assert acquire_fenced(client, OURS).fence == 2**53 - 1
    client.set(KEY, OTHER)
    assert [fence_of_holder(client, OTHER) for _ in range(2)] == 2 * [(True, 2**53)]


@pytest.mark.parametrize("key", [KEY, FENCE])
def test_key_of_another_type_raises_and_takes_nothing(client: redis.Redis, key: bytes) -> None:
    client.rpush(key, "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        acquire_fenced(client, OURS)
    assert client.keys() == [key]


def test_without_scripts_there_are_no_numbers(server: Server, connect: Connect, acl_user: MakeUser) -> None:
    client = connect(server.port, **acl_user(server, "-eval", "-evalsha").options())
    with pytest.raises(NoPermissionError):
        acquire_fenced(client, OURS)
    assert Lock(client, "name", timeout=10).acquire(token=OURS)
    with pytest.raises(NoPermissionError):
        fence_of_holder(client, OURS)
