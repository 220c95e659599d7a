"""Servers that refuse a form of a request in words of their own: the lock takes the next form, and leaves no key.

Rules: a real server, and a proxy that refuses the form in its place, as proxies of cloud services and other servers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.proxy import Proxy
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")

WORDS = [
    *("ERR syntax error near 'IFEQ'", "ERR command is disabled", "ERR unsupported", "DENIED by the proxy"),
    *("NOPERM this user has no permissions", "ERR wrong number of arguments", "error"),
]
EACH_WORDS = pytest.mark.parametrize("words", WORDS)
FORMS = ["DELIFEQ", "SET GET", "SET IFEQ", "EVALSHA 1"]


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    """A Valkey, behind a proxy that refuses nothing as yet."""
    with Proxy(valkey.port) as proxy:
        yield proxy


@pytest.mark.parametrize("options", [{}, {"auto_renew": True}], ids=str)
@pytest.mark.parametrize("form", FORMS)
@EACH_WORDS
def test_lock_does_without_one_form(
    world: World, proxy: Proxy, valkey_client: redis.Redis, form: str, words: str, options: dict[str, Any]
) -> None:
    proxy.answer(f"-{words}\r\n".encode(), form)
    client = world.connect(proxy.port)
    for _ in range(3):
        lock = world.lock(client, timeout=60, **options)
        assert lock.acquire(blocking=False)
        assert not world.lock(client, timeout=60).acquire(blocking=False)
        assert lock.owned()
        assert lock.extend(60)
        assert 60_000 < valkey_client.pttl("name") <= 120_000
        assert lock.reacquire()
        assert 0 < valkey_client.pttl("name") <= 60_000
        lock.release()
        assert valkey_client.keys() == []
    # What was refused once is not asked for again, but for the script of `extend`, which has no other form of its own.
    assert proxy.requests["DELIFEQ"] == (1 if form == "DELIFEQ" else 3)


@EACH_WORDS
def test_native_commands_do_without_any_script(
    world: World, proxy: Proxy, valkey_client: redis.Redis, words: str
) -> None:
    proxy.answer(f"-{words}\r\n".encode(), "EVALSHA", "EVAL")
    holder, waiter = (world.lock(world.connect(proxy.port), timeout=60, sleep=0.02) for _ in range(2))
    assert holder.acquire()
    assert holder.extend(60)
    assert waiter.acquire(blocking_timeout=0.05) is False
    answer = world.start(lambda: waiter.acquire() and waiter.release())
    holder.release()
    answer.result()
    assert valkey_client.keys() == []


@EACH_WORDS
def test_batch_does_without_native_commands(world: World, proxy: Proxy, valkey_client: redis.Redis, words: str) -> None:
    proxy.answer(f"-{words}\r\n".encode(), "DELIFEQ", "SET GET", "SET IFEQ")
    batch = world.locker(world.connect(proxy.port)).acquire_many(["a", "b"], 60)
    assert batch.extend(60) == {"a": True, "b": True}
    assert batch.release() == {"a": True, "b": True}
    assert valkey_client.keys() == []


@EACH_WORDS
def test_key_that_lingers_is_given_back_without_native_commands(
    world: World, proxy: Proxy, valkey_client: redis.Redis, words: str
) -> None:
    proxy.answer(f"-{words}\r\n".encode(), "DELIFEQ", "SET GET")
    lock = world.lock(world.connect(proxy.port), timeout=60, linger=0.01)
    assert lock.acquire()
    lock.release()
    wait_until(lambda: not valkey_client.exists("name"), "it is given back")
