"""Traces and metrics of redis-py's commands: our locks give the spans and records that redis-py's give."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

from redislock_fast.server import Server
from tests.support.clusters import Cluster
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.worlds import IN_THREADS, World

pytest.importorskip("opentelemetry.instrumentation.redis")

from opentelemetry.instrumentation.redis import RedisInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytestmark = pytest.mark.usefixtures("world")

RELEASES = {"EVALSHA", "DELIFEQ", "DELEX"}
FLAGGED_BYTES = 37  # of the value of a contended lock
PROGRAM = Path(__file__).with_name("traced_program.py")


class Spans:
    """The spans of the test so far."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def take(self) -> list[Any]:
        """Those that ended since the last call."""
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans

    def names(self) -> list[str]:
        """Their names."""
        return [span.name for span in self.take()]


@pytest.fixture
def spans() -> Iterator[Spans]:
    recorded = Spans()
    RedisInstrumentor().instrument(tracer_provider=recorded.provider)
    yield recorded
    if RedisInstrumentor().is_instrumented_by_opentelemetry:
        RedisInstrumentor().uninstrument()


def attributes(span: Any) -> dict[str, Any]:
    """Without the number of words, since our SET has one more."""
    return {
        name: value
        for name, value in span.attributes.items()
        if name not in {"db.redis.args_length", "db.statement", "db.query.text"}
    }


def test_lock_has_the_spans_of_redis_pys_lock(world: World, spans: Spans, client: redis.Redis) -> None:
    by_class = []
    for lock_class_id in ("redis-py", "ours"):
        lock = world.lock_class(lock_class_id)(client, "name", timeout=10)
        with lock:  # redis-py loads its script
            pass
        spans.take()
        with lock:
            pass
        by_class.append(spans.take())
    theirs, ours = by_class
    assert [span.name for span in theirs] == ["SET", "EVALSHA"]
    assert (ours[0].name, len(ours), ours[1].name in RELEASES) == ("SET", 2, True)
    assert [attributes(span) for span in ours] == [attributes(span) for span in theirs]
    assert [span.kind for span in ours] == [span.kind for span in theirs]


def test_every_method_that_asks_the_server_has_a_span(world: World, spans: Spans, client: redis.Redis) -> None:
    lock = world.lock_class("ours")(client, "name", timeout=10)
    assert lock.acquire(blocking_timeout=1)
    spans.take()
    for method, names in (
        (lambda: lock.extend(5), {"EVALSHA"}),
        (lock.reacquire, {"EVALSHA", "SET"}),
        (lock.owned, {"GET"}),
        (lock.locked, {"GET"}),
        (lock.release, RELEASES),
    ):
        method()
        (name,) = spans.names()
        assert name in names


def test_waiter_has_spans_and_still_queues(world: World, spans: Spans, client: redis.Redis) -> None:
    lock_class = world.lock_class("ours")
    holder, waiter = (lock_class(client, "name", timeout=100, sleep=50, thread_local=False) for _ in range(2))
    assert holder.acquire()
    answer = world.start(waiter.acquire)
    wait_until(lambda: "EVALSHA" in spans.names(), "it has a span for its place in the queue")
    assert client.strlen("name") == FLAGGED_BYTES
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert "SET" not in spans.names()


def test_error_is_recorded_and_raised(world: World, spans: Spans) -> None:
    lock = world.lock(world.connect(1), timeout=10)
    with pytest.raises(redis.ConnectionError):
        lock.acquire()
    (span,) = spans.take()
    assert (span.name, span.status.is_ok) == ("SET", False)
    assert [event.attributes["exception.type"] for event in span.events] == ["redis.exceptions.ConnectionError"]


def test_tracer_comes_and_goes(world: World, spans: Spans, client: redis.Redis) -> None:
    RedisInstrumentor().uninstrument()
    spans.take()
    lock = world.lock_class("ours")(client, "name", timeout=10)
    counts = []
    for change in (None, RedisInstrumentor().instrument, RedisInstrumentor().uninstrument):
        if change is not None:
            change(tracer_provider=spans.provider)
        with lock:
            pass
        counts.append(len(spans.take()))
    assert counts == [0, 2, 0]


def test_client_that_is_traced_alone_has_spans(world: World, server: Server) -> None:
    recorded = Spans()
    client = world.connect(server.port)
    RedisInstrumentor.instrument_client(client, tracer_provider=recorded.provider)
    with world.lock(client, timeout=10):
        pass
    names = recorded.names()
    assert (names[0], len(names), names[1] in RELEASES) == ("SET", 2, True)


def test_tracer_of_one_client_comes_and_goes(world: World, server: Server) -> None:
    recorded = Spans()
    client, other = world.connect(server.port), world.connect(server.port)
    locks = [world.lock(each, timeout=10) for each in (client, other)]
    counts = []
    for change in (None, RedisInstrumentor.instrument_client, RedisInstrumentor.uninstrument_client):
        if change is RedisInstrumentor.instrument_client:
            change(client, tracer_provider=recorded.provider)
        elif change is not None:
            change(client)
        locks.append(world.lock(client, timeout=10))
        for lock in locks:
            with lock:
                pass
            counts.append(len(recorded.take()))
    assert (counts[:3], counts[3:7], counts[7:]) == ([0, 0, 0], [2, 0, 2, 2], [0, 0, 0, 0, 0])


