"""The end of an event loop under cancelled acquires: no key stays behind.

Rules: programs run and end as users' do, and the end itself cancels their tasks, or they do it just before. The server
is idle, kept busy by another client, or frozen for a while. A lock that a task has got stays, for that is its user's.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import signal
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import eventually, run_in_loop
from tests.support.clusters import Cluster
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.proxy import Proxy
from tests.support.transports import connection_of

ROUNDS = 20
"""How often a race is run."""

FROZEN_ROUNDS = 2
"""The same, where each run takes half a second."""

FROZEN_S = 0.5
SENT = 2000
"""So many requests, which a server does not read at once."""

NAMES = [f"name-{number}" for number in range(100)]
BUSY = "local n = 0 while n < 300000 do n = n + 1 end"

Client: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"
Pause: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Trouble: TypeAlias = Callable[[], None]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@pytest.fixture
def busy(spare_server: Callable[..., Server]) -> Iterator[Server]:
    """A server that another client keeps busy."""
    server = spare_server()
    ends = threading.Event()

    def keep_busy() -> None:
        with redis.Redis(port=server.port) as other:
            while not ends.is_set():
                other.eval(BUSY, 0)

    other = start(keep_busy)
    yield server
    ends.set()
    other.result(PATIENCE_S)


@pytest.fixture
def frozen(spare_server: Callable[..., Server]) -> Iterator[Server]:
    """A server that the test may freeze."""
    server = spare_server()
    yield server
    server.signal(signal.SIGCONT)


def freeze_for_a_while(server: Server) -> None:
    """The server does nothing for half a second from now on."""
    server.signal(signal.SIGSTOP)
    threading.Timer(FROZEN_S, server.signal, [signal.SIGCONT]).start()


@pytest.fixture(params=["idle", "busy", "frozen"])
def at_work(request: pytest.FixtureRequest) -> tuple[Server, Trouble, int]:
    """A server, what happens to it while a program ends, and how often the program is run."""
    if request.param == "frozen":
        server = request.getfixturevalue("frozen")
        return server, lambda: freeze_for_a_while(server), FROZEN_ROUNDS
    return request.getfixturevalue("busy" if request.param == "busy" else "valkey"), lambda: None, ROUNDS


async def at_once() -> None:
    """The tasks have not begun."""


async def after_one_iteration() -> None:
    """The requests are about to leave."""
    await asyncio.sleep(0)


async def when_sent() -> None:
    """The requests have left."""
    for _ in range(3):
        await asyncio.sleep(0)


async def cancelled_before() -> None:
    """The program itself has cancelled its tasks, and they have ended."""
    await when_sent()
    tasks = [task for task in asyncio.all_tasks() if task.get_name() in NAMES]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def client_of(port: int, **options: Any) -> redis.asyncio.Redis:
    return redis.asyncio.Redis(port=port, client_name="locks", **options)


async def begin(
    make_client: Callable[[], Client], connected: bool, trouble: Trouble, pause: Pause, acquired: set[bytes]
) -> None:
    """Begin to acquire all locks, a task for each, and return. The tasks alone keep the client, if nobody else does."""

    async def acquire(lock: Lock, name: str) -> None:
        if await lock.acquire():
            acquired.add(name.encode())

    client = make_client()
    if connected:
        for name in NAMES[:10]:  # in a cluster, at different nodes
            async with Lock(client, name, timeout=10) as lock:
                await lock.extend(10)
    trouble()
    running = [asyncio.create_task(acquire(Lock(client, name, timeout=30), name), name=name) for name in NAMES]
    del client
    await pause()
    _running.update(running)
    for task in running:
        task.add_done_callback(_running.discard)


_running: set[asyncio.Task[None]] = set()  # a loop keeps none of its tasks alive


def connections(client: redis.Redis) -> set[str]:
    """The server's ids of the connections that call themselves locks."""
    return {entry["id"] for entry in client.client_list() if entry["name"] == "locks"}


def is_left(client: redis.Redis) -> bool:
    """Whether no lock is connected to the server any more."""
    return not connections(client)


def left_by(program: Callable[[set[bytes]], object], *servers: redis.Redis) -> set[bytes]:
    """The keys of locks that a program leaves without having got them, once the servers have read all that it sent."""
    acquired: set[bytes] = set()
    program(acquired)
    left: set[Any] = set()
    for server in servers:
        wait_until(partial(is_left, server), "its connections are gone")
        left.update(server.keys())
    return left - acquired


