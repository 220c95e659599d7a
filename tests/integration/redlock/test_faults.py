"""A Redlock while some of its servers are frozen, dead or out of reach, for threads and for tasks.

Rules: faults are real. That a server is not waited for is shown by a limit that is longer than the test may last.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError, LockNotOwnedError, ResponseError

from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, start, wait_until
from tests.support.holding import until_passed
from tests.support.proxy import Proxy
from tests.support.redlock import SHORT_S, Make, clients_of, freezing, take, values, wait_until_free, wait_until_held
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

Fleet = list[Server]


def _use(lock: Any) -> None:
    """All that a lock can do."""
    assert lock.acquire(blocking=False) is True
    assert lock.extend(10) is True
    assert lock.reacquire() is True
    assert (lock.locked(), lock.owned()) == (True, True)
    lock.release()


def _takes_part(server: Server, lock: Any) -> bool:
    """Whether the server holds the lock when it is held."""
    with lock:
        return values([server]) != [None]


@contextlib.contextmanager
def _dead(*servers: Server) -> Iterator[None]:
    """The servers are gone meanwhile."""
    for server in servers:
        server.kill()
    try:
        yield
    finally:
        for server in servers:
            server.start()


# A minority


def test_frozen_minority_is_not_waited_for(world: World, fleet: Fleet, make: Make) -> None:
    lock = make(thread_local=False)
    with lock:
        wait_until_held(fleet)
    wait_until_free(fleet)
    with freezing(*fleet[:2]):
        for _ in range(20):
            world.beside(lambda: _use(lock))
    wait_until_free(fleet)


@pytest.mark.slow
def test_minority_frozen_from_the_start_is_waited_for_once(world: World, fleet: Fleet, make: Make) -> None:
    with freezing(*fleet[:2]):
        clients = make.clients()
        _use(make.on(clients, limit=SHORT_S))
        for _ in range(3):
            world.beside(lambda: _use(make.on(clients)))
    wait_until_free(fleet)


def test_dead_minority_is_no_failure_and_is_asked_again(world: World, fleet: Fleet, make: Make) -> None:
    lock = make(thread_local=False)
    _use(lock)
    with _dead(*fleet[:2]):
        for _ in range(3):
            world.beside(lambda: _use(lock))
        world.beside(lambda: _use(make()))
    wait_until(lambda: _takes_part(fleet[0], lock), "it is asked again")


@pytest.mark.slow
def test_minority_out_of_reach_is_waited_for_once(world: World, make: Make) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        clients = [*make.clients()[:4], world.connect(silent.getsockname()[1])]
        _use(make.on(clients, limit=SHORT_S))
        for _ in range(3):
            world.beside(lambda: _use(make.on(clients)))


def test_frozen_server_is_asked_again_when_it_is_back(fleet: Fleet, make: Make) -> None:
    lock = make()
    _use(lock)
    with freezing(fleet[0]):
        for _ in range(20):
            _use(lock)

    wait_until(lambda: _takes_part(fleet[0], lock), "it is asked again")


def test_frozen_server_is_not_owed_ever_more(fleet: Fleet, make: Make) -> None:
    lock = make()
    _use(lock)
    with redis.Redis(port=fleet[0].port) as client:
        client.config_resetstat()
        with freezing(fleet[0]):
            for _ in range(500):
                with lock:
                    pass
        wait_until_free(fleet)
        assert client.info("commandstats")["cmdstat_set"]["calls"] < 100


def test_release_goes_behind_the_set_on_a_frozen_server(fleet: Fleet, make: Make) -> None:
    lock = make()
    _use(lock)
    wait_until_free(fleet)
    with redis.Redis(port=fleet[0].port) as client, client.monitor() as monitor:
        with freezing(fleet[0]):
            assert lock.acquire()
            lock.release()
        commands = (command["command"].split()[0] for command in monitor.listen())
        assert next(name for name in commands if name == "SET")
        assert next(name for name in commands if name in ("DELIFEQ", "DELEX", "EVAL", "EVALSHA"))
    wait_until_free(fleet)


def test_late_votes_are_noted(fleet: Fleet, make: Make) -> None:
    clients = make.clients()
    lock, other = (make.on(clients, name) for name in ("name", "other"))
    _use(other)
    with freezing(fleet[0]):
        assert lock.acquire()
        assert lock.votes[0] is None

    def noted() -> bool:
        _use(other)  # somebody has to read
        return lock.votes[0] is True

    wait_until(noted, "the vote comes")
    lock.release()


# A majority


def test_frozen_majority_is_a_timeout_and_leaves_nothing(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=SHORT_S)
    _use(lock)
    with freezing(*fleet[:3]):
        with pytest.raises(redis.TimeoutError, match="servers have voted"):
            lock.acquire(blocking=False)
        assert (lock.valid, lock.votes[:3]) == (False, (None, None, None))
    wait_until_free(fleet)
    _use(make())


def test_dead_majority_is_a_connection_error_until_it_is_back(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=SHORT_S)
    _use(lock)
    with _dead(*fleet[:3]):
        with pytest.raises(redis.ConnectionError):
            lock.acquire(blocking=False)
        with pytest.raises(redis.ConnectionError):
            lock.acquire()
        with pytest.raises(redis.ConnectionError):
            lock.locked()
        wait_until_free(fleet[3:])
    assert lock.acquire(blocking_timeout=PATIENCE_S) is True
    lock.release()


def test_waiter_outlives_a_majority_that_comes_back_in_time(world: World, fleet: Fleet, make: Make) -> None:
    lock = make(limit=SHORT_S, sleep=0.01, thread_local=False)
    with freezing(*fleet[:3]):
        answer = world.start(lambda: lock.acquire(blocking_timeout=PATIENCE_S))
        wait_until(lambda: lock.votes[3:] == (True, True), "it tries")
        assert not answer.done()
    assert answer.result(PATIENCE_S) is True
    lock.release()
    wait_until_free(fleet)


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_extend_without_answers_leaves_the_lease_as_it_was(fleet: Fleet, make: Make, verb: str) -> None:
    lock = make.connected(limit=SHORT_S)
    lock.acquire()
    wait_until_held(fleet)
    before = lock.remaining()
    with freezing(*fleet[:3]), pytest.raises(redis.TimeoutError):
        lock.extend(100) if verb == "extend" else lock.reacquire()
    assert before - 10 < lock.remaining() <= before
    assert lock.owned() is True
    lock.release()


def test_shorter_lease_without_answers_is_believed(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=SHORT_S)
    lock.acquire()
    wait_until_held(fleet)
    with freezing(*fleet[:3]), pytest.raises(redis.TimeoutError):
        lock.extend(5, replace_ttl=True)
    assert 0 < lock.remaining() < 5
    lock.release()


@contextlib.contextmanager
def _owing(fleet: Fleet, lock: Any) -> Iterator[None]:
    """A majority is frozen while the block lasts, and owes so many replies that it is asked nothing more."""
    with freezing(*fleet[:3]):
        for _ in range(70):
            with pytest.raises(redis.TimeoutError):
                lock.acquire(blocking=False)
        yield


@pytest.mark.slow
def test_majority_that_owes_many_replies_did_not_answer_in_time(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=0.02)
    with _owing(fleet, lock), pytest.raises(redis.TimeoutError, match="only 2 of 5 servers have voted"):
        make.on(lock.servers, limit=SHORT_S).acquire(blocking=False)


@pytest.mark.slow
def test_majority_that_owes_many_replies_is_waited_for_at_rest(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=0.02)
    with _owing(fleet, lock):
        patient = make.on(lock.servers, limit=SHORT_S)
        before_s = time.thread_time()
        with pytest.raises(redis.TimeoutError):
            patient.acquire(blocking=False)
        assert time.thread_time() - before_s < SHORT_S / 4


@pytest.mark.slow
def test_release_without_answers_can_be_called_again(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=SHORT_S)
    lock.acquire()
    wait_until_held(fleet)
    with freezing(*fleet[:3]):
        with pytest.raises(redis.TimeoutError):
            lock.release()
        with pytest.raises(redis.TimeoutError):
            lock.release()
    wait_until_free(fleet)
    lock.release()
    assert lock.votes.count(True) >= 3


@pytest.mark.slow
def test_release_after_the_lease_that_is_called_again_finds_the_loss(fleet: Fleet, make: Make) -> None:
    lock = make.connected(timeout=0.5)
    assert lock.acquire()
    wait_until_free(fleet)
    with freezing(*fleet[:3]):
        for _ in range(2):
            with pytest.raises(redis.TimeoutError):
                lock.release()
    with pytest.raises(LockNotOwnedError):
        lock.release()


@pytest.mark.slow
def test_release_while_a_majority_is_dead_can_be_called_again(fleet: Fleet, make: Make) -> None:
    lock = make.connected(limit=SHORT_S)
    lock.acquire()
    wait_until_held(fleet)
    with _dead(*fleet[:3]), pytest.raises(redis.ConnectionError):
        lock.release()
    wait_until(lambda: _released(lock), "the servers answer")
    wait_until_free(fleet)


def _released(lock: Any) -> bool:
    with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
        lock.release()
        return True
    return False


def test_release_with_a_dead_minority_is_a_success(fleet: Fleet, make: Make) -> None:
    take(fleet[3:])
    lock = make.connected(limit=SHORT_S)
    lock.acquire()
    with _dead(fleet[0]):
        lock.release()


# Connections and servers' errors


def test_connections_killed_between_two_operations(fleet: Fleet, make: Make) -> None:
    lock = make()
    for use in (lock.acquire, lambda: lock.extend(10), lock.reacquire, lock.owned, lock.release):
        for client in clients_of(fleet):
            client.client_kill_filter(_type="normal", skipme=True)
        assert use() in (True, None)
    wait_until_free(fleet)


def test_connections_outlast_a_pause_that_is_longer_than_the_socket_timeout(fleet: Fleet, make: Make) -> None:
    name = f"pause-{uuid.uuid4().hex}"  # what other tests have left may connect again at any time
    lock = make.on(make.clients(socket_timeout=SHORT_S, client_name=name))
    _use(lock)
    wait_until_free(fleet)
    admins = [redis.Redis(port=server.port) for server in fleet]

    def connected() -> list[list[str]]:
        return [[client["id"] for client in admin.client_list() if client["name"] == name] for admin in admins]

    before = connected()
    assert [len(ids) for ids in before] == [1] * len(fleet)
    until_passed(admins[0], 1.1 * SHORT_S)
    _use(lock)
    _use(lock)
    assert connected() == before


def test_servers_restarted_between_two_operations(fleet: Fleet, make: Make) -> None:
    lock = make()
    _use(lock)
    with _dead(*fleet):
        pass
    _use(lock)


def test_scripts_flushed_between_two_operations(fleet: Fleet, make: Make) -> None:
    lock = make()
    for use in (lock.acquire, lambda: lock.extend(10), lock.reacquire, lock.release):
        for client in clients_of(fleet):
            client.script_flush()
        assert use() in (True, None)
    wait_until_free(fleet)


@pytest.mark.parametrize("fault", ["drop_reply", "drop_request"])
def test_set_or_its_reply_lost_on_the_way(world: World, fleet: Fleet, make: Make, fault: str) -> None:
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.port)) for server in fleet]
        lock = make.on([world.connect(proxy.port) for proxy in proxies], limit=SHORT_S)
        _use(lock)
        wait_until_free(fleet)
        for proxy in proxies[:3]:
            getattr(proxy, fault)("SET")
        assert lock.acquire(blocking_timeout=PATIENCE_S) is True
        assert lock.owned() is True
        lock.release()
        wait_until_free(fleet)


def test_release_that_is_lost_unread_is_done_again(world: World, fleet: Fleet, make: Make) -> None:
    with Proxy(fleet[4].port) as proxy:
        lock = make.on([*make.clients()[:4], world.connect(proxy.port)])
        lock.acquire()
        wait_until_held(fleet)
        proxy.stall()
        lock.release()
        assert lock.votes[4] is None
        proxy.cut()
        wait_until_free(fleet)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_release_that_a_minority_puts_off_is_done_later(fleet: Fleet, make: Make, is_late: bool) -> None:
    admin = redis.Redis(port=fleet[0].port)
    lock = make.connected()
    lock.acquire()
    wait_until_held(fleet)
    admin.config_resetstat()
    admin.config_set("min-replicas-to-write", 1)
    try:
        with freezing(fleet[0]) if is_late else contextlib.nullcontext():
            lock.release()
        wait_until(lambda: "errorstat_NOREPLICAS" in admin.info("errorstats"), "it is put off")
        assert values(fleet[:1]) != [None]
    finally:
        admin.config_set("min-replicas-to-write", 0)
    wait_until_free(fleet)


@pytest.mark.slow
@IN_THREADS
def test_replies_are_polled_only_while_a_client_waits_for_them(fleet: Fleet, make: Make) -> None:
    def is_polling() -> bool:
        return any(thread.name == "redislock_fast-late-replies" for thread in threading.enumerate())

    lock = make()
    _use(lock)
    with freezing(fleet[0]):
        _use(lock)
        wait_until(is_polling, "a thread polls")
    wait_until(lambda: not is_polling(), "the replies have come")
    with freezing(fleet[0]):
        _use(lock)
        wait_until(is_polling, "a thread polls")
        del lock
        gc.collect()
        wait_until(lambda: not is_polling(), "the clients are gone")


@IN_THREADS
def test_release_by_a_signal_handler_that_is_lost_unread_is_done_again(world: World, fleet: Fleet, make: Make) -> None:
    with Proxy(fleet[4].port) as proxy:
        lock = make.on([*make.clients()[:4], world.connect(proxy.port)])
        lock.acquire()
        wait_until_held(fleet)
        proxy.drop_request(*RELEASE_COMMANDS)
        channels = lock._quorum._transports
        for channel in channels:
            channel.inside.add(threading.get_ident())  # as for a handler that interrupts an operation
        lock.release()
        for channel in channels:
            channel.inside.clear()
        wait_until_free(fleet)


def test_errors_of_a_minority_are_no_failure(fleet: Fleet, make: Make) -> None:
    for client in clients_of(fleet[:2]):
        client.lpush("name", "no string")
    lock = make()
    assert lock.acquire(blocking=False) is True
    lock.release()


def test_errors_of_a_majority_are_raised_at_once(fleet: Fleet, make: Make) -> None:
    for client in clients_of(fleet[:3]):
        client.lpush("name", "no string")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        make().acquire()
    wait_until_free(fleet[3:])


def test_errors_of_a_minority_do_not_hide_that_others_are_down(fleet: Fleet, make: Make) -> None:
    for client in clients_of(fleet[:2]):
        client.lpush("name", "no string")
    lock = make()
    with _dead(fleet[4]), pytest.raises(redis.ConnectionError, match=r"only 2 of 5 servers have voted .*WRONGTYPE"):
        lock.acquire(blocking=False)
    assert lock.acquire(blocking_timeout=PATIENCE_S) is True
    lock.release()


def test_wrong_password_is_raised_at_once(make: Make) -> None:
    with pytest.raises(AuthenticationError):
        make.on(make.clients(username="nobody", password="wrong")).acquire()


def test_user_that_may_not_use_scripts(world: World, fleet: Fleet, make: Make, acl_user: MakeUser) -> None:
    if any(server.kind != "valkey" for server in fleet):
        pytest.skip("they need scripts")
    _use(make.on([world.connect(server.port, **acl_user(server, "-@scripting").options()) for server in fleet]))
    wait_until_free(fleet)


# Interrupts


class _Interrupt(BaseException):
    pass


@IN_THREADS
def test_interrupted_acquire_leaves_nothing(fleet: Fleet, make: Make) -> None:
    lock = make()
    _use(lock)
    wait_until_free(fleet)

    def interrupt(*_: object) -> None:
        raise _Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.main_thread().ident or 0

    def send_when_it_waits() -> None:
        wait_until(lambda: all(values(fleet[3:])), "the requests have left")
        signal.pthread_kill(main, signal.SIGUSR1)

    try:
        with freezing(*fleet[:3]):
            sent = start(send_when_it_waits)
            with pytest.raises(_Interrupt):
                lock.acquire()
            sent.result()
            assert lock.remaining() == 0.0
    finally:
        signal.signal(signal.SIGUSR1, before)
    wait_until_free(fleet)
    _use(lock)
