"""Bugs of redis-py's Locks that ours do not have: lost replies, frozen servers, times, threads, odd clients and keys.

Rules: every test runs on both classes, for threads and for asyncio; on redis-py's it must fail (strict xfail), so that
a repaired original is noticed. What both do right is in test_parity.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import (
    EXTEND_COMMANDS,
    MODULES,
    PATIENCE_S,
    RELEASE_COMMANDS,
    RELEASE_KEEPS_TOKEN,
    FakeTime,
    LockClass,
    in_thread,
    once,
    redis_py_passes,
    run_script,
    wait_until,
)
from tests.support.proxy import Proxy
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

FAILURES = (AssertionError, AttributeError, pytest.fail.Exception, redis.RedisError)


@pytest.fixture(params=[pytest.param("redis-py", marks=pytest.mark.xfail(strict=True, raises=FAILURES)), "ours"])
def lock_class_id(request: pytest.FixtureRequest) -> str:
    """Which of the two classes a test runs on; redis-py's is expected to fail it."""
    name: str = request.param
    return name


@pytest.fixture
def proxied(proxy: Proxy, connect: Connect) -> redis.Redis:
    """A client behind the proxy, with redis-py's own retries."""
    return connect(proxy.port)


def warmed_up(lock_class: LockClass, client: redis.Redis, **settings: Any) -> Any:
    """A lock whose client is connected, on a server that knows all scripts."""
    lock = lock_class(client, "warm-up", timeout=10)
    lock.acquire()
    lock.extend(10)
    lock.extend(10, replace_ttl=True)
    lock.reacquire()
    lock.release()
    return lock_class(client, "name", **settings)


# Lost replies


def test_lost_reply_of_acquire_is_an_acquired_lock(
    lock_class: LockClass, proxy: Proxy, proxied: redis.Redis, client: redis.Redis
) -> None:
    lock = warmed_up(lock_class, proxied, timeout=10)
    proxy.drop_reply("SET")
    assert lock.acquire(blocking=False) is True
    assert proxy.dropped.is_set()
    assert lock.local.token == client.get("name")
    assert lock.owned()
    lock.release()
    assert not client.exists("name")


def test_lost_reply_of_acquire_does_not_make_it_wait_for_itself(
    lock_class: LockClass, proxy: Proxy, proxied: redis.Redis, fake_time: FakeTime
) -> None:
    fake_time.at_most = 3
    lock = warmed_up(lock_class, proxied)
    proxy.drop_reply("SET")
    assert lock.acquire() is True
    assert [] == fake_time.sleeps_s


def test_lost_reply_of_release_is_a_released_lock(
    lock_class: LockClass, proxy: Proxy, proxied: redis.Redis, client: redis.Redis
) -> None:
    lock = warmed_up(lock_class, proxied, timeout=10)
    lock.acquire()
    proxy.drop_reply(*RELEASE_COMMANDS)
    lock.release()
    assert proxy.dropped.is_set()
    assert lock.local.token is None
    assert not client.exists("name")


def test_lost_reply_of_extend_adds_once(
    lock_class: LockClass, proxy: Proxy, proxied: redis.Redis, client: redis.Redis
) -> None:
    lock = warmed_up(lock_class, proxied, timeout=10)
    lock.acquire()
    proxy.drop_reply(*EXTEND_COMMANDS)
    assert lock.extend(20) is True
    assert proxy.dropped.is_set()
    assert 22_000 < client.pttl("name") <= 30_000


@IN_THREADS  # redis-py's asyncio Lock can, too: see test_asyncio_parity
@redis_py_passes(RELEASE_KEEPS_TOKEN, *FAILURES)
def test_release_that_fails_on_the_network_can_be_repeated(
    lock_class: LockClass, proxy: Proxy, connect: Connect, client: redis.Redis
) -> None:
    lock = lock_class(connect(proxy.port, retry=once()), "name", timeout=30)
    lock.acquire()
    token = lock.local.token
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        lock.release()
    assert token == lock.local.token == client.get("name")
    proxy.accept()
    lock.release()
    assert lock.local.token is None
    assert not client.exists("name")


@pytest.mark.slow
def test_blocking_timeout_bounds_the_wait_for_a_frozen_server(
    world: World, lock_class: LockClass, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port, socket_timeout=30)
    lock_class(client, "warm-up").acquire()
    lock = lock_class(client, "name", thread_local=False)
    server.signal(signal.SIGSTOP)
    answer = world.start(lambda: lock.acquire(blocking_timeout=0.3))
    try:
        # The client's own limit is seven times as long.
        wait_until(answer.done, "its time is up", patience_s=4.0)
    finally:
        server.signal(signal.SIGCONT)
    with pytest.raises(redis.TimeoutError):
        answer.result(0)
    assert lock.local.token is None
    wait_until(lambda: not client.exists("name"), "the attempt is undone")
    assert lock.acquire(blocking=False)


