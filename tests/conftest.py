"""Fixtures: real servers, clients to them, and the lock classes that the parity suite compares.

A server starts when the first test asks for it and serves the whole session, except those that a test may kill,
freeze or reconfigure (`spare_server`). Every test gets an empty database. With `REDISLOCK_FAST_ALL_SERVERS=1`, a
missing server is a failure, not a skip.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest
import redis
import redis.asyncio

from redislock_fast._pipe.base import Pipe
from redislock_fast._procedures.lock import LockBase
from redislock_fast._transport import base
from redislock_fast._util import times
from redislock_fast.server import KINDS, Server, find_binary, free_port
from tests.support.any_pipe import any_pair, implementation, pipe_kind  # noqa: F401  # pytest finds fixtures by name
from tests.support.async_helpers import (
    ASYNC_CLASSES,
    ASYNC_MODULES,
    LOOP_KINDS,
    AsyncClients,
    AsyncLockClass,
    FakeAsyncio,
)
from tests.support.clusters import Cluster, Place
from tests.support.forks import in_fork  # noqa: F401  # as above
from tests.support.garbage import pytest_collection_finish, without_earlier_tests  # noqa: F401  # as above
from tests.support.helpers import (
    CLASSES,
    MODULES,
    PATIENCE_S,
    TAKES_RAISE_ON_RELEASE_ERROR,
    FakeTime,
    LockClass,
    capabilities_of,
)
from tests.support.holding import Holders, Losses
from tests.support.pipes import MAKERS, PAIRS, Peer
from tests.support.proxy import Proxy
from tests.support.running import runs  # noqa: F401  # as above
from tests.support.scenes import holder, mortal_scene, scene, valkey_scene  # noqa: F401  # as above
from tests.support.selection import (  # noqa: F401  # pytest finds hooks by name
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
)
from tests.support.stalls import pytest_report_teststatus, pytest_runtest_protocol  # noqa: F401
from tests.support.waiting import CALLERS, Callers
from tests.support.worlds import our_lock, pytest_pyfunc_call, world, world_of  # noqa: F401

ALL_SERVERS = os.environ.get("REDISLOCK_FAST_ALL_SERVERS") == "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # CPython 3.13 without the GIL has none
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from tests.support.certificates import certificate

with contextlib.suppress(ModuleNotFoundError):  # wheels are tested without it
    import hypothesis

    hypothesis.settings.register_profile("unhurried", deadline=None)  # a test may be slow on a busy machine
    hypothesis.settings.load_profile("unhurried")


FLEETS = {"valkey": ("valkey",) * 5, "mixed": ("valkey", "redis", "redis-6.2", "valkey", "redis")}
"""The kinds of independent servers that a Redlock is tested on."""


def absent(what: str) -> NoReturn:
    """Skip the test, or fail it where all servers are required."""
    if ALL_SERVERS:
        pytest.fail(f"{what}, and REDISLOCK_FAST_ALL_SERVERS=1")
    pytest.skip(what)


@pytest.fixture
def polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes our locks poll as redis-py's do, unless their settings say otherwise."""
    defaults: Any = LockBase.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "wait", "poll")


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes callers wait longer for requests that are under way at the end of their time: the machine may be busy."""
    for module in (base, times):
        monkeypatch.setattr(module, "GRACE_S", PATIENCE_S)


class Servers:
    """Starts each kind of server once, when it is first asked for."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, int], Server] = {}

    def get(self, kind: str, number: int = 0) -> Server:
        """The session's server of this kind, or one of several."""
        if (kind, number) not in self._running:
            self._running[kind, number] = self.start(kind)
        return self._running[kind, number]

    def start(self, kind: str, options: dict[str, str] | None = None) -> Server:
        """A new server, which the caller closes."""
        if find_binary(kind) is None:
            absent(f"no {kind} server here")
        return Server(kind, options)

    def close(self) -> None:
        """End them all."""
        for server in self._running.values():
            server.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The session's servers."""
    pool = Servers()
    yield pool
    pool.close()


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """Each kind of server in turn, its database empty."""
    return _emptied(servers.get(request.param))


@pytest.fixture
def valkey(servers: Servers) -> Server:
    """Valkey, for tests to which the kind of server does not matter, its database empty."""
    return _emptied(servers.get("valkey"))


@pytest.fixture
def scripts_only(servers: Servers) -> Server:
    """A server that has no command in place of a script (Redis before 8.4), its database empty."""
    for kind in ("redis", "redis-6.2"):
        if find_binary(kind) is not None and capabilities_of(servers.get(kind)).release is None:
            return _emptied(servers.get(kind))
    absent("no server without commands in place of scripts here")


@pytest.fixture(params=["valkey", "redis"])
def native(request: pytest.FixtureRequest, servers: Servers) -> Server:
    """A server that has commands in place of scripts (Valkey 9, Redis 8.4), its database empty."""
    server = servers.get(request.param)
    if capabilities_of(server).release is None:
        pytest.skip("this redis-server has no commands in place of scripts")
    return _emptied(server)


