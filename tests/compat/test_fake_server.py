"""Our locks on fakeredis: with its server, which has sockets, but no pushes, and closes after an error; and without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
import redis
from fakeredis import TcpFakeServer
from fakeredis._msgs import BAD_COMMAND_IN_PUBSUB_MSG

from redislock_fast.server import Server
from tests.compat import test_parity
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.waiting import identifier_of
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def fake() -> Iterator[Proxy]:
    """The server, behind a proxy that counts."""
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        with Proxy(server.server_address[1]) as proxy:
            yield proxy
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_contended_lock_is_polled(world: World, fake: Proxy, protocol: int) -> None:
    settings: dict[str, Any] = {"timeout": 60, "sleep": 0.02, "thread_local": False}
    client = world.connect(fake.port, protocol=protocol)
    holder, waiter = (world.lock(client, **settings) for _ in range(2))
    for _ in range(2):
        assert holder.acquire()
        assert holder.extend(1)
        assert holder.reacquire()
        assert not waiter.acquire(blocking=False)
        assert not waiter.acquire(blocking_timeout=0.05)
        answer = world.start(waiter.acquire)
        sent = fake.requests["SET"]
        wait_until(lambda: answer.done() or fake.requests["SET"] >= sent + 4, "it polls")  # noqa: B023
        assert not answer.done()
        holder.release()
        assert answer.result(PATIENCE_S) is True
        waiter.release()
    with redis.Redis(port=fake.port) as admin:
        assert admin.keys() == []
    assert fake.requests["SUBSCRIBE"] == 1


def test_server_that_answers_a_subscription_without_a_push_is_polled(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    with Proxy(valkey.port) as proxy:
        client = world.connect(proxy.port)
        holder, waiter = (world.lock(client, timeout=60, sleep=0.02, thread_local=False) for _ in range(2))
        assert holder.acquire()
        channel = b"rlf:" + identifier_of(valkey_client)
        proxy.answer(b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%b\r\n:1\r\n" % (len(channel), channel), "SUBSCRIBE")
        answer = world.start(waiter.acquire)
        sent = proxy.requests["SET"]
        wait_until(lambda: answer.done() or proxy.requests["SET"] >= sent + 4, "it polls")
        assert not answer.done()
        holder.release()
        assert answer.result(PATIENCE_S) is True
        waiter.release()


def test_request_that_is_refused_beside_the_subscription_of_another_caller_is_sent_again(
    world: World, valkey: Server
) -> None:
    with Proxy(valkey.port) as proxy:
        lock = world.lock(world.connect(proxy.port), timeout=60, thread_local=False)
        assert lock.acquire()
        proxy.answer(f"-{BAD_COMMAND_IN_PUBSUB_MSG}\r\n".encode(), "GET")  # for which there is no other form
        proxy.hold()
        read = world.start(lock.locked)
        wait_until(lambda: proxy.requests["GET"] == 1, "the request has been sent")
        proxy.disarm()
        proxy.resume()
        assert read.result(PATIENCE_S) is True
        lock.release()
    with redis.Redis(port=valkey.port) as admin:
        assert admin.keys() == []


# The tests of test_parity.py on fakeredis, which has neither a server nor sockets


NEED_A_SERVER = {
    "test_signature",
    "test_client_can_be_changed_after_construction",
    "test_locks_of_other_names_and_databases_are_independent",
}

globals().update(
    {name: test for name, test in vars(test_parity).items() if name.startswith("test_") and name not in NEED_A_SERVER}
)


@pytest.fixture
def client() -> Iterator[fakeredis.FakeRedis]:
    """A client of a new fake server."""
    with fakeredis.FakeRedis(server=fakeredis.FakeServer()) as made:
        yield made