# Threads


def _in_context(lock: Any) -> None:
    lock.__exit__(None, None, None)


@IN_THREADS
@pytest.mark.parametrize(
    "use",
    [lambda lock: lock.release(), lambda lock: lock.extend(10), lambda lock: lock.reacquire(), _in_context],
    ids=["release", "extend", "reacquire", "exit"],
)
def test_other_thread_cannot_use_a_thread_local_lock(
    lock_class: LockClass, client: redis.Redis, use: Callable[[Any], None]
) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    with pytest.raises(LockError) as caught:
        in_thread(lambda: use(lock))
    assert LockError is type(caught.value)
    assert "name" == caught.value.lock_name
    assert lock.owned()


@IN_THREADS
def test_other_thread_does_not_own_a_thread_local_lock(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    assert in_thread(lock.owned) is False
    assert lock.owned() is True


def test_acquire_again_while_held_raises_instead_of_waiting_for_ever(
    lock_class: LockClass, client: redis.Redis, fake_time: FakeTime
) -> None:
    fake_time.at_most = 3
    lock = lock_class(client, "name")
    lock.acquire()
    with pytest.raises(LockError) as caught:
        lock.acquire()
    assert "name" == caught.value.lock_name
    assert lock.owned()
    lock.release()
    assert lock.acquire() is True


# Times


def test_timeout_of_zero_is_no_timeout_to_reacquire(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=0)
    assert lock.acquire()
    with pytest.raises(LockError, match="with no timeout") as caught:
        lock.reacquire()
    assert LockError is type(caught.value)
    assert (True, -1) == (lock.owned(), client.ttl("name"))


def test_timeout_of_zero_is_no_timeout_to_extend(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=0)
    assert lock.acquire()
    with pytest.raises(LockError, match="with no timeout") as caught:
        lock.extend(10)
    assert LockError is type(caught.value)
    assert (True, -1) == (lock.owned(), client.ttl("name"))


@pytest.mark.parametrize(("additional_s", "replaces"), [(-10, False), (-20, False), (-10, True), (0, True)])
def test_extend_by_what_is_no_ttl_is_refused(
    lock_class: LockClass, client: redis.Redis, additional_s: float, replaces: bool
) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its exact type is asserted
        lock.extend(additional_s, replace_ttl=replaces)
    assert ValueError is type(caught.value)
    assert lock.owned()
    assert 7_000 < client.pttl("name") <= 10_000
    lock.release()


def _events_of_key(client: redis.Redis, subscription: Any) -> list[str]:
    """The events of the key "name" until it was gone."""
    events: list[str] = []
    give_up = time.monotonic() + PATIENCE_S
    while not {"del", "expired"} & set(events):
        assert time.monotonic() < give_up
        client.exists("name")  # makes the server notice an expiry
        message = subscription.get_message(ignore_subscribe_messages=True, timeout=0.01)
        if message:
            events.append(str(message["data"], "ascii"))
    return events


def test_extend_below_a_millisecond_is_one_millisecond(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.config_set("notify-keyspace-events", "KA")
    with client.pubsub() as subscription:  # type: ignore[no-untyped-call]
        subscription.subscribe("__keyspace@0__:name")
        assert lock.extend(0.0001, replace_ttl=True) is True
        # A key that is deleted by its new ttl gets none.
        assert ["expire", "expired"] == _events_of_key(client, subscription)[-2:]
    client.config_set("notify-keyspace-events", "")


@pytest.mark.parametrize("timeout_s", [0.0005, 0.0000001])
def test_timeout_below_a_millisecond_is_one_millisecond(
    lock_class: LockClass, client: redis.Redis, timeout_s: float
) -> None:
    lock = lock_class(client, "name", timeout=timeout_s)
    assert lock.acquire(blocking=False) is True
    assert client.pttl("name") in (-2, 0, 1)


def test_timeout_is_rounded_up(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=1.0005)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    lock.acquire()
    sent = [entry["command"] for entry in client.slowlog_get()]
    client.config_set("slowlog-log-slower-than", 10_000)
    assert any(b"1001" in command.split() for command in sent)


BAD_TIMEOUTS = [-1, -0.001, float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("timeout_s", BAD_TIMEOUTS)
def test_timeout_that_cannot_be_is_refused_by_the_constructor(
    lock_class: LockClass, valkey_client: redis.Redis, timeout_s: float
) -> None:
    with pytest.raises(ValueError, match="timeout"):
        lock_class(valkey_client, "name", timeout=timeout_s)


@pytest.mark.parametrize("timeout_s", BAD_TIMEOUTS)
def test_timeout_that_cannot_be_is_refused_when_assigned(
    lock_class: LockClass, valkey_client: redis.Redis, timeout_s: float
) -> None:
    lock = lock_class(valkey_client, "name", timeout=10)
    with pytest.raises(ValueError, match="timeout"):
        lock.timeout = timeout_s
    assert 10 == lock.timeout


@pytest.mark.parametrize("timeout", ["10", b"10", [], object], ids=repr)
def test_timeout_of_a_wrong_type_is_refused(lock_class: LockClass, valkey_client: redis.Redis, timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout"):
        lock_class(valkey_client, "name", timeout=timeout)
    lock = lock_class(valkey_client, "name")
    with pytest.raises(TypeError, match="timeout"):
        lock.timeout = timeout


# Clients


@IN_THREADS
def test_pipeline_as_the_client_is_refused(lock_class: LockClass, client: redis.Redis) -> None:
    with client.pipeline() as pipeline:
        with pytest.raises(TypeError, match=r"(?i)pipeline"):
            lock_class(pipeline, "name")
        with pytest.raises(TypeError, match=r"(?i)pipeline"):
            pipeline.lock("name", lock_class=lock_class)


@IN_THREADS
def test_asyncio_client_as_the_client_is_refused(lock_class: LockClass, valkey_client: redis.Redis) -> None:
    with pytest.raises(TypeError, match=r"(?i)asyncio"):
        lock_class(redis.asyncio.Redis(), "name")


@IN_THREADS
def test_class_does_not_keep_its_first_client_alive(lock_class_id: str, valkey_client: redis.Redis) -> None:
    port = valkey_client.connection_pool.connection_kwargs["port"]
    script = f"""
import gc, weakref
import redis
from {MODULES[lock_class_id].__name__} import Lock
client = redis.Redis(port={port})
pool = client.connection_pool
alive = [weakref.ref(client), weakref.ref(pool)]
with Lock(client, "name", timeout=10) as lock:
    lock.extend(1)
client.close()
del client, pool, lock
gc.collect()
print([one() for one in alive])
with redis.Redis(port={port}) as client, Lock(client, "name", timeout=10) as lock:
    lock.reacquire()
"""
    finished = run_script(script)
    assert "" == finished.stderr
    assert "[None, None]\n" == finished.stdout


# Keys and tokens


def test_empty_token_with_decode_responses_is_owned(
    lock_class: LockClass, client: redis.Redis, connect: Connect
) -> None:
    port = client.connection_pool.connection_kwargs["port"]
    lock = lock_class(connect(port, decode_responses=True), "name", timeout=10)
    assert lock.acquire(token="")
    assert lock.owned() is True
    lock.release()
    assert not client.exists("name")


def test_text_put_into_local_is_the_token(lock_class: LockClass, client: redis.Redis) -> None:
    holder, heir = lock_class(client, "name", timeout=10), lock_class(client, "name", timeout=10)
    holder.acquire(token="mine")
    heir.local.token = "mine"
    assert (b"mine", True) == (heir.local.token, heir.owned())
    heir.release()
    assert not client.exists("name")


def test_tokens_have_80_unguessable_bits(lock_class: LockClass, client: redis.Redis) -> None:
    drawn: list[bytes] = []

    class Drawing(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            drawn.append(token)
            return False

    lock = Drawing(client, "name", blocking=False)
    for _ in range(3000):
        lock.acquire()
    assert 3000 == len(set(drawn))
    # An unguessable byte takes every value of its alphabet in so many draws; clocks and addresses hardly change.
    columns = [len(set(column)) for column in zip(*drawn, strict=True)]
    assert 79.9 <= sum(math.log2(values) for values in columns)


@pytest.mark.parametrize("blocking", [True, False])
def test_acquire_of_a_key_that_is_no_string_raises(
    lock_class: LockClass, client: redis.Redis, fake_time: FakeTime, blocking: bool
) -> None:
    fake_time.at_most = 3
    client.hset("name", "field", "value")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        lock_class(client, "name").acquire(blocking=blocking)
    assert [] == fake_time.sleeps_s
    assert {b"field": b"value"} == client.hgetall("name")


def test_key_that_is_no_string_is_locked_and_not_owned(lock_class: LockClass, client: redis.Redis) -> None:
    client.hset("name", "field", "value")
    lock = lock_class(client, "name")
    assert (True, False) == (lock.locked(), lock.owned())


@pytest.mark.parametrize("use", ["release", "extend", "reacquire"])
def test_held_lock_whose_key_became_no_string_is_not_owned(
    lock_class: LockClass, client: redis.Redis, use: str
) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.delete("name")
    client.hset("name", "field", "value")
    assert lock.owned() is False
    with pytest.raises(LockNotOwnedError):
        lock.extend(10) if use == "extend" else getattr(lock, use)()
    assert {b"field": b"value"} == client.hgetall("name")


# Context manager


def test_failing_exit_does_not_replace_the_bodys_exception(lock_class: LockClass, client: redis.Redis) -> None:
    def lose_the_lock_and_raise() -> None:
        with lock_class(client, "name"):
            client.delete("name")
            raise KeyError

    with pytest.raises(KeyError):
        lose_the_lock_and_raise()
