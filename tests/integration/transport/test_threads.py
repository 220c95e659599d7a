"""The synchronous transport: whose connection it is, when it is made, shared, dropped, and what is undone.

Rules: every test runs on the compiled pipe and on its Python twin, where the pipe has a part in it; connections are
counted by the name that the client gives them.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hiredis
import pytest
import redis
import redis.asyncio
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.forks import InFork
from tests.support.helpers import COMMAND_NAME, PATIENCE_S, few, once, start, wait_until
from tests.support.proxy import Proxy
from tests.support.transports import (
    can_connect,
    clean_up,
    cleanups_left,
    connection_of,
    drive_by,
    reference_to_transport,
    transports,
)

BlockingConnectionPool: Any = redis.BlockingConnectionPool  # untyped
COMPARE_AND_DELETES = ("DELIFEQ", "DELEX", "EVALSHA", "EVAL")


@pytest.fixture(params=["compiled", "python"])
def pipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Connections are driven by the compiled pipe and by its Python twin, in turn."""
    kind = drive_by(request.param, monkeypatch)
    if kind is None:
        pytest.skip("no compiled core here")
    return kind


@pytest.fixture
def valkey_proxy(valkey: Server) -> Iterator[Proxy]:
    """A fault proxy before Valkey."""
    with Proxy(valkey.port) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A client name that no other test uses."""
    return secrets.token_hex(8)


def connections(server: Server, name: str) -> list[str]:
    """The ids of the connections to the server that bear a client's name."""
    with redis.Redis(port=server.port) as admin:
        return [str(row["id"]) for row in admin.client_list() if row["name"] == name]


def open_files() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- one channel per pool ----


def test_every_kind_of_client_has_a_transport(valkey: Server) -> None:
    class Derived(redis.Redis):
        pass

    pool = BlockingConnectionPool(port=valkey.port, max_connections=1, timeout=1)
    clients = [
        redis.Redis(port=valkey.port),
        redis.StrictRedis(port=valkey.port),
        redis.Redis.from_url(valkey.url),
        redis.Redis(unix_socket_path=valkey.unix_path),
        redis.Redis.from_url(f"unix://{valkey.unix_path}"),
        redis.Redis(connection_pool=pool),
        redis.Redis.from_pool(BlockingConnectionPool(port=valkey.port)),
        redis.Redis(port=valkey.port, single_connection_client=True),
        Derived(port=valkey.port),
    ]
    with contextlib.closing(pool):
        for client in clients:
            with client, Lock(client, "name", timeout=10, blocking=False):
                assert client.exists("name")


def test_what_cannot_hold_a_lock_is_refused(valkey_client: redis.Redis) -> None:
    for client, why in (
        (valkey_client.pipeline(), "pipeline"),
        (redis.asyncio.Redis(), "asyncio"),
        (redis.asyncio.RedisCluster(host="127.0.0.1"), "asyncio"),
        (None, "NoneType"),
        (object(), "object"),
        ("redis://127.0.0.1", "str"),
    ):
        with pytest.raises(TypeError, match=why):
            Lock(client, "name")  # type: ignore[arg-type]


def test_the_blocking_pools_connections_stay_the_users(valkey: Server) -> None:
    blocking_pool = BlockingConnectionPool(port=valkey.port, max_connections=1, timeout=0.01)
    with contextlib.closing(blocking_pool) as pool, redis.Redis(connection_pool=pool) as client:
        taken = pool.get_connection(*COMMAND_NAME)
        with Lock(client, "name", timeout=10):
            pool.release(taken)
            assert client.exists("name")


# ---- its connection ----


def test_a_collected_connection_is_closed_in_whichever_order_its_parts_are_finalized(
    pipe: type, valkey: Server, connect: Connect
) -> None:
    client = connect(valkey.port)
    with Lock(client, "name", timeout=10):
        pass
    cycle = [connection_of(client)]
    cycle.append(cycle)
    sock = cycle[0]._connection._sock
    gc.collect()  # a frame refers to the socket, which thus comes before its owner from now on
    transport = reference_to_transport(client)()
    assert transport is not None
    transport.connection = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ended, number = weakref.ref(sock), sock.fileno()
        del cycle, sock
        gc.collect()
        assert ended() is None
    # Others' sockets may be reported, too: without the GIL, garbage of other tests is found late.
    assert [text for warning in caught if f"fd={number}," in (text := str(warning.message))] == []