def test_waiter_of_a_client_that_is_traced_alone_still_queues(world: World, server: Server) -> None:
    recorded = Spans()
    client = world.connect(server.port)
    lock = world.lock(client, timeout=100, sleep=50, thread_local=False)
    RedisInstrumentor.instrument_client(client, tracer_provider=recorded.provider)
    waiter = world.lock(client, lock.name, timeout=100, sleep=50, thread_local=False)
    assert lock.acquire()
    answer = world.start(waiter.acquire)
    wait_until(lambda: "EVALSHA" in recorded.names(), "it has a span for its place in the queue")
    with redis.Redis(port=server.port) as reader:
        assert reader.strlen(lock.name) == FLAGGED_BYTES
    lock.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert "SET" not in recorded.names()


@IN_THREADS
def test_lock_of_a_cluster_has_spans(world: World, spans: Spans, cluster: Cluster) -> None:
    with (
        redis.RedisCluster(host="127.0.0.1", port=cluster.port) as client,
        world.ours.Lock(client, cluster.name(), timeout=10),
    ):
        spans.take()
    (span,) = spans.take()
    assert span.name in RELEASES
    assert span.attributes["net.peer.port"] in {node.port for node in cluster.nodes}


def test_wrapper_that_sends_nothing_gives_the_replies(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def execute_command(_: Any, *args: Any, **__: Any) -> bool:
        calls.append(args[0])
        return True

    async def execute_later(_: Any, *args: Any, **__: Any) -> bool:
        return execute_command(_, *args)

    lock = world.lock_class("ours")(client, "name", timeout=10)
    monkeypatch.setattr(
        redis.Redis if world.in_threads else redis.asyncio.Redis,
        "execute_command",
        execute_command if world.in_threads else execute_later,
    )
    assert lock.acquire()
    lock.release()
    monkeypatch.undo()
    assert (calls[0], calls[1] in RELEASES) == ("SET", True)
    assert client.keys() == []


def test_wrapper_that_changes_a_command_is_refused(
    world: World, client: redis.Redis, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_class = redis.Redis if world.in_threads else redis.asyncio.Redis
    execute_command = client_class.execute_command

    def with_prefix(self: Any, command: str, *words: Any, **options: Any) -> Any:
        at = 2 if command == "EVALSHA" else 0
        words = (*words[:at], f"prefix:{words[at]}", *words[at + 1 :])
        return execute_command(self, command, *words, **options)

    ours = world.connect(server.port)
    held = world.lock(ours, "held", timeout=10)
    assert held.acquire()
    monkeypatch.setattr(client_class, "execute_command", with_prefix)
    for name, call in (("name", world.lock(ours, "name", timeout=10).acquire), ("held", held.reacquire)):
        with pytest.raises(LockError, match=f"^Cannot lock '{name}'.*changes its commands") as raised:
            call()
        assert raised.value.lock_name == name
    monkeypatch.undo()
    assert client.keys() == [b"held"]


@pytest.mark.skipif(importlib.util.find_spec("redis.observability") is None, reason="redis-py 8.0 has it")
def test_redis_pys_own_metrics_record_the_commands(
    world: World, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redis.asyncio.observability import recorder as async_recorder
    from redis.observability import providers, recorder

    lock = world.lock_class("ours")(client, "name", timeout=10)
    collector = MagicMock()
    monkeypatch.setattr(providers, "_observability_instance", MagicMock(_provider_manager=MagicMock()))
    monkeypatch.setattr(recorder, "_metrics_collector", collector)
    monkeypatch.setattr(async_recorder, "_async_metrics_collector", collector)
    with lock:
        pass
    records = [call.kwargs for call in collector.record_operation_duration.call_args_list]
    assert records[0]["command_name"] == "SET"
    assert records[1]["command_name"] in RELEASES
    port = client.connection_pool.connection_kwargs["port"]
    assert {(record["server_port"], record["db_namespace"]) for record in records} == {(port, "0")}


@IN_THREADS
@pytest.mark.parametrize("tracer", ["sentry_sdk", "ddtrace", "redis.observability"])
@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "asyncio"])
def test_tracer_of_a_vendor_sees_what_it_sees_of_redis_py(tracer: str, is_async: bool, server: Server) -> None:
    if importlib.util.find_spec(tracer) is None:  # imported here, Sentry would import eventlet into all later tests
        pytest.skip(f"no {tracer} here")
    args = [sys.executable, str(PROGRAM), tracer, str(server.port), "asyncio" if is_async else "threads"]
    done = subprocess.run(args, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    theirs, ours = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, _ in theirs] == ["SET", "EVALSHA"]
    assert ours[0][0] == "SET"
    assert ours[1][0] in RELEASES
    assert [facts for _, facts in ours] == [facts for _, facts in theirs]
