"""Closes connections at the end of their event loop, once the server has answered what is under way, within a second.

- For the connections of one client in one loop, an asynchronous generator is suspended. `asyncio.run`, and every other
  runner that calls `loop.shutdown_asyncgens()`, closes the generator after all tasks were cancelled, while the loop
  still runs. It closes all generators at once: those of the program, which may release locks, end before ours.
- A connection to which nothing refers any more is closed once its server has answered, or after a second.
- A loop that is closed in another way drops its timers. One of them holds the socket, and then waits until the server
  has read what was sent.

A socket must not be closed before that: the first reply to a closed socket makes the server drop the connection with
the requests that it has not read yet, and among these may be the cleanup for the requests before them.

Thread safety: everything belongs to the loop's thread; `retire` and `_Remains.__del__` may run in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import weakref
from collections.abc import AsyncGenerator, Iterable
from types import CoroutineType
from typing import Any, Protocol

from redislock_fast._pipe.base import Args, ConnectionBroken, Reply
from redislock_fast._pipe.loop_py import Pipe
from redislock_fast._transport.base import KeptKeys
from redislock_fast._util import fork
from redislock_fast._util.fork import members
from redislock_fast._util.times import clock

_LIMIT_S = 1.0
_LEAST_S = 0.1  # to close a connection or to end a task when the limit has passed
_DAY_S = 86_400.0
_FENCE: Args = (b"PING",)  # whatever the server answers, it has executed what was sent before


class _Cleanup(Protocol):
    def cleaning_up(self) -> asyncio.Task[None] | None:
        """The task that cleans up; None where nothing is to be cleaned up, or nothing can be."""


class _ServerTransport(Protocol):
    @property
    def cleanup(self) -> _Cleanup: ...

    @property
    def lingering(self) -> KeptKeys | None: ...

    def stop(self) -> Iterable[asyncio.Task[Any]]:
        """Cancel the tasks of the server transport, and return them."""


class LoopEnd:
    """The end of the running loop, for all connections of one client.

    Attributes:
        has_come: whether connections are being closed: a connection that breaks now is not replaced.
        kept: server transports, with their owners, that must not be collected before they have tried to clean up.
    """

    def __init__(self) -> None:
        self._generation = fork.generation()
        self._loop = asyncio.get_running_loop()
        self._servers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pipes: set[Pipe] = set()
        self.kept: dict[object, object] = {}
        self.has_come = False
        self._generator = _finish_at_the_end(weakref.ref(self))
        with contextlib.suppress(StopIteration):  # it yields without awaiting anything
            self._generator.__anext__().__await__().send(None)

    def attend(self, server: _ServerTransport) -> None:
        """At the end, wait for the cleanup of the server transport, unless that is collected before."""
        self._servers.add(server)

    def guard(self, pipe: Pipe, transport: asyncio.Transport) -> None:
        """At the end, close the pipe. The pipe must keep this object alive as long as it is open."""
        self._pipes.add(pipe)
        pipe.closed.add_done_callback(lambda _: self._pipes.discard(pipe))
        _hold(self._loop, pipe.closed, _Remains(pipe, transport))

    def retire(self, pipe: Pipe) -> None:
        """Close a pipe that is not used any more, once its server has answered. Any thread may call this."""
        if not pipe.broken and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed in this very moment
                self._loop.call_soon_threadsafe(self._close_when_answered, pipe)

    def _close_when_answered(self, pipe: Pipe) -> None:
        if pipe.broken or pipe.is_idle:
            pipe.close()
            return
        closing = weakref.WeakMethod(pipe.close)  # a pipe that waits for a reply must not keep itself alive
        self._fence(pipe).add_done_callback(lambda _: _call(closing))
        self._loop.call_later(_LIMIT_S, _call, closing)

    def _fence(self, pipe: Pipe) -> asyncio.Future[None]:
        """A future that is done when the server has executed all that was sent, or the pipe is broken."""
        passed: asyncio.Future[None] = self._loop.create_future()

        def pass_(_: Reply | asyncio.Future[None]) -> None:
            if not passed.done():
                passed.set_result(None)

        pipe.closed.add_done_callback(pass_)
        with contextlib.suppress(ConnectionBroken):
            pipe.post(_FENCE, pass_)
        return passed

    async def finish(self) -> None:
        """Wait for cleanups and replies, within the limit, and close all connections. Not in a forked child."""
        if self._generation != fork.generation():
            return
        give_up = self._loop.time() + _LIMIT_S
        closing = await _other_generators()
        if closing:
            await self._wait(closing, give_up)
        servers = members(self._servers)
        for server in servers:
            if server.lingering is not None:
                server.lingering.give_up()
        try:
            while cleaning_up := [task for server in servers if (task := server.cleanup.cleaning_up()) is not None]:
                if not await self._wait(cleaning_up, give_up):
                    break
            while fences := [self._fence(pipe) for pipe in self._pipes if not pipe.broken and not pipe.is_idle]:
                if not await self._wait(fences, give_up):
                    break
        finally:
            self.has_come = True
            tasks = [task for server in servers for task in server.stop()]
            self.kept.clear()
            pipes = list(self._pipes)
            for pipe in pipes:
                pipe.close()
            if tasks:
                await asyncio.wait(tasks, timeout=max(give_up - self._loop.time(), _LEAST_S))
            for pipe in pipes:
                await pipe.wait_closed(max(give_up - self._loop.time(), _LEAST_S))

    async def _wait(self, futures: list[Any], give_up: float) -> bool:
        """Wait for all futures. Returns False when the time is up."""
        _, pending = await asyncio.wait(futures, timeout=max(give_up - self._loop.time(), 0.0))
        return not pending


_finishing: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""The tasks that close generators of ours. Any thread adds its own; each looks for those of its own loop."""