def test_many_threads_open_one_connection(pipe: type, name: str, server: Server, connect: Connect) -> None:
    client = connect(server.port, client_name=name)
    ready = threading.Barrier(16)

    def take(number: int) -> str:
        lock = Lock(client, f"name-{number}", timeout=10)
        ready.wait(PATIENCE_S)
        with lock:
            return ",".join(connections(server, name))

    futures = [start(lambda number=number: take(number)) for number in range(16)]  # type: ignore[misc]
    assert len({future.result(PATIENCE_S) for future in futures}) == 1
    assert len(connections(server, name)) == 1


def test_the_pipe_is_the_one_for_the_socket(pipe: type, valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    Lock(client, "name").locked()
    assert type(connection_of(client).pipe) is pipe


@pytest.mark.slow
def test_channel_and_connection_go_with_the_pool(pipe: type, name: str, server: Server) -> None:
    def use() -> weakref.ref[Any]:
        client = redis.Redis(port=server.port, client_name=name)
        with Lock(client, "name", timeout=10):
            assert connections(server, name)
        return reference_to_transport(client)

    use()
    gc.collect()
    registered, before = transports(), open_files()
    channels = [use() for _ in range(5)]
    gc.collect()
    assert [channel() for channel in channels] == [None] * 5
    assert transports() == registered
    assert open_files() == before
    wait_until(lambda: not connections(server, name), "the server sees them closed")


@pytest.mark.slow
def test_a_channel_goes_with_the_pool_though_an_undo_is_pending(valkey_proxy: Proxy) -> None:
    def use() -> weakref.ref[Any]:
        with redis.Redis(port=valkey_proxy.port) as client:
            clean_up(client, [(b"name", b"token")])
            return reference_to_transport(client)

    valkey_proxy.refuse()
    channel = use()
    wait_until(lambda: gc.collect() >= 0 and channel() is None, "nobody keeps the channel")


def test_a_lock_keeps_its_client_alive(valkey: Server) -> None:
    lock = Lock(redis.Redis(port=valkey.port), "name", timeout=10)
    gc.collect()
    with lock:
        assert lock.owned()


def test_a_callers_own_limit_leaves_the_connection_to_the_others(
    pipe: type, name: str, valkey: Server, valkey_proxy: Proxy, connect: Connect
) -> None:
    client = connect(valkey_proxy.port, client_name=name, socket_timeout=PATIENCE_S, retry=once())
    lock = Lock(client, "name", timeout=10)
    assert not lock.locked()
    before = connections(valkey, name)
    valkey_proxy.hold()
    other = start(Lock(client, "other").locked)
    valkey_proxy.wait_for_request("GET", 2)
    with pytest.raises(redis.TimeoutError):
        lock.acquire(blocking_timeout=0.01)
    valkey_proxy.resume()
    assert other.result(PATIENCE_S) is False
    assert lock.acquire(blocking=False)
    assert connections(valkey, name) == before


@pytest.mark.slow
def test_silence_for_the_socket_timeout_leaves_the_connection(
    pipe: type, valkey: Server, valkey_proxy: Proxy, connect: Connect
) -> None:
    client = connect(valkey_proxy.port, socket_timeout=0.8, retry=once())
    lock = Lock(client, "name", timeout=10)
    lock.locked()
    connection = connection_of(client)
    assert connection is not None
    valkey_proxy.hold()
    with pytest.raises(redis.TimeoutError):
        lock.locked()
    assert connection_of(client) is not connection
    valkey_proxy.resume()
    assert lock.acquire(blocking=False)


def test_forget_in_a_forked_child_leaves_the_parents_connection(
    in_fork: InFork, pipe: type, name: str, valkey: Server, connect: Connect
) -> None:
    client = connect(valkey.port, client_name=name)
    lock = Lock(client, "name", timeout=10)
    lock.acquire()
    before = connections(valkey, name)

    def in_child() -> str:
        other = Lock(client, "other", timeout=10)
        unconnected = connection_of(client) is None
        taken = other.acquire(blocking=False)
        return f"{unconnected} {taken} {len(connections(valkey, name))}"

    assert in_fork(in_child) == "True True 2"
    wait_until(lambda: connections(valkey, name) == before, "the child's connection is closed")
    assert lock.owned()
    assert connections(valkey, name) == before
    lock.release()


def test_forget_drops_the_parents_unfinished_business(in_fork: InFork, valkey_proxy: Proxy, connect: Connect) -> None:
    client = connect(valkey_proxy.port, retry=once())
    valkey_proxy.refuse()
    clean_up(client, [(b"name", b"token")])

    def in_child() -> str:
        Lock(client, "name")
        return str(cleanups_left(client))

    assert in_fork(in_child) == "0"
    assert cleanups_left(client) == 1
    valkey_proxy.accept()
    assert Lock(client, "name").locked() is False
    wait_until(lambda: cleanups_left(client) == 0, "the server has confirmed it")


def test_a_child_forked_while_another_thread_connects_can_connect(
    in_fork: InFork, valkey_proxy: Proxy, connect: Connect
) -> None:
    client = connect(valkey_proxy.port)
    valkey_proxy.hold()
    waits = start(Lock(client, "name").locked)
    wait_until(lambda: valkey_proxy.requests, "the thread connects")
    assert not can_connect(client)

    def in_child() -> str:
        Lock(client, "name")
        return str(can_connect(client))

    can_lock = in_fork(in_child)
    valkey_proxy.resume()
    assert can_lock == "True"
    assert waits.result(PATIENCE_S) is False


# ---- retries ----


@pytest.mark.parametrize(("retries", "losses", "succeeds"), [(3, 3, True), (2, 3, False), (0, 1, True), (0, 2, False)])
def test_requests_are_sent_again_as_often_as_the_pool_allows(
    pipe: type, valkey_proxy: Proxy, connect: Connect, retries: int, losses: int, succeeds: bool
) -> None:
    client = connect(valkey_proxy.port, retry=Retry(ConstantBackoff(0.001), retries))
    lock = Lock(client, "name", timeout=10)
    for _ in range(losses):
        valkey_proxy.drop_request("GET")
    if succeeds:
        assert lock.locked() is False
    else:
        with pytest.raises(redis.ConnectionError):
            lock.locked()


def test_without_a_limit_on_retries_a_server_is_waited_for(valkey_proxy: Proxy, connect: Connect) -> None:
    failures = threading.Semaphore(0)

    class Counting(ConstantBackoff):
        def compute(self, failures_: int) -> float:
            failures.release()
            return super().compute(failures_)

        def __deepcopy__(self, memo: object) -> Counting:
            return self

    client = connect(valkey_proxy.port, retry=Retry(Counting(0.005), -1))
    valkey_proxy.refuse()
    taken = start(lambda: Lock(client, "name", timeout=10).acquire())
    for _ in range(20):
        assert failures.acquire(timeout=PATIENCE_S)
    valkey_proxy.accept()
    assert taken.result(PATIENCE_S) is True


def test_a_refused_password_is_not_tried_again(valkey_proxy: Proxy, connect: Connect) -> None:
    client = connect(valkey_proxy.port, protocol=2, username="nobody", password="wrong", retry=few())
    lock = Lock(client, "name", timeout=10)
    uses: list[Callable[[], bool]] = [lock.locked, lock.acquire]
    for attempts, use in enumerate(uses, start=1):
        with pytest.raises(AuthenticationError):
            use()
        assert valkey_proxy.requests["AUTH"] == attempts


# ---- what is undone ----


def _acquire_in_vain(proxy: Proxy, client: redis.Redis) -> None:
    """An acquire whose SET is executed, whose reply is lost, and that finds no server any more."""
    Lock(client, "other").locked()
    proxy.refuse()
    proxy.drop_reply("SET")
    with pytest.raises(redis.ConnectionError):
        Lock(client, "name").acquire()


def test_a_failed_acquire_is_undone_first_on_the_next_connection(
    pipe: type, server: Server, proxy: Proxy, connect: Connect
) -> None:
    client = connect(proxy.port, retry=few())
    _acquire_in_vain(proxy, client)
    direct = connect(server.port)
    assert direct.exists("name")
    proxy.accept()
    assert Lock(client, "other").locked() is False
    assert not direct.exists("name")


def test_an_undo_spares_a_holder_that_took_the_lock_meanwhile(server: Server, proxy: Proxy, connect: Connect) -> None:
    client = connect(proxy.port, retry=few())
    _acquire_in_vain(proxy, client)
    direct = connect(server.port)
    direct.set("name", "another")
    proxy.accept()
    Lock(client, "other").locked()
    assert direct.get("name") == b"another"


@pytest.mark.parametrize("rules", [("-delifeq",), ("-eval", "-evalsha")], ids=" ".join)
def test_an_undo_does_with_what_the_user_may(
    valkey: Server, valkey_proxy: Proxy, connect: Connect, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    client = connect(valkey_proxy.port, retry=few(), **acl_user(valkey, *rules).options())
    _acquire_in_vain(valkey_proxy, client)
    valkey_proxy.accept()
    lock = Lock(client, "other")
    lock.locked()
    direct = connect(valkey.port)
    wait_until(lambda: not direct.exists("name"), "the acquire is undone")


def test_an_undo_that_is_lost_with_its_connection_is_sent_again(
    pipe: type, valkey: Server, valkey_proxy: Proxy, connect: Connect
) -> None:
    proxy = valkey_proxy
    client = connect(proxy.port, retry=few())
    Lock(client, "other").locked()
    proxy.hold()
    proxy.drop_request(*COMPARE_AND_DELETES)
    with pytest.raises(redis.TimeoutError):
        Lock(client, "name").acquire(blocking_timeout=0.01)
    assert proxy.dropped.wait(PATIENCE_S)
    proxy.resume()
    lock = Lock(client, "other")
    direct = connect(valkey.port)

    def undone() -> bool:
        lock.locked()
        return not direct.exists("name")

    wait_until(undone, "the acquire is undone")


def test_undo_goes_behind_what_was_sent_before(pipe: type, server: Server, proxy: Proxy, connect: Connect) -> None:
    client = connect(proxy.port, retry=few())
    lock = Lock(client, "name")
    lock.locked()
    proxy.hold()
    with pytest.raises(redis.TimeoutError):
        lock.acquire(blocking_timeout=0.01)
    proxy.resume()
    assert lock.locked() is False
    assert not connect(server.port).exists("name")


def test_an_interrupted_release_is_told_from_one_that_came_too_late(
    valkey: Server, valkey_proxy: Proxy, connect: Connect
) -> None:
    client = connect(valkey_proxy.port, retry=once())
    lock = Lock(client, "name", timeout=0.5)
    lock.acquire()
    wait_until(lambda: not lock.locked(), "the lock expires")
    valkey_proxy.drop_reply(*COMPARE_AND_DELETES)
    valkey_proxy.refuse()
    with pytest.raises(redis.ConnectionError):
        lock.release()
    valkey_proxy.accept()
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()


def test_the_same_token_released_again_is_judged_anew(valkey: Server, valkey_proxy: Proxy, connect: Connect) -> None:
    lock = Lock(connect(valkey_proxy.port, retry=few()), "name", timeout=10)
    lock.acquire(token="same")
    valkey_proxy.drop_reply(*COMPARE_AND_DELETES)
    lock.release()
    lock.acquire(token="same")
    connect(valkey.port).delete("name")
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()


@pytest.mark.parametrize("shorten", ["extend", "reacquire"])
def test_a_lease_that_may_have_been_shortened_is_not_believed(
    valkey: Server, valkey_proxy: Proxy, connect: Connect, shorten: str
) -> None:
    client = connect(valkey_proxy.port, retry=once())
    lock = Lock(client, "name", timeout=0.5)
    lock.acquire()
    lock.extend(100)
    Lock(client, "warm", timeout=0.5).acquire()
    valkey_proxy.drop_reply("SET", "EVALSHA")
    valkey_proxy.refuse()
    with pytest.raises(redis.ConnectionError):
        lock.extend(0.5, replace_ttl=True) if shorten == "extend" else lock.reacquire()
    valkey_proxy.accept()
    wait_until(lambda: not lock.locked(), "the shorter lease ends")
    valkey_proxy.drop_reply(*COMPARE_AND_DELETES)
    with pytest.raises(redis.exceptions.LockNotOwnedError):
        lock.release()


def test_no_file_is_left_open_by_failed_connections(valkey_proxy: Proxy, connect: Connect) -> None:
    lock = Lock(connect(valkey_proxy.port, retry=once()), "name")
    for command in 2 * ("COMMAND", "COMMAND", "PING"):
        valkey_proxy.drop_request(command)
    before = open_files()
    with pytest.raises(redis.ConnectionError):
        lock.locked()
    wait_until(lambda: open_files() <= before, "all files are closed")


def test_nothing_is_packed_by_hiredis_which_a_raising_signal_handler_crashes(
    valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(hiredis, "pack_command")
    with redis.Redis(port=valkey.port, protocol=3, db=3, client_name="name") as client:
        lock = Lock(client, "name", timeout=10)
        assert (lock.acquire(), lock.extend(1), lock.owned()) == (True, True, True)
        lock.release()