@pytest.mark.slow
@pytest.mark.parametrize(
    ("connected", "pause"),
    [(True, at_once), (True, after_one_iteration), (True, when_sent), (True, cancelled_before), (False, when_sent)],
)
@pytest.mark.usefixtures("quiet")
def test_loop_that_ends_leaves_no_key_of_a_cancelled_acquire(
    at_work: tuple[Server, Trouble, int],
    connect: Connect,
    loop_kind: str,
    connected: bool,
    pause: Pause,
) -> None:
    server, trouble, rounds = at_work
    client = connect(server.port)
    kept = client_of(server.port)
    # Every other client ends with its tasks.
    clients: Iterator[Callable[[], Client]] = itertools.cycle([partial(client_of, server.port), lambda: kept])

    def program(acquired: set[bytes]) -> None:
        run_in_loop(loop_kind, begin(next(clients), connected, trouble, pause, acquired))

    for _ in range(rounds):
        assert set() == left_by(program, client)
        client.flushdb()


@pytest.mark.slow
@pytest.mark.parametrize("pause", [when_sent, cancelled_before])
@pytest.mark.usefixtures("quiet")
def test_loop_that_ends_leaves_no_key_in_a_cluster(cluster: Cluster, loop_kind: str, pause: Pause) -> None:
    client = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.port, client_name="locks")
    primaries = cluster.primaries()

    async def program(acquired: set[bytes]) -> None:
        await begin(lambda: client, True, lambda: freeze_for_a_while(cluster.nodes[primaries[0]]), pause, acquired)
        await client.aclose()  # the locks' connections stay

    admins = [cluster.admins[number] for number in primaries]
    names = {name.encode() for name in NAMES}
    for _ in range(FROZEN_ROUNDS):
        left = left_by(lambda acquired: run_in_loop(loop_kind, program(acquired)), *admins) & names
        assert set() == left
        for admin in admins:
            for key in names.intersection(admin.keys()):
                admin.delete(key)


@pytest.mark.parametrize("keeps_client", [True, False])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.usefixtures("quiet")
def test_what_is_being_undone_as_the_loop_ends_is_undone_on_a_new_connection(
    proxy: Proxy, client: redis.Redis, loop_kind: str, keeps_client: bool, waits: bool
) -> None:
    kept: list[redis.asyncio.Redis] = []

    async def program() -> None:
        locks = client_of(proxy.port, retry=Retry(ConstantBackoff(60), 1))
        kept.extend([locks] * keeps_client)
        lock = Lock(locks, "name", timeout=60)
        await lock.locked()  # connects
        proxy.drop_reply("SET")
        proxy.refuse()
        acquiring = asyncio.create_task(lock.acquire())
        del locks, lock
        await eventually(lambda: client.exists("name"), "the server executes it")
        if waits:  # until it has failed, and the undoing finds no connection
            with pytest.raises(redis.ConnectionError):
                await asyncio.wait_for(acquiring, PATIENCE_S)
        proxy.accept()

    run_in_loop(loop_kind, program())
    wait_until(lambda: not client.exists("name"), "it is undone")


@pytest.mark.parametrize("method", ["locked", "acquire"])
def test_loop_that_ends_with_nothing_under_way_sends_nothing(
    proxy: Proxy, client: redis.Redis, loop_kind: str, method: str
) -> None:
    locks = client_of(proxy.port)

    async def program() -> int:
        await getattr(Lock(locks, "name", timeout=60), method)()
        return len(proxy.requests)

    assert run_in_loop(loop_kind, program()) == len(proxy.requests)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_what_was_sent_on_the_connection_of_a_collected_client_is_executed(
    frozen: Server, connect: Connect, loop_kind: str
) -> None:
    client = connect(frozen.port)

    async def program(stays: bool) -> None:
        locks = client_of(frozen.port)
        await Lock(locks, "name").locked()  # connects
        freeze_for_a_while(frozen)
        connection = connection_of(locks)
        assert connection is not None
        for _ in range(SENT):
            connection.pipe.post((b"INCR", b"count"))
        del locks, connection
        gc.collect()
        if stays:
            await eventually(partial(is_left, client), "it is closed")

    for stays in (True, False):
        run_in_loop(loop_kind, program(stays))
        wait_until(partial(is_left, client), "it is closed")
        assert client.getdel("count") == b"%d" % SENT


@pytest.mark.slow
def test_loop_closed_by_hand_leaves_no_key_of_an_acquire_that_was_cancelled(
    at_work: tuple[Server, Trouble, int], connect: Connect, loop_kind: str
) -> None:
    server, trouble, rounds = at_work
    client = connect(server.port)

    def program(acquired: set[bytes]) -> None:
        loop = importlib.import_module(loop_kind).new_event_loop()
        locks = client_of(server.port)
        loop.run_until_complete(begin(lambda: locks, True, trouble, cancelled_before, acquired))
        loop.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # asyncio's own, for the transport
        for _ in range(rounds):
            assert set() == left_by(program, client)
            client.flushdb()
        _running.clear()  # their loops run no callback any more
        for _ in range(3):  # what a finalizer has kept alive goes later
            gc.collect()