def _emptied(server: Server) -> Server:
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest, servers: Servers) -> Iterator[list[Server]]:
    """Five servers, of one kind and of several in turn, their databases empty. A test may freeze and kill them."""
    started = [servers.get(kind, number) for number, kind in enumerate(FLEETS[request.param], 1)]
    yield [_emptied(server) for server in started]
    for server in started:
        if server.process is None:
            server.start()
        else:
            server.signal(signal.SIGCONT)


@pytest.fixture
def spare_server(servers: Servers) -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own, to be killed, frozen or reconfigured: `spare_server("redis", {...})`."""
    started: list[Server] = []

    def start(kind: str = "valkey", options: dict[str, str] | None = None) -> Server:
        started.append(servers.start(kind, options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(params=KINDS)
def mortal_server(request: pytest.FixtureRequest, spare_server: Callable[..., Server]) -> Server:
    """Each kind of server in turn, for this test alone."""
    return spare_server(request.param)


class Connect(Protocol):
    """The type of the `connect` fixture."""

    def __call__(self, port: int, **options: Any) -> redis.Redis:
        """A client of the server on this port."""


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients with any options, closed after the test."""
    clients: list[redis.Redis] = []

    def make(port: int, **options: Any) -> redis.Redis:
        # By number: in a forked child, a thread of the parent may hold the C library's lock for names.
        clients.append(redis.Redis(**{"host": "127.0.0.1", "port": port, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def clusters() -> Iterator[dict[str, Cluster]]:
    """The session's clusters by kind, each started when it is first asked for."""
    running: dict[str, Cluster] = {}
    yield running
    for cluster in running.values():
        cluster.close()


@pytest.fixture(params=KINDS)
def cluster(request: pytest.FixtureRequest, clusters: dict[str, Cluster]) -> Cluster:
    """A cluster of each kind of server in turn, empty; `place` gives names that no other test has used."""
    kind: str = request.param
    if kind not in clusters:
        if find_binary(kind) is None:
            absent(f"no {kind} server here")
        clusters[kind] = Cluster(kind)
    clusters[kind].flush()
    return clusters[kind]


@pytest.fixture
def cluster_client(cluster: Cluster) -> Iterator[redis.RedisCluster]:
    """A client of the cluster."""
    with redis.RedisCluster(host="127.0.0.1", port=cluster.port) as running:
        yield running


@pytest.fixture
def place(cluster: Cluster) -> Place:
    """A name that no other test has used, and where its slot is."""
    return cluster.place()


@pytest.fixture
def client(server: Server, connect: Connect) -> redis.Redis:
    """A fresh client of each kind of server in turn."""
    return connect(server.port)


@pytest.fixture
def valkey_client(valkey: Server, connect: Connect) -> redis.Redis:
    """A fresh client of Valkey."""
    return connect(valkey.port)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    """A fault proxy before each kind of server in turn."""
    with Proxy(server.port) as running:
        yield running


@pytest.fixture(params=CLASSES)
def lock_class_id(request: pytest.FixtureRequest) -> str:
    """Which of the two classes a test runs on: "redis-py" or "ours"."""
    name: str = request.param
    return name


@pytest.fixture
def lock_class(lock_class_id: str, request: pytest.FixtureRequest) -> LockClass:
    """redis-py's Lock and ours, in turn, in the test's world."""
    chosen: LockClass = world_of(request).lock_class(lock_class_id)
    return chosen


@pytest.fixture
def raise_on_release_error(lock_class_id: str) -> None:
    """Skips a test of redis-py's class where that does not have this parameter."""
    if lock_class_id == "redis-py" and not TAKES_RAISE_ON_RELEASE_ERROR:
        pytest.skip("this redis-py's locks have no raise_on_release_error")


@pytest.fixture
def fake_time(
    lock_class_id: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, unhurried: None
) -> FakeTime:
    """A clock in place of the one that the lock class sleeps by."""
    fake = FakeTime()
    in_threads = world_of(request).in_threads
    if lock_class_id == "ours":
        (fake if in_threads else FakeAsyncio(fake)).replace_ours(monkeypatch)
    elif in_threads:
        monkeypatch.setattr(MODULES[lock_class_id], "mod_time", fake)
    else:
        monkeypatch.setattr(ASYNC_MODULES[lock_class_id], "asyncio", FakeAsyncio(fake))
    return fake


@pytest.fixture
def loop_kind() -> str:
    """The kind of event loop that an asyncio test runs in; a module that asks for `each_loop_kind` runs in each."""
    return LOOP_KINDS[0]


@pytest.fixture(params=LOOP_KINDS)
def each_loop_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of event loop in turn."""
    kind: str = request.param
    if kind != LOOP_KINDS[0]:
        pytest.importorskip(kind)
    return kind


@pytest.fixture
def async_connect() -> AsyncClients:
    """Makes asyncio clients with any options; `in_loop` closes them in the test's loop."""
    return AsyncClients()


@pytest.fixture
def async_client(server: Server, async_connect: AsyncClients) -> redis.asyncio.Redis:
    """A fresh asyncio client of each kind of server in turn; `client` is one of the same server."""
    return async_connect(server.port)


@pytest.fixture
def async_valkey_client(valkey: Server, async_connect: AsyncClients) -> redis.asyncio.Redis:
    """A fresh asyncio client of Valkey."""
    return async_connect(valkey.port)


@pytest.fixture
def async_lock_class(lock_class_id: str) -> AsyncLockClass:
    """redis-py's asyncio Lock and ours, in turn."""
    return ASYNC_CLASSES[lock_class_id]


@pytest.fixture
def fake_async_time(lock_class_id: str, monkeypatch: pytest.MonkeyPatch, unhurried: None) -> FakeTime:
    """A clock in place of the one that the asyncio lock class sleeps by."""
    clock = FakeTime()
    if lock_class_id == "ours":
        FakeAsyncio(clock).replace_ours(monkeypatch)
    else:
        monkeypatch.setattr(ASYNC_MODULES[lock_class_id], "asyncio", FakeAsyncio(clock))
    return clock


@dataclass(frozen=True)
class AclUser:
    """A user on a server, as a client's options name it."""

    username: str
    password: str

    def options(self) -> dict[str, str]:
        """The client's options."""
        return {"username": self.username, "password": self.password}


class MakeUser(Protocol):
    """The type of the `acl_user` fixture."""

    def __call__(self, server: Server, *rules: str) -> AclUser:
        """A user with all rights, changed by these rules."""


@pytest.fixture
def acl_user() -> Iterator[MakeUser]:
    """Makes users with all rights except the given: `acl_user(server, "-eval")`; deleted after the test."""
    made: list[tuple[Server, str]] = []

    def make(server: Server, *rules: str) -> AclUser:
        user = AclUser(f"user-{len(made)}", "canary-password")
        with redis.Redis(port=server.port) as admin:
            admin.execute_command(
                "ACL", "SETUSER", user.username, "on", f">{user.password}", "~*", "&*", "+@all", *rules
            )
        made.append((server, user.username))
        return user

    yield make
    for server, name in made:
        with redis.Redis(port=server.port) as admin:
            admin.acl_deluser(name)


@dataclass(frozen=True)
class TlsServer:
    """A running server's TLS port and the authority that signed its certificate."""

    port: int
    ca_path: str


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    """A server with TLS and a throwaway CA: Debian's redis-server is built with it."""
    pytest.importorskip("cryptography")
    folder: Path = tmp_path_factory.mktemp("tls")
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_path, certificate_path, key_path = (folder / name for name in ("ca", "certificate", "key"))
    ca_path.write_bytes(certificate("test CA", ca_key, "test CA", ca_key))
    certificate_path.write_bytes(certificate("127.0.0.1", server_key, "test CA", ca_key))
    key_path.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    options = {
        "tls-port": str(free_port()),
        "tls-cert-file": str(certificate_path),
        "tls-key-file": str(key_path),
        "tls-ca-cert-file": str(ca_path),
        "tls-auth-clients": "no",
    }
    if find_binary("redis") is None:
        absent("no redis-server here")
    try:
        server = Server("redis", options)
    except RuntimeError as error:
        absent(f"this redis-server knows no TLS: {error}")
    with server:
        yield TlsServer(int(options["tls-port"]), str(ca_path))


@pytest.fixture(params=MAKERS)
def make_pipe(request: pytest.FixtureRequest) -> Callable[[socket.socket], Pipe]:
    """Makes the pure-Python pipe, and the compiled one."""
    maker: Callable[[socket.socket], Pipe] = request.param
    return maker


@pytest.fixture(params=PAIRS)
def make_pair(request: pytest.FixtureRequest) -> Callable[[], tuple[Pipe, Peer]]:
    """Makes a pipe and the server's end of its socket: each pipe over a plain socket, and over one with TLS."""
    maker: Callable[[], tuple[Pipe, Peer]] = request.param
    return maker


@pytest.fixture
def pair(make_pair: Callable[[], tuple[Pipe, Peer]]) -> Iterator[tuple[Pipe, Peer]]:
    """A pipe, and the server's end of its socket."""
    pipe, peer = make_pair()
    yield pipe, peer
    pipe.close()
    peer.sock.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """A pool for callers."""
    pool = ThreadPoolExecutor(64)
    yield pool
    pool.shutdown(wait=False)  # callers of a failed test end with their pipe


@pytest.fixture(params=CALLERS)
def callers(request: pytest.FixtureRequest) -> Iterator[Callers]:
    """Threads and tasks in turn."""
    with CALLERS[request.param]() as running:
        yield running


@pytest.fixture
def holders(callers: Callers) -> Iterator[Holders]:
    """Makes locks for threads and for tasks in turn, and releases what is still held after the test."""
    made = Holders(callers)
    yield made
    made.close()


@pytest.fixture
def losses() -> Losses:
    """The losses that the lock under test reports."""
    return Losses()
