"""Forks that Python does not know of, as uWSGI makes them, beside those of `os.fork`.

Rules: what a child must not do is tested beside each feature, with `in_fork`. Here, whatever a child does first. Where
`PROGRAM` forks by the system's `fork`, the parent has no thread that may want the GIL: Python itself would not bear it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.forks import InFork, fork_unannounced
from tests.support.helpers import PATIENCE_S, run_script, start, wait_until
from tests.support.holding import KEPT_S, LONG_S
from tests.support.proxy import Proxy
from tests.support.transports import clean_up
from tests.support.waiting import FAR_S, queue_of

LINGERS: dict[str, Any] = {"timeout": FAR_S, "linger": FAR_S}
FORKS = {"announced": os.fork, "unannounced": fork_unannounced}


@pytest.fixture
def client(valkey: Server, connect: Connect) -> redis.Redis:
    # An address: in a child that was forked while another thread looked up a name, glibc's getaddrinfo hangs.
    return connect(valkey.port, host="127.0.0.1")


# ---- by the system's `fork` ----

PROGRAM = """
import asyncio, ctypes, json, os, sys, threading, time
import redis, redis.asyncio
from redislock_fast import Lock, asyncio as tasks, holders

kind, settings, first, way = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], sys.argv[5]
address = {"host": "127.0.0.1", "port": int(sys.argv[1])}
admin = redis.Redis(**address)
if kind == "threads":
    lock = Lock(redis.Redis(**address), "name", **settings)
else:
    lock = tasks.Lock(redis.asyncio.Redis(**address), "name", **settings)


def hold():
    if lock.owned():
        return "the parent's"
    with lock:
        return lock.local.token.decode(), inside()


async def hold_in_task():
    if await lock.owned():
        return "the parent's"
    async with lock:
        return lock.local.token.decode(), inside()


def inside():
    most = admin.incr("inside")
    holder = holders(admin, "name").holder
    time.sleep(0.002)
    return admin.decr("inside") == 0 and most == 1 and holder.process.pid == os.getpid()


def use(rounds=1):
    if kind == "threads":
        return [hold() for _ in range(rounds)]
    return asyncio.run(use_in_loop(rounds))


async def use_in_loop(rounds):
    return [await hold_in_task() for _ in range(rounds)]


def fork():
    if way == "thread":
        time.sleep(0.2)  # until the main thread sleeps
    child = ctypes.PyDLL(None).fork()  # keeps the GIL
    if child == 0 and way == "grandchildren":
        if children:
            use()
        child = ctypes.PyDLL(None).fork()
        if child:
            os.waitpid(child, 0)
            os._exit(0)
    if child == 0:
        tell = os.fdopen(ends[1], "w")
        tell.write(json.dumps(use(20)) + "\\n")
        tell.flush()
        os._exit(0)
    children.append(child)


if first == "used":
    use(3)
ends, children = os.pipe(), []
for _ in range(3):
    if way == "thread":
        forks = threading.Thread(target=fork)
        forks.start()
        forks.join()
    else:
        fork()
os.close(ends[1])
with os.fdopen(ends[0]) as told:
    results = [result for line in told for result in json.loads(line)]
for child in children:
    os.waitpid(child, 0)
