"""Helpers of the tests of waiting: a lock's queue, the commands that a client sends, and contenders for a lock.

`Threads` and `Tasks` make contenders with the same methods, so that a test is written once for both; a `Peer` is one in
another process, to be killed and frozen. Nothing here asserts what a lock should do, but for the order in `hand_round`,
and every wait is on a condition.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry

import redislock_fast
import redislock_fast.asyncio
from redislock_fast._protocol.keys import queue_keys
from tests.support.async_helpers import run_in_loop
from tests.support.helpers import PATIENCE_S, start, wait_until

FAR_S = 60.0
"""A ttl or fallback interval beyond any test's patience: a waiter that is not notified hangs."""

LATE: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S}
"""Settings of a lock that neither expires nor makes health checks while a test runs."""

HEARD_S = 1.0
"""A limit that is not over before the server's first reply, beside busy programs either: the caller waits in vain."""

_PEERS = multiprocessing.get_context("forkserver")  # a plain fork would copy locks that other threads hold
_PEERS.set_forkserver_preload(["tests.support.waiting"])


def queue_of(name: str | bytes) -> bytes:
    """The key of a lock's queue."""
    return queue_keys(name.encode() if isinstance(name, str) else name)[0]


def identifier_of(client: Any, name: str | bytes = "name") -> bytes:
    """The identifier of a connection in a lock's value, which this package has made."""
    value: bytes = client.get(name)
    assert (b"rlf:", 36) == (value[:4], len(value.removesuffix(b"+")))
    return value[4:15]


def queued(client: Any, name: str | bytes) -> int:
    """The length of a lock's queue."""
    length: int = client.zcard(queue_of(name))
    return length


def until_queued(client: Any, name: str | bytes, length: int) -> None:
    """Return once the queue has this length."""
    wait_until(lambda: queued(client, name) == length, f"{length} wait for {name!r}")


def awake_s(admin: redis.Redis, name: str | bytes) -> dict[bytes, float]:
    """For how much longer each connection that a lock's waiters listen on counts as awake, in seconds."""
    seconds, microseconds = admin.time()
    waiters: Any = admin.hgetall(queue_keys(name.encode() if isinstance(name, str) else name)[1])
    return {
        field: int(until) / 1000 - seconds - microseconds / 1e6
        for field, until in waiters.items()
        if field.startswith(b"c")
    }


class Sent:
    """The commands of the clients of one name, by MONITOR: their connections must exist by then.

    Attributes:
        commands: in order, in capitals, once the block is left.
    """

    def __init__(self) -> None:
        self.commands: list[str] = []


@contextmanager
def sent_by(admin: redis.Redis, client_name: str) -> Iterator[Sent]:
    """Note the commands of the connections of this client name within the block, without those of scripts."""
    sent = Sent()
    with admin.monitor() as monitor:  # type: ignore[no-untyped-call]
        yield sent
        ports = {row["addr"].rpartition(":")[2] for row in admin.client_list() if row["name"] == client_name}
        admin.echo("end of the block")
        while (seen := monitor.next_command())["command"] != "ECHO end of the block":
            if seen["client_type"] != "lua" and seen["client_port"] in ports:
                sent.commands.append(seen["command"].split(" ")[0].upper())


def connections(admin: redis.Redis, client_name: str) -> int:
    """How many connections have this name."""
    return sum(row["name"] == client_name for row in admin.client_list())


# Two holders at once


class Guard:
    """Notices when two holders are inside at once, in any processes: `with guard: ...` while a lock is held.

    Attributes:
        overlaps: how often that was so.
        entries: how often a holder was inside.
    """

    def __init__(self) -> None:
        self._inside = _PEERS.Lock()
        self._overlaps = _PEERS.Value("i", 0)
        self._entries = _PEERS.Value("i", 0)

    @property
    def overlaps(self) -> int:
        return int(self._overlaps.value)

    @property
    def entries(self) -> int:
        return int(self._entries.value)

    def __enter__(self) -> None:
        """Enter."""
        alone = self._inside.acquire(block=False)
        with self._entries.get_lock():
            self._entries.value += 1
        if not alone:
            with self._overlaps.get_lock():
                self._overlaps.value += 1

    def __exit__(self, *_: object) -> None:
        """Leave."""
        with contextlib.suppress(ValueError):  # of two, the first has let go for both
            self._inside.release()


# Threads and tasks


