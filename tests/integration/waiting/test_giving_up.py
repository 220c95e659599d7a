"""A waiter that stops waiting leaves nothing behind: timeouts, interrupts, signal handlers, forks, cancels, loops.

Rules: a waiter that must be notified makes health checks at `FAR_S`, so that a test hangs where it is not. Where giving
up races with the grant, either may win: the lock is then held, or passed on. A cancel strikes at a counted point of the
work, or beside a grant that a lock in the same thread makes, so that the message has come and no task has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
from redislock_fast.asyncio import Lock, Locker
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lock.test_asyncio_cancel import cancelled_at, warm_up
from tests.integration.lock.test_asyncio_loops import new_loop
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.forks import InFork
from tests.support.helpers import (
    PATIENCE_S,
    full_disk,
    in_thread,
    on_signal,
    signal_main,
    signals_handled_by,
    start,
    wait_until,
)
from tests.support.holding import passing
from tests.support.interrupts import interrupt_when, interrupted_at
from tests.support.proxy import Proxy
from tests.support.scenes import Scene
from tests.support.times import clock
from tests.support.transports import clean_up, noted_messages
from tests.support.waiting import (
    FAR_S,
    LATE,
    Callers,
    Contender,
    Guard,
    connections,
    gets_and_frees,
    queue_up,
    queued,
    sent_by,
    until_queued,
)

SHORT_S = 0.05
"""A time to wait that a test lives to see the end of."""

LONG_S = 1.0
"""One that is not over before a busy machine has let others come and go meanwhile."""


# Time is up


@pytest.mark.usefixtures("unhurried")
def test_a_waiter_that_gives_up_leaves_the_queue(scene: Scene, holder: redislock_fast.Lock) -> None:
    waiter = scene.contender()
    assert waiter.call("acquire", blocking_timeout=SHORT_S) is False
    assert waiter.lock.local.token is None
    assert scene.queued() == 0
    assert holder.owned()
    holder.release()
    assert scene.client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_a_waiter_that_gives_up_frees_the_place_for_the_next(scene: Scene, holder: redislock_fast.Lock) -> None:
    first, second = scene.contenders(2)
    gives_up = scene.wait(first, blocking_timeout=LONG_S)
    answer = scene.wait(second)
    assert gives_up.result(PATIENCE_S) is False
    assert scene.queued() == 1
    holder.release()
    gets_and_frees(second, answer, scene.client)


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_the_next_looks_when_the_first_has_given_up(scene: Scene, holder: redislock_fast.Lock) -> None:
    first, second = scene.contenders(2, timeout=FAR_S, sleep=0.02)
    gives_up = scene.wait(first, blocking_timeout=LONG_S)
    answer = second.acquire()
    assert gives_up.result(PATIENCE_S) is False
    scene.client.delete("name")
    assert answer.result(PATIENCE_S) is True


@pytest.mark.usefixtures("unhurried")
def test_blocking_timeout_shorter_than_the_interval_is_waited_for_to_its_end(
    scene: Scene, holder: redislock_fast.Lock
) -> None:
    waiter = scene.contender()
    began_at = clock()
    assert waiter.call("acquire", blocking_timeout=SHORT_S) is False
    assert clock() - began_at >= SHORT_S
    answer = scene.wait(waiter, blocking_timeout=FAR_S / 2)
    holder.release()
    assert answer.result(PATIENCE_S) is True


@pytest.mark.parametrize("arguments", [{"blocking_timeout": 0}, {"blocking_timeout": -1}, {"blocking": False}], ids=str)
@pytest.mark.parametrize("others", [0, 1])
def test_acquire_without_waiting_makes_one_attempt(
    scene: Scene, holder: redislock_fast.Lock, arguments: dict[str, Any], others: int
) -> None:
    locks = scene.connect(client_name="waiter")
    hasty, *patient = scene.contenders(1 + others, locks)
    assert hasty.call("locked")  # connects
    answers = [waiter.acquire() for waiter in patient]
    scene.until_queued(others)
    with sent_by(scene.client, "waiter") as sent:
        assert hasty.call("acquire", **arguments) is False
    assert sent.commands == (["SET", "GET"] if scene.server.kind == "redis-6.2" else ["SET"])
    assert scene.queued() == others
    holder.release()
    assert [answer.result(PATIENCE_S) for answer in answers] == [True] * others


@pytest.mark.slow
def test_a_waiter_whose_time_is_up_while_the_disk_is_full_gets_no_lock_later(mortal_scene: Scene) -> None:
    scene = mortal_scene
    holder, waiter = scene.holder(), scene.contender()
    answer = scene.wait(waiter, blocking_timeout=LONG_S)
    with full_disk(scene.server, scene.client):
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            answer.result(PATIENCE_S)
        assert scene.queued() == 1
    wait_until(lambda: scene.queued() == 0, "it has left the queue")
    holder.release()
    assert scene.client.keys() == []


@pytest.mark.usefixtures("unhurried")
def test_time_that_is_up_with_the_grant_on_its_way(scene: Scene, proxy: Proxy, holder: redislock_fast.Lock) -> None:
    def asks() -> bool:
        return any(proxy.requests[command] > proxy.replies[command] for command in ("EVAL", "EVALSHA"))

    waiter = scene.contender(scene.connect(proxy.port))
    granted = False
    for doublings in range(2, 8):  # until its time is not up before the lock is released
        answer = waiter.acquire(blocking_timeout=2**doublings * SHORT_S)
        wait_until(lambda: answer.done() or (scene.queued() and not asks()), "it waits")  # noqa: B023
        proxy.hold()
        holder.release()
        granted = scene.client.exists("name") == 1
        if granted:
            wait_until(asks, "its time is up, and it leaves")
        proxy.resume()
        assert answer.result(PATIENCE_S) is granted
        if granted:
            break
        assert holder.acquire()
    assert granted
    assert waiter.call("owned")
    waiter.release()
    assert scene.client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_time_that_is_up_with_the_grant_lost(scene: Scene, proxy: Proxy, holder: redislock_fast.Lock) -> None:
    waiter = scene.contender(scene.connect(proxy.port))
    answer = scene.wait(waiter, blocking_timeout=LONG_S)
    proxy.lose_messages()
    holder.release()
    gets_and_frees(waiter, answer, scene.client)
    assert proxy.lost == 1


@pytest.mark.slow
def test_time_that_is_up_while_the_server_is_frozen_at_the_grant(
    callers: Callers, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    client = connect(server.port)
    holder, patient = callers.contenders(2, callers.client(server.port), **LATE)
    hasty = callers.contender(callers.client(server.port), **LATE)
    assert holder.call("acquire")
    (gives_up,) = queue_up([hasty], client, blocking_timeout=LONG_S)
    (answer,) = queue_up([patient], client)
    server.signal(signal.SIGSTOP)
    try:
        released = holder.ask("release")
        assert gives_up.result(PATIENCE_S) is False
    finally:
        server.signal(signal.SIGCONT)
    released.result(PATIENCE_S)
    assert answer.result(PATIENCE_S) is True
    patient.release()
    wait_until(lambda: not client.keys(), "nothing is left")


def test_random_timeouts_around_the_hold_time_leave_nothing(scene: Scene) -> None:
    guard = Guard()

    def work(number: int, contender: Contender) -> int:
        rng = random.Random(number)
        acquired = 0
        for _ in range(25):
            try:
                use = contender.use(guard, hold_s=0.001, blocking_timeout=rng.uniform(0.0001, 0.012))
                acquired += use.result(PATIENCE_S)
            except redis.TimeoutError:  # no reply in time, on a busy machine
                pass
        return acquired

    contenders = scene.contenders(8)
    workers = [start(lambda n=n, one=one: work(n, one)) for n, one in enumerate(contenders)]  # type: ignore[misc]
    acquired = [worker.result(2 * PATIENCE_S) for worker in workers]
    assert (guard.entries, guard.overlaps) == (sum(acquired), 0)
    assert 0 < sum(acquired) < 200
    wait_until(lambda: not scene.client.keys(), "nothing is left")


# Interrupts


def test_interrupted_waiter_leaves_the_queue(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, connect: Connect
) -> None:
    locks = connect(server.port)
    waiter = redislock_fast.Lock(locks, "name", **LATE)
    interrupt_when(lambda: until_queued(client, "name", 1))
    with pytest.raises(KeyboardInterrupt):
        waiter.acquire()
    assert waiter.local.token is None
    until_queued(client, "name", 0)
    other = redislock_fast.Lock(locks, "name", thread_local=False, **LATE)
    answer = start(other.acquire)
    until_queued(client, "name", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    other.release()
    assert client.keys() == []


def test_interrupted_waiter_disturbs_no_other(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, connect: Connect
) -> None:
    locks = connect(server.port)
    others = [redislock_fast.Lock(locks, "name", thread_local=False, **LATE) for _ in range(4)]
    answers = []
    for other in others[:2]:
        answers.append(start(other.acquire))
        until_queued(client, "name", len(answers))

    def queue_up_behind() -> None:
        until_queued(client, "name", 3)
        answers.extend(start(other.acquire) for other in others[2:])
        until_queued(client, "name", 5)

    interrupt_when(queue_up_behind)
    with pytest.raises(KeyboardInterrupt):
        redislock_fast.Lock(locks, "name", **LATE).acquire()
    until_queued(client, "name", 4)
    holder.release()
    waiting = [*zip(others, answers, strict=True)]
    while waiting:
        wait_until(lambda: any(answer.done() for _, answer in waiting), "the next gets it")
        done = [one for one in waiting if one[1].done()]
        assert len(done) == 1
        assert done[0][1].result() is True
        waiting.remove(done[0])
        done[0][0].release()
    assert client.keys() == []


@pytest.mark.timeout(20)
def test_interrupt_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = redislock_fast.Lock(connect(server.port), "name", **LATE)
    ignored: list[type[BaseException]] = []  # Python ignores an interrupt that strikes a finalizer
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_type))

    def strike(releases_first: bool) -> None:
        until_queued(client, "name", 1)
        if releases_first:
            holder.release()
        signal_main(signal.SIGINT)
        if not releases_first:
            holder.release()

    for number in range(60):
        striker: Future[None] = start(lambda number=number: strike(number % 3 > 0))  # type: ignore[misc]
        ignored.clear()
        with contextlib.suppress(KeyboardInterrupt):  # whichever of the calls the signal hits
            waiter.acquire()
            wait_until(striker.done, "it has struck")  # an interrupt in a wait for the future breaks its condition
            wait_until(lambda: ignored == [KeyboardInterrupt], "the interrupt")
        striker.result(PATIENCE_S)
        if waiter.local.token is not None:
            waiter.release()
        wait_until(lambda: not client.keys(), "the lock is free")
        assert holder.acquire()


def test_program_interrupted_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock
) -> None:
    script = """