print(len(results), len({token for token, _ in results}), {alone for _, alone in results})
print({len({token[4:12] for token, _ in results})})
"""
"""Three children take a lock 20 times each. Prints how often, with how many tokens, and whether each was alone."""


@pytest.mark.parametrize("way", ["children", "grandchildren", "thread"])
@pytest.mark.parametrize("first", ["used", "unused"])
@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_children_exclude_each_other(valkey: Server, kind: str, first: str, way: str) -> None:
    done = run_script(PROGRAM, valkey.port, kind, json.dumps({"timeout": FAR_S}), first, way)
    assert (done.stdout, done.stderr) == ("60 60 {True}\n{3}\n", "")


@pytest.mark.parametrize("settings", [{"linger": 0.05}, {"auto_renew": "loop"}], ids=str)  # with no other thread
def test_children_of_a_loops_process_exclude_each_other(valkey: Server, settings: dict[str, Any]) -> None:
    done = run_script(PROGRAM, valkey.port, "tasks", json.dumps({"timeout": FAR_S, **settings}), "used", "children")
    assert (done.stdout.splitlines()[1], done.stderr) == ("{3}", "")
    assert done.stdout.startswith("60 ")
    assert "{True}" in done.stdout


# ---- in both ways ----


@pytest.fixture(params=FORKS)
def fork(request: pytest.FixtureRequest) -> Iterator[Callable[[], int]]:
    """Forks, in both ways in turn. Children that are still there at the end are killed."""
    children: list[int] = []

    def fork() -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is under test
            pid = FORKS[request.param]()
        if pid:
            children.append(pid)
        return pid

    yield fork
    for pid in children:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_waiter_that_is_killed_is_not_granted_a_lock_that_its_parent_has_only_made(
    fork: Callable[[], int], client: redis.Redis, valkey: Server, connect: Connect
) -> None:
    lock = redislock_fast.Lock(client, "name", timeout=FAR_S)
    admin = connect(valkey.port, host="127.0.0.1")
    waiters = []
    with redislock_fast.Lock(admin, "name", timeout=FAR_S):
        for place in (1, 2):
            pid = fork()
            if pid == 0:
                client.set("acquired", repr(lock.acquire()))
                time.sleep(FAR_S)
            waiters.append(pid)
            wait_until(lambda place=place: admin.zcard(queue_of("name")) == place, "it waits")  # type: ignore[misc]
        os.kill(waiters[0], signal.SIGKILL)
        os.waitpid(waiters[0], 0)
    wait_until(lambda: admin.get("acquired") == b"True", "the other one has the lock")


@pytest.mark.parametrize("uses", [False, True], ids=["unused", "used"])
def test_a_child_of_a_child_has_nothing_of_either(in_fork: InFork, client: redis.Redis, uses: bool) -> None:
    lock, other = (redislock_fast.Lock(client, name, **LINGERS) for name in ("name", "other"))
    lock.acquire()

    def grandchild() -> str:
        with redislock_fast.Lock(client, "own", timeout=FAR_S) as own:
            return f"{lock.acquire(blocking=False)} {other.acquire(blocking=False)} {other.owned()} {own.owned()}"

    def child() -> str:
        if uses:
            other.acquire()
        return in_fork(grandchild)

    assert in_fork(child) == f"False {not uses} {not uses} True"
    lock.release()


def test_threads_of_a_child_that_all_begin_at_once_exclude_each_other(in_fork: InFork, client: redis.Redis) -> None:
    lock = redislock_fast.Lock(client, "name", **LINGERS)
    with lock:
        pass

    def child() -> str:
        begin, tokens, inside = threading.Barrier(8), set(), []

        def work() -> bool:
            begin.wait(PATIENCE_S)
            with redislock_fast.Lock(client, f"own-{threading.get_ident()}", timeout=FAR_S) as own:
                tokens.add(own.local.token)
            with lock:
                inside.append(1)
                is_alone = len(inside) == 1
                time.sleep(0.001)
                inside.pop()
            return is_alone

        workers = [start(work) for _ in range(8)]
        answers = [worker.result(PATIENCE_S) for worker in workers]
        client.delete("name")  # which lingers, and would do so after the child's end
        return f"{answers.count(True)} {len(tokens)}"

    for _ in range(5):
        assert in_fork(child) == "8 8"


ENDS = """
import os, sys
import redis
from redislock_fast import Lock
from tests.support.forks import fork_unannounced

port, fork, closes = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
admin, client = redis.Redis(port=port), redis.Redis(port=port)
lock = Lock(client, "name", timeout=60, linger=60)
with lock:
    pass
