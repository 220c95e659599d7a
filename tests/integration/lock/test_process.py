"""Locks and the process around them: interrupts, forks, the interpreter's end, gevent, eventlet.

Rules: signals and forks are real; a script in an interpreter of its own where this one must not be changed. A test runs
on both classes where redis-py's does the same, else on ours.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import redislock_fast
import redislock_fast.lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.forks import FORKS, InFork
from tests.support.helpers import (
    MODULES,
    RELEASE_COMMANDS,
    RELEASES_LAST,
    LockClass,
    run_script,
    signals_handled_by,
    start,
    wait_until,
)
from tests.support.interrupts import interrupt_when
from tests.support.proxy import Proxy


@pytest.fixture
def frozen(spare_server: Callable[..., Server]) -> Iterator[tuple[Server, Proxy]]:
    """A server that the test may freeze, and a proxy that tells when a request has left for it."""
    server = spare_server()
    with Proxy(server.port) as proxy:
        yield server, proxy
        server.signal(signal.SIGCONT)


# Interrupts


def test_interrupted_acquire_leaves_no_lock(frozen: tuple[Server, Proxy], connect: Connect) -> None:
    server, proxy = frozen
    client = connect(proxy.port, socket_timeout=60)
    with redislock_fast.Lock(client, "warm-up"):
        pass
    lock = redislock_fast.Lock(client, "name")
    server.signal(signal.SIGSTOP)
    interrupt_when(lambda: proxy.wait_for_request("SET", 2))
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    # The server is still frozen: nothing but the signal has ended the wait.
    server.signal(signal.SIGCONT)
    assert lock.local.token is None
    wait_until(lambda: not client.exists("name"), "the attempt is undone")
    with redislock_fast.Lock(client, "name", blocking=False) as other:
        assert other.owned()


def test_interrupted_acquire_disturbs_no_other_thread(frozen: tuple[Server, Proxy], connect: Connect) -> None:
    server, proxy = frozen
    client = connect(proxy.port, socket_timeout=60)
    with redislock_fast.Lock(client, "warm-up"):
        pass
    others = [redislock_fast.Lock(client, f"other-{n}", thread_local=False) for n in range(3)]
    server.signal(signal.SIGSTOP)
    answers = [start(other.acquire) for other in others]
    proxy.wait_for_request("SET", 4)
    interrupt_when(lambda: proxy.wait_for_request("SET", 5))
    with pytest.raises(KeyboardInterrupt):
        redislock_fast.Lock(client, "name").acquire()
    server.signal(signal.SIGCONT)
    assert [True] * 3 == [answer.result(10) for answer in answers]
    assert all(other.owned() for other in others)
    wait_until(lambda: not client.exists("name"), "the attempt is undone")


def test_interrupted_release_can_be_repeated(frozen: tuple[Server, Proxy], connect: Connect) -> None:
    server, proxy = frozen
    client = connect(proxy.port, socket_timeout=60)
    lock = redislock_fast.Lock(client, "name", timeout=60)
    lock.acquire()
    server.signal(signal.SIGSTOP)
    sent = sum(proxy.requests[command] for command in RELEASE_COMMANDS)
    interrupt_when(
        lambda: wait_until(
            lambda: sum(proxy.requests[command] for command in RELEASE_COMMANDS) > sent, "the release is sent"
        )
    )
    with pytest.raises(KeyboardInterrupt):
        lock.release()
    server.signal(signal.SIGCONT)
    assert lock.local.token is not None
    lock.release()
    assert not client.exists("name")


def test_interrupted_sleep_raises_and_holds_nothing(
    lock_class_id: str, lock_class: LockClass, valkey: Server, connect: Connect
) -> None:
    with Proxy(valkey.port) as proxy:
        client = connect(proxy.port)
        client.set("name", "taken")
        waiter = lock_class(client, "name", sleep=60)
        interrupt_when(lambda: proxy.wait_for_reply("SET", 2))
        with pytest.raises(KeyboardInterrupt):
            waiter.acquire()
        assert waiter.local.token is None
        assert b"taken" == client.get("name")
        client.delete("name")
        with lock_class(client, "name", blocking=False):
            pass


def test_interrupted_body_releases(lock_class: LockClass, client: redis.Redis) -> None:
    with pytest.raises(KeyboardInterrupt), lock_class(client, "name"):
        signal.raise_signal(signal.SIGINT)
    assert not client.exists("name")


@pytest.mark.timeout(8)
def test_signals_that_do_not_raise_disturb_nothing(lock_class: LockClass, client: redis.Redis) -> None:
    caught: list[int] = []
    with signals_handled_by(lambda number, frame: caught.append(number)):
        while len(caught) < 100:
            with lock_class(client, "name", timeout=10) as lock:
                assert lock.owned()
    assert not client.exists("name")


@pytest.mark.timeout(8)
@pytest.mark.parametrize("is_connected", [True, False])
def test_signal_handler_may_use_locks_of_the_same_client(
    lock_class: LockClass, valkey: Server, connect: Connect, is_connected: bool
) -> None:
    owned: list[bool] = []

    def handle(number: int, frame: object) -> None:
        with lock_class(client, "in handler", timeout=10) as lock:
            owned.append(lock.owned())

    client = connect(valkey.port)
    with lock_class(client, "warm-up"):
        pass
    with signals_handled_by(handle):
        while len(owned) < 50:
            if not is_connected:
                client = connect(valkey.port)
            with lock_class(client, "name", timeout=10) as lock:
                assert lock.owned()
    assert all(owned)


# Forks


def test_forked_child_uses_locks_of_its_own_on_the_same_client(
    in_fork: InFork, lock_class: LockClass, client: redis.Redis
) -> None:
    held = lock_class(client, "held", timeout=30)
    held.acquire()

    def child() -> str:
        with lock_class(client, "child", timeout=30) as lock:
            inside = (lock.owned(), lock_class(client, "held").acquire(blocking=False))
        return repr((*inside, lock_class(client, "child").locked()))

    for _ in range(3):
        assert "(True, False, False)" == in_fork(child)
        assert held.owned()
        assert held.extend(10)
    held.release()
    assert [] == client.keys()


def test_forked_child_can_acquire_with_its_parents_instance(
    in_fork: InFork, lock_class: LockClass, client: redis.Redis
) -> None:
    lock = lock_class(client, "name", timeout=30)
    with lock:
        pass

    def child() -> str:
        with lock:
            return repr(lock.owned())

    assert "True" == in_fork(child)
    with lock:
        assert lock.owned()


def test_forked_children_draw_other_tokens(in_fork: InFork, lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=30)

    def draw() -> str:
        tokens = []
        for _ in range(50):
            lock.acquire()
            tokens.append(lock.local.token.decode())
            lock.release()
        return " ".join(tokens)

    draw()
    drawn = [*in_fork(draw).split(), *in_fork(draw).split(), *draw().split()]
    assert 150 == len(drawn) == len(set(drawn))


@pytest.mark.skipif(
    sysconfig.get_config_var("Py_GIL_DISABLED") == 1 and sys.version_info < (3, 14),
    reason="the child of threads that contend for an object may hang there: see docs/reference/connections.md",
)
def test_fork_while_other_threads_use_the_client(in_fork: InFork, client: redis.Redis) -> None:
    # Ours alone: redis-py's pool may be locked by another thread at the fork, and then forever in the child.
    finished = threading.Event()

    def work(name: str) -> int:
        rounds = 0
        while not finished.is_set():
            with redislock_fast.Lock(client, name, timeout=30) as lock:
                assert lock.owned()
            rounds += 1
        return rounds

    def child() -> str:
        with redislock_fast.Lock(client, "child", timeout=30) as lock:
            return repr(lock.owned())

    workers = [start(lambda name=name: work(name)) for name in ("a", "b")]  # type: ignore[misc]
    try:
        assert ["True"] * 5 == [in_fork(child) for _ in range(5)]
    finally:
        finished.set()
    assert all(worker.result(10) for worker in workers)


@FORKS
@pytest.mark.parametrize(("waits", "token"), [(True, None), (False, None), (False, "mine")])
def test_acquire_in_which_a_signal_handler_forks_goes_on_in_the_parent_alone(
    frozen: tuple[Server, Proxy], connect: Connect, fork: Callable[[], int], waits: bool, token: str | None
) -> None:
    server, proxy = frozen
    client = connect(proxy.port, socket_timeout=60)
    operator = connect(server.port)
    holder = redislock_fast.Lock(client, "name", timeout=60, thread_local=False)
    holder.acquire()
    told, tell = os.pipe()
    child = -1

    def handle(number: int, frame: object) -> None:
        nonlocal child
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is under test
            child = fork()

    def fork_then_let_the_parent_acquire() -> bytes:
        if waits:
            wait_until(lambda: operator.zcard("{name}:rlf:queue"), "a waiter is in the queue")
        else:
            proxy.wait_for_request("SET", 2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        outcome = os.read(told, 1000)
        server.signal(signal.SIGCONT)
        if waits:
            holder.release()
        return outcome

    if not waits:
        holder.release()
        server.signal(signal.SIGSTOP)
    lock = redislock_fast.Lock(client, "name", timeout=60)
    before = signal.signal(signal.SIGUSR1, handle)
    parent = start(fork_then_let_the_parent_acquire)
    outcome: object = None
    try:
        outcome = lock.acquire(token=token)
    except BaseException as error:
        outcome = type(error).__mro__[1].__name__
    finally:
        if child == 0:
            cleaners = [thread.name for thread in threading.enumerate() if "cleanup" in thread.name]
            os.write(tell, repr((outcome, cleaners)).encode())
            os._exit(0)
        signal.signal(signal.SIGUSR1, before)
    os.waitpid(child, 0)
    assert b"('RuntimeError', [])" == parent.result(20)
    assert outcome is True
    assert lock.owned()
    os.close(told)
    os.close(tell)


# The interpreter's end


@pytest.mark.parametrize("keeps", ["held", "waiting thread"])
def test_interpreter_exits_cleanly_with_a_lock(lock_class_id: str, valkey: Server, keeps: str) -> None:
    script = f"""
