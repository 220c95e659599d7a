"""An interrupt at any line of an acquire or a release: what was not returned is not held, nor is it left behind.

A trace function raises it, or the very assignment that notes what is held. What a waiting call does of a signal stands
in test_process and test_waiting_giving_up.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.support.async_helpers import eventually
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.interrupts import (
    each_line,
    handled,
    interrupt_kind,
    interrupt_noting,
    interrupted_at,
    line_of,
    skip_what_a_loop_takes,
)
from tests.support.proxy import Proxy
from tests.support.redlock import LIMIT_S, Listening, Onlooker
from tests.support.transports import clean_up, give_no_grace, is_idle, queue_at_once, threads_inside
from tests.support.waiting import queued

FACADE = (
    "lock.py",
    "asyncio/lock.py",
    "_procedures/lock.py",
    "_procedures/lease.py",
    "_procedures/acquire.py",
    "_procedures/acquire.py",
    "_procedures/acquire.py",
    "_procedures/release.py",
    "_procedures/prolong.py",
    "_lease/holding.py",
    "_lease/task_owner.py",
    "_queue/waiting.py",
    "_queue/waiters.py",
)
CHANNELS = (
    "_transport/base.py",
    "_transport/threads/cleanup.py",
    "_transport/threads/driver.py",
    "_transport/threads/server.py",
    "_transport/loop/cleanup.py",
    "_renewal/threads.py",
    "_transport/loop/driver.py",
    "_renewal/loop.py",
    "_transport/loop/server.py",
    "_protocol/commands.py",
)
REDLOCK = (
    "redlock.py",
    "asyncio/redlock.py",
    "_redlock/lock.py",
    "_redlock/procedures.py",
    "_redlock/lease.py",
    "_transport/threads/driver.py",
    "_transport/loop/driver.py",
    "_redlock/quorum.py",
    "_redlock/threads.py",
    "_redlock/loop.py",
)
RETURNING = tuple(
    f" in {name}"
    for name in ("release_lock", "release_token", "execute_release", "release", "_release", "settle_release", "drive")
)

__all__ = ["interrupt_kind"]

pytestmark = [pytest.mark.parametrize("fleet", ["valkey"], indirect=True), pytest.mark.usefixtures("interrupt_kind")]

NOTED = {"auto_renew": True, "thread_local": True}
"""Settings of a lock whose acquire is only noted."""

_Test = TypeVar("_Test", bound=Callable[..., None])
untraced = pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")


def at_any_line(test: _Test) -> _Test:
    """Marks a test that interrupts calls at each line in turn."""
    never_awaited = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
    for mark in (never_awaited, pytest.mark.usefixtures("collected"), untraced, pytest.mark.slow):
        test = mark(test)
    return test


class World(ABC):
    """Locks whose calls run in this very thread.

    Args:
        servers: one, or those of a Redlock.
    """

    def __init__(self, servers: Sequence[Listening]) -> None:
        self._onlooker = Onlooker(servers)

    @abstractmethod
    def lock(self, **settings: Any) -> Any:
        """A lock on the first server."""

    @abstractmethod
    def redlock(self, **settings: Any) -> Any:
        """A lock on all of them."""

    @abstractmethod
    def locker(self) -> Any:
        """A Locker on the first server."""

    @abstractmethod
    def semaphore(self, limit: int, **settings: Any) -> Any:
        """A semaphore on the first server."""

    @abstractmethod
    def do(self, call: Callable[[], Any]) -> Any:
        """The result or the error of a lock's method."""

    @abstractmethod
    def until_free(self) -> None:
        """Return once nothing is left, and nothing more is done."""

    @abstractmethod
    def until(self, condition: Callable[[], object], what: str) -> None:
        """Return once the condition is true, and let what is under way go on meanwhile."""

    def close(self) -> None:
        """Close the clients."""
        self._onlooker.close()


class ThreadWorld(World):
    """Locks for threads."""

    def __init__(self, servers: Sequence[Listening]) -> None:
        super().__init__(servers)
        self._clients = [redis.Redis(port=server.port) for server in servers]

    @property
    def client(self) -> redis.Redis:
        """Of the first server."""
        return self._clients[0]

    def lock(self, **settings: Any) -> Any:
        return redislock_fast.Lock(self.client, "name", 60, **{"thread_local": False, **settings})

    def redlock(self, **settings: Any) -> Any:
        return redislock_fast.Redlock(self._clients, "name", 60, thread_local=False, limit=LIMIT_S, **settings)

    def locker(self) -> Any:
        return redislock_fast.Locker(self.client)

    def semaphore(self, limit: int, **settings: Any) -> Any:
        return redislock_fast.Semaphore(self.client, "name", limit, timeout=60, **settings)

    def do(self, call: Callable[[], Any]) -> Any:
        for client in self._clients:
            threads_inside(client).clear()  # which an interrupt in the very line that leaves would not
        return call()

    def until_free(self) -> None:
        wait_until(lambda: not any(self._onlooker.values()), "nothing is left")

    def until(self, condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what)

    def close(self) -> None:
        super().close()
        for client in self._clients:
            client.close()