token = admin.get("name")
child = os.fork() if fork == "announced" else fork_unannounced()
if child == 0:
    if closes:
        client.close()
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, token is not None, admin.get("name") == token, lock.acquire(blocking=False), admin.get("name") == token)
"""


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("way", FORKS)
def test_a_child_that_ends_gives_back_nothing_of_its_parents(valkey: Server, way: str, closes: bool) -> None:
    done = run_script(
        f"import warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\n{ENDS}", valkey.port, way, closes
    )
    assert (done.stdout, done.stderr) == ("7 True True True True\n", "")


def test_a_child_cleans_up_though_its_parent_does_so_too(in_fork: InFork, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port, host="127.0.0.1")
    with Proxy(valkey.port) as proxy:
        client = connect(proxy.port, host="127.0.0.1", socket_timeout=0.1)
        lock = redislock_fast.Lock(client, "name")
        proxy.refuse()
        clean_up(client, [(b"parents", b"token")])  # by a thread, which tries again and again
        admin.set("childs", "token")

        def child() -> str:
            lock.locked()
            clean_up(client, [(b"childs", b"token")])
            wait_until(lambda: not admin.exists("childs"), "it is cleaned up")
            return "done"

        proxy.accept()
        assert in_fork(child) == "done"


@pytest.mark.slow
def test_a_child_renews_its_own_lock(in_fork: InFork, client: redis.Redis) -> None:
    lock = redislock_fast.Lock(client, "name", timeout=KEPT_S, auto_renew=True)
    with lock:
        pass

    def child() -> str:
        with lock:
            time.sleep(LONG_S)
            return str(lock.owned())

    assert in_fork(child) == "True"


@pytest.mark.parametrize("settings", [{}, {"linger": 0.05}, {"auto_renew": True}], ids=str)
@pytest.mark.parametrize("holds", [False, True], ids=["released", "held"])
def test_a_child_that_runs_its_parents_loop_has_nothing_of_its_parents(
    in_fork: InFork, valkey: Server, connect: Connect, settings: dict[str, Any], holds: bool
) -> None:
    admin = connect(valkey.port, host="127.0.0.1")
    client = redis.asyncio.Redis(host="127.0.0.1", port=valkey.port)
    lock = redislock_fast.asyncio.Lock(client, "name", timeout=FAR_S, thread_local=False, **settings)
    loop = asyncio.new_event_loop()

    async def use() -> None:
        assert await lock.acquire()
        if not holds:
            await lock.release()

    async def in_child() -> str:
        await asyncio.sleep(0.1)  # the parent's timers ring
        assert admin.get("name") == token
        try:
            await lock.release()
        except redis.exceptions.LockError:
            pass
        else:
            return "the child has released its parent's lock"
        async with redislock_fast.asyncio.Lock(client, "child", timeout=FAR_S, **settings) as own:
            return str(await own.owned())

    def child() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer: str = loop.run_until_complete(in_child())
        return answer

    loop.run_until_complete(use())
    token = admin.get("name")
    assert in_fork(child) == "True"
    if holds:
        assert loop.run_until_complete(lock.owned())
        loop.run_until_complete(lock.release())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_a_child_that_another_thread_forks(in_fork: InFork, client: redis.Redis) -> None:
    lock = redislock_fast.Lock(client, "name", timeout=FAR_S)
    lock.acquire()

    def child() -> str:
        with redislock_fast.Lock(client, "child", timeout=FAR_S) as own:
            return f"{own.owned()} {lock.owned()} {lock.acquire(blocking=False)}"

    assert start(lambda: in_fork(child)).result(2 * PATIENCE_S) == "True False False"
    assert lock.owned()
    lock.release()


def test_a_program_that_is_started_takes_nothing_from_its_parent(client: redis.Redis) -> None:
    with redislock_fast.Lock(client, "name", timeout=FAR_S) as lock:
        token = lock.local.token
        assert os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1] == 0
        assert os.spawnlp(os.P_WAIT, "true", "true") == 0
        assert (lock.local.token, lock.owned()) == (token, True)


# ---- what a program imports at its first lock ----

FIRST_USE = """
import asyncio, sys
import redis, redis.asyncio
import redislock_fast, redislock_fast.asyncio

address = {"host": "127.0.0.1", "port": int(sys.argv[1])}
client = redis.Redis(**address)
before = set(sys.modules)
for options in ({}, {"auto_renew": True}, {"fencing": True}, {"reentrant": True}, {"linger": 1}):
    with redislock_fast.Lock(client, f"{options}", timeout=10, **options) as lock:
        assert lock.extend(10)
        assert not redislock_fast.Lock(client, f"{options}", timeout=10, blocking_timeout=0.2).acquire()

async def use():
    async with redis.asyncio.Redis(**address) as client:
        for options in ({}, {"auto_renew": True}, {"linger": 1}):
            async with redislock_fast.asyncio.Lock(client, f"tasks {options}", timeout=10, **options) as lock:
                assert await lock.extend(10)

asyncio.run(use())
print(sorted(name for name in set(sys.modules) - before if name.startswith("redislock_fast")))
"""


def test_using_a_lock_for_the_first_time_imports_nothing_of_the_package(valkey: Server) -> None:
    # While a thread imports a module, it has the lock of that module. In a child that is forked then, it stays locked:
    # there, an import of the same module waits forever.
    result = run_script(FIRST_USE, valkey.port)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[]\n", "")