import sys
import redis
from redislock_fast import Lock
Lock(redis.Redis(port=int(sys.argv[1]), client_name="waiter"), "name", timeout=60, sleep=60).acquire()
"""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    program = subprocess.Popen(
        [sys.executable, "-c", script, str(server.port)], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        until_queued(client, "name", 1)
        program.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED)
        holder.release()
        program.send_signal(signal.SIGINT)
        program.send_signal(signal.SIGCONT)
        assert program.communicate(timeout=PATIENCE_S)[1].endswith("KeyboardInterrupt\n")
    finally:
        program.kill()
    wait_until(lambda: not client.keys(), "the lock is free")


@pytest.mark.timeout(20)
def test_signal_handler_uses_locks_while_its_thread_waits(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, connect: Connect
) -> None:
    locks = connect(server.port, client_name="handlers")
    owned: list[bool] = []

    def handle(number: int, frame: object) -> None:
        with redislock_fast.Lock(locks, "in handler", timeout=10) as lock:
            owned.append(lock.owned())

    def release() -> None:
        wait_until(lambda: len(owned) >= 20, "signals are handled")
        holder.release()

    releaser = start(release)
    waiter = redislock_fast.Lock(locks, "name", **LATE)
    with signals_handled_by(handle):
        assert waiter.acquire() is True
    releaser.result(PATIENCE_S)
    assert connections(client, "handlers") == 2  # one for all that the handlers did
    assert all(owned)
    assert waiter.owned()
    waiter.release()
    assert client.keys() == []


@pytest.mark.timeout(20)
def test_signal_handler_waits_for_another_lock_while_its_thread_waits(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, connect: Connect
) -> None:
    locks = connect(server.port)
    second = redislock_fast.Lock(client, "second", thread_local=False, **LATE)
    assert second.acquire()
    owned: list[bool] = []

    def handle(number: int, frame: object) -> None:
        releaser = start(second.release)
        with redislock_fast.Lock(locks, "second", timeout=10, sleep=0.002) as lock:
            owned.append(lock.owned())
        releaser.result(PATIENCE_S)

    def strike() -> None:
        until_queued(client, "name", 1)
        signal_main()
        wait_until(lambda: owned, "the handler is done")
        holder.release()

    waiter = redislock_fast.Lock(locks, "name", **LATE)
    striker = start(strike)
    with on_signal(handle):
        assert waiter.acquire() is True
        striker.result(PATIENCE_S)
    assert owned == [True]
    waiter.release()
    assert client.keys() == []


@pytest.mark.timeout(20)
def test_signal_handler_releases_what_its_thread_waits_for(
    server: Server, client: redis.Redis, connect: Connect
) -> None:
    locks = connect(server.port)
    holder = redislock_fast.Lock(locks, "name", thread_local=False, **LATE)
    waiter = redislock_fast.Lock(locks, "name", **LATE)

    def strike() -> None:
        until_queued(client, "name", 1)
        signal_main()

    with on_signal(lambda number, frame: holder.release()):
        for _ in range(10):
            assert holder.acquire()
            striker = start(strike)
            assert waiter.acquire() is True
            striker.result(PATIENCE_S)
            waiter.release()
    assert client.keys() == []


# Forks


@pytest.mark.usefixtures("unhurried")
def test_forked_child_waits_for_itself(
    in_fork: InFork, scene: Scene, holder: redislock_fast.Lock, connect: Connect
) -> None:
    locks = connect(scene.server.port)
    waiters = scene.contenders(3)
    threads = [redislock_fast.Lock(locks, "name", thread_local=False, **LATE) for _ in range(2)]
    answers = []
    for acquire in [waiter.acquire for waiter in waiters] + [lambda lock=lock: start(lock.acquire) for lock in threads]:
        answers.append(acquire())
        scene.until_queued(len(answers))

    def child() -> str:
        with redislock_fast.Lock(locks, "child", timeout=30) as lock:
            inside = lock.owned()
        return repr((inside, redislock_fast.Lock(locks, "name", **LATE).acquire(blocking_timeout=SHORT_S)))

    assert [in_fork(child) for _ in range(3)] == ["(True, False)"] * 3
    assert scene.queued() == 5
    holder.release()
    for number, release in enumerate([waiter.release for waiter in waiters] + [lock.release for lock in threads]):
        assert answers[number].result(PATIENCE_S) is True
        assert not any(answer.done() for answer in answers[number + 1 :])
        release()
    assert scene.client.keys() == []


def test_forked_child_is_handed_the_lock(
    in_fork: InFork, server: Server, client: redis.Redis, holder: redislock_fast.Lock, connect: Connect
) -> None:
    locks = connect(server.port)
    with redislock_fast.Lock(locks, "warm-up"):
        pass

    def child() -> str:
        with redislock_fast.Lock(locks, "name", **LATE) as lock:
            return repr(lock.owned())

    answer = start(lambda: in_fork(child))
    until_queued(client, "name", 1)
    holder.release()
    assert answer.result(PATIENCE_S) == "True"
    assert client.keys() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own token", "batch"])
def test_interrupt_before_any_line_of_waiting_by_a_ticket_leaves_nothing(
    kind: str, server: Server, client: redis.Redis, connect: Connect
) -> None:
    holder = redislock_fast.Lock(client, "b", timeout=60, thread_local=False)
    own = redislock_fast.Lock(connect(server.port), "b", timeout=60, sleep=0.02, thread_local=False)
    locker = redislock_fast.Locker(own.redis)
    files = ("_queue/waiting.py", "_procedures/acquire.py", "_transport/threads/driver.py")
    held: list[Any] = []

    def acquire() -> None:
        if kind == "batch":
            held.append(locker.acquire_many(["a", "b", "c"], 60, None, sleep=0.02, all_or_nothing=True))
        elif own.acquire(token="mine"):
            held.append(own)

    with own:  # connects
        pass
    for number in range(1, 2000):
        assert holder.acquire()
        is_over = threading.Event()

        def hand_over(is_over: threading.Event = is_over) -> None:
            wait_until(lambda: is_over.is_set() or queued(client, "b") == 1, "there is a waiter, or was none")
            holder.release()

        handed_over = start(hand_over)
        line = interrupted_at(number, acquire, *files)
        is_over.set()
        handed_over.result(PATIENCE_S)
        if not line:
            break
        if own.local.token is not None:  # the interrupt came behind the outcome
            own.release()
        wait_until(lambda: not client.keys(), f"nothing is left of what was interrupted at {line}")
    held[-1].release()
    assert number > 100


# Tasks: cancelled at every point, dropped, ended with their loop


TOLD: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S, "thread_local": False}
"""Settings of a waiter that must be notified."""

MOMENTS = 12
"""How many iterations of the loop a grant takes at most, from the socket to its task."""


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


async def waits(lock: Lock, client: redis.Redis, **arguments: Any) -> asyncio.Task[bool]:
    """A task that acquires, once it stands in the queue."""
    before = queued(client, "name")
    task = asyncio.create_task(lock.acquire(**arguments))
    await eventually(lambda: queued(client, "name") == before + 1, "it stands in the queue")
    return task


# Cancels


@in_loop
async def test_what_a_cancelled_waiter_raises_keeps_nothing_alive(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    gc.disable()
    try:
        task = await waits(Lock(locks, "name", **TOLD), client)
        task.cancel()
        error = None
        try:
            await task
        except asyncio.CancelledError as cancelled:
            error = weakref.ref(cancelled)
        del task
        assert error is not None
        await eventually(lambda: error() is None, "the error is gone, without the collector")
    finally:
        gc.enable()


@pytest.mark.parametrize("connected", [True, False])
@in_loop
async def test_cancelled_at_any_point_of_waiting(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients, connected: bool
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    for count in range(15):
        waiter = Lock(locks if connected else async_connect(server.port), "name", timeout=FAR_S, sleep=0.01)
        assert await cancelled_at(waiter.acquire, count)
        assert waiter.local.token is None
        await eventually(lambda: queued(client, "name") == 0, "it leaves the queue")
        assert holder.owned()
    holder.release()
    assert client.keys() == []


@pytest.mark.parametrize("others", [0, 1])
@in_loop
async def test_cancelled_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients, others: int
) -> None:
    locks, next_locks = async_connect(server.port), async_connect(server.port)
    outcomes = set()
    for moment in range(MOMENTS):
        waiter, next_waiter = Lock(locks, "name", **TOLD), Lock(next_locks, "name", **TOLD)
        task = await waits(waiter, client)
        next_tasks = [await waits(next_waiter, client) for _ in range(others)]
        holder.release()
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done(), "hangs"
        assert task.cancelled() == (waiter.local.token is None)
        outcomes.add(task.cancelled())
        if not task.cancelled():
            assert await waiter.owned()
            await waiter.release()
        for next_task in next_tasks:
            assert await asyncio.wait_for(next_task, PATIENCE_S) is True
            await next_waiter.release()
        await eventually(lambda: not client.keys(), "the lock is free")
        assert holder.acquire()
    assert outcomes == {True, False}


@in_loop
async def test_wait_for_that_ends_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    for number in range(20):
        waiter = Lock(locks, "name", **TOLD)
        loop = asyncio.get_running_loop()
        # Both are due at once; whichever timer comes first, the lock is held or free afterwards.
        waiting = asyncio.create_task(asyncio.wait_for(waiter.acquire(), 0.02))
        loop.call_later(0.0195 + number * 0.00005, holder.release)
        try:
            acquired = await waiting
        except asyncio.TimeoutError:
            acquired = False
        assert acquired == (waiter.local.token is not None)
        if acquired:
            await waiter.release()
        await eventually(lambda: not client.keys(), "the lock is free")
        assert holder.acquire()


@in_loop
async def test_cancel_of_some_waiters_disturbs_no_other(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    waiters = [Lock(locks, "name", **TOLD) for _ in range(10)]
    tasks = [await waits(waiter, client) for waiter in waiters]
    for task in tasks[::2]:
        task.cancel()
    await asyncio.wait(tasks[::2], timeout=PATIENCE_S)
    await eventually(lambda: queued(client, "name") == 5, "they leave the queue")
    holder.release()
    for waiter, task in zip(waiters[1::2], tasks[1::2], strict=True):
        assert await asyncio.wait_for(task, PATIENCE_S) is True
        await waiter.release()
    assert client.keys() == []


# Dropped, and ended with the loop


class DropAt:
    """Awaits the work, and closes it unfinished when it is suspended for the n-th time, from 0."""

    def __init__(self, work: Awaitable[Any], count: int) -> None:
        self._work = work
        self._count = count

    def __await__(self) -> Generator[Any, Any, None]:
        inner = self._work.__await__()
        for _ in range(self._count):
            yield inner.send(None)
        inner.send(None)
        in_thread(inner.close)  # as garbage is collected: by whichever thread


@in_loop
async def test_dropped_at_any_point_of_waiting(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    for count in range(15):
        waiter = Lock(locks, "name", timeout=FAR_S, sleep=0.01)
        await asyncio.wait_for(DropAt(waiter.acquire(), count), PATIENCE_S)
        assert waiter.local.token is None
        await waiter.locked()
        await eventually(lambda: queued(client, "name") == 0, "it leaves the queue")
        assert holder.owned()
    holder.release()
    assert client.keys() == []


@in_loop
async def test_another_looks_for_one_that_is_dropped(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    waiting = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.05), client)
    poller = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.05), client)
    await eventually(passing(client, 0.2), "the other waiter has left the health check to this one")
    work: Any = poller.get_coro()
    in_thread(work.close)  # as it is collected
    await eventually(lambda: queued(client, "name") == 1, "it leaves the queue")
    client.delete("name")  # of which nobody is told
    assert await asyncio.wait_for(waiting, PATIENCE_S) is True
    poller.cancel()
    await asyncio.wait([poller])
    assert isinstance(poller.exception(), RuntimeError)  # there is nothing left to cancel


@pytest.mark.slow
@in_loop
async def test_waiter_that_is_not_the_poller_sleeps_until_it_gives_up(
    server: Server,
    client: redis.Redis,
    holder: redislock_fast.Lock,
    async_connect: AsyncClients,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locks = async_connect(server.port)
    told = noted_messages(monkeypatch)
    gives_up = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.5, blocking_timeout=1), client)
    (messages,) = told.values()
    poller = await waits(Lock(locks, "name", timeout=FAR_S, sleep=0.5), client)
    messages.clear()
    assert await gives_up is False
    assert messages == [None]
    holder.release()
    assert await poller is True


class SlowLock(Lock):
    """Does more once it has the lock."""

    async def do_acquire(self, token: Any) -> bool:
        acquired = await super().do_acquire(token)
        await asyncio.sleep(0.001)
        return acquired


@in_loop
async def test_dropped_while_a_hook_that_has_the_lock_does_more(
    server: Server, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    for count in range(2):
        lock = SlowLock(locks, "name", timeout=FAR_S)
        await asyncio.wait_for(DropAt(lock.acquire(), count), PATIENCE_S)
        assert lock.local.token is None
        await eventually(lambda: not client.keys(), "the lock is free")


@in_loop
async def test_dropped_at_any_point_of_a_batch_that_waits(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    before = client.keys()
    for count in range(10):
        batch = Locker(locks).acquire_many(["a", "name"], FAR_S, None, sleep=0.01, all_or_nothing=True)
        await asyncio.wait_for(DropAt(batch, count), PATIENCE_S)
        await eventually(lambda: client.keys() == before, "the locks are free")
    holder.release()


@in_loop
async def test_dropped_while_its_own_token_is_undone(
    server: Server, client: redis.Redis, async_connect: AsyncClients
) -> None:
    locks = async_connect(server.port)
    await warm_up(locks)
    asyncio.get_running_loop().set_debug(True)  # then it refuses what no other thread may do
    client.set("name", "mine")
    clean_up(locks, [(b"name", b"mine")])
    await asyncio.wait_for(DropAt(Lock(locks, "name", timeout=FAR_S).acquire(token="mine"), 0), PATIENCE_S)
    await eventually(lambda: not client.keys(), "it is undone")


async def _wait_and_end(
    server: Server, admin: redis.Redis, holder: redislock_fast.Lock | None, cancels: bool
) -> asyncio.Task[bool]:
    """The task that waits when the program ends."""
    client = redis.asyncio.Redis(port=server.port, client_name="ending")
    task = await waits(Lock(client, "name", **TOLD), admin)
    if holder is not None:
        holder.release()
    if cancels:
        task.cancel()  # else the end of the loop does it
    return task


@pytest.mark.parametrize("cancels", [False, True])
def test_program_that_ends_while_a_task_waits(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, loop_kind: str, cancels: bool
) -> None:
    run_in_loop(loop_kind, _wait_and_end(server, client, None, cancels))
    wait_until(lambda: not connections(client, "ending"), "the connection is closed")
    holder.release()
    assert client.keys() == []


@pytest.mark.parametrize("cancels", [False, True])
def test_program_that_ends_at_the_moment_of_the_grant(
    server: Server, client: redis.Redis, holder: redislock_fast.Lock, loop_kind: str, cancels: bool
) -> None:
    task = run_in_loop(loop_kind, _wait_and_end(server, client, holder, cancels))
    wait_until(lambda: not connections(client, "ending"), "the connection is closed")
    # Where the task was faster than the end of the loop, it holds the lock, and has not released it.
    assert bool(client.exists("name")) == (not task.cancelled())
    assert task.cancelled() or not cancels


def test_loop_closed_while_a_task_waits(
    valkey: Server, valkey_client: redis.Redis, loop_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        client = redis.asyncio.Redis(port=valkey.port, client_name="ending")
        tasks.append(await waits(Lock(client, "name", **TOLD), valkey_client))

    async def is_gone() -> None:
        await eventually(lambda: not connections(valkey_client, "ending"), "the connection is closed", patience_s=1)

    holder = redislock_fast.Lock(valkey_client, "name", **TOLD)
    assert holder.acquire()
    tasks: list[asyncio.Task[bool]] = []
    loop = new_loop(loop_kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loop complains of what it was closed with
        loop.run_until_complete(program())
        loop.close()
        del loop
        tasks.clear()
        caplog.clear()
        gc.collect()
    run_in_loop(loop_kind, is_gone())
    holder.release()
    assert valkey_client.keys() == []
