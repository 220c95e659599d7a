"""The queue's bytes on bare sockets: what no lock that waits in the queue can beat on this machine.

Each lock has a connection of its own and its requests ready-made. It looks for its token in what comes and reads
nothing else: no timeouts, no retries, no second look, no fair share of a connection. Whatever a lock does beyond that,
it pays for. Must not know: who measures it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import hiredis

from bench.commands import Commands
from redislock_fast._names import queue_keys
from redislock_fast._scripts import PASS_ON, WAIT
from redislock_fast._tokens import MARK, new_token

if TYPE_CHECKING:
    import redis
    import redis.asyncio

__all__ = ["AsyncBareLock", "BareQueueLock"]

_AWAKE_MS = _KEPT_MS = 3_600_000
_ROOM = 4096


class _Words:
    """The requests of one waiter, and what he reads in the replies."""

    def __init__(self, name: str, lease_s: int) -> None:
        token = new_token()
        channel = "bench:" + token.decode()
        key = name.encode()
        ttl_ms = lease_s * 1000
        three_keys = (3, key, *queue_keys(key), token)
        self.greet = _pack("HELLO", 3) + _pack("SUBSCRIBE", channel)
        self.load = _pack("SCRIPT", "LOAD", WAIT.text) + _pack("SCRIPT", "LOAD", PASS_ON.text)
        self.acquire = _pack("SET", key, token, "NX", "PX", ttl_ms)
        waiting = (ttl_ms, "publish", channel, _AWAKE_MS, _KEPT_MS, "")
        self.wait = _pack("EVALSHA", WAIT.sha, *three_keys, *waiting)
        self.release = _pack("EVALSHA", PASS_ON.sha, *three_keys)
        self.ours = token + MARK
        self.greeted = channel.encode()
        self.loaded = PASS_ON.sha


def _pack(*words: Any) -> bytes:
    packed: bytes = hiredis.pack_command(words)
    return packed


class BareQueueLock:
    """The queue on a blocking socket.

    Args:
        client: of the server.
        name: the lock's, which is its key.
        lease_s: its ttl.
    """

    def __init__(self, client: redis.Redis, name: str, lease_s: int) -> None:
        self._words = words = _Words(name, lease_s)
        self._socket = Commands(client).connect()
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(words.greet)
        self._until(words.greeted)
        self._socket.sendall(words.load)
        self._until(words.loaded)

    def _until(self, sign: bytes) -> None:
        heard = b""
        while sign not in heard:
            heard += self._socket.recv(_ROOM)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it, or wait for it."""
        words = self._words
        self._socket.sendall(words.acquire)
        if self._socket.recv(_ROOM).startswith(b"+OK"):
            return True
        if blocking:
            self._socket.sendall(words.wait)
            self._until(words.ours)
        return blocking

    def release(self) -> None:
        """Give it back, or hand it over."""
        self._socket.sendall(self._words.release)
        self._socket.recv(_ROOM)

    def __enter__(self) -> object:
        """Take it."""
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        """Give it back."""
        self.release()


class AsyncBareLock(asyncio.Protocol):
    """The queue on a transport of asyncio; the arguments are those of `BareQueueLock`."""

    def __init__(self, client: redis.asyncio.Redis, name: str, lease_s: int) -> None:
        settings = client.connection_pool.connection_kwargs
        self._address = (str(settings.get("host", "localhost")), int(settings.get("port", 6379)))
        self._words = _Words(name, lease_s)
        self._transport: Any = None
        self._heard = b""
        self._signs: tuple[bytes, ...] = ()
        self._told: asyncio.Future[bytes] | None = None

    def data_received(self, data: bytes) -> None:
        """Look for what is waited for."""
        self._heard += data
        for sign in self._signs:
            if sign in self._heard and self._told is not None:
                self._heard, self._signs = b"", ()
                self._told.set_result(sign)
                return

    async def _ask(self, request: bytes, *signs: bytes) -> bytes:
        self._heard = b""
        self._signs = signs
        self._told = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._told

    async def acquire(self, *, blocking: bool = True) -> bool:
        """Take it, or wait for it."""
        words = self._words
        if self._transport is None:
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(lambda: self, *self._address)
            await self._ask(words.greet, words.greeted)
            await self._ask(words.load, words.loaded)
        if await self._ask(words.acquire, b"+OK\r\n", b"_\r\n") == b"+OK\r\n":
            return True
        if blocking:
            await self._ask(words.wait, words.ours)
        return blocking

    async def release(self) -> None:
        """Give it back, or hand it over."""
        await self._ask(self._words.release, b":1\r\n")
