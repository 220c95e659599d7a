"""Credentials that change while locks are held: a streaming credential provider announces new ones.

Rules: real servers, by threads and by tasks; users are made on the running servers. The provider keeps one callback, as
redis-entraid's does.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.asyncio.sentinel
import redis.credentials
from redis.sentinel import Sentinel

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import AclUser, Connect, MakeUser
from tests.support.clusters import Cluster, Place
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.transports import reference_to_transport
from tests.support.waiting import Callers, Contender, Tasks

SECRET = "canary-password"

_Streaming: Any = getattr(redis.credentials, "StreamingCredentialProvider", redis.credentials.CredentialProvider)


class _Token:
    """As redis-py's `TokenInterface`, as far as it is used here."""

    def __init__(self, user: AclUser) -> None:
        self.user = user

    def try_get(self, key: str) -> str:
        assert key == "oid"
        return self.user.username

    def get_value(self) -> str:
        return self.user.password


class Provider(_Streaming):  # type: ignore[misc]
    """Hands out one user's credentials, and announces another's. Like redis-entraid's, it keeps one callback."""

    def __init__(self, user: AclUser) -> None:
        self._user = user
        self._on_next: Callable[[Any], Any] | None = None

    def get_credentials(self) -> tuple[str, str]:
        return self._user.username, self._user.password

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        self._on_next = callback

    def on_error(self, callback: Callable[[Exception], Any]) -> None:
        pass

    def is_streaming(self) -> bool:
        return True

    def announce(self, callers: Callers, user: AclUser) -> None:
        """Let the client know of new credentials. Returns when redis-py has done its part."""
        self._user = user
        assert self._on_next is not None
        done = self._on_next(_Token(user))
        if inspect.isawaitable(done):
            assert isinstance(callers, Tasks)
            callers.submit(_awaited(done)).result(PATIENCE_S)


async def _awaited(done: Any) -> None:
    await done


streaming = pytest.mark.skipif(
    not hasattr(redis.credentials, "StreamingCredentialProvider"), reason="this redis-py streams no credentials"
)


def users_by_connection(admin: Any, client_name: str) -> dict[str, str]:
    """The users on the connections of this name, by the connections' numbers."""
    return {row["id"]: row["user"] for row in admin.client_list() if row["name"] == client_name}


def check_that_new_credentials_are_taken_over(
    contender: Contender, announce: Callable[[AclUser], None], admin: Any, make_user: Callable[[], AclUser]
) -> None:
    """A lock that is held goes on, on the same connection, when the old user is deleted."""
    first = next(iter(users_by_connection(admin, "ours").values()))
    assert contender.call("acquire")
    connections = users_by_connection(admin, "ours")
    assert set(connections.values()) == {first}
    second = make_user()
    announce(second)
    assert contender.call("owned")
    assert users_by_connection(admin, "ours") == dict.fromkeys(connections, second.username)
    admin.acl_deluser(first)  # and with it, all connections that are still its
    assert contender.call("extend", 30)
    assert users_by_connection(admin, "ours").keys() == connections.keys()
    contender.release()


@streaming
def test_new_credentials_of_a_pool_are_taken_over(
    callers: Callers, server: Server, client: redis.Redis, acl_user: MakeUser
) -> None:
    provider = Provider(acl_user(server))
    ours = callers.client(server.port, credential_provider=provider, client_name="ours")
    contender = callers.contender(ours, timeout=60)
    contender.call("locked")
    check_that_new_credentials_are_taken_over(
        contender, lambda user: provider.announce(callers, user), client, lambda: acl_user(server)
    )


@streaming
def test_new_credentials_behind_a_sentinel_are_taken_over(
    valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser, callers: Callers
) -> None:
    user = acl_user(valkey)
    provider = Provider(user)
    is_for_tasks = isinstance(callers, Tasks)
    kind: Any = redis.asyncio.sentinel.Sentinel if is_for_tasks else Sentinel

    class Announcer(kind):  # type: ignore[misc]
        """A sentinel that knows where the primary is without being asked."""

        def discover_master(self, service_name: str) -> Any:
            found: Any = ("127.0.0.1", valkey.port)
            return _value(found) if is_for_tasks else found

    primary = Announcer([]).master_for("service", credential_provider=provider, client_name="ours")
    # redis-py registers a pool with the provider that the client, not its pool, is given.
    ours = callers.keep(type(primary)(connection_pool=primary.connection_pool, credential_provider=provider))
    contender = callers.contender(ours, timeout=60)
    contender.call("locked")
    check_that_new_credentials_are_taken_over(
        contender, lambda user: provider.announce(callers, user), valkey_client, lambda: acl_user(valkey)
    )


async def _value(value: Any) -> Any:
    return value


@streaming
def test_new_credentials_come_in_order_with_other_requests(
    callers: Callers, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser
) -> None:
    users = [acl_user(valkey), acl_user(valkey)]
    provider = Provider(users[0])
    ours = callers.client(valkey.port, credential_provider=provider, client_name="ours")
    contenders = [callers.contender(ours, f"name:{number}", timeout=60) for number in range(8)]
    done = 0

    def pairs(contender: Contender) -> list[bool]:
        nonlocal done
        verdicts = []
        for _ in range(50):
            verdicts.append(contender.call("acquire", blocking=False))
            contender.release()
            done += 1
        return verdicts

    contenders[0].call("locked")
    answers: list[Future[list[bool]]] = [start(lambda one=one: pairs(one)) for one in contenders]  # type: ignore[misc]
    for number in range(20):
        before = done
        provider.announce(callers, users[number % 2])
        wait_until(lambda: done > before or all(answer.done() for answer in answers), "they go on")  # noqa: B023
    assert all(all(answer.result(PATIENCE_S)) for answer in answers)
    assert valkey_client.keys() == []
    assert set(users_by_connection(valkey_client, "ours").values()) == {users[1].username}


@streaming
def test_new_credentials_of_a_cluster_are_taken_over(cluster: Cluster, place: Place) -> None:
    home = place.cluster.admins[place.home]
    users = [AclUser(f"cluster-user-{number}", SECRET) for number in range(2)]
    for user in users:
        for admin in cluster.admins:
            admin.execute_command("ACL", "SETUSER", user.username, "on", f">{SECRET}", "~*", "&*", "+@all")
    provider = Provider(users[0])
    with redis.RedisCluster(
        host="127.0.0.1", port=cluster.port, credential_provider=provider, client_name="ours"
    ) as client:
        lock = redislock_fast.Lock(client, place.name, timeout=60)
        assert lock.acquire()
        provider._user = users[1]
        assert provider._on_next is not None
        provider._on_next(_Token(users[1]))
        assert lock.owned()
        assert set(users_by_connection(home, "ours").values()) == {users[1].username}
        lock.release()
    for admin in cluster.admins:
        admin.acl_deluser(*(user.username for user in users))


def test_callback_that_somebody_else_has_put_on_a_pool_stays(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    pool: Any = client.connection_pool
    pool.re_auth_callback = theirs = object()
    with redislock_fast.Lock(client, "name", timeout=60):
        assert pool.re_auth_callback is theirs


def test_pool_and_channels_are_not_kept_alive(valkey: Server) -> None:
    gc.collect()
    gc.disable()
    try:
        client = redis.Redis(port=valkey.port, protocol=2)  # with RESP3, redis-py makes a cycle of its own
        lock = redislock_fast.Lock(client, "name", timeout=60)
        with lock:
            pool = weakref.ref(client.connection_pool)
            channel = reference_to_transport(client)
        client.close()
        del client, lock
        assert (pool(), channel()) == (None, None)
    finally:
        gc.enable()
