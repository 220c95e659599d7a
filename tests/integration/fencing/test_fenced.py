"""The operations that number a lock's holders: what they send, what they make of each reply, and real servers.

Rules: as in `unit/protocol/test_commands.py`; where there is a client, there is a real server.
"""

from __future__ import annotations

import hiredis
import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.fenced import AcquireFenced, AcquireOwnFenced, Fence
from redislock_fast._protocol.keys import fence_key
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.scripts import ACQUIRE_FENCED
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._util.tokens import CONTENDED_FLAG
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.simulation.model import WRONGTYPE
from tests.support.proxy import Proxy

KEY = b"name"
FENCE = fence_key(KEY)
OURS = b"rlf:" + b"1" * 32
OTHER = b"rlf:" + b"2" * 32

NOSCRIPT = hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")


def operations() -> list[Operation]:
    return [AcquireFenced(KEY, OURS, 1000), AcquireOwnFenced(KEY, OURS, 1000), Fence(KEY, OURS)]


def acquire(
    client: redis.Redis, token: bytes, ttl_ms: int | None = 10_000, kind: type[AcquireFenced] = AcquireFenced
) -> AcquireFenced:
    operation = kind(KEY, token, ttl_ms)
    transport_of(client).execute(operation)
    return operation


def number(client: redis.Redis, token: bytes) -> Fence:
    operation = Fence(KEY, token)
    transport_of(client).execute(operation)
    return operation


# ---- with a pen ----


@pytest.mark.parametrize(("ttl_ms", "value"), [(1500, 1500), (None, 0)])
def test_acquire_request(ttl_ms: int | None, value: int) -> None:
    request = AcquireFenced(KEY, OURS, ttl_ms).request(Capabilities(), 1.0)
    assert (b"EVALSHA", ACQUIRE_FENCED.sha, 2, KEY, FENCE, OURS, value) == request


def test_fence_request_takes_nothing() -> None:
    request = Fence(KEY, OURS).request(Capabilities(), 1.0)
    assert (b"EVALSHA", ACQUIRE_FENCED.sha, 2, KEY, FENCE, OURS, b"") == request


def test_acquire_remembers_when_the_first_request_left() -> None:
    operation = AcquireFenced(KEY, OURS, 1000)
    operation.request(Capabilities(), 5.0)
    operation.note_unanswered(True)
    operation.request(Capabilities(), 6.0)
    assert operation.feed([1, None, 7], Capabilities())
    assert (operation.result, operation.fence, operation.sent_at) == (True, 7, 5.0)


@pytest.mark.parametrize("value", [OURS, OURS + CONTENDED_FLAG], ids=["unmarked", "marked"])
@pytest.mark.parametrize("sent", [True, False], ids=["lost", "never sent"])
def test_acquire_finds_its_own_token_after_a_lost_reply_only(value: bytes, sent: bool) -> None:
    operation = AcquireFenced(KEY, OURS, 1000)
    operation.request(Capabilities(), 5.0)
    operation.note_unanswered(sent)
    operation.request(Capabilities(), 6.0)
    assert operation.feed([2, value, 7], Capabilities())
    assert (operation.result, operation.fence, operation.holder) == (sent, 7, value)


@pytest.mark.parametrize("sent", [True, False])
def test_acquire_of_unknown_outcome_is_undone(sent: bool) -> None:
    operation = AcquireFenced(KEY, OURS, 1000)
    operation.request(Capabilities(), 1.0)
    operation.note_unanswered(sent)
    assert operation.to_clean_up(True) == ([(KEY, OURS)] if sent else [])
    assert operation.takes() == [(KEY, OURS)]


