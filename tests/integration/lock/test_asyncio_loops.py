"""Locks, event loops and tasks: what belongs to a loop ends with it; locks are used by what runs elsewhere.

Rules: loops are made and ended as programs do it, by `asyncio.run`, by hand, in threads, around a fork. Warnings out
of a loop's end are recorded, not raised: within the end of a uvloop, an exception would hang it. What is used elsewhere
was acquired in the test's own task, on a plain lock, with options, with a key that lingers, and on a Redlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import gc
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError
from starlette.responses import StreamingResponse

from redislock_fast import LockLostError, LossReason
from redislock_fast.asyncio import Lock, Locker, Redlock
from redislock_fast.server import Server
from redislock_fast.testing import assert_no_locks_left
from tests.conftest import Connect, Servers
from tests.support.async_helpers import AsyncClients, Owner, eventually, in_loop, in_task, run_in_loop, settle
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, run_script, start, wait_until
from tests.support.proxy import Proxy
from tests.support.redlock import LIMIT_S, values


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


# A lock that one task has acquired is used by other tasks, timers, signal handlers, threads


FAR: dict[str, Any] = {"timeout": 60}
OPTIONS: dict[str, dict[str, Any]] = {
    "Lock": {},
    "noted": {"auto_renew": True},
    "kept": {"auto_renew": True, "reentrant": True, "on_lost": print},
    "lingers": {"linger": 0.05},
    "lingers on options": {"linger": 0.05, "auto_renew": True},
    "Redlock": {},
    "renewed Redlock": {"auto_renew": True},
}


class Made:
    """Locks of one kind, and what their servers have."""

    def __init__(self, servers: Servers, connect: AsyncClients, kind: str) -> None:
        self._is_redlock = "Redlock" in kind
        self._settings = {**FAR, **OPTIONS[kind]}
        self._servers = [servers.get("valkey", number) for number in (range(1, 4) if self._is_redlock else range(1))]
        self._clients = [connect(server.port) for server in self._servers]
        for server in self._servers:
            with redis.Redis(port=server.port) as admin:
                admin.flushall()

    def __call__(self, **settings: Any) -> Any:
        """A lock."""
        settings = {**self._settings, **settings}
        if self._is_redlock:
            return Redlock(self._clients, "name", limit=LIMIT_S, **settings)
        return Lock(self._clients[0], "name", **settings)

    def anew(self) -> Made:
        """The same on clients of its own, which are left to the end of the loop."""
        made = copy.copy(self)
        made._clients = [redis.asyncio.Redis(port=server.port) for server in self._servers]
        return made

    def values(self) -> list[bytes | None]:
        """The value at the key, by server."""
        return values(self._servers)

    async def until_gone(self) -> None:
        """Return once no key is left, with what lingers given back."""
        await eventually(lambda: not any(self.values()), "no key is left")


@pytest.fixture(params=OPTIONS)
def make(request: pytest.FixtureRequest, servers: Servers, async_connect: AsyncClients) -> Made:
    return Made(servers, async_connect, request.param)


async def prolong(lock: Any) -> None:
    """Prolong the lock, and ask about it; a caller that may prolong it finds it held."""
    assert isinstance(lock.local.token, bytes)
    assert (lock.valid, lock.lost, await lock.owned()) == (True, False, True)
    assert await lock.extend(10) is True
    assert await lock.reacquire() is True
    assert 50 < lock.remaining() <= 60


async def use_and_release(lock: Any) -> None:
    await prolong(lock)
    await lock.release()


async def held_until_closed(lock: Any) -> AsyncIterator[bytes]:
    """Hold the lock for as long as the generator is not closed."""
    async with lock:
        yield b"held"


# The ways. Each is called by a task that has acquired the lock and lives on, except for those of a generator.


async def same_task(lock: Any) -> None:
    await use_and_release(lock)


async def child_task(lock: Any) -> None:
    await asyncio.create_task(use_and_release(lock))


async def gathered(lock: Any) -> None:
    await asyncio.gather(prolong(lock), prolong(lock))
    await asyncio.gather(lock.release())


async def task_group(lock: Any) -> None:
    group: Any = vars(asyncio)["TaskGroup"]()  # from Python 3.11 on
    async with group:
        group.create_task(use_and_release(lock))


async def anyio_task_group(lock: Any) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(use_and_release, lock)


async def heartbeat(lock: Any) -> None:
    beaten = asyncio.Event()

    async def beat() -> None:
        while True:
            await prolong(lock)
            beaten.set()

    beating = asyncio.create_task(beat())
    await asyncio.wait_for(beaten.wait(), PATIENCE_S)
    beating.cancel()
    await asyncio.wait([beating])
    await lock.release()


async def timer(lock: Any) -> None:
    released: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def release() -> None:
        assert lock.valid
        asyncio.ensure_future(lock.release()).add_done_callback(released.set_result)

    asyncio.get_running_loop().call_later(0.001, release)
    (await asyncio.wait_for(released, PATIENCE_S)).result()


async def soon(lock: Any) -> None:
    tasks: list[asyncio.Future[Any]] = []
    asyncio.get_running_loop().call_soon(lambda: tasks.append(asyncio.ensure_future(use_and_release(lock))))
    await asyncio.sleep(0)
    await tasks[0]


async def signal_handler(lock: Any) -> None:
    loop, handled = asyncio.get_running_loop(), asyncio.Event()
    tasks: list[asyncio.Future[Any]] = []

    def handle() -> None:
        tasks.append(asyncio.ensure_future(lock.release()))
        handled.set()

    loop.add_signal_handler(signal.SIGUSR1, handle)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(handled.wait(), PATIENCE_S)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
    await tasks[0]


def _by_the_loop(loop: asyncio.AbstractEventLoop, lock: Any) -> None:
    """Use the lock from a thread, by calls that are made there."""
    for call in (lock.owned, lock.reacquire, lambda: lock.extend(10), lock.release):
        asyncio.run_coroutine_threadsafe(call(), loop).result(PATIENCE_S)


async def thread(lock: Any) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, _by_the_loop, loop, lock)


async def thread_with_the_context(lock: Any) -> None:
    await asyncio.to_thread(_by_the_loop, asyncio.get_running_loop(), lock)


async def exit_stack(lock: Any) -> None:
    await lock.release()
    stack = contextlib.AsyncExitStack()
    await stack.enter_async_context(lock)
    await asyncio.create_task(stack.aclose())


async def generator_closed(lock: Any) -> None:
    await lock.release()
    generator: Any = held_until_closed(lock)
    await anext(generator)
    await asyncio.create_task(generator.aclose())


async def generator_dropped(lock: Any) -> None:
    await lock.release()
    generator: Any = held_until_closed(lock)
    await anext(generator)
    del generator
    gc.collect()


async def fixture(lock: Any) -> None:
    """Setup and teardown in tasks of their own, as pytest-asyncio runs them."""
    await lock.release()
    generator: Any = held_until_closed(lock)
    await in_task(generator.__anext__)
    await asyncio.create_task(prolong(lock))
    with pytest.raises(StopAsyncIteration):
        await in_task(generator.__anext__)


async def streaming_response(lock: Any) -> None:
    sent: list[Any] = []

    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"held" if await lock.owned() else b"free"
        finally:
            await lock.release()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": "/", "headers": []}
    await StreamingResponse(body())(scope, receive, send)
    assert [b"held"] == [message["body"] for message in sent if message.get("body")]


async def shielded(lock: Any) -> None:
    await asyncio.shield(use_and_release(lock))


async def limited(lock: Any) -> None:
    await asyncio.wait_for(use_and_release(lock), PATIENCE_S)


async def copied_context(lock: Any) -> None:
    await contextvars.copy_context().run(asyncio.ensure_future, use_and_release(lock))


WAYS = [
    same_task,
    child_task,
    gathered,
    pytest.param(task_group, marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="it came with Python 3.11")),
    anyio_task_group,
    heartbeat,
    timer,
    soon,
    signal_handler,
    thread,
    thread_with_the_context,
    exit_stack,
    generator_closed,
    generator_dropped,
    fixture,
    streaming_response,
    shielded,
    limited,
    copied_context,
]


@pytest.mark.parametrize("way", WAYS)
@in_loop
async def test_lock_is_used_and_released_elsewhere(make: Made, way: Callable[[Any], Awaitable[None]]) -> None:
    lock = make()
    await lock.acquire()
    await way(lock)
    await make.until_gone()
    await eventually(lambda: lock.local.token is None, "the reply has come")
    assert not lock.valid


def test_end_of_the_loop_closes_the_generator_that_holds(make: Made, loop_kind: str) -> None:
    generators: list[Any] = []

    async def held_a_little_longer(lock: Any) -> AsyncIterator[bytes]:
        async with lock:
            try:
                yield b"held"
            finally:
                await settle()

    async def leave_open() -> None:
        made = make.anew()
        generators.append(held_a_little_longer(made()))
        await anext(generators[0])

    run_in_loop(loop_kind, leave_open())
    assert not any(make.values())


# What stays as it is: a task holds the lock only by its own acquire.


@in_loop
async def test_task_that_acquires_waits_though_it_may_use_the_lock(make: Made) -> None:
    lock = make(sleep=0.01)
    async with Owner(lock) as holder:
        assert await lock.acquire(blocking=False) is False
        waiting = asyncio.create_task(lock.acquire())
        await prolong(lock)
        assert not waiting.done()
        await holder.ask(lock.release)
        assert await asyncio.wait_for(waiting, PATIENCE_S) is True
        assert await in_task(lock.owned) is True
        await lock.release()
    await make.until_gone()


@in_loop
async def test_reentrance_is_each_tasks_own(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", reentrant=True, **FAR)
    async with lock:
        assert await in_task(lock.try_acquire) is False
        async with lock:
            await in_task(lock.release)  # of the inner one
            assert await lock.owned()
            await lock.acquire()
    assert await lock.locked() is False


@in_loop
async def test_acquire_or_extend_does_not_hold_by_another_task(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", blocking=False, **FAR)
    async with Owner(lock):
        assert await lock.acquire_or_extend() is False
        assert await in_task(lock.acquire_or_extend) is False


@in_loop
async def test_attached_lock_is_not_entered_by_another_task(async_valkey_client: redis.asyncio.Redis) -> None:
    first = Lock(async_valkey_client, "name", **FAR)
    await first.acquire()
    lock = Lock.attach(async_valkey_client, first.detach(), blocking=False)

    async def enter() -> None:
        with pytest.raises(LockError, match="Unable to acquire"):
            async with lock:
                pass

    await asyncio.create_task(enter())
    async with lock:
        assert await lock.owned()


@in_loop
async def test_token_that_a_task_sets_is_its_own(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", **FAR)
    async with Owner(lock, token="first"):
        lock.local.token = b"second"
        assert await lock.owned() is False
        assert await in_task(_token_of(lock)) is None  # two have one
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        assert b"first" == valkey_client.get("name") == lock.local.token


def _token_of(lock: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def token() -> Any:
        return lock.local.token

    return token


@in_loop
async def test_own_lock_goes_first_though_it_was_lost(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", **FAR)
    await lock.acquire()
    valkey_client.delete("name")
    async with Owner(lock, token="others"):
        with pytest.raises(LockNotOwnedError):
            await lock.extend(10)
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        assert b"others" == valkey_client.get("name")


LATE: dict[str, dict[str, Any]] = {
    "plain": {},
    "on options": {"auto_renew": True},
    "lingers": {"linger": 5},
    "lingers on options": {"linger": 5, "auto_renew": True},
}


@pytest.mark.parametrize("settings", LATE.values(), ids=LATE)
@in_loop
async def test_release_that_begins_late_does_not_release_what_was_acquired_since(
    async_valkey_client: redis.asyncio.Redis, settings: dict[str, Any]
) -> None:
    lock = Lock(async_valkey_client, "name", timeout=60, **settings)
    made: list[Any] = []
    await lock.acquire()
    asyncio.get_running_loop().call_soon(lambda: made.append(lock.release()))
    await asyncio.sleep(0)
    await lock.release()
    await lock.acquire()
    with pytest.raises(LockNotOwnedError):
        await made[0]
    assert (lock.valid, await lock.owned()) == (True, True)
    await lock.release()


# Refusals


REFUSED: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "release": lambda lock: lock.release(),
    "extend": lambda lock: lock.extend(10),
    "reacquire": lambda lock: lock.reacquire(),
}


async def _refusal_of(lock: Any, verb: str, caplog: pytest.LogCaptureFixture) -> LockError:
    """The error, which is logged."""
    caplog.clear()
    with pytest.raises(LockError) as caught:
        await in_task(lambda: REFUSED[verb](lock))
    assert LockError is type(caught.value)
    assert "name" == caught.value.lock_name
    assert [logging.WARNING] == [record.levelno for record in caplog.records]
    assert "'name'" in caplog.text
    return caught.value


@pytest.mark.parametrize("verb", REFUSED)
@in_loop
async def test_refusal_is_logged_where_nothing_is_held(make: Made, caplog: pytest.LogCaptureFixture, verb: str) -> None:
    lock = make()
    await _refusal_of(lock, verb, caplog)
    async with lock:
        pass
    await _refusal_of(lock, verb, caplog)


@pytest.mark.parametrize("verb", REFUSED)
@in_loop
async def test_refusal_is_logged_where_two_tasks_hold(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    lock = Lock(async_valkey_client, "name", **FAR)
    async with Owner(lock):
        valkey_client.delete("name")
        async with Owner(lock) as second:
            error = await _refusal_of(lock, verb, caplog)
            assert "2 other tasks" in str(error)
            assert (lock.local.token, lock.valid, await lock.owned()) == (None, False, False)
            assert await second.ask(lock.owned) is True
            await second.ask(lock.release)


@in_loop
async def test_lease_that_has_ended_is_no_second_owner(async_valkey_client: redis.asyncio.Redis) -> None:
    lock = Lock(async_valkey_client, "name", timeout=0.05)
    async with Owner(lock):
        await eventually(lambda: not lock.valid, "the lease ends")
        lock.timeout = 60
        async with Owner(lock) as second:
            await prolong(lock)
            await lock.release()
            assert await second.ask(lock.owned) is False


# Along with losses and batches


@in_loop
async def test_callback_for_a_loss_uses_no_other_tasks_lock(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    refusals: list[Any] = []

    async def on_lost(lock: Any, _: LossReason) -> None:
        with pytest.raises(LockLostError) as caught:
            await lock.release()
        refusals.append(caught.value.reason)

    lock = Lock(async_valkey_client, "name", timeout=0.3, auto_renew=True, on_lost=on_lost)
    async with Owner(lock) as holder:
        valkey_client.delete("name")
        await eventually(lambda: refusals, "the loss is found")
        assert [LossReason.DELETED] == refusals
        with pytest.raises(LockLostError):
            await holder.ask(lock.release)


@in_loop
async def test_lost_lock_is_known_as_lost_elsewhere(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    lock = Lock(async_valkey_client, "name", auto_renew=True, **FAR)
    async with Owner(lock):
        valkey_client.delete("name")
        with pytest.raises(LockLostError):
            await lock.extend(10)
        assert (lock.lost, lock.valid) == (True, False)


@in_loop
async def test_batch_is_prolonged_and_released_elsewhere(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    batch = await Locker(async_valkey_client).acquire_many(["a", "b"], timeout=60)
    assert {"a": True, "b": True} == await asyncio.create_task(batch.extend(10))
    assert {"a": True, "b": True} == await asyncio.create_task(batch.release())
    assert_no_locks_left(valkey_client)


@in_loop
async def test_lock_is_detached_elsewhere(async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis) -> None:
    lock = Lock(async_valkey_client, "name", auto_renew=True, **FAR)
    async with Owner(lock) as holder:

        async def detach() -> Any:
            return lock.detach()

        handle = await in_task(detach)
        assert await holder.ask(lock.owned) is False
    attached = Lock.attach(async_valkey_client, handle)
    await in_task(attached.release)
    assert not valkey_client.exists("name")