class LoopWorld(World):
    """Locks for tasks, in a loop that runs while something is done.

    Args:
        servers: as for every world.
        options: of the clients.

    Attributes:
        loop: it is not closed before the world is.
    """

    def __init__(self, servers: Sequence[Listening], **options: Any) -> None:
        super().__init__(servers)
        self.loop = asyncio.new_event_loop()
        self._clients = [redis.asyncio.Redis(port=server.port, **options) for server in servers]

    def lock(self, **settings: Any) -> Any:
        return redislock_fast.asyncio.Lock(self._clients[0], "name", 60, **{"thread_local": False, **settings})

    def redlock(self, **settings: Any) -> Any:
        return redislock_fast.asyncio.Redlock(self._clients, "name", 60, thread_local=False, limit=LIMIT_S, **settings)

    def locker(self) -> Any:
        return redislock_fast.asyncio.Locker(self._clients[0])

    def semaphore(self, limit: int, **settings: Any) -> Any:
        return redislock_fast.asyncio.Semaphore(self._clients[0], "name", limit, timeout=60, **settings)

    def do(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async def work() -> Any:
            return await call()

        task = self.loop.create_task(work())
        try:
            return self.loop.run_until_complete(task)
        except KeyboardInterrupt:  # it may have struck the loop itself: then the task is cancelled, as by asyncio.run
            task.cancel()
            self._run_on(task)
            raise

    def _run_on(self, task: asyncio.Task[Any]) -> None:
        """Run the loop until the task has ended, and any interrupted run of the loop, too.

        A loop stops at an interrupt in a task, which becomes that task's result, and stops again for each task that
        awaits this one. A run that an interrupt has ended may have asked for its end before, which ends the next run.
        """
        while True:
            ended = self.loop.create_future()
            task.add_done_callback(lambda _: ended.set_result(None))  # noqa: B023
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                self.loop.run_until_complete(ended)
                self.loop.call_soon(self.loop.stop)
                self.loop.run_forever()
                return

    def until_free(self) -> None:
        self.until(lambda: not any(self._onlooker.values()) and len(asyncio.all_tasks()) == 1, "nothing is left")

    def until(self, condition: Callable[[], object], what: str) -> None:
        task = self.loop.create_task(eventually(condition, what))
        self._run_on(task)
        task.result()

    def close(self) -> None:
        super().close()
        for client in self._clients:
            self.loop.run_until_complete(client.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@pytest.fixture(params=[ThreadWorld, LoopWorld], ids=["threads", "tasks"])
def world(request: pytest.FixtureRequest, fleet: list[Server], interrupt_kind: None) -> Iterator[World]:
    """Both worlds in turn."""
    if request.param is LoopWorld:
        skip_what_a_loop_takes()
    running: World = request.param(fleet[:3])
    yield running
    running.close()


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect the coroutines that an interrupt left before the next test begins: they are in cycles with its error."""
    yield
    gc.collect()


@pytest.mark.parametrize("settings", [{}, {"wait": "poll"}, {"auto_renew": True}], ids=["usual", "polling", "on terms"])
@pytest.mark.parametrize("is_first", [True, False], ids=["cold", "warm"])
def test_interrupt_just_behind_the_noting(world: World, settings: dict[str, Any], is_first: bool) -> None:
    lock = world.lock(**settings)
    if not is_first:
        world.do(lock.acquire)
        world.do(lock.release)
    interrupt_noting(lock)
    with pytest.raises(KeyboardInterrupt):
        world.do(lock.acquire)
    assert lock.local.token is None
    world.until_free()


@pytest.mark.parametrize("at_once", [False, True], ids=["after an attempt", "at once"])
def test_interrupt_just_behind_the_noting_of_a_grant(
    world: World, fleet: list[Server], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:
        queue_at_once(monkeypatch)
        lock = world.lock()
        world.do(lock.locked)  # connects
        world.do(lock.acquire)  # subscribes
        world.do(lock.release)
    with redis.Redis(port=fleet[0].port) as client:
        holder = redislock_fast.Lock(client, "name", 60, thread_local=False)
        holder.acquire()
        lock = world.lock()
        interrupt_noting(lock)
        releaser = threading.Timer(0.05, holder.release)
        releaser.start()
        with pytest.raises(KeyboardInterrupt):
            world.do(lock.acquire)
        releaser.join()
    assert lock.local.token is None
    world.until_free()


def test_interrupt_just_behind_the_noting_of_a_redlock(world: World) -> None:
    lock = world.redlock()
    interrupt_noting(lock)
    with pytest.raises(KeyboardInterrupt):
        world.do(lock.acquire)
    assert lock.local.token is None
    world.until_free()


@at_any_line
@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}, NOTED, {"blocking_timeout": 10}], ids=str)
def test_acquire_interrupted_at_any_line(world: World, settings: dict[str, Any]) -> None:
    world.do(world.lock().locked)  # connects
    for strike in each_line(30):
        lock = world.lock(**settings)
        place = strike(lambda: world.do(lock.acquire), *FACADE, *CHANNELS)  # noqa: B023
        if lock.local.token is not None:  # returned, or about to
            world.do(lock.release)
        world.until_free()
        assert " raises " not in place


@at_any_line
@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
def test_acquire_interrupted_twice_leaves_nothing(world: World, settings: dict[str, Any]) -> None:
    world.do(world.lock().locked)  # connects
    for strike in each_line(30, handled):
        lock = world.lock(**settings)
        interrupt_noting(lock)
        strike(lambda: world.do(lock.acquire), *FACADE, *CHANNELS, "_transport/cleanup.py")  # noqa: B023
        assert lock.local.token is None
        world.until_free()


@at_any_line
@pytest.mark.parametrize("settings", [{}, NOTED, {"linger": 0.02}], ids=str)
@pytest.mark.parametrize("kind", [ThreadWorld, LoopWorld], ids=["threads", "tasks"])
def test_acquire_without_an_answer_interrupted_at_any_line(
    kind: type[World], fleet: list[Server], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is LoopWorld:
        skip_what_a_loop_takes()
    give_no_grace(monkeypatch)
    with Proxy(fleet[0].port) as proxy, contextlib.closing(kind([proxy])) as world:
        lock = world.lock(**settings)
        world.do(lock.acquire)  # connects
        world.do(lock.release)
        for strike in each_line(30):
            lock = world.lock(blocking_timeout=0.01, **settings)

            def acquire(lock: Any = lock) -> None:
                with contextlib.suppress(redis.TimeoutError):
                    world.do(lock.acquire)

            proxy.hold()
            place = strike(acquire, *FACADE, *CHANNELS, "_transport/cleanup.py")
            proxy.resume()
            assert lock.local.token is None
            world.until_free()
            assert " raises " not in place.removesuffix(" raises nothing")


@at_any_line
@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
def test_acquire_of_a_redlock_interrupted_at_any_line(world: World, settings: dict[str, Any]) -> None:
    if isinstance(world, LoopWorld):
        pytest.skip(
            "the loop raises the interrupt again later, perhaps outside of the test, which ends pytest's worker"
        )
    world.do(world.redlock().locked)  # connects
    for strike in each_line(60):
        lock = world.redlock(**settings)
        place = strike(lambda: world.do(lock.acquire), *REDLOCK)  # noqa: B023
        if lock.local.token is not None:  # returned, or about to
            world.do(lock.release)
        world.until_free()
        assert " raises " not in place


@at_any_line
@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=str)
def test_release_of_a_redlock_interrupted_at_any_line_can_be_repeated(world: World, settings: dict[str, Any]) -> None:
    for strike in each_line(60):
        lock = world.redlock(**settings)
        world.do(lock.acquire)
        place = strike(lambda: world.do(lock.release), *REDLOCK)  # noqa: B023
        if lock.local.token is not None:
            world.do(lock.release)
        world.until_free()
        if isinstance(world, LoopWorld):  # a pipe's callback: the loop raises it later, perhaps after the release
            place = place.replace(" in answer raises nothing", " in answer")
        assert " raises " not in place
        assert lock.local.token is None


@at_any_line
@pytest.mark.parametrize("at_once", [False, True], ids=["after an attempt", "at once"])
def test_waiting_acquire_interrupted_at_any_line(
    world: World, fleet: list[Server], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_once:  # as where others of the process wait already
        queue_at_once(monkeypatch)
    world.do(world.lock().locked)  # connects
    with redis.Redis(port=fleet[0].port) as client, ThreadPoolExecutor() as pool:
        holder = redislock_fast.Lock(client, "name", 60, thread_local=False)
        for strike in each_line(60):
            holder.acquire()
            over = threading.Event()

            def hand_over(over: threading.Event = over) -> None:
                wait_until(lambda: over.is_set() or queued(client, "name") == 1, "there is a waiter, or was none")
                holder.release()

            handing_over = pool.submit(hand_over)
            lock = world.lock()
            place = strike(lambda: world.do(lock.acquire), *FACADE, *CHANNELS)  # noqa: B023
            over.set()
            handing_over.result(PATIENCE_S)
            if lock.local.token is not None:  # returned, or about to
                world.do(lock.release)
            world.until_free()
            assert " raises " not in place


@pytest.mark.slow
@untraced
def test_thread_interrupted_at_any_line_is_inside_no_more(fleet: list[Server]) -> None:
    with contextlib.closing(ThreadWorld(fleet[:1])) as world, contextlib.closing(ThreadWorld(fleet[:1])) as other:
        world.do(world.lock().locked)  # connects
        other.do(other.lock().acquire)
        for strike in each_line(60):
            lock = world.lock(blocking_timeout=0.001)
            place = strike(lambda: world.do(lock.acquire), *FACADE, *CHANNELS)  # noqa: B023
            # A bare `return` is left by the lines of its `finally`. On these no signal strikes.
            left = line_of(place)
            is_leaving = left == "return" or left.startswith(("self.inside.discard", "if not was_inside"))
            assert is_leaving or threading.get_ident() not in threads_inside(world.client)


@at_any_line
@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}, NOTED], ids=str)
def test_release_interrupted_at_any_line_can_be_repeated(world: World, settings: dict[str, Any]) -> None:
    for strike in each_line(20):
        lock = world.lock(**settings)
        world.do(lock.acquire)
        place = strike(lambda: world.do(lock.release), *FACADE, *CHANNELS)  # noqa: B023
        if lock.local.token is not None:
            try:
                world.do(lock.release)
            except LockNotOwnedError:  # the verdict is there, and not noted: on lines on which no signal strikes,
                assert place.endswith(RETURNING)  # since Python looks for one in calls and loops alone
        world.until_free()
        assert lock.local.token is None


@at_any_line
def test_release_interrupted_at_any_line_of_handing_over_can_be_repeated(world: World, fleet: list[Server]) -> None:
    with redis.Redis(port=fleet[0].port) as client:
        waiter = redislock_fast.Lock(client, "name", timeout=10, sleep=10, thread_local=False)
        for strike in each_line(20):
            lock = world.lock()
            world.do(lock.acquire)
            acquired = start(waiter.acquire)
            wait_until(lambda: queued(client, "name"), "another waits")
            place = strike(lambda: world.do(lock.release), *FACADE, *CHANNELS)  # noqa: B023
            if lock.local.token is not None:
                try:
                    world.do(lock.release)
                except LockNotOwnedError:
                    assert place.endswith(RETURNING)
            assert acquired.result(PATIENCE_S) is True
            waiter.release()
            world.until_free()


@at_any_line
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "unconnected"])
def test_undoing_task_interrupted_at_any_line_leaves_nothing(fleet: list[Server], is_connected: bool) -> None:
    async def others() -> None:
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})

    with redis.Redis(port=fleet[0].port) as client:
        for strike in each_line(40):
            with contextlib.closing(LoopWorld(fleet[:1])) as world:
                lock = world.lock()

                async def leave_to_be_undone(lock: redislock_fast.asyncio.Lock = lock) -> None:
                    if is_connected:
                        await lock.locked()
                    client.set("name", "mine")
                    clean_up(lock.redis, [(b"name", b"mine")])

                world.do(leave_to_be_undone)
                strike(lambda: world.do(others), "_transport/cleanup.py", *CHANNELS)
                world.until_free()


def test_interrupt_while_connecting_is_raised_once(fleet: list[Server]) -> None:
    interrupts = [KeyboardInterrupt()]

    async def on_connect(connection: redis.asyncio.Connection) -> None:
        if interrupts:
            raise interrupts.pop()
        await connection.on_connect()

    world = LoopWorld(fleet[:1], redis_connect_func=on_connect)
    with contextlib.closing(world):
        acquiring = world.loop.create_task(world.lock().acquire())
        with pytest.raises(KeyboardInterrupt):
            world.loop.run_until_complete(acquiring)
        assert world.loop.run_until_complete(acquiring) is True


def test_interrupt_while_connecting_leaves_nothing_to_undo(fleet: list[Server]) -> None:
    def on_connect(*_: object) -> None:
        raise KeyboardInterrupt

    with redis.Redis(port=fleet[0].port, redis_connect_func=on_connect) as client:
        with pytest.raises(KeyboardInterrupt):
            redislock_fast.Lock(client, "name").acquire()
        assert is_idle(client)


@pytest.mark.slow
@untraced
def test_connecting_acquire_interrupted_at_any_line(fleet: list[Server]) -> None:
    for number in range(1, 1000):
        with contextlib.closing(ThreadWorld(fleet[:1])) as world:
            lock = world.lock()
            place = interrupted_at(
                number,
                lambda: world.do(lock.acquire),  # noqa: B023
                "_transport/cleanup.py",
                "_transport/threads/connect.py",
                *CHANNELS,
            )
            assert " raises " not in place
            start(lambda: world.do(lock.locked)).result(PATIENCE_S)  # noqa: B023  # another thread can connect
            if lock.local.token is not None:  # returned, or about to
                world.do(lock.release)
            world.until_free()
            if not place:
                assert number > 80
                return
