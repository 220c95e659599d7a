"""The server's end of an asyncio pipe, driven by a test, and tasks that call the pipe.

Nothing here asserts what a pipe should do, and nothing waits longer than `PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import ConnectionBroken, Reply
from redislock_fast._pipe.loop_py import LoopPipe, Pipe, new_pipe
from tests.support.helpers import PATIENCE_S

FOREVER = -1.0

MakePipe = Callable[..., Pipe]

PIPES = [pytest.param(LoopPipe, id="python")]
if new_pipe is not LoopPipe:
    PIPES.append(pytest.param(new_pipe, id="compiled"))


class Peer:
    """The server's end: reads whole requests, answers when told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._parser = hiredis.Reader()

    async def read(self, count: int = 1) -> list[list[bytes]]:
        """The next requests; fewer where the stream ends."""
        requests: list[list[bytes]] = []
        while len(requests) < count:
            request = self._parser.gets()
            if request is not False:
                requests.append(request)
                continue
            data = await within(asyncio.get_running_loop().sock_recv(self.sock, 1 << 20))
            if not data:
                break
            self._parser.feed(data)
        return requests

    async def read_all(self) -> list[list[bytes]]:
        """All requests until the stream ends."""
        return await self.read(1 << 30)

    async def answer(self, data: bytes) -> None:
        await within(asyncio.get_running_loop().sock_sendall(self.sock, data))

    async def echo(self, count: int = 1) -> None:
        """Answer the next requests, each with its own last word."""
        for request in await self.read(count):
            await self.answer(b"$%d\r\n%b\r\n" % (len(request[-1]), request[-1]))

    def sent_so_far(self) -> bytes:
        """The bytes that can be read without waiting."""
        with contextlib.suppress(BlockingIOError):
            return self.sock.recv(1 << 20)
        return b""


async def within(work: Awaitable[Any]) -> Any:
    """The result of the work, within `PATIENCE_S`."""
    return await asyncio.wait_for(work, PATIENCE_S)


@contextlib.asynccontextmanager
async def connected(make_pipe: MakePipe, received: bytes = b"") -> AsyncIterator[tuple[Pipe, Peer]]:
    near, far = socket.socketpair()
    far.setblocking(False)
    _, writer = await asyncio.open_connection(sock=near)
    pipe = make_pipe(writer.transport, writer, received)
    del writer
    try:
        yield pipe, Peer(far)
    finally:
        far.close()
        pipe.close()
        await pipe.wait_closed(1.0)


async def call(pipe: Pipe, value: bytes, timeout_s: float) -> Reply:
    """Echo the word."""
    return await pipe.call((b"ECHO", value), timeout_s)


async def start(pipe: Pipe, *words: bytes, timeout_s: float = FOREVER) -> list[asyncio.Task[Any]]:
    """A task for each word that echoes it; all of them have called."""
    tasks = [asyncio.create_task(call(pipe, value, timeout_s)) for value in words]
    await asyncio.sleep(0)
    return tasks


async def start_many(pipe: Pipe, *words: bytes, timeout_s: float = FOREVER) -> asyncio.Task[Any]:
    """A task that echoes the words in one piece."""

    async def call_many() -> list[Reply]:
        return await pipe.call_many([(b"ECHO", value) for value in words], timeout_s)

    task = asyncio.create_task(call_many())
    await asyncio.sleep(0)
    return task


async def outcomes(*tasks: asyncio.Task[Any]) -> list[object]:
    """For each task its reply, or for `ConnectionBroken` whether the request was sent, or the class of its error."""
    _, hanging = await asyncio.wait(tasks, timeout=PATIENCE_S)
    return ["hangs" if task in hanging else _outcome(task) for task in tasks]


def _outcome(task: asyncio.Task[Any]) -> object:
    if task.cancelled():
        return asyncio.CancelledError
    error = task.exception()
    if error is None:
        return task.result()
    return error.sent if isinstance(error, ConnectionBroken) else type(error)


async def pause(pipe: Pipe) -> asyncio.Task[Any]:
    """Send more than the transport takes, without an answer; returns the task that waits for it."""
    return await start_many(pipe, *[b"x" * (1 << 20)] * 4)
