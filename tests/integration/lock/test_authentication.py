"""Connections that lose their authentication.

Rules: real servers, by threads and by tasks. The proxy has a server forget who is on a connection, as a proxy or a
managed service may.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

import redislock_fast
from redislock_fast.server import KINDS, Server, find_binary
from tests.conftest import absent
from tests.support.clusters import SOON, Cluster, Place, remap_ports
from tests.support.clusters import connect as connect_to_cluster
from tests.support.helpers import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.waiting import Callers, Contender, Threads, until_queued
from tests.support.worlds import World

NOAUTH = b"-NOAUTH Authentication required.\r\n"
SECRET = "canary-password"


@pytest.fixture(scope="module")
def guarded_servers() -> Iterator[dict[str, Server]]:
    """A server of each kind that wants a password, by kind."""
    running = {kind: Server(kind, {"requirepass": SECRET}) for kind in KINDS if find_binary(kind) is not None}
    yield running
    for server in running.values():
        server.close()


@pytest.fixture(params=KINDS)
def guarded(request: pytest.FixtureRequest, guarded_servers: dict[str, Server]) -> Iterator[Server]:
    """Each kind of server in turn, with a password that a test may change, its database empty."""
    if request.param not in guarded_servers:
        absent(f"no {request.param} server here")
    server = guarded_servers[request.param]
    with redis.Redis(port=server.port, password=SECRET) as admin:
        admin.flushall()
        yield server
        admin.config_set("requirepass", SECRET)


@pytest.fixture
def admin(guarded: Server) -> Iterator[redis.Redis]:
    """A client that looks at the server from outside."""
    with redis.Redis(port=guarded.port, password=SECRET) as client:
        yield client


@pytest.fixture
def proxy(guarded: Server) -> Iterator[Proxy]:
    """The commands that make the server forget the authentication."""
    with Proxy(guarded.port) as running:
        yield running


def contender_at(callers: Callers, proxy: Proxy, **options: Any) -> Contender:
    """A lock on a client behind the proxy, which has connected."""
    contender = callers.contender(callers.client(proxy.port, password=SECRET, **options), timeout=60)
    contender.call("locked")
    return contender


# A connection that was good


@pytest.mark.parametrize("use", ["acquire", "owned", "extend", "reacquire", "release"])
def test_connection_that_loses_its_authentication_is_replaced(
    callers: Callers, proxy: Proxy, admin: redis.Redis, use: str
) -> None:
    contender = contender_at(callers, proxy)
    if use != "acquire":
        assert contender.call("acquire")
    proxy.forget()
    assert contender.call(use, *([30] if use == "extend" else [])) is (None if use == "release" else True)
    assert admin.exists("name") == (use != "release")
    if use != "release":
        contender.release()
    assert not admin.exists("name")


def test_waiter_whose_connection_loses_its_authentication_is_granted_the_lock(
    callers: Callers, proxy: Proxy, admin: redis.Redis, guarded: Server
) -> None:
    client = callers.client(proxy.port, password=SECRET)
    holder = callers.contender(callers.client(guarded.port, password=SECRET), **SOON)
    waiter = callers.contender(client, **SOON)
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(admin, "name", 1)
    proxy.forget()
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert admin.keys() == []


def test_batch_outlives_the_loss_of_authentication(world: World, proxy: Proxy, admin: redis.Redis) -> None:
    locker = world.locker(world.connect(proxy.port, password=SECRET))
    names = ["a", "b", "c"]
    with locker.acquire_many(["first"], 60):
        proxy.forget()
    batch = locker.acquire_many(names, 60)
    assert batch.acquired == names
    proxy.forget()
    assert batch.extend(30) == dict.fromkeys(names, True)
    proxy.forget()
    assert batch.release() == dict.fromkeys(names, True)
    assert admin.keys() == []


def test_one_new_connection_is_tried_and_then_the_error_is_the_callers(
    callers: Callers, proxy: Proxy, admin: redis.Redis
) -> None:
    contender = contender_at(callers, proxy)
    proxy.answer(NOAUTH, "SET")
    for blocking_timeout in (None, PATIENCE_S):
        before = proxy.requests["SET"]
        with pytest.raises(redis.AuthenticationError, match="Authentication required"):
            contender.call("acquire", blocking_timeout=blocking_timeout)
        assert proxy.requests["SET"] == before + 2
    assert admin.keys() == []


def test_credentials_that_are_not_valid_any_more_are_the_callers_error_until_they_are(
    callers: Callers, proxy: Proxy, admin: redis.Redis
) -> None:
    contender = contender_at(callers, proxy)
    assert contender.call("acquire")
    admin.config_set("requirepass", "another")
    proxy.forget()
    for _ in range(2):
        with pytest.raises(redis.AuthenticationError):
            contender.call("extend", 30)
    admin.config_set("requirepass", SECRET)
    assert contender.call("extend", 30)
    contender.release()


def test_connection_that_never_had_an_authentication_is_not_kept(
    callers: Callers, proxy: Proxy, admin: redis.Redis
) -> None:
    contender = callers.contender(callers.client(proxy.port, protocol=2), timeout=60)
    for _ in range(2):
        with pytest.raises(redis.AuthenticationError):
            contender.call("acquire")
    assert not proxy.requests["SET"]
    admin.config_set("requirepass", "")
    assert contender.call("acquire")
    contender.release()


# More than one server


def test_redlock_outlives_the_loss_of_authentication(callers: Callers, guarded_servers: dict[str, Server]) -> None:
    servers = list(guarded_servers.values())
    if len(servers) < 3:
        absent("fewer than three kinds of server here")
    proxies = [Proxy(server.port) for server in servers]
    clients = [callers.client(proxy.port, password=SECRET) for proxy in proxies]
    redlock = callers.redlock(clients, "redlock", timeout=60, limit=PATIENCE_S)
    for use in ("acquire", "owned", "extend", "release", "acquire", "release"):
        assert redlock.call(use, *([30] if use == "extend" else [])) is (None if use == "release" else True)
        for proxy in proxies:
            proxy.forget()
    for proxy in proxies:
        proxy.close()


def at_home(callers: Callers, place: Place, proxy: Proxy) -> Any:
    """A client of the cluster that reaches the home of this place by the proxy."""
    port = place.cluster.nodes[place.home].port
    remap = remap_ports({port: proxy.port})
    return connect_to_cluster(callers, place.cluster, password=SECRET, address_remap=remap)


@pytest.fixture
def home_proxy(place: Place) -> Iterator[Proxy]:
    """A proxy before the home of this place, which wants a password meanwhile."""
    home = place.cluster.admins[place.home]
    home.execute_command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
    with Proxy(place.cluster.nodes[place.home].port) as proxy:
        yield proxy
    home.execute_command("ACL", "SETUSER", "default", "nopass")


def test_connection_to_a_node_that_loses_its_authentication_is_replaced(
    callers: Callers, place: Place, home_proxy: Proxy
) -> None:
    contender = callers.contender(at_home(callers, place, home_proxy), place.name, timeout=60)
    for use in ("acquire", "owned", "extend", "release", "acquire", "release"):
        assert contender.call(use, *([30] if use == "extend" else [])) is (None if use == "release" else True)
        home_proxy.forget()
    home_proxy.answer(NOAUTH, "SET")
    with pytest.raises(redis.AuthenticationError):
        contender.call("acquire")


def test_batch_in_a_cluster_outlives_the_loss_of_authentication(
    cluster: Cluster, place: Place, home_proxy: Proxy
) -> None:
    names = [place.name, *(cluster.place().name for _ in range(5))]
    with Threads() as threads:
        locker = redislock_fast.Locker(at_home(threads, place, home_proxy))
        batch = locker.acquire_many(names, 60)
        assert batch.acquired == names
        home_proxy.forget()
        assert batch.extend(30) == dict.fromkeys(names, True)
        home_proxy.forget()
        assert batch.release() == dict.fromkeys(names, True)
        home_proxy.forget()