import sys, threading
import redis
from {MODULES[lock_class_id].__name__} import Lock
client = redis.Redis(port=int(sys.argv[1]))
lock = Lock(client, "name", timeout=10)
assert lock.acquire()
if sys.argv[2] != "held":
    waiter = threading.Thread(target=Lock(client, "name").acquire, daemon=True)
    waiter.start()
"""
    finished = run_script(script, valkey.port, keeps)
    assert (0, "", "") == (finished.returncode, finished.stderr, finished.stdout)


CONNECTED = """
import sys, threading, time
import redis

client = redis.Redis(port=int(sys.argv[1]), socket_timeout=None, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0))
"""

WAITS = """
admin = redis.Redis(port=int(sys.argv[1]))
admin.set("held", "mine")
threading.Thread(target=Lock(client, "held").acquire, daemon=True).start()
while not admin.client_list(_type="pubsub"):
    time.sleep(0.01)
"""
"""A thread waits for another lock on the same connection, and reads there."""

CONNECTS = """
import socket
silent = socket.create_server(("127.0.0.1", 0))
client.connection_pool.connection_kwargs["port"] = silent.getsockname()[1]
client.close()
threading.Thread(target=lambda: Lock(client, "other").acquire(), daemon=True).start()
accepted = silent.accept()
"""
"""A thread connects, and gets no reply."""


@pytest.mark.parametrize("other", [WAITS, CONNECTS], ids=["waits", "connects"])
def test_release_by_the_last_finalizers_waits_for_no_thread(valkey: Server, other: str) -> None:
    ended = run_script(CONNECTED + RELEASES_LAST + other, valkey.port, "name")
    assert (ended.returncode, ended.stdout) == (0, "ends\n")


def test_interpreter_exits_cleanly_after_use_in_threads(valkey: Server) -> None:
    script = """
