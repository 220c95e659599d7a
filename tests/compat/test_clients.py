"""One suite on redis-py's Lock and on ours: every kind of client and connection, and both classes on one key.

Rules: each test passes on both classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.credentials import CredentialProvider
from redis.exceptions import LockNotOwnedError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser, TlsServer
from tests.support.helpers import LockClass, in_thread, once, start


def exercise(lock_class: LockClass, client: redis.Redis) -> None:
    """Every operation once, through this client."""
    lock = lock_class(client, "name", timeout=10)
    for _ in range(2):
        assert lock.acquire(blocking=False) is True
        assert (True, True) == (lock.owned(), lock.locked())
        other = lock_class(client, "name", timeout=10)
        assert other.acquire(blocking=False) is False
        assert other.owned() is False
        assert lock.extend(10) is True
        assert 10_000 < client.pttl("name") <= 20_000
        assert lock.extend(5, replace_ttl=True) is True
        assert 0 < client.pttl("name") <= 5_000
        assert lock.reacquire() is True
        assert 5_000 < client.pttl("name") <= 10_000
        lock.release()
        assert lock.locked() is False
    lock.acquire()
    client.delete("name")
    for fails in (lambda: lock.extend(1), lock.reacquire, lock.release):
        with pytest.raises(LockNotOwnedError):
            fails()


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": 2},
        {"protocol": 3},
        {"decode_responses": True},
        {"decode_responses": True, "protocol": 3},
        {"decode_responses": True, "encoding": "latin-1"},
        {"single_connection_client": True},
        {"db": 3},
        {"socket_timeout": None},
        {"socket_timeout": 5, "socket_connect_timeout": 5, "socket_keepalive": True},
        {"health_check_interval": 1},
        {"client_name": "tester"},
        {"max_connections": 2},
        {"host": "127.0.0.1"},
    ],
    ids=str,
)
def test_client_options(lock_class: LockClass, server: Server, connect: Connect, options: dict[str, Any]) -> None:
    client = connect(server.port, **options)
    client.flushdb()
    exercise(lock_class, client)


def test_unix_socket(lock_class: LockClass, server: Server) -> None:
    with redis.Redis(unix_socket_path=server.unix_path) as client:
        exercise(lock_class, client)


@pytest.mark.parametrize("query", ["", "?protocol=3", "?decode_responses=true&db=2"])
def test_url(lock_class: LockClass, server: Server, query: str) -> None:
    with redis.Redis.from_url(f"redis://127.0.0.1:{server.port}{query}") as client:
        client.flushdb()
        exercise(lock_class, client)


def test_url_of_a_unix_socket(lock_class: LockClass, server: Server) -> None:
    with redis.Redis.from_url(f"unix://{server.unix_path}") as client:
        exercise(lock_class, client)


@pytest.fixture
def blocking_pool(valkey: Server) -> Iterator[redis.BlockingConnectionPool]:
    """A pool that makes its callers wait for its one connection."""
    pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        port=valkey.port, max_connections=1, timeout=10
    )
    yield pool
    pool.disconnect()


def test_blocking_connection_pool(lock_class: LockClass, blocking_pool: redis.BlockingConnectionPool) -> None:
    client = redis.Redis(connection_pool=blocking_pool)
    exercise(lock_class, client)

    def work() -> None:
        for _ in range(10):
            with lock_class(client, "name", sleep=0.001):
                client.incr("counter")

    for worker in [start(work) for _ in range(4)]:
        worker.result(20)
    assert b"40" == client.get("counter")


def test_two_clients_of_one_pool(lock_class: LockClass, blocking_pool: redis.BlockingConnectionPool) -> None:
    first, second = (redis.Redis(connection_pool=blocking_pool) for _ in range(2))
    with lock_class(first, "name"):
        assert lock_class(second, "name").acquire(blocking=False) is False
    exercise(lock_class, second)


def test_single_connection_client_from_threads(lock_class: LockClass, valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port, single_connection_client=True)
    with lock_class(client, "name"):
        assert in_thread(lambda: lock_class(client, "name").acquire(blocking=False)) is False
    exercise(lock_class, client)


def test_tls(lock_class: LockClass, tls_server: TlsServer, connect: Connect) -> None:
    client = connect(tls_server.port, host="127.0.0.1", ssl=True, ssl_ca_certs=tls_server.ca_path)
    client.flushdb()
    exercise(lock_class, client)


def test_tls_by_url(lock_class: LockClass, tls_server: TlsServer) -> None:
    url = f"rediss://localhost:{tls_server.port}?ssl_ca_certs={tls_server.ca_path}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        exercise(lock_class, client)


def test_tls_with_an_unknown_ca_is_refused(lock_class: LockClass, tls_server: TlsServer, connect: Connect) -> None:
    client = connect(tls_server.port, host="127.0.0.1", ssl=True, retry=once())
    with pytest.raises(redis.ConnectionError, match=r"(?i)certificate"):
        lock_class(client, "name").acquire(blocking=False)


@pytest.mark.parametrize("protocol", [2, 3])
def test_acl_user_with_password(
    lock_class: LockClass, server: Server, connect: Connect, acl_user: MakeUser, protocol: int
) -> None:
    user = acl_user(server)
    exercise(lock_class, connect(server.port, protocol=protocol, **user.options()))


def test_wrong_password_is_refused(lock_class: LockClass, server: Server, connect: Connect, acl_user: MakeUser) -> None:
    options = {**acl_user(server).options(), "password": "canary-wrong"}
    with pytest.raises(redis.AuthenticationError) as caught:
        lock_class(connect(server.port, retry=once(), **options), "name").acquire(blocking=False)
    assert "canary" not in str(caught.value)


class Credentials(CredentialProvider):
    """Hands out a user's credentials, and counts how often it was asked."""

    def __init__(self, username: str, password: str) -> None:
        self.username = username
        self.password = password
        self.asked = 0

    def get_credentials(self) -> tuple[str, str]:
        """The user and the password."""
        self.asked += 1
        return self.username, self.password


