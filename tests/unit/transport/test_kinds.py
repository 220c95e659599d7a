"""Which transport serves a client, and what a patch of `threading` changes. No server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, create_autospec

import fakeredis
import pytest
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from kombu.transport.redis import PrefixedStrictRedis
from opentelemetry.instrumentation.redis import RedisInstrumentor

from redislock_fast import Lock
from redislock_fast._transport import kinds
from redislock_fast._transport.kinds import kind_of, sends_by_itself
from redislock_fast._transport.threads.driver import transport_of
from tests.support.helpers import in_thread

CLIENTS = pytest.mark.parametrize("client_class", [redis.Redis, redis.asyncio.Redis])


class Wrapper:
    """A client that delegates to another."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@CLIENTS
def test_subclass_without_commands_of_its_own_has_a_server(client_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(client_class):  # type: ignore[misc]
        def lock(self, *_: Any) -> None: ...

    monkeypatch.setattr(client_class, "execute_command", lambda *_: None)  # as a tracer does
    client = Plain()
    assert kind_of(client, client_class is redis.asyncio.Redis) == "server"
    assert not sends_by_itself(client)


@CLIENTS
@pytest.mark.parametrize("method", ["execute_command", "set", "get", "evalsha", "script_load", "register_script"])
def test_subclass_with_a_method_of_its_own_is_called(client_class: Any, method: str) -> None:
    base = type("Base", (client_class,), {method: lambda *_: None})
    assert kind_of(type("Derived", (base,), {})(), client_class is redis.asyncio.Redis) == "client"


@pytest.mark.parametrize(
    ("make", "for_asyncio"),
    [
        (partial(PrefixedStrictRedis, global_keyprefix="prefix:"), False),
        (partial(create_autospec, redis.Redis), False),
        (partial(create_autospec, redis.Redis, instance=True), False),
        (partial(create_autospec, redis.cluster.RedisCluster), False),
        (partial(MagicMock, spec=redis.Redis), False),
        (MagicMock, False),
        (partial(AsyncMock, spec=redis.asyncio.Redis), True),
        (AsyncMock, True),
        (lambda: Wrapper(redis.Redis()), False),
    ],
)
def test_other_objects_with_redis_pys_methods_are_called(make: Callable[[], Any], for_asyncio: bool) -> None:
    assert kind_of(make(), for_asyncio) == "client"


@pytest.mark.parametrize("client", [fakeredis.FakeRedis(), fakeredis.FakeAsyncRedis(), fakeredis.FakeStrictRedis()])
def test_a_fake_server_has_connections_of_its_own(client: Any) -> None:
    assert sends_by_itself(client)


@CLIENTS
@pytest.mark.parametrize("all_are_traced", [False, True], ids=["alone", "with all"])
def test_client_that_is_traced_alone_has_a_server(client_class: Any, all_are_traced: bool) -> None:
    client = client_class()
    if all_are_traced:
        RedisInstrumentor().instrument()
    try:
        RedisInstrumentor.instrument_client(client)
        assert not sends_by_itself(client)
        RedisInstrumentor.uninstrument_client(client)
        assert not sends_by_itself(client)
    finally:
        if all_are_traced:
            RedisInstrumentor().uninstrument()


@CLIENTS
def test_tracer_around_a_method_of_its_own_changes_nothing(client_class: Any) -> None:
    client = client_class()
    client.execute_command = lambda *_: None
    RedisInstrumentor.instrument_client(client)
    assert sends_by_itself(client)


def test_a_connection_class_that_reads_in_its_own_way_is_not_used() -> None:
    class Recording(redis.Connection):
        def read_response(self, *args: Any, **options: Any) -> Any:
            return super().read_response(*args, **options)

    class Named(redis.Connection):
        pass

    def client(connection_class: type[redis.Connection]) -> redis.Redis:
        return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=connection_class))

    assert [sends_by_itself(client(kind)) for kind in (Recording, Named)] == [True, False]


@pytest.mark.parametrize(
    ("make", "for_asyncio"),
    [
        (partial(create_autospec, redis.asyncio.Redis), False),
        (partial(create_autospec, redis.Redis), True),
        (redis.asyncio.Redis, False),
        (redis.Redis, True),
        (lambda: redis.Redis().pipeline(), False),
        (lambda: "name", False),
        (lambda: None, True),
        (dict, False),
    ],
)
def test_clients_of_the_other_kind_and_other_objects_are_refused(make: Callable[[], Any], for_asyncio: bool) -> None:
    client = make()
    with pytest.raises(TypeError, match="lock"):
        kind_of(client, for_asyncio)


def test_the_log_says_once_for_each_class_that_its_methods_are_called(caplog: pytest.LogCaptureFixture) -> None:
    kinds._log_once.cache_clear()
    with caplog.at_level(logging.INFO, kinds.__name__):
        for _ in range(2):
            kind_of(PrefixedStrictRedis(), False)  # type: ignore[no-untyped-call]
            sends_by_itself(fakeredis.FakeRedis())
    expected = ["kombu.transport.redis.PrefixedStrictRedis has methods", "FakeRedisConnection sends and reads"]
    assert [text in record for text, record in zip(expected, caplog.messages, strict=True)] == [True, True]


def test_a_pool_has_one_transport() -> None:
    client = redis.Redis()
    transport = transport_of(client)
    assert transport_of(client) is transport
    assert transport_of(redis.Redis(connection_pool=client.connection_pool)) is transport
    assert transport_of(redis.Redis()) is not transport
    assert in_thread(lambda: transport_of(client)) is transport


# What goes on after gevent or eventlet has patched threading (real programs: integration/lock/test_patched_later.py)


def test_connection_from_before_a_patch_is_closed() -> None:
    closed: list[bool] = []
    connection: Any = SimpleNamespace(close=lambda: closed.append(True), ending=None)
    transport = Lock(redis.Redis(), "name")._transport
    transport.connection = connection
    transport.adapt()
    assert (transport.connection, closed) == (None, [True])


def test_greenlet_that_another_one_overtakes_keeps_the_owners() -> None:
    lock = Lock(redis.Redis(), "name")
    owners = lock._owners
    lock._adapt_to_patch()
    assert lock._owners is owners
