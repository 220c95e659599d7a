"""One suite on redis-py's Locks and on ours, for threads and for asyncio: every kind of client and connection.

Rules: each test passes on both classes. What a server has is asked by a client of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio
from redis.credentials import CredentialProvider
from redis.exceptions import LockNotOwnedError

from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser, TlsServer
from tests.support.async_helpers import async_once
from tests.support.helpers import LockClass, once
from tests.support.worlds import World, waited

pytestmark = pytest.mark.usefixtures("world")


def package(world: World) -> Any:
    """redis-py for this world."""
    return redis if world.in_threads else redis.asyncio


def no_retry(world: World) -> Any:
    """A retry policy without retries."""
    return once() if world.in_threads else async_once()


def exercise(lock_class: LockClass, client: Any, admin: Any) -> None:
    """Every operation once, through this client; `admin` is another client of the same database."""
    lock = lock_class(client, "name", timeout=10)
    for _ in range(2):
        assert lock.acquire(blocking=False) is True
        assert (True, True) == (lock.owned(), lock.locked())
        other = lock_class(client, "name", timeout=10)
        assert other.acquire(blocking=False) is False
        assert other.owned() is False
        assert lock.extend(10) is True
        assert 10_000 < admin.pttl("name") <= 20_000
        assert lock.extend(5, replace_ttl=True) is True
        assert 0 < admin.pttl("name") <= 5_000
        assert lock.reacquire() is True
        assert 5_000 < admin.pttl("name") <= 10_000
        lock.release()
        assert lock.locked() is False
    lock.acquire()
    admin.delete("name")
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
def test_client_options(
    world: World, lock_class: LockClass, server: Server, connect: Connect, options: dict[str, Any]
) -> None:
    admin = connect(server.port, db=options.get("db", 0))
    admin.flushdb()
    client = world.keep(package(world).Redis(port=server.port, **options))
    exercise(lock_class, client, admin)


def test_unix_socket(world: World, lock_class: LockClass, server: Server, client: redis.Redis) -> None:
    exercise(lock_class, world.keep(package(world).Redis(unix_socket_path=server.unix_path)), client)


@pytest.mark.parametrize(("query", "db"), [("", 0), ("?protocol=3", 0), ("?decode_responses=true&db=2", 2)])
def test_url(world: World, lock_class: LockClass, server: Server, connect: Connect, query: str, db: int) -> None:
    admin = connect(server.port, db=db)
    admin.flushdb()
    exercise(lock_class, world.keep(package(world).Redis.from_url(f"redis://127.0.0.1:{server.port}{query}")), admin)


def test_url_of_a_unix_socket(world: World, lock_class: LockClass, server: Server, client: redis.Redis) -> None:
    exercise(lock_class, world.keep(package(world).Redis.from_url(f"unix://{server.unix_path}")), client)


@pytest.fixture
def blocking_pool(world: World, valkey: Server) -> Any:
    """Makes clients of a pool that makes its callers wait for its one connection."""
    pool = world.keep(package(world).BlockingConnectionPool(port=valkey.port, max_connections=1, timeout=10))
    return lambda: package(world).Redis(connection_pool=pool)


def test_blocking_connection_pool(
    world: World, lock_class: LockClass, blocking_pool: Any, valkey_client: redis.Redis
) -> None:
    client = blocking_pool()
    exercise(lock_class, client, valkey_client)

    def work() -> None:
        for _ in range(10):
            with lock_class(client, "name", sleep=0.001):
                waited(client.incr("counter"))

    for worker in [world.start(work) for _ in range(4)]:
        worker.result(20)
    assert valkey_client.get("counter") == b"40"


def test_two_clients_of_one_pool(lock_class: LockClass, blocking_pool: Any, valkey_client: redis.Redis) -> None:
    first, second = blocking_pool(), blocking_pool()
    with lock_class(first, "name"):
        assert lock_class(second, "name").acquire(blocking=False) is False
    exercise(lock_class, second, valkey_client)


def test_single_connection_client_of_many_callers(
    world: World, lock_class: LockClass, valkey: Server, valkey_client: redis.Redis
) -> None:
    client = world.connect(valkey.port, single_connection_client=True)
    with lock_class(client, "name"):
        assert world.beside(lambda: lock_class(client, "name").acquire(blocking=False)) is False
    exercise(lock_class, client, valkey_client)


def test_tls(world: World, lock_class: LockClass, tls_server: TlsServer, connect: Connect) -> None:
    options: dict[str, Any] = {"host": "127.0.0.1", "ssl": True, "ssl_ca_certs": tls_server.ca_path}
    admin = connect(tls_server.port, **options)
    admin.flushdb()
    exercise(lock_class, world.keep(package(world).Redis(port=tls_server.port, **options)), admin)


def test_tls_by_url(world: World, lock_class: LockClass, tls_server: TlsServer, connect: Connect) -> None:
    admin = connect(tls_server.port, host="127.0.0.1", ssl=True, ssl_ca_certs=tls_server.ca_path)
    admin.flushdb()
    url = f"rediss://localhost:{tls_server.port}?ssl_ca_certs={tls_server.ca_path}"
    exercise(lock_class, world.keep(package(world).Redis.from_url(url)), admin)


def test_tls_with_an_unknown_ca_is_refused(world: World, lock_class: LockClass, tls_server: TlsServer) -> None:
    client = world.connect(tls_server.port, ssl=True, retry=no_retry(world))
    with pytest.raises(redis.ConnectionError, match=r"(?i)certificate"):
        lock_class(client, "name").acquire(blocking=False)


@pytest.mark.parametrize("protocol", [2, 3])
def test_acl_user_with_password(
    world: World, lock_class: LockClass, server: Server, client: redis.Redis, acl_user: MakeUser, protocol: int
) -> None:
    options = acl_user(server).options()
    exercise(lock_class, world.connect(server.port, protocol=protocol, **options), client)


def test_wrong_password_is_refused(world: World, lock_class: LockClass, server: Server, acl_user: MakeUser) -> None:
    options = {**acl_user(server).options(), "password": "canary-wrong"}
    with pytest.raises(redis.AuthenticationError) as caught:
        lock_class(world.connect(server.port, retry=no_retry(world), **options), "name").acquire(blocking=False)
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


def test_credential_provider(
    world: World, lock_class: LockClass, server: Server, client: redis.Redis, acl_user: MakeUser
) -> None:
    provider = Credentials(**acl_user(server).options())
    exercise(lock_class, world.connect(server.port, credential_provider=provider), client)
    assert provider.asked


def test_requirepass(world: World, lock_class: LockClass, spare_server: Any, connect: Connect) -> None:
    server = spare_server("valkey", {"requirepass": "canary-password"})
    admin = connect(server.port, password="canary-password")
    exercise(lock_class, world.connect(server.port, password="canary-password"), admin)
    with pytest.raises(redis.AuthenticationError):
        lock_class(world.connect(server.port, retry=no_retry(world)), "name").acquire(blocking=False)


@pytest.mark.parametrize("arguments", [{"blocking": False}, {"blocking_timeout": 0.1}], ids=str)
def test_server_that_does_not_listen_raises_connection_error(
    world: World, lock_class: LockClass, arguments: dict[str, Any]
) -> None:
    client = world.connect(1, retry=no_retry(world))
    with pytest.raises(redis.ConnectionError):
        lock_class(client, "name").acquire(**arguments)


# Both classes on one key

BOTH = pytest.mark.parametrize("ids", [("redis-py", "ours"), ("ours", "redis-py")], ids="-".join)


@BOTH
def test_both_classes_exclude_each_other(world: World, client: redis.Redis, ids: tuple[str, str]) -> None:
    one, other = map(world.lock_class, ids)
    holder, waiter = one(client, "name", timeout=10), other(client, "name", sleep=0.001)
    holder.acquire()
    assert waiter.acquire(blocking=False) is False
    assert (True, False) == (waiter.locked(), waiter.owned())
    answer = world.start(lambda: waiter.acquire(blocking_timeout=10))
    holder.extend(10)
    holder.reacquire()
    holder.release()
    assert answer.result(10) is True


@BOTH
def test_either_class_can_release_and_extend_by_the_others_token(
    world: World, client: redis.Redis, ids: tuple[str, str]
) -> None:
    one, other = map(world.lock_class, ids)
    holder, heir = one(client, "name", timeout=10), other(client, "name", timeout=10)
    holder.acquire()
    heir.local.token = holder.local.token
    assert (True, True) == (heir.owned(), heir.extend(10))
    assert 10_000 < client.pttl("name") <= 20_000
    heir.release()
    assert not client.exists("name")
    with pytest.raises(LockNotOwnedError):
        holder.release()
