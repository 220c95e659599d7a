"""A lock whose server, connection or scripts go away, for threads and for tasks.

Rules: a test runs on both classes where redis-py's does the same, else on ours. Faults are real: killed and frozen
servers, cut connections, flushed scripts.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.exceptions import LockError, LockNotOwnedError
from redis.retry import Retry

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import async_few
from tests.support.helpers import (
    EXTEND_COMMANDS,
    RELEASE_COMMANDS,
    RETRIED,
    LockClass,
    few,
    many,
    once,
    pause,
    start,
    wait_until,
)
from tests.support.proxy import Proxy
from tests.support.waiting import connections, queued
from tests.support.worlds import World, waited

pytestmark = pytest.mark.usefixtures("world")

StartServer = Callable[..., Server]


USES: dict[str, Callable[[Any], Any]] = {
    "acquire": lambda lock: lock.acquire(blocking=False),
    "extend": lambda lock: lock.extend(10),
    "reacquire": lambda lock: lock.reacquire(),
    "release": lambda lock: lock.release(),
    "owned": lambda lock: lock.owned(),
    "locked": lambda lock: lock.locked(),
}


class NoCopies(Exception):
    """An error of a user's own code."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class Refusing(redis.CredentialProvider):
    """Knows no password."""

    def get_credentials(self) -> tuple[str]:
        raise NoCopies(reason="no password today")


def _warm_up(our_lock: Any, client: redis.Redis) -> None:
    """Connect, and let the server know all scripts."""
    with our_lock(client, "warm-up", timeout=10) as lock:
        lock.extend(10)
        lock.reacquire()


def _connection_ids(client: redis.Redis) -> set[str]:
    """The server's ids of the connections that call themselves locks."""
    return {entry["id"] for entry in client.client_list() if entry["name"] == "locks"}


def _kill_connections(port: int) -> None:
    """Make the server close every connection but the one that asks."""
    with redis.Redis(port=port) as admin:
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


# Servers and connections


def test_server_restarted_between_operations(lock_class: LockClass, mortal_server: Server, connect: Connect) -> None:
    lock = lock_class(connect(mortal_server.port), "name", timeout=10)
    lock.acquire()
    for use in ("extend", "reacquire", "owned", "locked", "release"):
        mortal_server.kill()
        mortal_server.start()
        for _ in range(3):
            pause(0)  # a loop hears of the closed connection
        if use in ("owned", "locked"):
            assert USES[use](lock) is False
        else:
            with pytest.raises(LockNotOwnedError):
                USES[use](lock)
    assert lock.acquire(blocking=False) is True
    lock.release()


