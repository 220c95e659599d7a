"""Cancelling whatever a lock does, at every point where it waits: no key stays behind, nobody else is disturbed.

Rules: on ours alone; redis-py leaves keys behind (test_asyncio_fixed_bugs). A cancel strikes at a counted point of the
work, while a server is frozen, or at the end of the loop, whose programs run and end as those of users do. A lock
that a task has got stays, for that is its user's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import itertools
import random
import signal
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import LockNotOwnedError

from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.clusters import Cluster
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.proxy import Proxy
from tests.support.transports import connection_of

ROUNDS = 20
"""How often a race is run."""


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


@pytest.fixture
def frozen(spare_server: Callable[..., Server]) -> Iterator[Server]:
    """A server that the test may freeze."""
    server = spare_server()
    yield server
    server.signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def freezing(server: Server) -> AsyncIterator[None]:
    """The server does nothing meanwhile."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


class CancelAt:
    """Awaits the work, and cancels the task that does so when the work is suspended for the n-th time, from 0."""

    def __init__(self, work: Awaitable[Any], count: int) -> None:
        self._work = work
        self._count = count

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        error: BaseException | None = None
        for suspended in itertools.count():
            try:
                waits_for = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            if suspended == self._count:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                error = thrown
        return None


async def _cancelled_at(work: Callable[[], Awaitable[Any]], count: int) -> Any:
    return await CancelAt(work(), count)


async def cancelled_at(work: Callable[[], Awaitable[Any]], count: int) -> bool:
    """Whether the work, in a task of its own, was cancelled at its n-th suspension, not finished before."""
    task = asyncio.create_task(_cancelled_at(work, count))
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.done(), "hangs"
    if not task.cancelled():
        task.result()
    return task.cancelled()


async def cancelled_after(work: Callable[[], Coroutine[Any, Any, Any]], iterations: int) -> bool:
    """The same, after so many iterations of the loop."""
    task = asyncio.create_task(work())
    for _ in range(iterations):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.done(), "hangs"
    if not task.cancelled():
        task.result()
    return task.cancelled()


Cancelled = Callable[[Callable[[], Any], int], Awaitable[bool]]

CANCELS = [
    pytest.param(cancelled_at, range(1000), id="suspension"),
    pytest.param(cancelled_after, [*range(1, 40), *(int(40 * 1.3**n) for n in range(30))], id="iteration"),
]


def connections(client: redis.Redis) -> set[str]:
    """The server's ids of the connections that call themselves locks."""
    return {entry["id"] for entry in client.client_list() if entry["name"] == "locks"}


async def warm_up(client: redis.asyncio.Redis) -> None:
    """Connect, and let the server know all scripts."""
    async with Lock(client, "warm-up", timeout=10) as lock:
        await lock.extend(10)
        await lock.reacquire()


# Acquire, while the server is frozen


async def _by_cancel(lock: Lock) -> None:
    task = asyncio.create_task(lock.acquire())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _by_wait_for(lock: Lock) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(lock.acquire(), 0.005)


async def _by_timeout(lock: Lock) -> None:
    timeout = getattr(asyncio, "timeout", None)
    if timeout is None:
        pytest.skip("asyncio.timeout came with Python 3.11")
    with pytest.raises(asyncio.TimeoutError):
        async with timeout(0.005):
            await lock.acquire()


@pytest.mark.parametrize("give_up", [_by_cancel, _by_wait_for, _by_timeout])
@pytest.mark.parametrize("connected", [True, False])
@in_loop
async def test_acquire_cancelled_while_the_server_is_frozen_leaves_no_key(
    frozen: Server,
    connect: Connect,
    async_connect: AsyncClients,
    give_up: Callable[[Lock], Awaitable[None]],
    connected: bool,
) -> None:
    client = connect(frozen.port)
    locks = async_connect(frozen.port)
    for _ in range(ROUNDS):
        if connected:
            await warm_up(locks)
        else:
            locks = async_connect(frozen.port)
        lock = Lock(locks, "name")
        async with freezing(frozen):
            await give_up(lock)
        assert lock.local.token is None
        await lock.locked()  # answered behind whatever the attempt has sent
        await eventually(lambda: not client.exists("name"), "the attempt is undone")
        assert await lock.acquire(blocking=False) is True
        await lock.release()