async def _other_generators() -> list[asyncio.Task[Any]]:
    """The tasks that close generators of the program in the running loop, as the calling one closes one of ours."""
    mine: Any = asyncio.current_task()
    _finishing.add(mine)
    await asyncio.sleep(0)  # until all of ours have come here
    kind = type(mine.get_coro())
    if kind is CoroutineType:  # it was closed in another way
        return []
    return [task for task in asyncio.all_tasks() if type(task.get_coro()) is kind and task not in _finishing]


async def _finish_at_the_end(end_ref: weakref.ref[LoopEnd]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        end = end_ref()
        if end is not None:
            await end.finish()


def _call(method: weakref.WeakMethod[Any]) -> None:
    live = method()
    if live is not None:
        live()


class _Remains:
    """A connection's socket, which only a timer of the loop refers to, and which is shut down with the loop.

    A loop that is closed before its tasks have ended closes nothing else: the server would go on granting them locks.
    """

    def __init__(self, pipe: Pipe, transport: asyncio.Transport) -> None:
        self._pipe = pipe
        self._sock = transport.get_extra_info("socket")
        self._generation = fork.generation()

    def __del__(self) -> None:
        """Send the end of the stream; if a reply is missing, wait for the server's end, which blocks `loop.close()`."""
        if self._sock is None or self._generation != fork.generation():  # in a forked child it is the parent's
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._sock.fileno())) as sock:
            sock.shutdown(socket.SHUT_WR)
            if not self._pipe.is_idle:
                _drain(sock)


def _drain(sock: socket.socket) -> None:
    """Read until the server has read all that was sent and closes the connection."""
    give_up = clock() + _LIMIT_S
    while (left_s := give_up - clock()) > 0:
        sock.settimeout(left_s)
        if not sock.recv(65536):
            return


def _hold(loop: asyncio.AbstractEventLoop, closed: asyncio.Future[None], remains: _Remains) -> None:
    """Refer to the socket until the connection or the loop is closed, anew each day: timers of loops have a limit."""
    timer = weakref.ref(loop.call_later(_DAY_S, _hold, loop, closed, remains))

    def cancel(_: object) -> None:
        running = timer()
        if running is not None:
            running.cancel()

    closed.add_done_callback(cancel)
