"""Locks and event loops: a connection belongs to a loop and ends with it, or with its client; nothing is left behind.

Rules: loops are made and ended as programs do it, by `asyncio.run`, by hand, in threads, around a fork. Warnings out
of a loop's end are recorded, not raised: within the end of a uvloop, an exception would hang it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, run_script, start, wait_until
from tests.support.proxy import Proxy

Scenario = Callable[[], Coroutine[Any, Any, Any]]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = importlib.import_module(kind).new_event_loop()
    return loop


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def connections(client: redis.Redis) -> set[str]:
    """The server's ids of the connections that call themselves locks."""
    return {entry["id"] for entry in client.client_list() if entry["name"] == "locks"}


def client_of(server: Server) -> redis.asyncio.Redis:
    # An address: in a child that was forked while another thread looked up a name, glibc's getaddrinfo hangs.
    return redis.asyncio.Redis(host="127.0.0.1", port=server.port, client_name="locks")


async def use(lock: Lock) -> None:
    """Every operation once."""
    assert await lock.acquire()
    assert await lock.extend(10)
    assert await lock.owned()
    await lock.release()


# One loop after the other


@pytest.mark.slow
def test_many_loops_on_one_client_leave_nothing_behind(
    valkey: Server, connect: Connect, loop_kind: str, quiet: None
) -> None:
    client = connect(valkey.port)
    locks = client_of(valkey)
    shared = Lock(locks, "shared", timeout=10)
    ends: list[weakref.ref[Any]] = []

    async def program() -> None:
        ends.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(use(shared), *[use(Lock(locks, f"name-{number}", timeout=10)) for number in range(3)])
        assert len(connections(client)) == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_loop(loop_kind, program())
    gc.collect()
    files, threads = open_files(), threading.active_count()
    for _ in range(200):
        run_in_loop(loop_kind, program())
    gc.collect()
    assert open_files() <= files
    assert threading.active_count() <= threads
    assert sum(end() is not None for end in ends) <= 1, "one ended loop at most is remembered, until the next"
    wait_until(lambda: not connections(client), "all are closed")


def test_loop_made_and_closed_by_hand(valkey: Server, connect: Connect, loop_kind: str, quiet: None) -> None:
    client = connect(valkey.port)
    locks = client_of(valkey)
    for _ in range(10):
        loop = new_loop(loop_kind)
        for _ in range(2):
            loop.run_until_complete(use(Lock(locks, "name", timeout=10)))
            assert len(connections(client)) == 1
        loop.run_until_complete(loop.shutdown_asyncgens())
        wait_until(lambda: not connections(client), "it is closed")
        loop.close()


