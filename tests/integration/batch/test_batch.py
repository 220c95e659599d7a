"""Batches of locks, for threads and for tasks: which locks a batch gets, leases, leaving.

What failing networks and servers make of them stands in `test_faults.py`. Rules: real servers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.batch.conftest import MakeLocker
from tests.support.forks import InFork
from tests.support.helpers import wait_until
from tests.support.proxy import Proxy
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

# Which locks it gets


def test_what_is_free_is_acquired_in_the_order_given(locker: Any, client: redis.Redis) -> None:
    client.mset({"b": "other", "d": "other"})
    batch = locker.acquire_many(["c", "b", "a", "d"])
    assert (["c", "a"], ["b", "d"]) == (batch.acquired, batch.missed)
    assert [("c", True), ("a", True)] == list(batch.release().items())
    assert [b"other", b"other"] == client.mget("b", "d")
    assert 2 == client.dbsize()


def test_all_free_or_none(locker: Any, client: redis.Redis) -> None:
    first = locker.acquire_many(["a", "b"])
    second = locker.acquire_many(["b", "a"])
    assert (["a", "b"], []) == (first.acquired, first.missed)
    assert ([], ["b", "a"]) == (second.acquired, second.missed)
    assert {} == second.release()
    assert {"a": True, "b": True} == first.release()
    assert 0 == client.dbsize()


def test_names_come_back_as_they_were_given(locker: Any, client: redis.Redis) -> None:
    names = ["é", b"\xff\x00", b"bytes", "", "with space\r\n"]
    batch = locker.acquire_many(names)
    assert names == batch.acquired
    assert {"é".encode(), b"\xff\x00", b"bytes", b"", b"with space\r\n"} == set(client.keys())
    assert dict.fromkeys(names, True) == batch.release()


def test_names_are_any_iterable(valkey_locker: Any) -> None:
    for names in ((name for name in "ab"), {"a": 1, "b": 2}, ("a", "b"), dict.fromkeys(["a", "b"]).keys()):
        with valkey_locker.acquire_many(names) as batch:
            assert ["a", "b"] == batch.acquired


def test_the_callers_list_is_not_the_batchs(valkey_locker: Any) -> None:
    names = ["a", "b"]
    batch = valkey_locker.acquire_many(names)
    names.append("c")
    batch.acquired.clear()
    assert {"a": True, "b": True} == batch.release()


def test_a_result_is_the_callers_own(valkey_locker: Any) -> None:
    batch = valkey_locker.acquire_many(["a", "b"], timeout=10)
    batch.extend(1).clear()
    batch.reacquire()["a"] = False
    assert {"a": True, "b": True} == batch.release()


@pytest.mark.parametrize(
    ("names", "settings", "error"),
    [
        ("abc", {}, TypeError),
        (b"abc", {}, TypeError),
        (5, {}, TypeError),
        (["a", "b", "a"], {}, ValueError),
        (["a", b"a"], {}, ValueError),
        (["a", "é", "é".encode()], {}, ValueError),
        (["a", None], {}, redis.DataError),
        (["a", "\ud800"], {}, UnicodeEncodeError),
        *[(["a"], {"timeout": bad}, ValueError) for bad in (-1, math.nan, math.inf, -math.inf)],
        *[(["a"], {"sleep": bad}, ValueError) for bad in (-1, math.nan)],
        (["a"], {"blocking_timeout": math.nan}, ValueError),
        *[(["a"], {bad: "1"}, TypeError) for bad in ("timeout", "sleep", "blocking_timeout")],
    ],
    ids=repr,
)
def test_what_can_be_no_batch_is_refused_before_anything_is_sent(
    make_locker: MakeLocker, valkey: Server, names: Any, settings: dict[str, Any], error: type[Exception]
) -> None:
    with Proxy(valkey.port) as proxy:
        locker = make_locker(proxy.port)
        with pytest.raises(error):
            locker.acquire_many(names, **settings)
        assert not proxy.requests


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_a_batch_of_nothing_sends_nothing(make_locker: MakeLocker, valkey: Server, all_or_nothing: bool) -> None:
    with Proxy(valkey.port) as proxy:
        with make_locker(proxy.port).acquire_many([], 10, None, all_or_nothing=all_or_nothing) as batch:
            assert ([], [], {}, {}) == (batch.acquired, batch.missed, batch.extend(1), batch.reacquire())
        assert {} == batch.release()
        assert not proxy.requests


def test_a_batch_has_one_token_of_its_own(locker: Any, client: redis.Redis) -> None:
    locker.acquire_many(["a", "b"])
    locker.acquire_many(["c", "d"])
    a, b, c, d = client.mget("a", "b", "c", "d")
    assert (a, c) == (b, d)
    assert a != c
    assert a is not None


@pytest.mark.parametrize("lock_of", [redis.lock.Lock, redislock_fast.Lock], ids=["redis-py", "ours"])
def test_a_batch_and_single_locks_exclude_each_other(
    locker: Any, client: redis.Redis, lock_of: Callable[..., redis.lock.Lock]
) -> None:
    single = lock_of(client, "b", timeout=10)
    batch = locker.acquire_many(["a", "b"], 10)
    assert not lock_of(client, "a").acquire(blocking=False)
    assert not single.acquire(blocking=False)
    batch.release()
    assert single.acquire(blocking=False)
    batch = locker.acquire_many(["a", "b"], 10)
    assert (["a"], ["b"]) == (batch.acquired, batch.missed)
    batch.release()
    assert single.owned()


def test_a_locker_makes_locks(locker: Any, client: redis.Redis) -> None:
    with locker.lock("a", timeout=10) as lock:
        assert lock.owned()
        assert ["a"] == locker.acquire_many(["a"]).missed
        assert 0 < client.pttl("a") <= 10_000
    assert 0 == client.dbsize()


def test_one_hundred_thousand_names(valkey_locker: Any, valkey_client: redis.Redis) -> None:
    names = [f"name:{number}" for number in range(100_000)]
    valkey_client.mset(dict.fromkeys(names[::1000], "other"))
    batch = valkey_locker.acquire_many(names, timeout=60)
    assert [name for number, name in enumerate(names) if number % 1000] == batch.acquired
    assert names[::1000] == batch.missed
    assert dict.fromkeys(batch.acquired, True) == batch.reacquire()
    assert dict.fromkeys(batch.acquired, True) == batch.release()
    assert 100 == valkey_client.dbsize()


# Leases


@pytest.mark.parametrize(("timeout", "longest_ms"), [(10, 10_000), (0.5005, 501), (0.9, 900)])
def test_every_key_has_the_ttl(locker: Any, client: redis.Redis, timeout: float, longest_ms: int) -> None:
    locker.acquire_many(["a", "b", "c"], timeout)
    assert all(0 < client.pttl(name) <= longest_ms for name in "abc")


@pytest.mark.parametrize("timeout", [None, 0])
def test_without_timeout_no_key_has_a_ttl(locker: Any, client: redis.Redis, timeout: float | None) -> None:
    batch = locker.acquire_many(["a", "b"], timeout)
    assert [-1, -1] == [client.ttl(name) for name in "ab"]
    for use in (lambda: batch.extend(1), batch.reacquire):
        with pytest.raises(LockError, match="no timeout"):
            use()
    assert {"a": True, "b": True} == batch.release()


def test_extend_adds_to_every_lease(locker: Any, client: redis.Redis) -> None:
    batch = locker.acquire_many(["b", "a"], 10)
    assert [("b", True), ("a", True)] == list(batch.extend(20).items())
    assert all(25_000 < client.pttl(name) <= 30_000 for name in "ab")
    assert {"b": True, "a": True} == batch.extend(0)
    assert all(25_000 < client.pttl(name) <= 30_000 for name in "ab")


def test_reacquire_sets_every_lease_back(locker: Any, client: redis.Redis) -> None:
    batch = locker.acquire_many(["b", "a"], 10)
    for name in "ab":
        client.pexpire(name, 60_000)
    assert [("b", True), ("a", True)] == list(batch.reacquire().items())
    assert all(5_000 < client.pttl(name) <= 10_000 for name in "ab")


@pytest.mark.parametrize("use", ["extend", "reacquire"])
def test_what_was_lost_is_told_once_and_leaves_the_batch(locker: Any, client: redis.Redis, use: str) -> None:
    batch = locker.acquire_many(["a", "b", "c"], 10)
    client.delete("a")
    client.set("c", "other")

    def prolong() -> Any:
        return batch.extend(1) if use == "extend" else batch.reacquire()

    assert {"a": False, "b": True, "c": False} == prolong()
    assert {"b": True} == prolong()
    assert (["a", "b", "c"], []) == (batch.acquired, batch.missed)
    client.delete("b")
    assert {"b": False} == prolong()
    assert {} == prolong() == batch.release()
    assert [b"c"] == client.keys()


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_extend_refuses_bad_times(valkey_locker: Any, valkey_client: redis.Redis, bad: float) -> None:
    batch = valkey_locker.acquire_many(["a"], 10)
    with pytest.raises(ValueError, match="additional_time"):
        batch.extend(bad)
    assert 5_000 < valkey_client.pttl("a") <= 10_000


# Releasing


def test_release_tells_what_was_lost(locker: Any, client: redis.Redis) -> None:
    batch = locker.acquire_many(["a", "b", "c"], 10)
    client.delete("a")
    client.set("b", "other")
    assert {"a": False, "b": False, "c": True} == batch.release()
    assert {} == batch.release()
    assert [b"b"] == client.keys()


def test_what_was_released_and_taken_again_is_not_released_twice(locker: Any, client: redis.Redis) -> None:
    batch = locker.acquire_many(["a"])
    batch.release()
    again = locker.acquire_many(["a"])
    assert {} == batch.release()
    assert {"a": True} == again.release()


def test_with_releases(locker: Any, client: redis.Redis) -> None:
    client.set("b", "other")
    with locker.acquire_many(["a", "b"], 10) as batch:
        assert (["a"], ["b"]) == (batch.acquired, batch.missed)
        assert client.exists("a")
    assert [b"b"] == client.keys()
    with locker.acquire_many(["a"]) as batch:
        batch.release()


def test_leaving_with_raises_for_what_was_lost(locker: Any, client: redis.Redis) -> None:
    with pytest.raises(LockNotOwnedError) as caught, locker.acquire_many(["a", "b", "c"], 10):
        client.delete("b")
    assert "b" == caught.value.lock_name
    assert 0 == client.dbsize()


def test_the_bodys_exception_goes_before_what_was_lost(
    locker: Any, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), locker.acquire_many(["a", "b"], 10):
        _ = client.delete("b") / 0
    assert "no longer owned" in caplog.text
    assert 0 == client.dbsize()


# Waiting


def test_a_batch_waits_for_what_is_missed(world: World, locker: Any, client: redis.Redis) -> None:
    holder = locker.acquire_many(["b"])
    waiting = world.start(lambda: locker.acquire_many(["a", "b", "c"], 10, 60, sleep=0.01))
    wait_until(lambda: client.exists("a", "c") == 2, "the waiter holds what is free")
    assert not waiting.done()
    holder.release()
    batch = waiting.result(10)
    assert (["a", "b", "c"], []) == (batch.acquired, batch.missed)
    assert dict.fromkeys("abc", True) == batch.release()


@pytest.mark.usefixtures("unhurried")
def test_a_batch_waits_no_longer_than_it_was_told(locker: Any, client: redis.Redis) -> None:
    client.set("b", "other")
    for wait_s in (-1, 0, 0.02, 0.1):
        with locker.acquire_many(["a", "b"], 10, wait_s, sleep=0.01) as batch:
            assert (["a"], ["b"]) == (batch.acquired, batch.missed)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("all_or_nothing", [False, True], ids=["what is free", "all"])
def test_a_wait_shorter_than_the_pause_is_used_to_its_end(
    locker: Any, client: redis.Redis, all_or_nothing: bool
) -> None:
    client.set("b", "other", px=50)
    batch = locker.acquire_many(["a", "b"], 10, 0.3, sleep=60, all_or_nothing=all_or_nothing)
    assert (["a", "b"], []) == (batch.acquired, batch.missed)


@pytest.mark.slow
def test_leases_stay_fresh_while_a_batch_waits(valkey_locker: Any, valkey_client: redis.Redis) -> None:
    valkey_client.set("b", "other", px=1500)
    batch = valkey_locker.acquire_many(["a", "b", "c"], 1, None, sleep=0.02)  # waits for one and a half leases
    assert ["a", "b", "c"] == batch.acquired
    assert all(valkey_client.pttl(name) > 300 for name in "abc")
    assert 1 == len(set(valkey_client.mget("a", "b", "c")))
    assert dict.fromkeys("abc", True) == batch.release()


def test_what_is_lost_while_waiting_is_taken_again_or_missed(world: World, locker: Any, client: redis.Redis) -> None:
    client.set("b", "other")
    waiting = world.start(lambda: locker.acquire_many(["a", "b", "c"], 0.4, None, sleep=0.01))
    wait_until(lambda: client.exists("a", "c") == 2, "the waiter holds what is free")
    client.delete("a")
    wait_until(lambda: client.exists("a"), "the waiter has seen that it lost one")
    client.delete("b")
    batch = waiting.result(10)
    assert dict.fromkeys("abc", True) == batch.release()


# Forks


@IN_THREADS
def test_a_forked_child_holds_nothing(in_fork: InFork, valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    batch = redislock_fast.Locker(client).acquire_many(["a", "b"], 10)

    def in_child() -> str:
        with batch:
            told = [batch.release(), batch.extend(1), batch.reacquire()]
        missed = redislock_fast.Locker(client).acquire_many(["a", "c"], 10).missed
        return repr((told, missed))

    assert repr(([{}, {}, {}], ["a"])) == in_fork(in_child)
    assert {"a": True, "b": True} == batch.release()
    assert [b"c"] == client.keys()