class Contender(ABC):
    """One lock, whose calls run beside the test.

    Attributes:
        lock: the lock; its token is its object's, not a thread's or a task's.
    """

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    @abstractmethod
    def ask(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin to call a method of the lock."""

    @abstractmethod
    def use(self, guard: Guard, hold_s: float = 0.0, **kwargs: Any) -> Future[bool]:
        """Begin to acquire, be inside for so long, and release. The result is that of `acquire`."""

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the lock; returns or raises what it does."""
        return self.ask(verb, *args, **kwargs).result(PATIENCE_S)

    def acquire(self, **kwargs: Any) -> Future[bool]:
        """Begin to acquire."""
        return self.ask("acquire", **kwargs)

    def release(self) -> None:
        """Release."""
        self.call("release")


def queue_up(contenders: list[Contender], admin: Any, **arguments: Any) -> list[Future[Any]]:
    """Let them wait for one lock, one after another, with these arguments of `acquire`."""
    answers = []
    for contender in contenders:
        length = queued(admin, contender.lock.name) + 1
        answers.append(contender.acquire(**arguments))
        until_queued(admin, contender.lock.name, length)
    return answers


def hand_round(contenders: list[Contender], answers: list[Future[Any]]) -> None:
    """Each gets the lock in turn, before any later one, and releases it."""
    for number, contender in enumerate(contenders):
        assert answers[number].result(PATIENCE_S) is True
        assert not any(answer.done() for answer in answers[number + 1 :])
        contender.release()


def gets_and_frees(waiter: Contender, answer: Future[Any], admin: Any) -> None:
    """The waiter gets the lock, owns it and releases it, and nothing is left on the server."""
    assert answer.result(PATIENCE_S) is True
    assert waiter.call("owned")
    waiter.release()
    assert admin.keys() == []


def until_one_is_done(answers: Iterable[Future[Any]]) -> None:
    """Return once one of them has an answer."""
    wait_until(lambda: any(answer.done() for answer in answers), "one of them is done")


def serve(contenders: list[Contender], answers: list[Future[Any]]) -> list[int]:
    """Each gets the lock, one at a time and in any order, and releases it. Returns that order."""
    order: list[int] = []
    waiting = dict(enumerate(answers))
    while waiting:
        until_one_is_done(waiting.values())
        (number,) = (number for number, answer in waiting.items() if answer.done())
        assert waiting.pop(number).result() is True
        assert contenders[number].call("owned")
        contenders[number].release()
        order.append(number)
    return order


class Callers(ABC):
    """Makes contenders of one kind: `with Threads() as callers: ...`.

    Attributes:
        kind: the name of this kind in `CALLERS`.
        package: ours for this kind.
        retry: redis-py's class of retry policies for this kind.
    """

    kind: str
    package: ModuleType
    retry: type[Any]
    _redis: ModuleType

    def __init__(self) -> None:
        self._clients: list[Any] = []

    def __enter__(self) -> Any:
        """Ready."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all clients."""
        self.close()

    @abstractmethod
    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin to call this in a new thread or task, which awaits what it returns."""

    @abstractmethod
    def close(self) -> None:
        """End the calls of tasks, and close all clients."""

    @abstractmethod
    def _contender(self, lock: Any) -> Contender:
        """The contender that uses this lock."""

    def run(self, work: Callable[[], Any]) -> Any:
        """The result or the error of this in a new thread or task."""
        return self.begin(work).result(PATIENCE_S)

    def client(self, port: int, **options: Any) -> Any:
        """A client of the server on this port, which is closed at the end."""
        return self.keep(self._redis.Redis(port=port, **options))

    def keep(self, client: Any) -> Any:
        """The client, to be closed at the end."""
        self._clients.append(client)
        return client

    def contender(self, client: Any, name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock on this client."""
        return self._contender(self.package.Lock(client, name, thread_local=False, **settings))

    def contenders(self, count: int, client: Any, name: str = "name", **settings: Any) -> list[Contender]:
        """So many, each with a lock object of its own."""
        return [self.contender(client, name, **settings) for _ in range(count)]

    def attached(self, client: Any, handle: redislock_fast.Handle, **settings: Any) -> Contender:
        """A lock on this client that was detached."""
        return self._contender(
            self.run(lambda: self.package.Lock.attach(client, handle, thread_local=False, **settings))
        )

    def redlock(self, clients: list[Any], name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock on the servers of these clients."""
        return self._contender(self.package.Redlock(clients, name, thread_local=False, **settings))


class _ThreadContender(Contender):
    def ask(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return start(lambda: getattr(self.lock, verb)(*args, **kwargs))

    def use(self, guard: Guard, hold_s: float = 0.0, **kwargs: Any) -> Future[bool]:
        def work() -> bool:
            acquired: bool = self.lock.acquire(**kwargs)
            if acquired:
                with guard:
                    time.sleep(hold_s)
                self.lock.release()
            return acquired

        return start(work)


class Threads(Callers):
    """Contenders whose calls run in threads, each in a new one."""

    kind = "threads"
    package = redislock_fast
    retry = redis.retry.Retry
    _redis = redis

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin to call this in a new thread."""
        return start(work)

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()

    def _contender(self, lock: Any) -> Contender:
        return _ThreadContender(lock)


class _TaskContender(Contender):
    def __init__(self, lock: Any, tasks: Tasks) -> None:
        super().__init__(lock)
        self._tasks = tasks

    def ask(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._tasks.begin(lambda: getattr(self.lock, verb)(*args, **kwargs))

    def use(self, guard: Guard, hold_s: float = 0.0, **kwargs: Any) -> Future[bool]:
        async def work() -> bool:
            acquired: bool = await self.lock.acquire(**kwargs)
            if acquired:
                with guard:
                    await asyncio.sleep(hold_s)
                await self.lock.release()
            return acquired

        return self._tasks.submit(work())


class Tasks(Callers):
    """Contenders whose calls run in tasks of one event loop of this kind, which runs in a thread of its own."""

    kind = "tasks"
    package = redislock_fast.asyncio
    retry = redis.asyncio.retry.Retry
    _redis = redis.asyncio

    def __init__(self, loop_kind: str = "asyncio") -> None:
        super().__init__()
        running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended = start(lambda: run_in_loop(loop_kind, self._live(running)))
        self._loop, self._end = running.result(PATIENCE_S)

    async def _live(self, running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        end = asyncio.Event()
        running.set_result((asyncio.get_running_loop(), end))
        await end.wait()
        for client in self._clients:
            await client.aclose()

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        """Begin to call this in a task of the loop, which awaits what it returns."""

        async def run() -> Any:
            answer = work()
            return await answer if inspect.isawaitable(answer) else answer

        return self.submit(run())

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run in a task of the loop; cancelling the future cancels the task."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what still runs, and close all clients."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._ended.result(PATIENCE_S)

    def _contender(self, lock: Any) -> Contender:
        return _TaskContender(lock, self)


CALLERS: dict[str, type[Threads | Tasks]] = {kind.kind: kind for kind in (Threads, Tasks)}


# Processes


class Peer:
    """A contender in a forked process with a client of its own: `with Peer("tasks", server.port, timeout=10) as peer`.

    Args:
        kind: of `CALLERS`.
        port: the server's.
        name: the lock's.
        settings: of the lock.

    Attributes:
        client_name: as the server lists its connections.
    """

    _number = 0

    def __init__(self, kind: str, port: int, name: str = "name", **settings: Any) -> None:
        Peer._number += 1
        self.client_name = f"peer-{Peer._number}"
        self._pipe, theirs = _PEERS.Pipe()
        serve = (theirs, kind, port, self.client_name, name, settings)
        self._process = _PEERS.Process(target=_serve, args=serve, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, verb: str, *args: Any, **kwargs: Any) -> None:
        """Begin to call a method of its contender; one at a time."""
        self._pipe.send((verb, args, kwargs))

    @property
    def has_answered(self) -> bool:
        """Whether the method has returned or raised."""
        return self._pipe.poll()

    def answer(self) -> Any:
        """Return or raise what the method did."""
        if not self._pipe.poll(PATIENCE_S):
            raise AssertionError(f"no answer from {self.client_name}")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of its contender; returns or raises what it does."""
        self.ask(verb, *args, **kwargs)
        return self.answer()

    def freeze(self) -> None:
        """Stop the process where it stands. Returns once it has stopped."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")  # the fork server's child: this process cannot wait for it
        wait_until(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), "it has stopped")

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Peer:
        """The running process."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.kill()
        self._pipe.close()


def _serve(pipe: Connection, kind: str, port: int, client_name: str, name: str, settings: dict[str, Any]) -> None:
    with CALLERS[kind]() as callers:
        contender = callers.contender(callers.client(port, client_name=client_name), name, **settings)
        with contextlib.suppress(EOFError):
            for verb, args, kwargs in _received(pipe):
                try:
                    pipe.send(contender.ask(verb, *args, **kwargs).result())
                except Exception as error:
                    pipe.send(error)


def _received(pipe: Connection) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    while True:
        yield pipe.recv()


def transport_in_use(contender: Contender) -> Any:
    """The server transport that executes the contender's operations; a task's is that of the only loop."""
    transport = contender.lock._transport
    return transport if hasattr(transport, "execute") else next(iter(transport._servers.values()))