def test_loop_closed_without_shutdown_of_generators_raises_nothing(
    valkey: Server, connect: Connect, loop_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(valkey.port)
    locks = client_of(valkey)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # asyncio's own, for the transport
        for _ in range(3):
            loop = new_loop(loop_kind)
            loop.run_until_complete(use(Lock(locks, "name", timeout=10)))
            loop.close()
        run_in_loop(loop_kind, use(Lock(locks, "name", timeout=10)))
        del loop
        gc.collect()
        wait_until(lambda: not connections(client), "all are closed once they are collected")
    assert [] == caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("method", ["acquire", "release"])
def test_loop_closed_over_a_waiting_task_raises_nothing(
    spare_server: Callable[..., Server], loop_kind: str, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    server = spare_server()
    locks = client_of(server)
    lock = Lock(locks, "name", timeout=10, thread_local=False)
    loop = new_loop(loop_kind)
    loop.run_until_complete(lock.acquire())
    raised: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, raised.append
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            task = loop.create_task(getattr(lock, method)())
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            del task, loop
            gc.collect()
            run_in_loop(loop_kind, lock.locked())
            gc.collect()
    finally:
        sys.unraisablehook = before
    assert [] == raised
    assert all("Task was destroyed" in message for message in caplog.messages)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.Runner came with Python 3.11")
def test_runner_as_test_frameworks_use_it(valkey: Server, connect: Connect, loop_kind: str, quiet: None) -> None:
    client = connect(valkey.port)
    locks = client_of(valkey)
    lock = Lock(locks, "name", timeout=10)
    for _ in range(5):
        with asyncio.Runner(loop_factory=lambda: new_loop(loop_kind)) as runner:
            assert runner.run(lock.acquire()) is True
            assert runner.run(lock.owned()) is True
            runner.run(lock.release())
            assert len(connections(client)) == 1
        wait_until(lambda: not connections(client), "it is closed")


@pytest.mark.slow
def test_debug_mode_finds_nothing(valkey: Server, loop_kind: str, quiet: None) -> None:
    async def program() -> None:
        asyncio.get_running_loop().set_debug(True)
        locks = client_of(valkey)
        tasks = [asyncio.create_task(use(Lock(locks, "name", timeout=10, sleep=0.001))) for _ in range(20)]
        await asyncio.sleep(0.002)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        assert all(task.done() for task in tasks)

    run_in_loop(loop_kind, program())


SCRIPT = """
import asyncio, importlib, sys
import redis.asyncio
from redislock_fast.asyncio import Lock

kind, port = sys.argv[1:]

async def program():
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is nobody's fault
    client = redis.asyncio.Redis(port=int(port))
    async with Lock(client, "name", timeout=10) as lock:
        assert await lock.extend(10)
    task = asyncio.create_task(Lock(client, "other").acquire())
    await asyncio.sleep(0)
    task.cancel()

importlib.import_module(kind).run(program())
"""


@pytest.mark.parametrize("debug", ["", "1"])
def test_program_in_an_interpreter_that_tolerates_no_warning(
    valkey: Server, connect: Connect, loop_kind: str, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv("PYTHONASYNCIODEBUG", debug)
    monkeypatch.setenv("PYTHONWARNINGS", "error::ResourceWarning,error::RuntimeWarning")
    ended: subprocess.CompletedProcess[str] = run_script(SCRIPT, loop_kind, valkey.port)
    assert (0, "", "") == (ended.returncode, ended.stdout, ended.stderr)
    wait_until(lambda: not connect(valkey.port).keys(), "the cancelled attempt is undone")


# Loops side by side


@pytest.mark.slow
def test_two_loops_in_two_threads_use_one_client_and_one_lock(
    valkey: Server, connect: Connect, loop_kind: str, quiet: None
) -> None:
    client = connect(valkey.port)
    locks = client_of(valkey)
    shared = Lock(locks, "shared", timeout=30, sleep=0.001)
    both = threading.Barrier(2)
    inside = 0

    async def work(name: str) -> None:
        nonlocal inside
        async with shared:
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1
        await use(Lock(locks, name, timeout=10))

    async def program(number: int) -> None:
        both.wait(PATIENCE_S)
        await asyncio.gather(*[work(f"name-{number}-{task}") for task in range(50)])
        both.wait(PATIENCE_S)
        assert len(connections(client)) == 2
        both.wait(PATIENCE_S)

    threads = [start(partial(run_in_loop, loop_kind, program(number))) for number in (0, 1)]
    for thread in threads:
        thread.result(PATIENCE_S)
    wait_until(lambda: not connections(client), "both are closed")
    assert [] == client.keys()


@in_loop
async def test_one_connection_per_pool_and_loop(valkey: Server, connect: Connect, async_connect: AsyncClients) -> None:
    client = connect(valkey.port)
    first = async_connect(valkey.port, client_name="locks")
    twin = async_connect.keep(redis.asyncio.Redis(connection_pool=first.connection_pool))
    await asyncio.gather(
        *[use(Lock(locks, f"{id(locks)}-{n}", timeout=9)) for n in range(20) for locks in (first, twin)]
    )
    assert len(connections(client)) == 1
    second = async_connect(valkey.port, client_name="locks")
    await use(Lock(second, "name", timeout=10))
    assert len(connections(client)) == 2


@pytest.mark.slow
@in_loop
async def test_connection_of_a_collected_client_is_closed(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    for _ in range(5):
        lock = Lock(client_of(valkey), "name", timeout=10)
        await use(lock)
        assert len(connections(client)) == 1
        del lock
        gc.collect()
        await eventually(lambda: not connections(client), "it is closed")
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "who closed it has ended")


@pytest.mark.slow
def test_client_collected_as_the_loop_ends(valkey: Server, connect: Connect, loop_kind: str, quiet: None) -> None:
    client = connect(valkey.port)

    async def program() -> None:
        await use(Lock(client_of(valkey), "name", timeout=10))
        gc.collect()

    for _ in range(10):
        run_in_loop(loop_kind, program())
        wait_until(lambda: not connections(client), "it is closed")


@pytest.mark.slow
def test_client_collected_in_another_thread(valkey: Server, connect: Connect, loop_kind: str, quiet: None) -> None:
    client = connect(valkey.port)
    kept: list[Any] = []

    async def program() -> None:
        kept.append(Lock(client_of(valkey), "name", timeout=10))
        await use(kept[0])
        await asyncio.get_running_loop().run_in_executor(None, drop)
        await eventually(lambda: not connections(client), "it is closed")

    def drop() -> None:
        kept.clear()
        gc.collect()

    run_in_loop(loop_kind, program())


# Forks


def test_forked_child_uses_a_loop_and_a_connection_of_its_own(
    in_fork: InFork, valkey: Server, connect: Connect, loop_kind: str
) -> None:
    client = connect(valkey.port)
    locks = client_of(valkey)

    async def in_child() -> str:
        try:
            await parents.release()
        except redis.exceptions.LockError:
            pass
        else:
            return "the child has released its parent's lock"
        assert await parents.locked()
        await use(Lock(locks, "child", timeout=10))
        return str(len(connections(client)))

    def child() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer: str = run_in_loop(loop_kind, in_child())
        return answer

    async def program() -> None:
        assert await parents.acquire()
        before = connections(client)
        waiting = asyncio.create_task(Lock(locks, "name", sleep=0.001).acquire())
        await asyncio.sleep(0.01)
        for _ in range(3):
            with connect(valkey.port) as _:
                assert "2" == in_fork(child)
            assert await parents.owned()
            await parents.extend(5)
        assert before == connections(client)
        await parents.release()
        assert await asyncio.wait_for(waiting, PATIENCE_S)
        client.delete("name")

    parents = Lock(locks, "name", timeout=60, thread_local=False)
    run_in_loop(loop_kind, program())
    wait_until(lambda: not connections(client), "it is closed")


def test_child_of_an_ended_loop_starts_anew(in_fork: InFork, valkey: Server, connect: Connect, loop_kind: str) -> None:
    locks = client_of(valkey)
    run_in_loop(loop_kind, use(Lock(locks, "name", timeout=10)))

    def child() -> str:
        run_in_loop(loop_kind, use(Lock(locks, "name", timeout=10)))
        return "fine"

    assert "fine" == in_fork(child)
    run_in_loop(loop_kind, use(Lock(locks, "name", timeout=10)))


def test_child_that_closes_its_parents_loop_leaves_the_connection_alone(
    in_fork: InFork, valkey: Server, connect: Connect
) -> None:
    locks, client = client_of(valkey), connect(valkey.port)
    loop = new_loop("asyncio")  # uvloop may hang in the child: libuv wants to be told of a fork
    loop.run_until_complete(use(Lock(locks, "name", timeout=10)))
    before = connections(client)

    def child() -> str:
        loop.close()
        return "fine"

    assert before
    assert in_fork(child) == "fine"
    assert before == connections(client)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


# Eager tasks


def start_tasks_eagerly(loop_kind: str) -> None:
    """Have the running loop step a new task at once."""
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None or loop_kind != "asyncio":
        pytest.skip("eager tasks came with Python 3.12, and uvloop has not all of them")
    asyncio.get_running_loop().set_task_factory(factory)


@in_loop
async def test_eager_tasks(valkey: Server, connect: Connect, async_connect: AsyncClients, loop_kind: str) -> None:
    start_tasks_eagerly(loop_kind)
    locks = async_connect(valkey.port, client_name="locks")
    await asyncio.gather(*[use(Lock(locks, f"name-{number % 5}", timeout=10, sleep=0.001)) for number in range(50)])
    tasks = [asyncio.create_task(Lock(locks, f"name-{number}").acquire()) for number in range(10)]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=PATIENCE_S)
    assert all(task.cancelled() for task in tasks)
    await eventually(lambda: not connect(valkey.port).keys(), "all attempts are undone")


@in_loop
async def test_eager_connecting_that_fails_is_tried_again(
    spare_server: Callable[..., Server], async_connect: AsyncClients, loop_kind: str
) -> None:
    start_tasks_eagerly(loop_kind)
    server = spare_server()
    server.kill()
    locks = async_connect.keep(redis.asyncio.Redis(unix_socket_path=server.unix_path))
    with contextlib.suppress(redis.ConnectionError):
        await Lock(locks, "name").acquire(blocking_timeout=0.01)
    server.start()
    assert await asyncio.wait_for(Lock(locks, "name").acquire(), PATIENCE_S)


@in_loop
async def test_connecting_that_is_cancelled_with_all_other_tasks_is_begun_again(
    valkey: Server, async_connect: AsyncClients
) -> None:
    with Proxy(valkey.port) as proxy:
        proxy.hold()
        acquiring = asyncio.create_task(Lock(async_connect(proxy.port), "name").acquire())
        await eventually(lambda: proxy.requests, "it connects")
        for task in asyncio.all_tasks() - {acquiring, asyncio.current_task()}:
            task.cancel()
        proxy.resume()
        assert await asyncio.wait_for(acquiring, PATIENCE_S) is True