def test_server_killed_while_waiting_and_started_again(
    world: World, lock_class: LockClass, mortal_server: Server, connect: Connect
) -> None:
    client = connect(mortal_server.port, retry=many(), retry_on_error=RETRIED)
    client.set("name", "taken")
    tried = threading.Event()

    class Noting(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            acquired = bool(waited(super().do_acquire(token)))
            tried.set()
            return acquired

    lock = Noting(client, "name", timeout=10, sleep=0.002, thread_local=False)
    answer = world.start(lock.acquire)
    wait_until(tried.is_set, "it has tried")
    mortal_server.kill()
    mortal_server.start()
    assert answer.result(20) is True
    assert lock.owned()


def test_server_killed_under_many_waiters_and_started_again(
    world: World, our_lock: Any, mortal_server: Server, connect: Connect
) -> None:
    client = connect(mortal_server.port, retry=many(), retry_on_error=RETRIED)
    holder = our_lock(client, "name", thread_local=False)
    holder.acquire()

    def work() -> bool:
        with our_lock(client, "name", timeout=10, sleep=0.002, blocking_timeout=60) as lock:
            return bool(lock.owned())

    answers = [world.start(work) for _ in range(5)]
    wait_until(lambda: queued(client, "name") == 5, "they stand in the queue")
    mortal_server.kill()
    pause(0.01)
    mortal_server.start()
    assert [True] * 5 == [answer.result(60) for answer in answers]


def test_server_that_stays_away_raises_connection_error(
    lock_class: LockClass, mortal_server: Server, connect: Connect
) -> None:
    client = connect(mortal_server.port, retry=once())
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    mortal_server.kill()
    for fails in (
        lambda: lock_class(client, "other").acquire(),
        lambda: lock.extend(10),
        lock.reacquire,
        lock.owned,
        lock.locked,
        lock.release,
    ):
        with pytest.raises(redis.ConnectionError):
            fails()
    mortal_server.start()
    assert lock_class(client, "other").acquire()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fault", ["drop_request", "drop_reply", "cut", "idle"])
def test_lost_connection_is_found_and_the_request_repeated(
    our_lock: Any, client: redis.Redis, server: Server, proxy: Proxy, connect: Connect, use: str, fault: str
) -> None:
    proxied = connect(proxy.port, client_name="locks")
    with our_lock(proxied, "warm-up", timeout=10) as warm_up:
        warm_up.reacquire()
    lock = our_lock(proxied, "name", timeout=10)
    if use != "acquire":
        lock.acquire()
    if fault == "cut":
        proxy.cut()
    elif fault == "idle":
        _kill_connections(server.port)
        wait_until(lambda: not connections(client, "locks"), "the connection is closed")
    else:
        getattr(proxy, fault)("GET", *RELEASE_COMMANDS, *EXTEND_COMMANDS)
    assert USES[use](lock) in (True, None)
    assert fault.startswith("drop") == proxy.dropped.is_set()
    if use == "release":
        assert not client.exists("name")
    else:
        assert lock.local.token == client.get("name")
        low_ms, high_ms = (12_000, 20_000) if use == "extend" else (5_000, 10_000)
        assert low_ms < client.pttl("name") <= high_ms
    assert 1 == connections(client, "locks")


def test_server_that_comes_up_is_found_by_the_clients_retries(
    world: World, our_lock: Any, mortal_server: Server, connect: Connect
) -> None:
    mortal_server.kill()
    patient = connect(mortal_server.port, retry=Retry(ConstantBackoff(0.01), -1))
    answers = [world.start(our_lock(patient, f"name-{number}").acquire) for number in range(10)]
    pause(0.02)
    mortal_server.start()
    assert [True] * 10 == [answer.result(10) for answer in answers]


def test_connection_killed_while_waiting(world: World, lock_class: LockClass, connect: Connect, server: Server) -> None:
    client = connect(server.port, retry=few(), retry_on_error=RETRIED)
    holder = lock_class(client, "name")
    holder.acquire()
    tries = 0

    class Counting(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            nonlocal tries
            acquired = bool(waited(super().do_acquire(token)))
            tries += 1
            return acquired

    answer = world.start(Counting(client, "name", sleep=0.002).acquire)
    for _ in range(3):
        before = tries
        wait_until(lambda: tries > before + 1, "the waiter polls")  # noqa: B023 - called at once
        _kill_connections(server.port)
    assert not answer.done()
    holder.release()
    assert answer.result(10) is True


@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
def test_cut_during_shared_requests_loses_no_callers_result(
    world: World, our_lock: Any, client: redis.Redis, proxy: Proxy, connect: Connect, fault: str
) -> None:
    proxied = connect(proxy.port)

    def work(number: int) -> int:
        for _ in range(10):
            with our_lock(proxied, f"name-{number % 2}", timeout=10, sleep=0.001):
                client.incr("counter")
        return number

    getattr(proxy, fault)("SET", "EVALSHA", nth=11)  # a caller that has just handed over joins the queue at once
    getattr(proxy, fault)("SET", "EVALSHA", nth=25)
    workers = [world.start(partial(work, number)) for number in range(4)]
    assert [0, 1, 2, 3] == [worker.result(20) for worker in workers]
    assert proxy.dropped.is_set()
    assert b"40" == client.get("counter")
    assert [b"counter"] == client.keys()


def test_callers_whose_connection_breaks_all_go_on_over_one_new_one(
    world: World, our_lock: Any, proxy: Proxy, client: redis.Redis, connect: Connect
) -> None:
    proxied = connect(proxy.port, client_name="locks")
    _warm_up(our_lock, proxied)
    locks = [our_lock(proxied, f"name-{number}", timeout=60, thread_local=False) for number in range(20)]
    for use in ("acquire", "extend", "reacquire", "release"):
        proxy.hold()
        sent = proxy.requests.total()
        answers = [world.start(partial(USES[use], lock)) for lock in locks]
        wait_until(lambda: proxy.requests.total() >= sent + 20, "all have sent")  # noqa: B023 - called at once
        proxy.cut()
        proxy.resume()
        assert all(answer.result(10) in (True, None) for answer in answers)
        assert 1 == connections(client, "locks")
    assert [] == client.keys()


def test_callers_whose_connection_breaks_for_good_are_all_told(
    world: World, our_lock: Any, proxy: Proxy, client: redis.Redis, connect: Connect
) -> None:
    proxied = connect(proxy.port, retry=once())
    with our_lock(proxied, "warm-up"):
        pass
    proxy.refuse()
    proxy.hold()
    sent = proxy.requests["SET"]
    answers = [world.start(our_lock(proxied, f"name-{number}").acquire) for number in range(20)]
    wait_until(lambda: proxy.requests["SET"] == sent + 20, "all have sent")
    proxy.cut()
    proxy.resume()
    for answer in answers:
        with pytest.raises(redis.ConnectionError):
            answer.result(10)
    proxy.accept()
    assert our_lock(proxied, "other", timeout=10).acquire()
    wait_until(lambda: [b"other"] == client.keys(), "all attempts are undone")


def test_error_of_a_credential_provider_leaves_no_connection(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    def connections() -> int:
        return len(valkey_client.client_list())

    before = connections()
    with pytest.raises(NoCopies) as raised:
        world.lock(world.connect(valkey.port, credential_provider=Refusing())).acquire()
    wait_until(lambda: connections() <= before, "it is closed, though the error may keep it")
    assert raised.value.__traceback__ is not None


def test_error_that_cannot_be_copied_reaches_each_caller(world: World, valkey: Server) -> None:
    locks = world.connect(valkey.port, credential_provider=Refusing())
    answers = [world.start(world.lock(locks, f"name-{number}").acquire) for number in range(3)]
    for answer in answers:
        with pytest.raises(NoCopies) as raised:
            answer.result(10)
        assert repr(raised.value) == "NoCopies('no password today')"


@pytest.mark.slow
def test_half_open_connection_is_left_for_a_new_one(
    world: World, our_lock: Any, proxy: Proxy, client: redis.Redis, connect: Connect
) -> None:
    proxied = connect(proxy.port, socket_timeout=0.5, retry=once(), client_name="locks")
    _warm_up(our_lock, proxied)
    before = _connection_ids(client)
    proxy.hold()
    for answer in [world.start(our_lock(proxied, f"name-{number}").acquire) for number in range(5)]:
        with pytest.raises(redis.TimeoutError):
            answer.result(10)
    proxy.resume()
    assert our_lock(proxied, "other", timeout=10).acquire()
    wait_until(lambda: [b"other"] == client.keys(), "the attempts are undone")
    wait_until(lambda: len(_connection_ids(client)) == 1, "the old connection is closed")
    assert before != _connection_ids(client)


# Scripts


@pytest.mark.parametrize("use", ["extend", "reacquire", "release"])
def test_flushed_scripts_are_sent_again_for_all_callers(
    world: World, our_lock: Any, client: redis.Redis, use: str
) -> None:
    locks = [our_lock(client, f"name-{number}", timeout=10, thread_local=False) for number in range(10)]
    for _ in range(3):
        assert [True] * 10 == [answer.result(10) for answer in [world.start(lock.acquire) for lock in locks]]
        client.script_flush()
        answers = [world.start(partial(USES[use], lock)) for lock in locks]
        assert all(answer.result(10) in (True, None) for answer in answers)
        if use != "release":
            for lock in locks:
                lock.release()
        assert [] == client.keys()


@pytest.mark.parametrize("use", ["release", "extend", "reacquire"])
def test_script_flush_before_an_operation(lock_class: LockClass, client: redis.Redis, use: str) -> None:
    for _ in range(2):
        lock = lock_class(client, "name", timeout=10)
        lock.acquire()
        client.script_flush()
        assert USES[use](lock) in (True, None)
        client.delete("name")


def test_script_flush_again_and_again(our_lock: Any, client: redis.Redis) -> None:
    finished = threading.Event()

    def flush() -> None:
        while not finished.is_set():
            client.script_flush()

    flusher = start(flush)
    try:
        for _ in range(30):
            with our_lock(client, "name", timeout=10) as lock:
                assert lock.extend(10)
                assert lock.extend(10, replace_ttl=True)
                assert lock.reacquire()
    finally:
        finished.set()
    flusher.result(10)
    assert not client.exists("name")


# Server states


def test_noreplicas_raises_in_the_end(lock_class: LockClass, spare_server: StartServer, connect: Connect) -> None:
    server = spare_server("redis", {"min-replicas-to-write": "1"})
    lock = lock_class(connect(server.port, retry=few()), "name", timeout=10)
    with pytest.raises(redis.ResponseError, match="NOREPLICAS"):
        lock.acquire(blocking=False)
    assert lock.local.token is None


def test_noreplicas_that_passes_is_waited_for(
    world: World, our_lock: Any, spare_server: StartServer, connect: Connect
) -> None:
    server = spare_server("valkey", {"min-replicas-to-write": "1"})
    client = connect(server.port)
    lock = our_lock(client, "name", timeout=10, thread_local=False)
    answer = world.start(lambda: lock.acquire(blocking_timeout=10))
    wait_until(lambda: client.info("commandstats").get("cmdstat_set", {}).get("rejected_calls"), "the server refuses")
    client.config_set("min-replicas-to-write", 0)
    assert answer.result(10) is True
    assert lock.owned()


def test_readonly_replica_raises_in_the_end(lock_class: LockClass, spare_server: StartServer, connect: Connect) -> None:
    server = spare_server()
    client = connect(server.port, retry=few())
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.replicaof("127.0.0.1", 1)
    other = lock_class(client, "other")
    with pytest.raises(redis.ReadOnlyError):
        other.acquire(blocking=False)
    with pytest.raises(redis.ReadOnlyError):
        lock.reacquire()
    client.replicaof("NO", "ONE")
    assert lock.owned()
    lock.release()
    assert not client.exists("name")


def test_busy_server_raises_in_the_end(lock_class: LockClass, spare_server: StartServer, connect: Connect) -> None:
    server = spare_server("redis", {"lua-time-limit": "20"})
    client = connect(server.port, retry=few())
    with lock_class(client, "name"):
        pass
    runaway = start(lambda: connect(server.port).eval("while true do end", 0))

    def is_busy() -> bool:
        try:
            client.get("name")
        except redis.ResponseError as error:
            return str(error).startswith("BUSY")
        return False

    wait_until(is_busy, "the script runs too long")
    with pytest.raises(redis.ResponseError, match="BUSY"):
        lock_class(client, "name").acquire(blocking=False)
    client.script_kill()
    with pytest.raises(redis.ResponseError):
        runaway.result(10)
    assert lock_class(client, "name").acquire(blocking=False)


def test_lease_is_set_back_without_memory(lock_class: LockClass, spare_server: StartServer, connect: Connect) -> None:
    client = connect(spare_server().port)
    lock = lock_class(client, "name", timeout=60)
    lock.acquire()
    assert lock.extend(5, replace_ttl=True)
    client.config_set("maxmemory", 1)
    assert lock.reacquire()
    assert 5_000 < client.pttl("name") <= 60_000


def test_out_of_memory_raises_and_still_releases(
    lock_class: LockClass, spare_server: StartServer, connect: Connect
) -> None:
    client = connect(spare_server().port)
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.OutOfMemoryError):
        lock_class(client, "other").acquire()
    lock.release()
    assert not client.exists("name")


@pytest.mark.slow
def test_frozen_server_times_out_by_the_clients_socket_timeout(
    lock_class: LockClass, spare_server: StartServer, connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port, socket_timeout=0.5, retry=once())
    with lock_class(client, "name"):
        pass
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(redis.TimeoutError):
            lock_class(client, "name").locked()
        with pytest.raises(redis.TimeoutError):
            lock_class(client, "name").acquire()
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.slow
def test_socket_timeout_is_reached_as_often_as_the_client_wants_to_try(
    world: World, our_lock: Any, spare_server: StartServer, connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port)
    with Proxy(server.port) as proxy:
        locks = connect(proxy.port, socket_timeout=0.5, retry=few())
        _warm_up(our_lock, locks)
        held = our_lock(locks, "held", timeout=60)
        held.acquire()
        sent = proxy.requests["GET"]
        server.signal(signal.SIGSTOP)
        try:
            for answer in [world.start(partial(USES[use], our_lock(locks, "name"))) for use in ("acquire", "locked")]:
                with pytest.raises(redis.TimeoutError):
                    answer.result(20)
            with pytest.raises(redis.TimeoutError):
                held.release()
        finally:
            server.signal(signal.SIGCONT)
        assert proxy.requests["GET"] <= sent + 4
        held.release()
        wait_until(lambda: not client.keys(), "the attempt is undone")


def test_caller_whose_time_is_up_disturbs_no_other(
    world: World, our_lock: Any, spare_server: StartServer, connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port, socket_timeout=30)
    with our_lock(client, "warm-up"):
        pass
    patient = [our_lock(client, f"patient-{n}", thread_local=False) for n in range(3)]
    hasty = our_lock(client, "hasty", thread_local=False)
    server.signal(signal.SIGSTOP)
    try:
        answers = [world.start(lock.acquire) for lock in patient]
        with pytest.raises(redis.TimeoutError):
            world.beside(lambda: hasty.acquire(blocking_timeout=0.1))
        answers += [world.start(our_lock(client, "late").acquire)]
    finally:
        server.signal(signal.SIGCONT)
    assert [True] * 4 == [answer.result(10) for answer in answers]
    assert all(lock.owned() for lock in patient)
    wait_until(lambda: not client.exists("hasty"), "the attempt is undone")


@pytest.mark.slow
def test_failed_acquire_is_undone(our_lock: Any, spare_server: StartServer, connect: Connect) -> None:
    server = spare_server()
    client = connect(server.port, socket_timeout=0.5, retry=once())
    with our_lock(client, "name"):
        pass
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(redis.TimeoutError), our_lock(client, "name"):
            pass
    finally:
        server.signal(signal.SIGCONT)
    wait_until(lambda: not client.exists("name"), "the attempt is undone")


@pytest.mark.usefixtures("raise_on_release_error")
def test_connection_errors_pass_through_exit(
    lock_class: LockClass, spare_server: StartServer, connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port, retry=once())
    lock = lock_class(client, "name", raise_on_release_error=False)
    with pytest.raises(redis.ConnectionError) as caught, lock:
        server.kill()
    assert not isinstance(caught.value, LockError)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize(("name", "text"), [("name", "'name'"), (b"n\xff", r"'n\\xff'")])
def test_errors_of_the_client_name_the_lock_in_a_note(
    world: World, server: Server, client: redis.Redis, mortal_server: Server, name: str | bytes, text: str
) -> None:
    client.lpush(name, "no lock")
    refused = world.lock(world.connect(server.port), name, timeout=60)
    retry = few() if world.in_threads else async_few()
    unreachable = world.lock(world.connect(mortal_server.port, retry=retry), name, timeout=60)
    mortal_server.kill()
    for lock, error in ((refused, redis.ResponseError), (unreachable, redis.ConnectionError)):
        with pytest.raises(error) as raised:
            lock.acquire()
        assert raised.value.__notes__ == [f"of the lock {text}"]