import sys, threading
import redis
from redislock_fast import Lock
client = redis.Redis(port=int(sys.argv[1]))
def work():
    for _ in range(20):
        with Lock(client, "name", timeout=10, sleep=0.001):
            pass
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
    finished = run_script(f"import warnings\nwarnings.simplefilter('error')\n{script}", valkey.port)
    assert (0, "", "") == (finished.returncode, finished.stderr, finished.stdout)


# gevent and eventlet


PATCHED = {
    "gevent": """
from gevent import monkey
monkey.patch_all()
from gevent import joinall, sleep, spawn

def run(*functions):
    joinall([spawn(function) for function in functions], raise_error=True)
""",
    "eventlet": """
import warnings
warnings.simplefilter("ignore")  # it says of itself that it is deprecated
import eventlet
eventlet.monkey_patch()
from eventlet import sleep, spawn

def run(*functions):
    for green in [spawn(function) for function in functions]:
        green.wait()
""",
}

GREEN_SCRIPT = """
import os, signal, sys
import redis
from {module} import Lock

port, pid = int(sys.argv[1]), int(sys.argv[2])
client = redis.Redis(port=port, socket_timeout=30)
inside, most, rounds = 0, 0, 0

def contend():
    global inside, most, rounds
    for _ in range(10):
        with Lock(client, "name", timeout=30, sleep=0.001):
            inside += 1
            most = max(most, inside)
            sleep(0.001)
            inside -= 1
            rounds += 1

run(contend, contend, contend)
print(most, rounds)

# While one greenlet waits for a frozen server, the others run; one of them thaws it.
def acquire():
    with Lock(client, "name", timeout=30):
        order.append("acquired")

def thaw():
    for _ in range(20):
        sleep(0.005)
    order.append("others ran")
    os.kill(pid, signal.SIGCONT)

order = []
os.kill(pid, signal.SIGSTOP)
run(acquire, thaw)
print(order)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("library", PATCHED)
def test_green_threads_share_a_client(library: str, lock_class_id: str, spare_server: Callable[..., Server]) -> None:
    server = spare_server()
    assert server.process is not None
    finished = run_script(
        PATCHED[library] + GREEN_SCRIPT.format(module=MODULES[lock_class_id].__name__), server.port, server.process.pid
    )
    server.signal(signal.SIGCONT)
    assert "" == finished.stderr
    assert ["1 30", "['others ran', 'acquired']"] == finished.stdout.splitlines()
    assert 0 == finished.returncode


def test_file_descriptors_do_not_leak(server: Server) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def use() -> None:
        with redis.Redis(port=server.port) as client, redislock_fast.Lock(client, "name"):
            pass

    if not Path("/proc/self/fd").exists():
        pytest.skip(f"no /proc on {os.uname().sysname}")
    use()
    before = count()
    for _ in range(20):
        use()
    gc.collect()  # redis-py's pools are in reference cycles
    assert count() <= before