def test_script_is_sent_whole_once_the_server_does_not_know_it() -> None:
    for operation in operations():
        by_sha = operation.request(Capabilities(), 1.0)
        assert not operation.feed(NOSCRIPT, Capabilities())
        assert (b"EVAL", ACQUIRE_FENCED.text, *by_sha[2:]) == operation.request(Capabilities(), 1.0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("READONLY You can't write against a read only replica.", NotExecuted),
        ("ERR Error running script (call to f_0): @user_script:7: @user_script: 7: -READONLY You can't.", NotExecuted),
        ("MOVED 5798 127.0.0.1:7001", Redirected),
        ("NOPERM User u has no permissions to run the 'evalsha' command", Refused),
        ("OOM command not allowed when used memory > 'maxmemory'.", Refused),
        (WRONGTYPE, Refused),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_errors(text: str, error: type[Exception]) -> None:
    for operation in operations():
        before = operation.request(Capabilities(), 1.0)
        with pytest.raises(error):
            operation.feed(hiredis.ReplyError(text), Capabilities())
        assert before == operation.request(Capabilities(), 1.0)
        assert (operation.result, operation.unsettled) == (False, False)


# ---- on real servers ----


def test_each_holder_has_a_higher_number(client: redis.Redis) -> None:
    fences = []
    for token in (OURS, OTHER, OURS, OURS):  # a token that comes back is a new holder
        fences.append(acquire(client, token).fence)
        client.delete(KEY)
    assert fences == [1, 2, 3, 4]
    assert client.pttl(FENCE) == -1


def test_lock_expires_and_the_numbers_do_not(client: redis.Redis) -> None:
    assert acquire(client, OURS).result
    assert 0 < client.pttl(KEY) <= 10_000
    client.delete(KEY)
    assert acquire(client, OURS, None).result
    assert (client.pttl(KEY), client.pttl(FENCE)) == (-1, -1)


def test_acquire_of_a_held_lock_names_the_holder_and_counts_nothing(client: redis.Redis) -> None:
    acquire(client, OURS)
    operation = acquire(client, OTHER)
    assert (operation.result, operation.holder, operation.fence) == (False, OURS, 0)
    assert client.hget(FENCE, "number") == b"1"


def test_acquire_of_what_another_holds_with_the_same_token_fails(client: redis.Redis) -> None:
    acquire(client, b"same")
    operation = acquire(client, b"same")
    assert (operation.result, operation.holder) == (False, b"same")
    assert client.hget(FENCE, "number") == b"1"


@pytest.mark.parametrize("value", [b"job", OURS, OURS + CONTENDED_FLAG], ids=["brought", "ours", "marked"])
def test_acquire_with_the_token_of_the_holder_has_the_same_number_and_a_new_lease(
    client: redis.Redis, value: bytes
) -> None:
    token = value.removesuffix(CONTENDED_FLAG)
    acquire(client, token)
    client.set(KEY, value, px=5_000)
    operation = acquire(client, token, 60_000, AcquireOwnFenced)
    assert (operation.result, operation.fence) == (True, 1)
    assert 50_000 < client.pttl(KEY) <= 60_000
    assert client.get(KEY) == value


def test_acquire_with_a_token_that_has_lost_the_lock_has_a_higher_number(client: redis.Redis) -> None:
    fences = []
    for _ in range(3):
        fences.append(acquire(client, b"job", kind=AcquireOwnFenced).fence)
        client.delete(KEY)
    assert fences == [1, 2, 3]


def test_own_token_does_not_take_anothers_lock(client: redis.Redis) -> None:
    acquire(client, OTHER)
    operation = acquire(client, b"job", kind=AcquireOwnFenced)
    assert (operation.result, operation.holder, operation.fence) == (False, OTHER, 0)


def test_holder_of_a_handed_over_lock_is_numbered_once(client: redis.Redis) -> None:
    acquire(client, OURS)
    client.set(KEY, OTHER + CONTENDED_FLAG)  # as the script that hands over does
    assert [number(client, OTHER).fence for _ in range(3)] == [2, 2, 2]
    assert client.get(KEY) == OTHER + CONTENDED_FLAG


@pytest.mark.parametrize("value", [None, OTHER], ids=["free", "another's"])
def test_a_lock_that_is_not_held_any_more_is_not_numbered(client: redis.Redis, value: bytes | None) -> None:
    if value is not None:
        client.set(KEY, value)
    operation = number(client, OURS)
    assert (operation.result, operation.fence) == (False, 0)
    assert client.get(KEY) == value
    assert not client.exists(FENCE)


@pytest.mark.parametrize("command", ["EVALSHA", "EVAL"])
@pytest.mark.parametrize("kind", [AcquireFenced, AcquireOwnFenced])
def test_acquire_whose_reply_is_lost_gets_the_number_that_it_has(
    client: redis.Redis, proxy: Proxy, connect: Connect, command: str, kind: type[AcquireFenced]
) -> None:
    client.script_flush()
    if command == "EVALSHA":
        client.script_load(ACQUIRE_FENCED.text)
    proxy.drop_reply(command)
    operation = acquire(connect(proxy.port), OURS, kind=kind)
    assert proxy.dropped.is_set()
    assert (operation.result, operation.unsettled, operation.fence) == (True, True, 1)
    assert client.hget(FENCE, "number") == b"1"


def test_numbers_are_exact_as_far_as_a_double_is(client: redis.Redis) -> None:
    client.hset(FENCE, "number", str(2**53 - 2))
    assert acquire(client, OURS).fence == 2**53 - 1
    client.set(KEY, OTHER)
    assert [number(client, OTHER).fence for _ in range(2)] == [2**53, 2**53]


@pytest.mark.parametrize("key", [KEY, FENCE])
def test_key_of_another_type_raises_and_takes_nothing(client: redis.Redis, key: bytes) -> None:
    client.rpush(key, "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        acquire(client, OURS)
    assert client.keys() == [key]


def test_without_scripts_there_are_no_numbers(server: Server, connect: Connect, acl_user: MakeUser) -> None:
    client = connect(server.port, **acl_user(server, "-eval", "-evalsha").options())
    with pytest.raises(NoPermissionError):
        acquire(client, OURS)
    transport_of(client).execute(Acquire(KEY, OURS, 10_000))
    with pytest.raises(NoPermissionError):
        number(client, OURS)
