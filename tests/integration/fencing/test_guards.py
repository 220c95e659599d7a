"""Guarded writes to real servers: a writer with a lower fence than another is refused, whatever has happened since.

Rules: each test runs on every kind of server, and for threads and tasks.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, ResponseError

from redislock_fast import Lock
from redislock_fast.fencing import AsyncGuard, Guard, StaleFenceError
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import wait_until
from tests.support.worlds import World, waited

KEY = b"name"
NOTE = b"{name}:rlf:guard"


def two_holders(client: redis.Redis) -> tuple[int, int]:
    """The fence of a holder that was paused until its lease had ended, and that of the next."""
    fences = []
    for _ in range(2):
        lock = Lock(client, "lock", timeout=0.001, fencing=True)
        assert lock.acquire()
        assert lock.fence is not None
        fences.append(lock.fence)
        wait_until(lambda: not client.exists("lock"), "the lease ends")
    return fences[0], fences[1]


MakeGuard = Callable[..., Any]


class Blocking:
    """A guard of either kind, whose methods block."""

    def __init__(self, guard: Any) -> None:
        self._guard = guard

    def set(self, *args: Any, **options: Any) -> None:
        waited(self._guard.set(*args, **options))

    def eval(self, *args: Any) -> Any:
        return waited(self._guard.eval(*args))


@pytest.fixture
def make_guard(world: World, server: Server, connect: Connect) -> MakeGuard:
    """Makes guards for threads and for tasks in turn, on clients with any options."""
    kind: Any = Guard if world.in_threads else AsyncGuard
    return lambda **options: Blocking(kind(world.client(connect(server.port, **options))))


@pytest.fixture
def guard(make_guard: MakeGuard) -> Blocking:
    """A guard on a client without options."""
    guard: Blocking = make_guard()
    return guard


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_script_with_a_shebang_is_guarded(guard: Blocking, client: redis.Redis, server: Server, end: str) -> None:
    if server.kind == "redis-6.2":
        pytest.skip("this server takes no shebang")
    script = f"#!lua flags=allow-stale{end}return redis.call('set', KEYS[1], ARGV[1])"
    assert b"OK" == guard.eval(script, [KEY], ["value"], 2)
    assert b"value" == client.get(KEY)
    with pytest.raises(StaleFenceError):
        guard.eval(script, [KEY], ["stale"], 1)
    assert b"value" == client.get(KEY)


def test_paused_holder_is_refused(guard: Blocking, client: redis.Redis) -> None:
    paused, later = two_holders(client)
    guard.set(KEY, "later", later)
    with pytest.raises(StaleFenceError):
        guard.set(KEY, "stale", paused)
    assert client.get(KEY) == b"later"


@pytest.mark.parametrize(
    ("fences", "outcomes"),
    [
        ([1], "1 "),
        ([5, 5], "5 5 "),
        ([3, 7, 3], "3 7 3<7 "),
        ([9, 10, 9, 10], "9 10 9<10 10 "),
        ([2**53 - 1, 2**53, 2**53 - 1], f"{2**53 - 1} {2**53} {2**53 - 1}<{2**53} "),
    ],
    ids=str,
)
def test_lower_fence_than_one_that_has_written_is_refused(
    guard: Blocking, client: redis.Redis, fences: list[int], outcomes: str
) -> None:
    written = ""
    for fence in fences:
        try:
            guard.set(KEY, f"of {fence}", fence)
        except StaleFenceError as error:
            written += f"{error.fence}<{error.highest} "
        else:
            written += f"{fence} "
    assert written == outcomes
    assert client.get(KEY) == b"of %d" % max(fences)


def test_every_order_of_three_holders_ends_with_the_last(guard: Blocking, client: redis.Redis) -> None:
    for order in itertools.permutations((1, 2, 3)):
        client.flushall()
        highest = 0
        for fence in order:
            if fence < highest:
                with pytest.raises(StaleFenceError):
                    guard.set(KEY, fence, fence)
            else:
                guard.set(KEY, fence, fence)
            highest = max(highest, fence)
        assert client.get(KEY) == b"3"


def test_neither_expiry_nor_deletion_lets_a_stale_writer_in(guard: Blocking, client: redis.Redis) -> None:
    guard.set(KEY, "short-lived", 7, ttl=60)
    assert 0 < client.pttl(KEY) <= 60_000
    assert client.pttl(NOTE) == -1
    client.delete(KEY)
    with pytest.raises(StaleFenceError):
        guard.set(KEY, "stale", 6)
    assert client.keys() == [NOTE]


def test_set_without_a_ttl_takes_the_old_one_away(guard: Blocking, client: redis.Redis) -> None:
    guard.set(KEY, "one", 1, ttl=60)
    guard.set(KEY, "two", 1)
    assert client.pttl(KEY) == -1


def test_each_key_has_a_guard_of_its_own(guard: Blocking, client: redis.Redis) -> None:
    guard.set("one", "later", 7)
    guard.set("other", "earlier", 6)
    assert client.mget("one", "other") == [b"later", b"earlier"]


@pytest.mark.parametrize("decodes", [False, True], ids=["bytes", "decoded"])
def test_any_script_can_be_guarded(make_guard: MakeGuard, client: redis.Redis, decodes: bool) -> None:
    guard = make_guard(decode_responses=decodes)
    script = "redis.call('rpush', KEYS[1], unpack(ARGV)) return {#KEYS, #ARGV, redis.call('lrange', KEYS[1], 0, -1)}"
    for _ in range(2):
        answer = guard.eval(script, ["list"], ["a", 2], 7)
    assert answer == [1, 2, ["a", "2", "a", "2"] if decodes else [b"a", b"2", b"a", b"2"]]
    with pytest.raises(StaleFenceError, match="fence 6 is stale: 7 has written"):
        guard.eval(script, ["list"], ["stale"], 6)
    assert client.llen("list") == 4


def test_script_of_many_keys_is_guarded_by_the_first(guard: Blocking, client: redis.Redis) -> None:
    move = "redis.call('rename', KEYS[2], KEYS[1])"
    client.mset({"from": 1, "also from": 2})
    guard.eval(move, ["to", b"from"], [], 7)
    with pytest.raises(StaleFenceError):
        guard.eval(move, ["to", "also from"], [], 6)
    guard.eval("redis.call('del', KEYS[1])", ["also from"], [], 6)
    assert sorted(client.keys()) == sorted([b"to", b"{to}:rlf:guard", b"{also from}:rlf:guard"])


def test_script_that_fails_raises_and_has_noted_its_fence(guard: Blocking, client: redis.Redis) -> None:
    client.set(KEY, "a string")
    with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
        guard.eval("return redis.call('rpush', KEYS[1], 'x')", [KEY], [], 7)
    assert not isinstance(caught.value, StaleFenceError)
    with pytest.raises(StaleFenceError):
        guard.set(KEY, "stale", 6)


def test_guards_of_both_kinds_guard_the_same(guard: Blocking, client: redis.Redis) -> None:
    Guard(client).set(KEY, "earlier", 7)
    guard.set(KEY, "later", 8)
    with pytest.raises(StaleFenceError):
        Guard(client).set(KEY, "stale", 7)


@pytest.mark.parametrize(
    ("fence", "error"),
    [(None, TypeError), (True, TypeError), ("7", TypeError), (0, ValueError), (2**53 + 1, ValueError)],
)
def test_what_is_no_fence_is_refused_before_anything_is_sent(
    guard: Blocking, client: redis.Redis, fence: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="fence"):
        guard.set(KEY, "value", fence)
    assert client.keys() == []


@pytest.mark.parametrize("ttl", [0, -1, math.nan, math.inf, 1e-400])
def test_what_is_no_ttl_is_refused_before_anything_is_sent(guard: Blocking, client: redis.Redis, ttl: float) -> None:
    with pytest.raises(ValueError, match="ttl"):
        guard.set(KEY, "value", 1, ttl=ttl)
    assert client.keys() == []


@pytest.mark.parametrize("keys", [[], "name", b"name"])
def test_what_is_no_list_of_keys_is_refused(guard: Blocking, keys: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="keys"):
        guard.eval("return 1", keys, [], 1)


def test_clients_of_the_other_kind_and_pipelines_are_refused() -> None:
    clients: list[Any] = [redis.Redis(), redis.asyncio.Redis()]
    kinds: list[Any] = [Guard, AsyncGuard]
    for kind, other in zip(kinds, reversed(clients), strict=True):
        with pytest.raises(TypeError, match="asyncio"):
            kind(other)
    for kind, client in zip(kinds, clients, strict=True):
        with pytest.raises(TypeError, match="pipeline"):
            kind(client.pipeline())


def test_error_is_one_of_a_lock_and_can_be_pickled() -> None:
    error: StaleFenceError = pickle.loads(pickle.dumps(StaleFenceError(6, 7)))
    assert issubclass(StaleFenceError, LockError)
    assert (error.fence, error.highest, str(error)) == (6, 7, "fence 6 is stale: 7 has written")