def test_credential_provider(lock_class: LockClass, server: Server, connect: Connect, acl_user: MakeUser) -> None:
    provider = Credentials(**acl_user(server).options())
    exercise(lock_class, connect(server.port, credential_provider=provider))
    assert provider.asked


def test_requirepass(lock_class: LockClass, spare_server: Any, connect: Connect) -> None:
    server = spare_server("valkey", {"requirepass": "canary-password"})
    exercise(lock_class, connect(server.port, password="canary-password"))
    with pytest.raises(redis.AuthenticationError):
        lock_class(connect(server.port, retry=once()), "name").acquire(blocking=False)


def test_server_that_does_not_listen_raises_connection_error(
    lock_class: LockClass, valkey: Server, connect: Connect
) -> None:
    client = connect(1, host="127.0.0.1", retry=once())
    with pytest.raises(redis.ConnectionError):
        lock_class(client, "name").acquire(blocking=False)


@pytest.mark.parametrize("ours_first", [True, False])
def test_both_classes_exclude_each_other(client: redis.Redis, ours_first: bool) -> None:
    classes: list[LockClass] = [redislock_fast.Lock, redis.lock.Lock]
    one, other = classes if ours_first else reversed(classes)
    holder, waiter = one(client, "name", timeout=10), other(client, "name", sleep=0.001)
    holder.acquire()
    assert waiter.acquire(blocking=False) is False
    assert (True, False) == (waiter.locked(), waiter.owned())
    answer = start(lambda: waiter.acquire(blocking_timeout=10))
    holder.extend(10)
    holder.reacquire()
    holder.release()
    assert answer.result(10) is True


@pytest.mark.parametrize("ours_first", [True, False])
def test_either_class_can_release_and_extend_by_the_others_token(client: redis.Redis, ours_first: bool) -> None:
    classes: list[LockClass] = [redislock_fast.Lock, redis.lock.Lock]
    one, other = classes if ours_first else reversed(classes)
    holder, heir = one(client, "name", timeout=10), other(client, "name", timeout=10)
    holder.acquire()
    heir.local.token = holder.local.token
    assert (True, True) == (heir.owned(), heir.extend(10))
    assert 10_000 < client.pttl("name") <= 20_000
    heir.release()
    assert not client.exists("name")
    with pytest.raises(LockNotOwnedError):
        holder.release()