@in_loop
async def test_cancel_of_some_tasks_disturbs_no_other_and_keeps_the_connection(
    frozen: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    client = connect(frozen.port)
    locks = async_connect(frozen.port, client_name="locks")
    await warm_up(locks)
    before = connections(client)
    for _ in range(5):
        made = [Lock(locks, f"name-{number}", thread_local=False) for number in range(20)]
        async with freezing(frozen):
            tasks = [asyncio.create_task(lock.acquire()) for lock in made]
            await asyncio.sleep(0.005)
            for task in tasks[1::2]:
                task.cancel()
            await asyncio.wait(tasks[1::2], timeout=PATIENCE_S)
            assert all(task.cancelled() for task in tasks[1::2])
        assert [True] * 10 == await asyncio.wait_for(asyncio.gather(*tasks[::2]), PATIENCE_S)
        assert [True] * 10 == await asyncio.gather(*[lock.owned() for lock in made[::2]])
        await eventually(lambda: len(client.keys()) == 10, "the cancelled attempts are undone")
        await asyncio.gather(*[lock.release() for lock in made[::2]])
    assert [] == client.keys()
    assert before == connections(client)


# Acquire, at every point


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_acquire_cancelled_at_any_point_is_undone_or_done(
    valkey: Server,
    connect: Connect,
    async_connect: AsyncClients,
    cancelled: Cancelled,
    counts: list[int],
    connected: bool,
) -> None:
    client = connect(valkey.port)
    locks = async_connect(valkey.port)
    await warm_up(locks)
    for count in counts:
        lock = Lock(locks if connected else async_connect(valkey.port), f"name-{count}", thread_local=False)
        struck = await cancelled(lock.acquire, count)
        assert struck == (lock.local.token is None)
        if not struck:
            assert lock.local.token == client.get(f"name-{count}")
            await lock.release()
            break
        await lock.locked()
    else:
        pytest.fail("never acquired")
    await eventually(lambda: not client.keys(), "all attempts are undone")


@pytest.mark.parametrize("blocking_timeout", [None, 1])
@in_loop
async def test_waiter_cancelled_at_any_point_leaves_no_key(
    server: Server, connect: Connect, async_connect: AsyncClients, blocking_timeout: float | None
) -> None:
    client = connect(server.port)
    locks = async_connect(server.port)
    client.set("name", "taken")
    for count in range(12):
        waiter = Lock(locks, "name", sleep=0.001, blocking_timeout=blocking_timeout, thread_local=False)
        assert await cancelled_at(waiter.acquire, count)
        assert b"taken" == client.get("name")
        assert waiter.local.token is None
    client.delete("name")
    assert await waiter.acquire(blocking=False)
    await waiter.release()
    await eventually(lambda: not client.keys(), "nothing is left")


@in_loop
async def test_acquire_cancelled_at_any_point_of_a_retry_is_undone(
    proxy: Proxy, client: redis.Redis, async_connect: AsyncClients
) -> None:
    for count in range(100):
        locks = async_connect(proxy.port, retry=Retry(ConstantBackoff(0.01), 2))
        await warm_up(locks)
        lock = Lock(locks, f"name-{count}", thread_local=False)
        proxy.drop_reply("SET")
        proxy.refuse()
        try:
            assert await cancelled_at(lock.acquire, count)
        except redis.ConnectionError:
            break
        finally:
            proxy.accept()
        assert lock.local.token is None
    assert count > 3, "the request, a pause, connecting, another pause"
    await eventually(lambda: not client.keys(), "all attempts are undone")


# Release, extend, reacquire


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_release_cancelled_at_any_point_goes_on_and_can_be_repeated(
    proxy: Proxy,
    client: redis.Redis,
    async_connect: AsyncClients,
    cancelled: Cancelled,
    counts: list[int],
    connected: bool,
) -> None:
    locks = async_connect(proxy.port)
    await warm_up(locks)
    for count in counts:
        lock = Lock(locks, "name", timeout=60, thread_local=False)
        assert await lock.acquire(blocking=False)
        token = lock.local.token
        if not connected:
            proxy.cut()
        if not await cancelled(lock.release, count):
            assert lock.local.token is None
            break
        assert token == lock.local.token
        await eventually(lambda: not client.exists("name"), "it is released all the same")
        await lock.release()
        assert lock.local.token is None
    else:
        pytest.fail("never released")
    assert not client.exists("name")


@in_loop
async def test_release_cancelled_by_a_timeout_is_repeated_by_the_holder(
    frozen: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    client = connect(frozen.port)
    lock = Lock(async_connect(frozen.port), "name", timeout=60)
    await warm_up(lock.redis)
    for _ in range(ROUNDS):
        assert await lock.acquire(blocking=False)
        async with freezing(frozen):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(lock.release(), 0.005)
        await lock.release()
        assert not client.exists("name")


@in_loop
async def test_release_cancelled_after_the_lease_ended_says_so_when_repeated(
    frozen: Server, connect: Connect, async_connect: AsyncClients
) -> None:
    client = connect(frozen.port)
    lock = Lock(async_connect(frozen.port), "name", timeout=0.02, thread_local=False)
    assert await lock.acquire()
    await eventually(lambda: not client.exists("name"), "the lease ends")
    assert client.set("name", "another")
    async with freezing(frozen):
        task = asyncio.create_task(lock.release())
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(LockNotOwnedError):
        await lock.release()
    assert b"another" == client.get("name")


@pytest.mark.parametrize("use", ["extend", "replace", "reacquire"])
@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_extend_and_reacquire_cancelled_at_any_point_keep_the_lock(
    server: Server, client: redis.Redis, async_connect: AsyncClients, cancelled: Cancelled, counts: list[int], use: str
) -> None:
    async def prolong() -> None:
        await (lock.reacquire() if use == "reacquire" else lock.extend(20, replace_ttl=use == "replace"))

    locks = async_connect(server.port)
    await warm_up(locks)
    for count in counts:
        lock = Lock(locks, "name", timeout=30, thread_local=False)
        assert await lock.acquire(blocking=False)
        struck = await cancelled(prolong, count)
        assert await lock.owned()
        assert 15_000 < client.pttl("name") <= 50_000
        await lock.release()
        assert not client.exists("name")
        if not struck:
            return
    pytest.fail("never finished")


@in_loop
async def test_own_token_used_again_is_not_undone(
    proxy: Proxy, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(proxy.port, retry=Retry(ConstantBackoff(0.2), 5))
    await warm_up(locks)
    lock = Lock(locks, "name", thread_local=False)
    proxy.drop_request("SET")
    proxy.refuse()
    task = asyncio.create_task(lock.acquire(token="mine"))
    await eventually(proxy.dropped.is_set, "the request is lost")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cleaning_up = [task for task in asyncio.all_tasks() if "clean_up" in repr(task.get_coro())]
    assert [] == cleaning_up  # no reply said that the request took the key
    proxy.accept()
    assert await lock.acquire(token="mine") is True
    assert b"mine" == client.get("name")
    await lock.release()


# The end of the loop


async def _slow_to_close() -> AsyncIterator[None]:
    try:
        yield
    finally:
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["acquire", "release"])
@pytest.mark.parametrize("cancels", [True, False])
def test_program_that_ends_with_a_cancel_leaves_no_key(
    frozen: Server, connect: Connect, loop_kind: str, caplog: pytest.LogCaptureFixture, use: str, cancels: bool
) -> None:
    client = connect(frozen.port)
    locks = redis.asyncio.Redis(port=frozen.port)

    async def program() -> None:
        await warm_up(locks)
        lock = Lock(locks, "name", thread_local=False)
        if use == "release":
            await lock.acquire()
        other = _slow_to_close()  # of the program's own, it keeps the ending loop running for a while
        await anext(other)
        frozen.signal(signal.SIGSTOP)
        task = asyncio.create_task(getattr(lock, use)())
        await asyncio.sleep(0.005)
        if cancels:
            task.cancel()  # else the end of the loop does it

    for _ in range(3):
        # Recorded, not raised: within the end of a uvloop, an exception would hang it.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run_in_loop(loop_kind, program())
            gc.collect()
        frozen.signal(signal.SIGCONT)
        wait_until(lambda: not client.exists("name"), "no key stays")
        assert [] == [str(warning.message) for warning in warned]
    assert [] == caplog.messages


# Many tasks


@in_loop
async def test_random_cancels_of_many_tasks_break_no_exclusion(
    server: Server, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port, client_name="locks")
    await warm_up(locks)
    before = connections(client)
    holders: Counter[str] = Counter()
    entered = 0

    async def use(name: str) -> None:
        nonlocal entered
        async with Lock(locks, name, timeout=30, sleep=0.001):
            holders[name] += 1
            try:
                assert holders[name] == 1
                entered += 1
                await asyncio.sleep(0)
            finally:
                holders[name] -= 1

    async def work(worker: int) -> None:
        rng = random.Random(worker)
        for _ in range(10):
            task = asyncio.create_task(use(f"name-{rng.randrange(3)}"))
            await asyncio.wait([task], timeout=rng.choice([0, 0.001, 0.01, 0.1]))
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.done(), "hangs"
            if not task.cancelled():
                task.result()

    await asyncio.gather(*map(work, range(100)))
    assert entered > 0
    await eventually(lambda: not client.keys(), "no key is left")
    assert before == connections(client)


# The end of an event loop under cancelled acquires


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
    at_work: tuple[Server, Trouble, int], connect: Connect, loop_kind: str, connected: bool, pause: Pause
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
